"""ListOps as data: made on the spot from one seed, no file needed."""

from __future__ import annotations

import collections
import random
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from experiments.listops.expressions import DIGITS, SYMBOLS, encode, grow, value
from experiments.training.sampling import ResumableBatches, ResumableLoader, in_turn, share_of

SHORTEST = 16


class ListOpsData(pl.LightningDataModule):
    """Expressions of `SHORTEST` to `max_length` symbols, padded on the right to `max_length`.

    Args:
        train_count: expressions to train on.
        val_count: to choose the checkpoint by.
        test_count: to judge by.
        max_length: the longest expression.
        batch_size: expressions in a batch.
        split_seed: the expressions follow from it.
    """

    def __init__(
        self,
        train_count: int = 4000,
        val_count: int = 500,
        test_count: int = 1000,
        max_length: int = 512,
        batch_size: int = 32,
        split_seed: int = 0,
    ) -> None:
        super().__init__()
        for name, count in (("train", train_count), ("val", val_count), ("test", test_count)):
            if count < 1:
                raise ValueError(f"--data.{name}_count is {count}; expected 1 or more.")
        if max_length < SHORTEST:
            raise ValueError(f"--data.max_length is {max_length}; expected {SHORTEST} symbols or more.")
        self.train_count, self.val_count, self.test_count = train_count, val_count, test_count
        self.max_length, self.batch_size, self.split_seed = max_length, batch_size, split_seed
        self.order_seed = 0
        self._parts: dict[str, TensorDataset] = {}

    def setup(self, stage: str) -> None:
        """Make the expressions; a second call changes nothing."""
        if self._parts:
            return
        seen: set[tuple[str, ...]] = set()
        draw = random.Random(self.split_seed)
        for part, count in (("test", self.test_count), ("val", self.val_count), ("train", self.train_count)):
            self._parts[part] = self._make(draw, count, seen)

    @property
    def facts(self) -> dict[str, Any]:
        """How many symbols and classes there are, the longest length, and the most frequent value in training."""
        labels = self._part("train").tensors[1].tolist()
        return {
            "symbols": len(SYMBOLS), "classes": len(DIGITS), "max_length": self.max_length,
            "majority": collections.Counter(labels).most_common(1)[0][0],
        }  # fmt: skip

    def train_dataloader(self) -> ResumableLoader:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        samples = self._part("train")
        batches = ResumableBatches(len(samples), self.batch_size, seed=self.order_seed, rank=rank, world_size=world)
        return ResumableLoader(samples, batch_sampler=batches)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._in_order("val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self._in_order("test")

    def _in_order(self, part: str) -> DataLoader[tuple[Tensor, ...]]:
        samples = self._part(part)
        return DataLoader(samples, batch_sampler=in_turn(len(samples), self.batch_size, **share_of(self.trainer)))

    def _part(self, part: str) -> TensorDataset:
        self.setup("fit")
        return self._parts[part]

    def _make(self, draw: random.Random, count: int, seen: set[tuple[str, ...]]) -> TensorDataset:
        tokens = torch.zeros(count, self.max_length, dtype=torch.long)
        labels = torch.empty(count, dtype=torch.long)
        for row in range(count):
            symbols = grow(draw.randint(SHORTEST, self.max_length), draw)
            while tuple(symbols) in seen:  # what is tested must not be trained on
                symbols = grow(draw.randint(SHORTEST, self.max_length), draw)
            seen.add(tuple(symbols))
            tokens[row, : len(symbols)] = torch.tensor(encode(symbols))
            labels[row] = value(symbols)
        return TensorDataset(tokens, labels)
