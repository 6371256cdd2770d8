"""From the gradients of several batches to one update: exact mean, norm before clipping, clipping."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor

from experiments.training.sharding import local, whole


class AccumulatedLoss:
    """Losses of the batches that make one optimiser step.

    Lightning averages the batches of an accumulated step, and DDP the processes, as if all had the same size.
    They do not: the last batch is smaller, and sentences differ in length. Here each batch is divided by the
    size of the first one, and `correction` turns the gradient of that into the gradient of the mean over
    everything in the step. So splitting a batch does not change the update.
    """

    def __init__(self) -> None:
        self._unit: Tensor | None = None
        self._loss: Tensor | float = 0.0
        self._aux: Tensor | float | None = None
        self._plain: Tensor | float | None = None
        self._count: Tensor | int = 0
        self._means: dict[str, float] | None = None
        self._norm: Tensor | None = None

    def add(
        self, trainer: pl.Trainer, loss_sum: Tensor, count: Tensor, aux: Tensor | None, plain: Tensor | None = None
    ) -> Tensor:
        """Take one batch in; returns the scalar to differentiate."""
        if self._unit is None:
            # In double precision where the loss is; single precision would round the factor of every gradient.
            exact = torch.promote_types(loss_sum.dtype, torch.float32)
            self._unit = count.detach().to(exact).clamp(min=1)
            if trainer.world_size > 1:
                self._unit = trainer.strategy.reduce(self._unit, reduce_op="mean")
        self._loss = self._loss + loss_sum.detach()
        self._count = self._count + count.detach()
        if plain is not None:
            self._plain = (0.0 if self._plain is None else self._plain) + plain.detach()
        if aux is None:
            return loss_sum / self._unit
        self._aux = (0.0 if self._aux is None else self._aux) + aux.detach() * count
        return (loss_sum + aux * count) / self._unit

    def correction(self, trainer: pl.Trainer) -> Tensor | float:
        """Factor from the gradient that Lightning has accumulated to that of the mean."""
        if trainer.accumulate_grad_batches == 1 and trainer.world_size == 1:
            return 1.0
        assert self._unit is not None
        count = torch.as_tensor(self._count, dtype=self._unit.dtype)
        if trainer.world_size > 1:
            count = trainer.strategy.reduce(count, reduce_op="sum")
        return self._unit * trainer.accumulate_grad_batches * trainer.world_size / count.clamp(min=1)

    def means(self, trainer: pl.Trainer) -> dict[str, float]:
        """`train/loss`, and `train/aux` and `train/nll` where there are such, per sample or token of the step.

        Asked for when all batches have been added; the processes exchange them once.
        """
        if self._means is not None:
            return self._means
        parts = {"train/loss": self._loss, "train/aux": self._aux, "train/nll": self._plain}
        known = {name: part for name, part in parts.items() if part is not None}
        exact = torch.float32 if self._unit is None else self._unit.dtype
        values = [torch.as_tensor(part, dtype=exact) for part in (self._count, *known.values())]
        total = torch.stack(values)
        if trainer.world_size > 1:
            total = trainer.strategy.reduce(total, reduce_op="sum")
        count, *sums = total.tolist()
        self._means = {name: value / max(count, 1) for name, value in zip(known, sums, strict=True)}
        return self._means

    def norm(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Euclidean norm of the gradients that Lightning has accumulated, before `correction`; measured once."""
        if self._norm is None:
            self._norm = norm(true_gradients(optimizer, 1.0))
        return self._norm


def true_gradients(optimizer: torch.optim.Optimizer, correction: Tensor | float) -> list[torch.nn.Parameter]:
    """Parameters that have a gradient, after `correction` was applied to all of them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if isinstance(correction, Tensor) and parameters:
        torch._foreach_mul_([local(p.grad) for p in parameters], correction)
    return parameters


def norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients together."""
    return whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
