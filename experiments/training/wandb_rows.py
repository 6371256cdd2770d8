"""Weights & Biases: one run for one folder, offline unless logged in, and never the end of a run."""

from __future__ import annotations

import functools
import logging
import netrc
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from experiments.training.samples import Samples
from experiments.training.usage import python, short

R = TypeVar("R")

_log = logging.getLogger("experiments")

PROJECT = "attnzoo"
STEP = "trainer/global_step"
ONLINE = ("online", "run", "shared")
"""Values of WANDB_MODE that need a server."""


class WandbRows(Logger):
    """Sends rows to W&B. Whatever goes wrong there costs one line of warning and the rest of the W&B log.

    A thread of its own hands them over, one after the other: W&B makes its caller wait for another thread, which is
    a thirtieth of a short step.

    Args:
        folder: run folder; W&B makes `wandb/` in it, and its run id is kept there for resuming.
        name: name of the run.
        group: runs to be compared with each other.
        tags: words to filter by.
        config: gives short flat options; asked when the run is opened, with the first row.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        group: str,
        tags: Sequence[str],
        config: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__()
        self.folder = folder
        self.options = {"name": name, "group": group, "tags": list(tags), "job_type": "train"}
        self.config = config
        self._run: Any = None
        self._broken = False
        self._sender = ThreadPoolExecutor(1, "wandb-rows")

    @property
    def name(self) -> str:
        """Kind of logger."""
        return "wandb"

    @property
    def version(self) -> str:
        """Nothing: the folder has the number."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Not taken: `config` is the short form made for comparing."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """One row, on the axis of optimiser steps. The first one opens the run, on the first process only."""
        if self._run is None:
            self._run = self._try(self._open)
        if self._run is not None:
            self._sender.submit(self._try, functools.partial(self._run.log, {**metrics, STEP: step}))

    @rank_zero_only
    def log_figures(self, figures: dict[str, Path], step: int) -> None:
        """Pictures from files."""
        if self._run is not None:
            self._in_turn(lambda: self._run.log({**{k: _picture(path) for k, path in figures.items()}, STEP: step}))

    @rank_zero_only
    def log_samples(self, table: Samples, step: int) -> None:
        """Predictions of fixed samples, as a table; paths in it are pictures in the run folder."""
        if self._run is not None:
            self._in_turn(lambda: self._run.log({"samples": self._table(table), STEP: step}))

    @rank_zero_only
    def keep_checkpoint(self, path: Path, score: float | None) -> None:
        """The best checkpoint as an artifact of the run, where it is online; offline it stays the file that it is."""
        if self._run is not None and not self._run.offline:
            self._in_turn(lambda: self._send(path, score))

    @rank_zero_only
    def summarise(self, values: dict[str, Any]) -> None:
        """Figures of the whole run, such as the best score and its step."""
        if self._run is not None:
            self._in_turn(lambda: self._run.summary.update(values))

    @rank_zero_only
    def finish(self, exit_code: int) -> None:
        """Close the run."""
        if self._run is not None:
            self._in_turn(lambda: None)
            # Also after a failure: what has been written so far is to be kept.
            self._broken = False
            self._in_turn(lambda: self._run.finish(exit_code=exit_code))
            self._run = None

    @property
    def offline_folder(self) -> Path | None:
        """What `wandb sync` takes, None where the run is online or there is none."""
        if self._run is None or not self._run.offline:
            return None
        return Path(self._run.dir).parent

    def _open(self) -> Any:
        import wandb

        kept = self.folder / "wandb_id.txt"
        identity = kept.read_text().strip() if kept.is_file() else secrets.token_hex(4)
        kept.write_text(identity + "\n")
        options = {
            **self.options, "project": os.environ.get("WANDB_PROJECT", PROJECT), "dir": self.folder, "id": identity,
            "config": self.config(), "settings": wandb.Settings(silent=True, console="off", init_timeout=30),
        }  # fmt: skip
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        online = mode in ONLINE
        try:
            if online and not logged_in():
                # In a terminal W&B would ask for a key, and wait for ever.
                raise wandb.Error(f"no key is known, {python()} -m wandb login")
            run = wandb.init(**options, mode=mode, resume="allow" if online else None)
        except wandb.Error as error:
            if not online:
                raise
            _log.warning("W&B cannot be reached (%s); it logs offline, and make sync sends it.", _line(error))
            wandb.teardown()  # which lets the id be used again
            run = wandb.init(**options, mode="offline")
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        run.define_metric("val/primary", step_metric=STEP, summary="max,last")
        for loss in ("train/loss", "val/loss"):
            run.define_metric(loss, step_metric=STEP, summary="min,last")
        return run

    def _table(self, table: Samples) -> Any:
        import wandb

        rows = [
            [_picture(self.folder / cell) if isinstance(cell, Path) else cell for cell in row] for row in table.rows
        ]
        return wandb.Table(columns=table.columns, data=rows)

    def _send(self, path: Path, score: float | None) -> None:
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata={"val/primary": score})
        artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["best"])

    def _in_turn(self, action: Callable[[], R]) -> R | None:
        """After all rows before; waits for it."""
        return self._sender.submit(self._try, action).result()

    def _try(self, action: Callable[[], R]) -> R | None:
        if self._broken:
            return None
        try:
            return action()
        except Exception as error:  # A logger must not cost a run, whatever it throws.
            self._broken = True
            _log.warning("W&B is off for the rest of this run: %s", _line(error))
            return None


def logged_in() -> bool:
    """Whether a key is known, by the environment or by `wandb login`; nothing is asked and nothing sent."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host or "")
    except (OSError, netrc.NetrcParseError):
        return False
    return known is not None


def _line(error: Exception) -> str:
    return short(str(error), lines=1, width=200) or type(error).__name__


def _picture(path: Path) -> Any:
    import wandb

    return wandb.Image(str(path))
