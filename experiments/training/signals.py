"""Signals that ask a run to end: all its processes agree on the step, and SLURM is told that it shall go on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

log = logging.getLogger("experiments")

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the end that a system or scheduler sets; the warning that SLURM sends before it (`--signal=USR1@120`)."""

SAME_REQUEST = 2.0
"""Seconds in which a second signal is the first one again: torchrun passes on what a terminal sends to all anyway."""


class Stopped(BaseException):
    """The run was asked to end by a signal.

    Not an `Exception`, so that nothing that deals with errors takes it for one.

    Args:
        number: of the signal.
        step: the optimiser step after which the run has saved itself; None where it was not training.
    """

    def __init__(self, number: int, step: int | None = None) -> None:
        after = "" if step is None else f" after step {step}"
        super().__init__(f"stopped by {signal.Signals(number).name}{after}")
        self.number, self.step = number, step


class Signals:
    """Listens in the main thread of this process.

    In training a signal is only kept, for `heard`; elsewhere there is nothing to finish, and `Stopped` is raised. In
    training a second one, `SAME_REQUEST` seconds later, raises `KeyboardInterrupt`.
    """

    def __init__(self) -> None:
        self._number = 0
        self._since = 0.0
        self._listening: list[tuple[bool, int, dict[signal.Signals, Any]]] = []

    def listen(self, *, training: bool) -> None:
        """Catch signals until `release`."""
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._on_signal) for number in NUMBERS}
            self._listening.append((training, os.getpid(), before))

    def release(self) -> None:
        """Give them back to who had them before the last `listen`, if there was one."""
        if self._listening:
            for number, handler in self._listening.pop()[2].items():
                signal.signal(number, handler)

    @property
    def own(self) -> int:
        """The signal that this process has got in training, 0 for none."""
        return self._number

    def heard(self, trainer: pl.Trainer) -> int:
        """The signal that any process of the run has got, 0 for none; the same in all, for they wait for each other.

        So one that is signalled alone does not save and end while the others are in the next step.
        """
        if trainer.world_size == 1:
            return self._number
        number = torch.tensor(self._number, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(number, reduce_op="max"))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        training, process, _ = self._listening[-1]
        if os.getpid() != process:  # a worker that reads data, forked with our handlers; its parent ends it
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if not training:
            raise Stopped(number)
        if not self._number:
            self._number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > SAME_REQUEST:
            self.release()
            raise KeyboardInterrupt


def requeue(number: int) -> None:
    """Put the job back into SLURM's queue, where `number` is its warning that the time is over.

    Not at SIGTERM: with that one cancels a job, and a preempted one SLURM requeues by itself.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if number != signal.SIGUSR1 or job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        said = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        log.warning("SLURM did not requeue job %s: %s", job, said)
    else:
        log.info("SLURM has requeued job %s.", job)
