"""An exponential moving average of the weights, beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from experiments.training.sharding import agree_on_buffers, gathered, local, spread_as


@dataclass(frozen=True)
class Ema:
    """Averaging of weights.

    Args:
        decay: share of the old average that stays at each optimiser step. In the first 9 / (1 - decay) steps
            less of it stays, min(decay, (1 + step) / (10 + step)), so that the start has no weight.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"--ema.decay is {self.decay}; it must lie between 0 and 1.")


class EmaWeights(pl.Callback):
    """Averages after every optimiser step; validates, tests and ends with the average.

    Lightning's own callback makes a deep copy of the whole module and warns where there is a
    `configure_model`; this one keeps the tensors of `state_dict` and no more.

    In a checkpoint `state_dict` is the average, which is what one wants to use; the weights that training
    goes on with are in `raw_state_dict`.
    """

    def __init__(self, options: Ema) -> None:
        self.decay = options.decay
        self._average: dict[str, Tensor] | None = None
        self._raw: dict[str, Tensor] | None = None
        self._live: dict[str, Tensor] = {}
        self._averaged: list[str] = []
        self._steps = 0

    @property
    def average(self) -> dict[str, Tensor]:
        """The averaged weights by their names in `state_dict`; what is written there stays."""
        assert self._average is not None
        return self._average

    @contextmanager
    def put_in(self, pl_module: pl.LightningModule) -> Iterator[None]:
        """The average in the module, as long as the context is open."""
        raw = _copy(pl_module)
        _load(pl_module, self.average)
        try:
            yield
        finally:
            _load(pl_module, raw)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights as they are, unless a checkpoint brought an average."""
        if self._average is None:
            self._average = _copy(pl_module)
        # Of weights that are spread over processes, each averages its part.
        live = pl_module.state_dict()
        self._average = {
            name: spread_as(value.to(pl_module.device), live[name]) for name, value in self._average.items()
        }
        # These share memory with the parameters; to collect them anew takes as long as to average them.
        self._live = pl_module.state_dict()
        # A mean of what was drawn at random (features of a Performer) would be something else, so that is copied.
        learned = {name for name, _ in pl_module.named_parameters()}
        self._averaged = [
            name
            for name, value in self._live.items()
            if value.is_floating_point() and (name in learned or name.endswith(("running_mean", "running_var")))
        ]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average, where this batch ended an optimiser step."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        assert self._average is not None
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        with torch.no_grad():
            get_ema_multi_avg_fn(decay)(
                [local(self._average[name]) for name in self._averaged],
                [local(self._live[name]) for name in self._averaged],
                self._steps,
            )
        for name in self._live.keys() - set(self._averaged):
            self._average[name].copy_(self._live[name])

    def go_back(self, checkpoint: dict[str, Any]) -> None:
        """Take the average of `checkpoint`, one of a run with averaging."""
        assert self._average is not None
        with torch.no_grad():
            for name, value in self._average.items():
                value.copy_(checkpoint["state_dict"][name])

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the average."""
        if self._average is not None and trainer.state.fn == "fit":
            self._raw = _copy(pl_module)
            _load(pl_module, self._average)
            agree_on_buffers(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Back to the weights that are trained."""
        if self._raw is not None:
            _load(pl_module, self._raw)
            self._raw = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the module."""
        assert self._average is not None
        _load(pl_module, self._average)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Average under `state_dict`, trained weights beside it."""
        if self._average is not None:
            checkpoint["raw_state_dict"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = gathered(self._average, trainer.is_global_zero)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take both up again. A run without averaging before goes on with its weights as the average."""
        if trainer.state.fn != "fit":
            return
        average = checkpoint.get("average_state_dict", checkpoint["state_dict"])
        self._average = {name: value.clone() for name, value in average.items()}

    def state_dict(self) -> dict[str, Any]:
        """Steps averaged."""
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Steps averaged."""
        self._steps = state_dict["steps"]


def _copy(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _load(module: pl.LightningModule, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(values[name])
