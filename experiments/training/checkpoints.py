"""Checkpoints that survive: written whole or not at all, at moments from which a run goes on bit for bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from experiments.training import saved
from experiments.training.signals import Signals, Stopped
from experiments.training.writing import remove_leftovers, write_whole


class WholeFiles(TorchCheckpointIO):
    """Lightning plugin: writes by `write_whole`, reads plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one checkpoint."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getbuffer(), "--run.root")

    def load_checkpoint(
        self, path: Any, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read one checkpoint; files with objects are refused whatever `weights_only` says."""
        return saved.read(path)


class BestAndLast(Checkpoint):
    """Keeps `best.ckpt`, by `val/primary`, and `last.ckpt`, from which a run goes on exactly.

    `last.ckpt` is written after each epoch, every `every_n_steps` optimiser steps, when a step or time limit
    ends the run inside an epoch, and when one of the processes gets SIGINT, SIGTERM or SIGUSR1: at the end of the
    step they are in (of the validation, if they are validating). A second signal ends it at once.

    Args:
        every_n_steps: extra saves inside an epoch; 0 for none. They fall on optimiser steps, never between
            batches whose gradients are accumulated.
    """

    def __init__(self, every_n_steps: int = 0) -> None:
        if every_n_steps < 0:
            raise ValueError(f"--checkpoint.every_n_steps is {every_n_steps}; it must be 0 (never) or more.")
        self.every_n_steps = every_n_steps
        self.folder: Path | None = None
        self.best_score: float | None = None
        self.best_step = 0
        self._best_loss = 0.0
        self.signals = Signals()

    @property
    def best_path(self) -> Path | None:
        """Where the best weights are, None before the first validation."""
        return None if self.folder is None or self.best_score is None else self.folder / "best.ckpt"

    @property
    def last_path(self) -> Path | None:
        """Where the newest state is."""
        return None if self.folder is None else self.folder / "last.ckpt"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Clean up behind a killed process."""
        assert self.folder is not None, "the run folder sets it"
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Catch signals from here on, once loading can no longer be cut short by one."""
        self.signals.listen(training=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the signals back, before Lightning does so with its own."""
        self.signals.release()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Catch signals instead of Lightning, which lets a process that is signalled alone wait for the others."""
        self.signals.listen(training=False)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give them back."""
        self.signals.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the signals back; the state of a step that failed is not worth saving."""
        self.signals.release()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save inside the epoch where that was asked for and a resumed run can start."""
        if self._validation_follows(trainer, batch_idx) or not self._stepped(trainer, batch_idx):
            return
        step = trainer.global_step
        due = self.every_n_steps and step % self.every_n_steps == 0
        ends_here = trainer.should_stop or step == trainer.max_steps
        number = self.signals.heard(trainer)
        if due or ends_here or number:
            self._save(trainer, "last.ckpt")
        if number:
            raise Stopped(number, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the weights if they are the best so far."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score, loss = (float(trainer.callback_metrics[name]) for name in ("val/primary", "val/loss"))
        # A NaN is smaller than nothing and larger than nothing: it would stay the best for ever.
        score, loss = -math.inf if math.isnan(score) else score, math.inf if math.isnan(loss) else loss
        # A small validation part gives many equal scores; among these the loss decides.
        if self.best_score is None or (score, -loss) > (self.best_score, -self._best_loss):
            self.best_score, self._best_loss, self.best_step = score, loss, trainer.global_step
            self._save(trainer, "best.ckpt")
        ends_here = trainer.should_stop or trainer.global_step == trainer.max_steps
        if trainer.is_last_batch or not self._stepped(trainer, trainer.fit_loop.epoch_loop.batch_idx):
            return
        number = self.signals.heard(trainer)
        if ends_here or number:
            self._save(trainer, "last.ckpt")
        if number:
            raise Stopped(number, trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save after a full epoch; an epoch that was left early has been saved where it was left."""
        if trainer.is_last_batch:
            self._save(trainer, "last.ckpt")
            if number := self.signals.heard(trainer):
                raise Stopped(number, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Best score so far."""
        return {"best_score": self.best_score, "best_loss": self._best_loss, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the best score so far, provided its file is in this folder."""
        if self.folder is not None and (self.folder / "best.ckpt").exists():
            self.best_score, self._best_loss = state_dict["best_score"], state_dict["best_loss"]
            self.best_step = state_dict["best_step"]

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        assert self.folder is not None
        # What a checkpoint has behind it must be on the disk first: a resumed run does not measure it again.
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(self.folder / name, weights_only=False)

    @staticmethod
    def _stepped(trainer: pl.Trainer, batch_idx: int) -> bool:
        return (batch_idx + 1) % trainer.accumulate_grad_batches == 0

    @staticmethod
    def _validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
        # A state saved between a batch and the validation due after it would be resumed without that
        # validation.
        every = trainer.val_check_batch
        due = bool(every) and every != float("inf") and (batch_idx + 1) % every == 0
        return trainer.is_last_batch or (due and bool(trainer.enable_validation))
