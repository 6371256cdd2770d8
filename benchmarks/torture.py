"""`make torture`: runs are killed, cut off and starved, again and again; what happened becomes a table.

Each fault is tried on a real command, in processes of its own, at moments drawn at random from a seed. The table
between the two marks in docs/reliability.md is written anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich import print as show
from rich.table import Table

from benchmarks.machine import ROOT, machine
from benchmarks.tortured import Life
from experiments.training import saved

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- written by make torture -->\n", "<!-- end -->\n"


class Outcome(NamedTuple):
    """One line of the table: the fault, how often it was tried, how often all was well, and what that means."""

    fault: str
    tries: int
    well: int
    happened: str


def measure(folder: Path, arguments: list[str]) -> int:
    """Tries all faults, prints the table, writes it into the page unless --page=false."""
    parser = argparse.ArgumentParser(prog="make torture")
    parser.add_argument("--kills", type=int, default=50, help="kill -9 at random moments (about 10 s each)")
    parser.add_argument("--rounds", type=int, default=3, help="of each fault of two processes (about a minute each)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", choices=["true", "false"], default="true")
    given = parser.parse_args(arguments)
    draw, started = random.Random(given.seed), time.monotonic()
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as place:
        faults: list[Callable[[], Outcome]] = [
            lambda: killed(Path(place) / "killed", given.kills, draw),
            *(
                lambda number=number: signalled(Path(place) / number.name, number, given.rounds, draw)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
            ),
            lambda: lost(Path(place) / "lost", given.rounds, draw),
            lambda: full(Path(place) / "full"),
            lambda: cut(Path(place) / "cut"),
            lambda: unwritable(Path(place) / "unwritable"),
            lambda: exploding(Path(place) / "exploding"),
            lambda: unreachable(Path(place) / "unreachable"),
        ]
        for fault in faults:
            found.append(fault())
            show(f"{found[-1].fault}: {found[-1].well} of {found[-1].tries}")
    minutes = round((time.monotonic() - started) / 60, 1)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"faults": [outcome._asdict() for outcome in found], "minutes": minutes, "machine": machine()}
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    table = Table("fault", "tried", "well", "what happened")
    for outcome in found:
        table.add_row(outcome.fault, str(outcome.tries), str(outcome.well), outcome.happened)
    show(table)
    if given.page == "true":
        write_page(found, minutes)
    return 0 if all(outcome.well == outcome.tries for outcome in found) else 1


def write_page(found: list[Outcome], minutes: float) -> None:
    """The table into docs/reliability.md, with what it was measured on."""
    here = machine()
    lines = [
        "| What was done | tried | all was well | what that means |",
        "|---|---:|---:|---|",
        *(f"| {o.fault} | {o.tries} | {o.well} | {o.happened} |" for o in found),
        "",
        f"{minutes} minutes on {here['cores']} cores, torch {here['torch']}, commit {here['commit']}.",
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after, encoding="utf-8")


def killed(root: Path, kills: int, draw: random.Random) -> Outcome:
    """kill -9 at random moments of a run that saves after every step; then the end of it, against one in one piece."""
    well, before = 0, 0
    for _ in range(kills):
        life = Life(root, "--checkpoint.every_n_steps=1")
        life.wait_for_step(before)
        time.sleep(draw.uniform(0.0, 1.5))
        life.processes[0].kill()
        life.end()
        step = int(saved.read(life.last)["global_step"])  # raises where the file is not whole
        well += before <= step
        before = step
    done = f"--trainer.max_steps={before + 10}"
    parts, whole = Life(root, done), Life(root.with_name("whole"), done)
    same = parts.end() == [0] and whole.end() == [0]
    one, other = (saved.read(life.last) for life in (parts, whole))
    same = same and all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())
    with (parts.folder / "metrics.csv").open() as file:
        same = same and [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, before + 11))
    means = "the newest checkpoint loads, no step is lost before it, and the next process goes on"
    verdict = "the weights at the end are, bit for bit, those of a run in one piece" if same else "the end DIFFERS"
    return Outcome("kill -9 at a random moment, saving after every step", kills, well, f"{means}; {verdict}")


def signalled(root: Path, number: signal.Signals, rounds: int, draw: random.Random) -> Outcome:
    """A signal to one of two processes."""
    well = 0
    for _ in range(rounds):
        life = Life(root, "--trainer.devices=2")
        ranks = life.ranks()
        time.sleep(draw.uniform(0.0, 1.0))
        life.send(draw.choice(ranks), number)
        status = life.end(within=30)
        with (life.folder / "metrics.csv").open() as file:
            last = int(list(csv.DictReader(file))[-1]["step"])
        well += status == [128 + number] and saved.read(life.last)["global_step"] == last and not life.left()
    means = f"both end behind the same step within 30 s, saved, with status {128 + number}"
    return Outcome(f"{number.name} to one of two processes", rounds, well, means)


def lost(root: Path, rounds: int, draw: random.Random) -> Outcome:
    """kill -9 of one of two processes."""
    well = 0
    for _ in range(rounds):
        life = Life(root, "--trainer.devices=2", "--checkpoint.every_n_steps=5")
        ranks = life.ranks()
        life.wait_for_step(1)
        time.sleep(draw.uniform(0.0, 1.0))
        life.send(draw.choice(ranks), signal.SIGKILL)
        status = life.end(within=60)
        well += status != [0] and not life.left() and saved.read(life.last)["global_step"] > 0
    return Outcome("kill -9 of one of two processes", rounds, well, "the other ends within a minute; the state loads")


def _begun(root: Path) -> Life:
    """A run that was killed after its first steps, to be taken up again."""
    life = Life(root, "--checkpoint.every_n_steps=1")
    life.wait_for_step(1)
    life.processes[0].kill()
    life.end()
    return life


def full(root: Path) -> Outcome:
    """A disk that takes no more: the system refuses files above a size, between two saves."""
    life = _begun(root)
    before = life.last.read_bytes()
    limit = len(before) // 2
    again = Life(
        root, "--checkpoint.every_n_steps=1",
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    status = again.end()
    well = status == [1] and again.last.read_bytes() == before and "bytes needed" in again.said()
    return Outcome("no room for a checkpoint", 1, int(well), "status 1; path and bytes are said; the file stays")


def cut(root: Path) -> Outcome:
    """A checkpoint of which half is missing."""
    life = _begun(root)
    life.last.write_bytes(life.last.read_bytes()[:5000])
    again = Life(root)
    well = again.end() == [1] and "is it cut off?" in again.said()
    return Outcome("half a checkpoint", 1, int(well), "refused in a line")


def unwritable(root: Path) -> Outcome:
    """A folder of runs in which nothing can be made."""
    root.write_text("a file stands here")
    life = Life(root)
    well = life.end() == [1] and "--run.root" in life.said()
    return Outcome("a folder of runs that cannot be written", 1, int(well), "said before training, with the option")


def exploding(root: Path) -> Outcome:
    """A rate at which the loss is no number after a step."""
    life = Life(root, "--model.optim.lr=1e30", "--model.optim.warmup_steps=0")
    well = life.end() == [1] and "highest at samples" in life.said()
    return Outcome("a loss that is no number", 1, int(well), "stopped before the update; samples and rate are named")


def unreachable(root: Path) -> Outcome:
    """A key for W&B and a server that does not answer."""
    life = Life(
        root, "--run.wandb=true", "--trainer.max_steps=5",
        environment={"WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"},
    )  # fmt: skip
    well = life.end(within=300) == [0] and saved.read(life.last)["global_step"] == 5
    return Outcome("W&B cannot be reached", 1, int(well), "a warning; the run ends well, its own tables are complete")
