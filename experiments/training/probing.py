"""A fixed set of validation samples, by which the heads of a model are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from attnzoo import Mechanism
from attnzoo.heads.figures import Head, Health
from attnzoo.heads.health import ablation, head_health, mean_loss
from attnzoo.swap import adopt
from experiments.training.module import Experiment

SAMPLES = 512


def has_attention(network: nn.Module) -> bool:
    """Whether there is attention of ours in it, and not of another library alone."""
    return any(isinstance(module, Mechanism) for module in network.modules())


@runtime_checkable
class TellsQueries(Protocol):
    """An experiment some of whose sites see queries that are padding, of which no mask of theirs tells."""

    def real_queries(self, site: str, batch: Any) -> Tensor | None:
        """Bool [B, T], the real queries of a site; None where its mask tells, or all are real."""


class ProbeSet:
    """The first samples of the validation part, on the device of the model.

    Args:
        model: whose heads are measured; its loss tells of what use they are.
        data: set up; the numbers of the run are drawn as if nothing had been read.
        samples: at least so many, in whole batches.

    Raises:
        ValueError: where there are none, or the network has no attention that could be looked at.
    """

    def __init__(self, model: Experiment, data: pl.LightningDataModule, samples: int = SAMPLES) -> None:
        self.model, self.batches = model, []
        count = 0
        with torch.random.fork_rng(devices=[]):  # an iterator of a loader draws a number
            for batch in data.val_dataloader():
                batch = model.receive(batch, data)
                self.batches.append(batch)
                values = batch.values() if isinstance(batch, dict) else batch
                count += len(next(value for value in values if isinstance(value, Tensor)))
                if count >= samples:
                    break
        if not self.batches:
            raise ValueError("The validation part is empty, so there is nothing to measure heads by.")
        with self._ours():
            pass  # a network without attention is refused now, and not when the first check is due

    @property
    def network(self) -> nn.Module:
        """What the sites are named in."""
        assert self.model.network is not None
        return self.model.network

    def loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """The validation loss of one batch, in the precision of the run."""
        trainer = self.model._trainer  # None where a model is used without one
        if trainer is None:
            step = self.model.step(batch, "val")
        else:
            with trainer.precision_plugin.forward_context():
                step = self.model.step(batch, "val")
        return step.loss_sum, step.count

    def health(self, *, ablate: bool = False, seed: int = 0) -> Health:
        """The figures of all heads, the same on every process."""
        queries = self.model.real_queries if isinstance(self.model, TellsQueries) else None
        with self._ours():
            return head_health(
                self.network, self.batches, loss=self.loss, ablate=ablate, queries=queries, seed=seed,
                reduce=self._reduce,
            )  # fmt: skip

    def ablation(self, heads: Sequence[Head | Sequence[Head]], health: Health) -> list[float]:
        """By how much the loss rises without each of them, the same on every process."""
        with self._ours():
            return ablation(self.network, self.batches, self.loss, heads, health, self._reduce)

    def mean_loss(self) -> float:
        """The validation loss, the same on every process."""
        training = self.network.training
        self.network.eval()
        try:
            with torch.no_grad():
                return mean_loss(self.batches, self.loss, self._reduce)
        finally:
            self.network.train(training)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """A network of another library gives way to a copy with our attention meanwhile, which computes the same."""
        own = self.network
        if not has_attention(own):
            self.model.network = adopt(own)
        try:
            yield
        finally:
            self.model.network = own

    def _reduce(self, values: Tensor) -> Tensor:
        trainer = self.model._trainer
        if trainer is None or trainer.world_size == 1:
            return values
        whole = trainer.strategy.reduce(values.to(self.model.device), reduce_op="sum")
        assert isinstance(whole, Tensor)
        return whole.to(values.device)
