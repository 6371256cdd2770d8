"""How the weight of head diversity moves along a run, and what is logged of it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from attnzoo import HeadDiversity
from experiments.training.module import Experiment
from experiments.training.optim import total_steps

RISE, END = 0.1, 0.8
"""Up to which share of the run the weight rises, and from which on it is 0."""


def share(done: int, total: int) -> float:
    """Share of the weight in the optimiser step that follows `done` of `total`.

    The heads first find something to do, and end with the loss of the task alone.

    Example:
        >>> [share(done, 100) for done in (0, 5, 10, 79, 80)]
        [0.0, 0.5, 1.0, 1.0, 0.0]
    """
    return 0.0 if done >= END * total else min(1.0, done / (RISE * total))


class DiversityRamp(pl.Callback):
    """Moves the weight before each step, from the number of steps done alone, so that a resumed run needs no more.

    Writes `train/head_diversity`, the term without its weight: the mean over batches, processes and attentions.
    Does nothing where a network has no `HeadDiversity`.
    """

    def __init__(self) -> None:
        self._terms: list[HeadDiversity] = []
        self._hooks: list[RemovableHandle] = []
        self._done = self._total = 0
        # Sum and count of what was heard, in place: a list that grows would make a compiled block anew each time.
        self._heard = torch.zeros(2)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find what is to be moved, and listen to it.

        Raises:
            ValueError: nothing bounds the run.
        """
        self._terms = [module for module in pl_module.modules() if isinstance(module, HeadDiversity)]
        if not self._terms:
            return
        total = total_steps(trainer)
        if total is None:
            raise ValueError(
                "--model.head_diversity rises and ends at shares of the run, so it must know where the run ends; set "
                "--trainer.max_epochs or --trainer.max_steps."
            )
        self._done, self._total = trainer.global_step, total
        self._heard = torch.zeros(2, device=pl_module.device)
        self._hooks = [term.register_forward_hook(self._hear) for term in self._terms]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the weight of the step that this batch belongs to."""
        for term in self._terms:
            term.move(share(trainer.global_step, self._total))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write what was heard, where this batch ended an optimiser step that is logged."""
        if trainer.global_step == self._done:
            return
        self._done, every = trainer.global_step, trainer.log_every_n_steps
        if self._terms and every and (self._done % every == 0 or trainer.is_last_batch):
            total, count = trainer.strategy.reduce(self._heard.clone(), reduce_op="sum").tolist()
            assert isinstance(pl_module, Experiment)
            if count:
                pl_module.write({"train/head_diversity": total / count})
        self._heard.zero_()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()

    def _hear(self, term: HeadDiversity, inputs: Any, output: Tensor) -> None:
        self._heard[0] += output.detach()
        self._heard[1] += 1
