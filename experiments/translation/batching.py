"""Batches of pairs: padded to one length, bounded by tokens, formed of pairs of like length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.training.sampling import ResumableBatches
from experiments.translation.samples import Sample
from experiments.translation.tokens import PAD


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """One batch, padded on the right.

    Returns:
        "source" int64 [B, S], "target" int64 [B, T], "index" int64 [B], "source_text" and "target_text" lists of B.
    """
    return {
        "source": pad([sample.source for sample in samples]),
        "target": pad([sample.target for sample in samples]),
        "index": torch.tensor([sample.index for sample in samples]),
        "source_text": [sample.source_text for sample in samples],
        "target_text": [sample.target_text for sample in samples],
    }


def pad(rows: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    """Rows of numbers as one tensor, int64 [rows, longest], with `PAD` behind the shorter ones."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), PAD, dtype=np.int64)
    for filled, row in zip(padded, rows, strict=True):
        filled[: len(row)] = row
    return torch.from_numpy(padded)


class TokenBatches(ResumableBatches):
    """Training batches of pairs of like length; batch `i` of epoch `e` is a pure function of (seed, e, i).

    Rows times the longest row of either side, padding counted, stays within `batch_tokens`. Pairs are laid out by
    length, anew at random among equals in each epoch, and cut into batches, which then come in random order.

    With several processes each takes one of as many neighbours: all do about the same work and have equally many
    batches, and no pair is left out or used twice. Where there are too few pairs for that, some batches are joined
    to the next one, above the bound.

    Args:
        source_lengths: length of each source row, int64 [pairs].
        target_lengths: length of each target row, int64 [pairs].
        batch_tokens: the bound, for each process.
        seed: the order follows from it.
        rank: number of this process, from 0.
        world_size: how many processes share the data.

    Raises:
        ValueError: a pair alone is over the bound, or there are fewer pairs than processes.

    Example:
        >>> batches = TokenBatches(np.array([3, 3, 9]), np.array([4, 4, 9]), 10, seed=0)
        >>> sorted(map(sorted, batches))
        [[0, 1], [2]]
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        batch_tokens: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(source_lengths) < world_size:
            raise ValueError(
                f"{len(source_lengths)} training pairs are too few for {world_size} processes. "
                "Use more data, or fewer --trainer.devices."
            )
        super().__init__(len(source_lengths), 1, seed=seed, rank=rank, world_size=world_size)
        self.source_lengths, self.target_lengths = source_lengths, target_lengths
        longest = int(np.maximum(source_lengths, target_lengths).max())
        if longest > batch_tokens:
            raise ValueError(
                f"--data.batch_tokens is {batch_tokens}, but the longest pair has {longest} tokens, start and end "
                f"included. Raise it to {longest} or more, or lower --data.max_length."
            )
        # Equals change places from epoch to epoch; the lengths in this order, and so the cuts, stay.
        order = _by_length(source_lengths, target_lengths)
        self._cuts = _cut(np.maximum(source_lengths, target_lengths)[order], batch_tokens, world_size)

    def plan(self, epoch: int) -> list[list[int]]:
        """Batches of this process in epoch `epoch`, each a list of pair numbers."""
        random = np.random.default_rng((self.seed, epoch))
        shuffled = random.permutation(self.num_samples)
        order = shuffled[_by_length(self.source_lengths[shuffled], self.target_lengths[shuffled])]
        batches = np.split(order, self._cuts)
        steps = random.permutation(len(self))
        return [batches[step * self.world_size + self.rank].tolist() for step in steps]

    def __len__(self) -> int:
        return (len(self._cuts) + 1) // self.world_size


def in_order_of_length(
    source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int, *, rank: int = 0, world_size: int = 1
) -> list[list[int]]:
    """Batches for evaluation, long pairs first: every pair once over all processes, each with equally many batches.

    Fewer pairs than processes are given to each process whole. Scores are ratios of sums, which that leaves as
    they are, and no process is without a batch, for which the others would wait.

    Args:
        source_lengths: length of each source row, int64 [pairs].
        target_lengths: length of each target row, int64 [pairs].
        batch_tokens: bound of rows times the longest row; a pair above it is a batch by itself.
        rank: number of this process, from 0.
        world_size: how many processes share the data.
    """
    if len(source_lengths) < world_size:
        rank, world_size = 0, 1
    order = _by_length(source_lengths, target_lengths)
    cuts = _cut(np.maximum(source_lengths, target_lengths)[order], batch_tokens, world_size)
    return [batch.tolist() for batch in reversed(np.split(order, cuts)[rank::world_size])]


def _by_length(source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Places of the pairs in order of the longer side, equals in their order.

    Among pairs with the same longer side the difference of the sides rises and falls in turn: so there is no jump
    where the longer side grows, and neighbours are alike on both sides.
    """
    longer, difference = np.maximum(source_lengths, target_lengths), target_lengths - source_lengths
    return np.lexsort((np.where(longer % 2, difference, -difference), longer))


def _cut(lengths: np.ndarray, batch_tokens: int, multiple: int) -> list[int]:
    """Where to cut rows of rising length into batches, so that their number is a multiple and none is empty."""
    ends: list[int] = []
    start = 0
    for place, length in enumerate(lengths.tolist()):
        if place > start and length * (place + 1 - start) > batch_tokens:
            ends.append(place)
            start = place
    ends.append(len(lengths))
    missing = -len(ends) % multiple
    if missing <= len(lengths) - len(ends):
        for _ in range(missing):
            sizes = np.diff(ends, prepend=0)
            largest = int(sizes.argmax())
            ends.insert(largest, ends[largest] - int(sizes[largest]) // 2)
    else:
        # Too few rows for more batches: some of one row are joined two by two, the shortest ones. Where a row fills a
        # batch all later ones do, so these stand together; and they are enough, since few batches have more rows.
        first = int((np.diff(ends, prepend=0) > 1).sum())
        del ends[first : first + 2 * (len(ends) % multiple) : 2]
    return ends[:-1]
