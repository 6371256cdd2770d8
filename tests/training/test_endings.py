"""How runs of two processes end: by signals to one or all of them, or the loss of one; started in three ways."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from experiments.__main__ import main
from experiments.training import saved

HERE = Path(__file__).parent
SLURM = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1",
         "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}  # fmt: skip


class Beacon(pl.Callback):
    """Writes the number of each process beside its rank, and that a step has been made."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        path = self.folder / f"rank-{trainer.global_rank}"
        if trainer.global_step >= 3 and not path.exists():
            path.with_suffix(".new").write_text(str(os.getpid()))
            path.with_suffix(".new").rename(path)


class Run:
    """A run of two processes, started from outside of this one.

    Args:
        config: of the preset.
        how: plain, torchrun or srun.
        more: further options.
    """

    def __init__(self, config: Path, how: str, *more: str) -> None:
        self.config, self.how = config, how
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = [
            "fit", f"--config={config}", f"--run.root={config.parent / 'runs'}", "--run.wandb=false", "--resume=auto",
            "--trainer.callbacks+=test_endings.Beacon", f"--trainer.callbacks.folder={config.parent}",
            "--trainer.max_epochs=100000", "--trainer.limit_val_batches=0", *more,
        ]  # fmt: skip
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "ATTNZOO", "RANK"))}
        base = keep | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
        base |= {"PATH": f"{config.parent / 'bin'}{os.pathsep}{base['PATH']}"}
        python = [sys.executable, "-m"]
        if how == "plain":
            commands: list[tuple[list[str], dict[str, str]]]
            commands = [([*python, "experiments", *words, "--trainer.devices=2"], {})]
        elif how == "torchrun":
            start = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m", "experiments"]
            commands = [([*python, *start, *words], {})]
        else:  # what srun does: every task by itself
            tasks = [SLURM | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "MASTER_PORT": port} for n in range(2)]
            commands = [([*python, "experiments", *words], task) for task in tasks]
        self.processes = []
        for number, (command, own) in enumerate(commands):
            with (config.parent / f"said-{number}").open("w") as said:
                self.processes.append(
                    subprocess.Popen(command, env=base | own, cwd=config.parent, stdout=subprocess.DEVNULL, stderr=said)
                )

    def ranks(self) -> list[int]:
        """Process numbers by rank, once both train."""
        paths = [self.config.parent / f"rank-{rank}" for rank in range(2)]
        end = time.monotonic() + 240
        while not all(path.exists() for path in paths):
            assert time.monotonic() < end and all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.1)
        return [int(path.read_text()) for path in paths]

    def end(self, within: float) -> list[int]:
        """Statuses of what was started; nothing that trains is left by then."""
        ranks, end = self.ranks(), time.monotonic() + within
        statuses = [process.wait(timeout=max(0.1, end - time.monotonic())) for process in self.processes]
        while any(_alive(rank) for rank in ranks):
            assert time.monotonic() < end, "a process is left"
            time.sleep(0.1)
        return statuses

    def said(self) -> str:
        """What was printed to standard error."""
        return "".join(path.read_text() for path in sorted(self.config.parent.glob("said-*")))

    @property
    def folder(self) -> Path:
        """Of the run, the only one."""
        (folder,) = (self.config.parent / "runs" / "toy").iterdir()
        return folder


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def start(config: Path) -> Iterator[Callable[..., Run]]:
    """Starts a run in one of three ways; kills what is left of it."""
    runs: list[Run] = []
    scontrol = config.parent / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {config.parent / "asked"}\n')
    scontrol.chmod(0o755)

    def begin(how: str, *more: str) -> Run:
        runs.append(Run(config, how, *more))
        return runs[-1]

    yield begin
    for run in runs:
        left = [int(path.read_text()) for path in config.parent.glob("rank-?")]
        for process in [*left, *(p.pid for p in run.processes if p.poll() is None)]:
            if _alive(process):
                os.kill(process, signal.SIGKILL)
        for process in run.processes:
            process.wait(timeout=60)


def complete(run: Run) -> int:
    """The step of last.ckpt, which is the last one in the table."""
    content = saved.read(run.folder / "checkpoints" / "last.ckpt")
    with (run.folder / "metrics.csv").open() as file:
        assert int(list(csv.DictReader(file))[-1]["step"]) == content["global_step"]
    return int(content["global_step"])


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_and_one_goes_on(
    config: Path, start: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """37, R11: both end behind the same step, with one W&B run; --resume=auto goes on with one process, and says so."""
    run = start("plain", "--run.wandb=true")
    os.kill(run.ranks()[1], signal.SIGTERM)
    assert run.end(within=30) == [128 + signal.SIGTERM]
    assert len(list(run.folder.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert "stopped by SIGTERM after step" in run.said()
    step = complete(run)
    content = yaml.safe_load((run.folder / "config.yaml").read_text())
    content["trainer"] |= {"callbacks": None, "max_epochs": -1, "max_steps": step + 12, "devices": "auto"}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(content))
    root = f"--run.root={config.parent / 'runs'}"
    assert main(["fit", f"--config={config}", root, "--run.wandb=false", "--resume=auto"]) == 0
    assert complete(run) == step + 12
    said = capsys.readouterr().out
    assert "The run had 2 process(es) and goes on with 1." in said
    assert "An epoch had 5 steps of a batch in each process and has 10" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "srun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_ends_both_however_they_were_started(
    how: str, rank: int, start: Callable[..., Run]
) -> None:
    """37: torchrun has a status of its own for processes that did not end well."""
    run = start(how)
    os.kill(run.ranks()[rank], signal.SIGTERM)
    assert run.end(within=30) == ([1] if how == "torchrun" else [143, 143])
    assert complete(run) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("how", ["plain", "torchrun"])
def test_a_signal_to_what_was_started_ends_all(how: str, number: int, start: Callable[..., Run]) -> None:
    """37: torchrun passes it on."""
    run = start(how)
    run.ranks()
    run.processes[0].send_signal(number)
    (status,) = run.end(within=30)
    assert status == 128 + number if how == "plain" else status != 0
    assert complete(run) >= 3


@pytest.mark.slow
def test_two_processes_go_on_with_a_run_of_one(config: Path, start: Callable[..., Run]) -> None:
    """In the middle of an epoch of 10 batches, which becomes one of 5; every row of the table is one step."""
    root = f"--run.root={config.parent / 'runs'}"
    assert main(["fit", f"--config={config}", root, "--run.wandb=false", "--trainer.max_steps=17"]) == 0
    (folder,) = (config.parent / "runs" / "toy").iterdir()
    (folder / "results.json").unlink()  # as if it had been killed
    content = yaml.safe_load((folder / "config.yaml").read_text())
    beacon = {"class_path": "test_endings.Beacon", "init_args": {"folder": str(config.parent)}}
    content["trainer"] |= {"max_steps": -1, "callbacks": [beacon]}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    run = start("plain")
    os.kill(run.ranks()[0], signal.SIGTERM)
    assert run.end(within=30) == [128 + signal.SIGTERM]
    assert complete(run) > 17
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    # 7 of 10 batches are done, as 3 of 5: two are left of the second epoch.
    assert [row["step"] for row in rows if row["epoch"] == "1"][-1] == "19" or len(rows) < 20


@pytest.mark.slow
def test_the_warning_of_slurm_requeues_once(config: Path, start: Callable[..., Run]) -> None:
    """35: SLURM warns every task; the job is put back once, and the same command goes on."""
    run = start("srun")
    for rank in run.ranks():
        os.kill(rank, signal.SIGUSR1)
    assert run.end(within=30) == [128 + signal.SIGUSR1] * 2
    assert (config.parent / "asked").read_text() == "requeue 17\n"
    step = complete(run)
    for path in config.parent.glob("rank-?"):
        path.unlink()
    content = yaml.safe_load((run.folder / "config.yaml").read_text())
    content["trainer"] |= {"callbacks": None, "max_epochs": -1, "max_steps": step + 8}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(content))
    root = f"--run.root={config.parent / 'runs'}"
    assert main(["fit", f"--config={config}", root, "--run.wandb=false", "--resume=auto"]) == 0
    assert complete(run) == step + 8


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "torchrun", "srun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_loss_of_one_process_ends_the_other_with_a_message(how: str, rank: int, start: Callable[..., Run]) -> None:
    """Within a minute, without a traceback of ours, and what was saved loads."""
    run = start(how)
    ranks = run.ranks()
    end = time.monotonic() + 60
    while not (run.folder / "checkpoints" / "last.ckpt").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(ranks[rank], signal.SIGKILL)
    assert all(status != 0 for status in run.end(within=60))
    assert "another one has ended" in run.said() or "terminated with code -9" in run.said() or how == "torchrun"
    assert saved.read(run.folder / "checkpoints" / "last.ckpt")["global_step"] > 0


LONG = """
import os, subprocess, sys, time
from experiments.training.processes import end_with_the_first
if len(sys.argv) > 1:
    end_with_the_first()
    print("ready", flush=True)
else:
    subprocess.Popen([sys.executable, __file__, "second"])
time.sleep(120)
"""


@pytest.mark.slow
def test_no_process_outlives_the_first_that_started_it(tmp_path: Path) -> None:
    """Killed, it can tell the others nothing; the pipe is closed when the last of them has ended."""
    script = tmp_path / "long.py"
    script.write_text(LONG)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, str(script)]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    first.kill()
    said, _ = first.communicate(timeout=40)
    assert "the first process of this run has gone" in said
