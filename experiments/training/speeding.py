"""Time for memory and memory for time: recomputed activations, and compiled blocks."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.training.module import Experiment
from experiments.training.sharding import blocks


class Blocks(pl.Callback):
    """Changes how the blocks of a network run while it is trained; their weights and names stay.

    Args:
        recompute: keep the inputs of each block alone, and run it again in the backward pass (Chen et al. 2016,
            "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174).
        compiled: by `torch.compile`, each block by itself: equal blocks are compiled once.
    """

    def __init__(self, *, recompute: bool, compiled: bool) -> None:
        self.recompute, self.compiled = recompute, compiled
        self._changed: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change them, once all is said that is found out by looking into them.

        Raises:
            ValueError: the network has no blocks.
        """
        assert isinstance(pl_module, Experiment) and isinstance(pl_module.network, nn.Module)
        self._changed = list(blocks(pl_module.network))
        if not self._changed:
            asked = "activation_checkpointing" if self.recompute else "compile"
            raise ValueError(f"--{asked}=true: {type(pl_module.network).__name__} has no blocks; leave the option out.")
        for block in self._changed:
            if self.recompute:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            if self.compiled:
                block.compile()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave them as they were."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave them as they were."""
        self._restore()

    def _restore(self) -> None:
        for block in self._changed:
            block.__dict__.pop("forward", None)
            block._compiled_call_impl = None
        self._changed = []
