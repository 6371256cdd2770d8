"""One life of a small run that is about to be ill-treated: the command, its processes, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.machine import ROOT
from experiments.training import saved

SMALL = [
    "--config=vit", "--run.wandb=false", "--resume=auto", "--trainer.accelerator=cpu", "--model.dim=16",
    "--model.depth=1", "--model.optim.schedule=constant", "--trainer.max_epochs=100000", "--data.cache=null",
]  # fmt: skip


class Life:
    """`fit` with `--resume=auto` on a small network, in processes of its own.

    Args:
        root: folder of runs; the next life in it goes on.
        words: further options; a later one wins.
        environment: further variables.
        before: called in the new process before the command.
    """

    def __init__(
        self, root: Path, *words: str, environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.root = root
        self._said = root.with_name(f"{root.name}.said")
        self._said.parent.mkdir(parents=True, exist_ok=True)
        self._rows = self._written()
        command = [sys.executable, "-m", "experiments", "fit", *SMALL, f"--run.root={root}", *words]
        with self._said.open("w") as said:
            # A process group of its own: a signal to one of them is not one to all.
            self.processes = [
                subprocess.Popen(
                    command, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, cwd=ROOT,
                    stdout=said, stderr=said, preexec_fn=before, start_new_session=True,
                )
            ]  # fmt: skip

    @property
    def folder(self) -> Path:
        """Of the run."""
        return max((self.root / "vit").iterdir(), key=lambda path: path.name)

    @property
    def last(self) -> Path:
        """Its newest state."""
        return self.folder / "checkpoints" / "last.ckpt"

    def wait_for_step(self, step: int, seconds: float = 240.0) -> None:
        """Until a later step than `step` has been saved."""
        end = time.monotonic() + seconds
        while True:
            assert self.processes[0].poll() is None and time.monotonic() < end, self.said()
            if (self.root / "vit").is_dir() and self.last.is_file() and saved.read(self.last)["global_step"] > step:
                return
            time.sleep(0.05)

    def ranks(self, seconds: float = 240.0) -> list[int]:
        """The first process and the one that it has started, once this life has written some rows."""
        first, end = self.processes[0].pid, time.monotonic() + seconds
        while True:
            assert self.processes[0].poll() is None and time.monotonic() < end, self.said()
            others = _children(first)
            if others and self._written() > self._rows + 5:
                return [first, others[0]]
            time.sleep(0.1)

    def _written(self) -> int:
        return sum(path.read_text().count("\n") for path in self.root.glob("vit/*/metrics.csv"))

    def send(self, process: int, number: signal.Signals) -> None:
        """A signal to one process."""
        self._sent = [self.processes[0].pid, *_children(self.processes[0].pid)]
        self._sent_at = time.monotonic()
        os.kill(process, number)

    def left(self, within: float) -> list[int]:
        """Processes that are still there of those when a signal was sent, after so many seconds from then."""
        while True:
            there = [process for process in self._sent if _state(process) not in ("Z", "")]
            if not there or time.monotonic() > self._sent_at + within:
                return there
            time.sleep(0.1)

    def end(self, within: float = 240.0) -> list[int]:
        """Waits for the end; gives the status. Kills what is not gone by then."""
        try:
            return [self.processes[0].wait(timeout=within)]
        except subprocess.TimeoutExpired:
            os.killpg(self.processes[0].pid, signal.SIGKILL)
            return [self.processes[0].wait()]

    def said(self) -> str:
        """What was printed."""
        return self._said.read_text()


def _stat(process: int) -> list[str]:
    """State, parent and so on, as the system lists them; nothing where the process is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _state(process: int) -> str:
    return next(iter(_stat(process)), "")


def _children(process: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _stat(int(path.name))[1:2] == [str(process)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone by now
                if b"LOCAL_RANK=1" in (path / "environ").read_bytes():
                    found.append(int(path.name))
    return found
