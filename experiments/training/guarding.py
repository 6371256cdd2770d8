"""Steps that cannot be right: a loss or gradient that is no number, a loss that explodes. Named, left out, or undone.

Going back past a spike and leaving out the batches that led to it was done by hand by Chowdhery et al. 2022, "PaLM:
Scaling Language Modeling with Pathways", arXiv:2204.02311, section 5.1.
"""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from experiments.training import gradients, saved
from experiments.training.checkpoints import BestAndLast
from experiments.training.ema import EmaWeights
from experiments.training.module import Experiment
from experiments.training.sharding import Sharded

log = logging.getLogger("experiments")

WINDOW, LEAST = 50, 10
"""How many losses the usual one is the median of, and how many there must be."""
SHOWN = 5
"""Samples that are named."""


@dataclass(frozen=True)
class Guard:
    """What becomes of a step whose loss or gradient is no number, or whose loss explodes.

    Args:
        policy: stop; skip (leave the step out: no weight moves, and the step counts); or roll_back (also go back to the
            weights and the optimiser's averages of last.ckpt; the data goes on behind the step).
        spike: a loss more than this many times the median of the last 50 steps counts too, such as 10; null for none.
        limit: after so many such steps the run stops all the same.
    """

    policy: Literal["stop", "skip", "roll_back"] = "stop"
    spike: float | None = None
    limit: int = 10

    def __post_init__(self) -> None:
        if self.spike is not None and self.spike <= 1:
            raise ValueError(f"--guard.spike is {self.spike}; it must be above 1, or null.")
        if self.limit < 1:
            raise ValueError(f"--guard.limit is {self.limit}; it must be at least 1.")


class StepGuard(pl.Callback):
    """Looks at each step before its update: with the policy `stop` at each step that is logged.

    Args:
        options: the policy.
        keeper: knows where last.ckpt is.
    """

    def __init__(self, options: Guard, keeper: BestAndLast) -> None:
        self.options, self.keeper = options, keeper
        self._losses: list[float] = []
        self._faults = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be undone."""
        if self.options.policy == "roll_back" and isinstance(trainer.strategy, Sharded):
            raise ValueError("--guard.policy=roll_back cannot go back in weights that are spread (fsdp2); take skip.")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """All processes come to the same verdict: loss and gradient are those of all."""
        assert isinstance(pl_module, Experiment)
        if self.options.policy == "stop" and self.options.spike is None and not pl_module.logs_this_step():
            return
        loss = pl_module.accumulated.means(trainer)["train/loss"]
        # A scaler of half precision leaves steps out by itself, until it has found its factor.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        norm = 0.0 if scaled else float(pl_module.accumulated.norm(optimizer))
        usual = statistics.median(self._losses) if len(self._losses) >= LEAST else math.inf
        exploded = self.options.spike is not None and loss > self.options.spike * usual
        if math.isfinite(loss) and math.isfinite(norm) and not exploded:
            if self.options.spike is not None:
                self._losses = [*self._losses[1 - WINDOW :], loss]
            return
        self._faults += 1
        said = self._said(trainer, pl_module, optimizer, loss, norm, usual if exploded else None)
        if self.options.policy == "stop" or self._faults > self.options.limit:
            raise ValueError(f"{said}\n{self._advice(trainer)}")
        log.warning("%s It is left out (%d of at most %d).", said, self._faults, self.options.limit)
        for parameter in gradients.true_gradients(optimizer, 1.0):
            parameter.grad = None
        if self.options.policy == "roll_back":
            self._go_back(trainer, pl_module, optimizer)
        pl_module.write({"train/faults": self._faults}, step=trainer.global_step + 1)

    def state_dict(self) -> dict[str, Any]:
        """What later verdicts rest on."""
        return {"losses": self._losses, "faults": self._faults}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with it."""
        self._losses, self._faults = state_dict["losses"], state_dict["faults"]

    def _said(
        self, trainer: pl.Trainer, module: Experiment, optimizer: Optimizer, loss: float, norm: float,
        usual: float | None,
    ) -> str:  # fmt: skip
        high = "" if usual is None else f", and {usual:.4g} is usual"
        gradient = "" if math.isfinite(norm) else f", its gradient {norm}"
        rate = optimizer.param_groups[0]["lr"]
        return (
            f"The loss is {loss:.4g} in step {trainer.global_step + 1}{gradient}{high}, at rate {rate:.3g}; "
            f"highest at samples {blame(trainer, module)}."
        )

    def _advice(self, trainer: pl.Trainer) -> str:
        clip = "" if trainer.gradient_clip_val else ", or clip (--trainer.gradient_clip_val=1)"
        return (
            f"Lower --model.optim.lr, warm up longer (--model.optim.warmup_steps){clip}; look at these samples; or "
            "leave such steps out by --guard.policy=skip."
        )

    def _go_back(self, trainer: pl.Trainer, module: Experiment, optimizer: Optimizer) -> None:
        path = self.keeper.last_path
        if path is None or not path.is_file():
            log.warning("There is no last.ckpt yet to go back to.")
            return
        checkpoint = saved.read(path)
        rates = [group["lr"] for group in optimizer.param_groups]
        module.load_state_dict(checkpoint.get("raw_state_dict", checkpoint["state_dict"]))
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EmaWeights):
                callback.go_back(checkpoint)
        log.warning("Weights and averages are again those after step %d.", checkpoint["global_step"])


def blame(trainer: pl.Trainer, module: Experiment) -> str:
    """Numbers of the training samples of this step whose loss is no number or the highest, with the loss of each.

    The batches are read again, and their samples sent through one by one. Where weights are spread over processes that
    cannot be done in one alone, and all samples are named.
    """
    loader, loop = trainer.train_dataloader, trainer.fit_loop.epoch_loop
    first = loop.batch_idx - loop.batch_idx % trainer.accumulate_grad_batches
    found: list[tuple[float, int]] = []
    for position in range(first, loop.batch_idx + 1):
        numbers, batch = loader.again(trainer.current_epoch, position)
        if isinstance(trainer.strategy, Sharded):
            found += [(math.nan, number) for number in numbers]
            continue
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        with torch.no_grad(), trainer.precision_plugin.train_step_context():
            for place, number in enumerate(numbers):
                step = module.step(_row(batch, place, len(numbers)), "train")
                found.append((float(step.loss_sum) / max(1.0, float(step.count)), number))
    if trainer.world_size > 1:
        everywhere: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(everywhere, found)
        found = [entry for part in everywhere for entry in part]
    found.sort(key=lambda entry: (math.isfinite(entry[0]), -entry[0] if math.isfinite(entry[0]) else 0.0))
    shown = ", ".join(f"{number} ({loss:.4g})" for loss, number in found[:SHOWN])
    return f"{shown}{', ...' if len(found) > SHOWN else ''}"


def _row(batch: Any, place: int, rows: int) -> Any:
    """One sample of a batch, still a batch: of what has as many entries as there are samples, one."""
    if isinstance(batch, dict):
        return {name: _row(value, place, rows) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(value, place, rows) for value in batch)
    if isinstance(batch, list) and any(isinstance(value, torch.Tensor) for value in batch):
        return [_row(value, place, rows) for value in batch]
    return batch[place : place + 1] if hasattr(batch, "__len__") and len(batch) == rows else batch
