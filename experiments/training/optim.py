"""AdamW with weight decay where it belongs, and learning-rate schedules counted in optimiser steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import nn

log = logging.getLogger("experiments")


@dataclass(frozen=True)
class Optim:
    """Optimiser and schedule.

    The rate rises in a straight line over the warm-up and reaches `lr` at step `warmup_steps` (steps count
    from 1, so the first step already moves). After it: `cosine` falls to `min_lr_ratio * lr`, which the step
    after the last would have, so that the last one still moves; `inverse_sqrt` falls as the square root of 1
    / step; `constant` stays.

    Args:
        lr: the highest learning rate.
        weight_decay: AdamW's decay; not for norms, biases, embeddings, position tables and other vectors.
        betas: AdamW's two averages.
        eps: AdamW's smallest divisor.
        warmup_steps: optimiser steps until the rate reaches `lr`.
        schedule: what follows the warm-up.
        min_lr_ratio: where the cosine ends, as a share of `lr`.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    warmup_steps: int = 100
    schedule: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"--model.optim.lr is {self.lr}; it must be above 0.")
        if self.weight_decay < 0:
            raise ValueError(f"--model.optim.weight_decay is {self.weight_decay}; it must be 0 or more.")
        if self.warmup_steps < 0:
            raise ValueError(f"--model.optim.warmup_steps is {self.warmup_steps}; it must be 0 or more.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"--model.optim.min_lr_ratio is {self.min_lr_ratio}; it must lie between 0 and 1.")

    def check_length(self, total: int | None, bound: str = "--trainer.max_epochs") -> None:
        """Refuse a schedule that must know the steps of the run where nothing bounds them; warn of too few.

        Args:
            total: steps of the run, None where nothing bounds it.
            bound: the option that does.

        Raises:
            ValueError: a cosine without an end.
        """
        if total is None and self.schedule == "cosine":
            raise ValueError(
                "--model.optim.schedule=cosine must know where the run ends; set --trainer.max_epochs or "
                "--trainer.max_steps, or take another schedule."
            )
        if total is not None and total <= self.warmup_steps:
            log.warning(
                "The run has %d steps, and %d of warm-up: it never reaches --model.optim.lr. Lower "
                "--model.optim.warmup_steps%s, or raise %s.",
                total, self.warmup_steps, "" if bound.endswith("steps") else " or the size of a batch", bound,
            )  # fmt: skip

    def factor(self, step: int, total_steps: int | None) -> float:
        """Share of `lr` that optimiser step `step` (from 1) uses.

        Args:
            step: number of the step, from 1.
            total_steps: steps of the whole run; only the cosine needs it.

        Example:
            >>> [round(Optim(warmup_steps=4).factor(step, 8), 2) for step in (1, 2, 3, 4, 9)]
            [0.25, 0.5, 0.75, 1.0, 0.0]
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "inverse_sqrt":
            return math.sqrt(max(self.warmup_steps, 1) / step)
        assert total_steps is not None
        start = max(self.warmup_steps, 1)
        done = min(1.0, (step - start) / max(1, total_steps + 1 - start))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    def optimizer(self, network: nn.Module) -> torch.optim.AdamW:
        """AdamW over the parameters of `network` that are trained."""
        decayed, spared = split_parameters(network)
        groups = [
            {"params": decayed, "weight_decay": self.weight_decay, "decays": True},
            {"params": spared, "weight_decay": 0.0, "decays": False},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps)

    def scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int | None) -> torch.optim.lr_scheduler.LambdaLR:
        """The schedule; to be moved on once per optimiser step."""
        factor: Callable[[int], float] = lambda done: self.factor(done + 1, total_steps)  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def enforce(self, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
        """Put these options in force again after a checkpoint brought those it was trained with."""
        for group in optimizer.param_groups:
            group.update(betas=self.betas, eps=self.eps, initial_lr=self.lr)
            group["weight_decay"] = self.weight_decay if group["decays"] else 0.0
            group["lr"] = self.lr * scheduler.lr_lambdas[0](scheduler.last_epoch)
        scheduler.base_lrs = [self.lr] * len(optimizer.param_groups)


def split_parameters(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trained parameters with weight decay, and those without.

    Spared are vectors (biases, norm gains, class tokens: at most one axis longer than 1 in front of the
    last), the weights of embeddings, everything inside `attnzoo.positions` modules, and what a module lists
    by `no_weight_decay() -> set of its own parameter names`.
    """
    spared: set[int] = set()
    for module in network.modules():
        own = dict(module.named_parameters(recurse=False))
        names = set(module.no_weight_decay()) if hasattr(module, "no_weight_decay") else set()
        table = isinstance(module, nn.Embedding) or type(module).__module__.startswith("attnzoo.positions")
        for name, parameter in own.items():
            vector = parameter.ndim <= 1 or (parameter.ndim >= 3 and parameter.numel() == parameter.shape[-1])
            if table or vector or name in names:
                spared.add(id(parameter))
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return (
        [parameter for parameter in trained if id(parameter) not in spared],
        [parameter for parameter in trained if id(parameter) in spared],
    )


def total_steps(trainer: pl.Trainer) -> int | None:
    """Optimiser steps of the whole run, or None where nothing bounds it.

    Lightning's own figure, `estimated_stepping_batches`, sets the loaders up too early: a resumed run would
    then start its epoch from the first batch.
    """
    bounds = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        bounds.append(trainer.max_epochs * steps_per_epoch(trainer))
    return min(bounds, default=None)


def bound(trainer: pl.Trainer) -> str:
    """The option that ends the run."""
    by_steps = trainer.max_steps > 0 and trainer.max_steps == total_steps(trainer)
    return "--trainer.max_steps" if by_steps else "--trainer.max_epochs"


def steps_per_epoch(trainer: pl.Trainer) -> int:
    """Optimiser steps in an epoch; the last group of an accumulated epoch may be a short one."""
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
    return math.ceil(batches / trainer.accumulate_grad_batches)
