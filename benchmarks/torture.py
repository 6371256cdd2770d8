"""`make torture`: runs are killed, cut off and starved, again and again; what happened becomes a table.

Each fault is tried on a real command, in processes of its own, at moments drawn at random from a seed. The table
between the two marks in docs/reliability.md is written anew.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
    """Tries faults, keeps what was found, and writes the table into the page unless --page=false."""
    parser = argparse.ArgumentParser(prog="make torture")
    parser.add_argument("--kills", type=int, default=50, help="kill -9 at random moments (about 10 s each)")
    parser.add_argument("--rounds", type=int, default=3, help="of each fault of two processes (about a minute each)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default=",".join(FAULTS), help="names of faults; the table keeps the others as they are"
    )
    parser.add_argument("--page", choices=["true", "false"], default="true")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.only.split(",") if name not in FAULTS]:
        parser.error(f"--only={unknown[0]}: there are {', '.join(FAULTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    found: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
    for name in given.only.split(","):
        started, draw = time.monotonic(), random.Random(given.seed)
        with tempfile.TemporaryDirectory() as place:
            outcome = FAULTS[name](Path(place) / name, given.kills if name == "killed" else given.rounds, draw)
        minutes = round((time.monotonic() - started) / 60, 1)
        found[name] = {**outcome._asdict(), "minutes": minutes, "machine": machine()}
        result.write_text(json.dumps(found, indent=2) + "\n")
        print(f"{outcome.fault}: {outcome.well} of {outcome.tries}", flush=True)
    if given.page == "true":
        write_page([found[name] for name in FAULTS if name in found])
    return 0 if all(found[name]["well"] == found[name]["tries"] for name in given.only.split(",")) else 1


def write_page(found: list[dict[str, Any]]) -> None:
    """The table into docs/reliability.md, with what it was measured on."""
    here = found[-1]["machine"]
    lines = [
        "| What was done | tried | all was well | what that means | commit |",
        "|---|---:|---:|---|---|",
        *(
            f"| {row['fault']} | {row['tries']} | {row['well']} | {row['happened']} | {row['machine']['commit']} |"
            for row in found
        ),
        "",
        f"On {here['cores']} cores, torch {here['torch']}; a plus behind a commit says that files had changed since.",
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
    fault = "kill -9 at a random moment, saving after every step"
    return Outcome(fault, kills, well if same else 0, f"{means}; {verdict}")


def signalled(number: signal.Signals, root: Path, rounds: int, draw: random.Random) -> Outcome:
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
        done, left = saved.read(life.last)["global_step"], life.left(within=30)
        if status == [128 + number] and done == last and not left:
            well += 1
        else:
            _tell(life, f"status {status}, saved behind step {done} of {last}, left {left}")
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
        left = life.left(within=60)
        if status != [0] and not left and saved.read(life.last)["global_step"] > 0:
            well += 1
        else:
            _tell(life, f"status {status}, left {left}")
    return Outcome("kill -9 of one of two processes", rounds, well, "the other ends within a minute; the state loads")


def _tell(life: Life, what: str) -> None:
    """Of a try that did not go well, what happened and the last that was said."""
    print(f"not well: {what}", *life.said().splitlines()[-12:], sep="\n  ", flush=True)


def _begun(root: Path) -> Life:
    """A run that was killed after its first steps, to be taken up again."""
    life = Life(root, "--checkpoint.every_n_steps=1")
    life.wait_for_step(1)
    life.processes[0].kill()
    life.end()
    return life


def full(root: Path, rounds: int, draw: random.Random) -> Outcome:
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


def cut(root: Path, rounds: int, draw: random.Random) -> Outcome:
    """A checkpoint of which half is missing."""
    life = _begun(root)
    life.last.write_bytes(life.last.read_bytes()[:5000])
    again = Life(root)
    well = again.end() == [1] and "is it cut off?" in again.said()
    return Outcome("half a checkpoint", 1, int(well), "refused in a line")


def unwritable(root: Path, rounds: int, draw: random.Random) -> Outcome:
    """A folder of runs in which nothing can be made."""
    root.write_text("a file stands here")
    life = Life(root)
    well = life.end() == [1] and "--run.root" in life.said()
    return Outcome("a folder of runs that cannot be written", 1, int(well), "said before training, with the option")


def exploding(root: Path, rounds: int, draw: random.Random) -> Outcome:
    """A rate at which the loss is no number after a step."""
    life = Life(root, "--model.optim.lr=1e30", "--model.optim.warmup_steps=0")
    well = life.end() == [1] and "highest at samples" in life.said()
    return Outcome("a loss that is no number", 1, int(well), "stopped before the update; samples and rate are named")


def unreachable(root: Path, rounds: int, draw: random.Random) -> Outcome:
    """A key for W&B and a server that does not answer."""
    life = Life(
        root, "--run.wandb=true", "--trainer.max_steps=5",
        environment={"WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": "online"},
    )  # fmt: skip
    well = life.end(within=300) == [0] and saved.read(life.last)["global_step"] == 5
    return Outcome("W&B cannot be reached", 1, int(well), "a warning; the run ends well, its own tables are complete")


FAULTS: dict[str, Callable[[Path, int, random.Random], Outcome]] = {
    "killed": killed,
    **{number.name: functools.partial(signalled, number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)},
    "lost": lost,
    "full": full,
    "cut": cut,
    "unwritable": unwritable,
    "exploding": exploding,
    "unreachable": unreachable,
}
"""Name -> function of a folder for the runs, how often, and where moments are drawn from."""
