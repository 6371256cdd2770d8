"""Order of samples and random numbers follow from (seed, epoch, batch, process)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from experiments.training.sampling import ResumableBatches, ResumableLoader


class Draws:
    """Sample i: its number, and what three generators gave when it was read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


def read(workers: int, *, seed: int = 0, epochs: int = 2, rank: int = 0, world: int = 1) -> list[list[Any]]:
    batches = ResumableBatches(12, 3, seed=seed, rank=rank, world_size=world)
    loader = ResumableLoader(Draws(), batch_sampler=batches, num_workers=workers)
    found = []
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for batch in loader:
            found.append([part.tolist() for part in batch] + [float(torch.rand(()))])
    return found


def test_r14_no_worker_process_or_epoch_draws_the_same() -> None:
    """R14: with NumPy and torch, workers, 2 epochs, 2 processes; and the same seed gives the same again."""
    both = [*read(2, rank=0, world=2), *read(2, rank=1, world=2)]
    for kind in (1, 2, 3):
        drawn = [value for batch in both for value in batch[kind]]
        assert len(set(drawn)) == len(drawn)
    steps = [batch[4] for batch in both]
    assert len(set(steps)) == len(steps)
    assert read(2) == read(2)
    assert read(2) != read(2, seed=1)


def test_number_of_workers_changes_nothing() -> None:
    assert read(0) == read(2)


@pytest.mark.parametrize(
    ("count", "size", "world"), [(5, 2, 2), (5, 2, 1), (3, 1, 2), (9, 2, 2), (2, 4, 2), (8, 2, 2), (7, 3, 3)]
)
def test_r02_each_sample_once_and_equally_many_batches(count: int, size: int, world: int) -> None:
    """R02, 8: uneven shares; no process waits for another, none has an empty batch."""
    shares = [ResumableBatches(count, size, seed=3, rank=rank, world_size=world) for rank in range(world)]
    plans = [share.plan(1) for share in shares]
    assert {len(plan) for plan in plans} == {len(shares[0])}
    assert all(0 < len(batch) <= size + 2 for plan in plans for batch in plan)
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(count))


@pytest.mark.parametrize(
    ("count", "size", "world", "right"), [(9, 4, 1, [4, 5]), (10, 4, 1, [4, 4, 2]), (11, 4, 2, [6]), (3, 1, 1, [1] * 3)]
)
def test_v12_the_last_batch_is_large_enough_for_a_batch_norm(
    count: int, size: int, world: int, right: list[int]
) -> None:
    assert [len(batch) for batch in ResumableBatches(count, size, seed=0, world_size=world)] == right


def test_drop_last_gives_full_batches_alone() -> None:
    batches = ResumableBatches(9, 2, seed=0, world_size=2, drop_last=True)
    assert [len(batch) for batch in batches] == [2, 2]
    assert len(batches) == 2


def test_order_changes_with_epoch_and_seed_and_is_stable() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return ResumableBatches(20, 4, seed=seed).plan(epoch)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    # A stored order: an update that changed it would change every published run.
    assert order(0, 0)[0] == FIRST


FIRST = [5, 9, 13, 11]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_samples": 1, "batch_size": 1, "world_size": 2}, "1 training samples are too few"),
        ({"num_samples": 0, "batch_size": 1}, "0 training samples"),
        ({"num_samples": 3, "batch_size": 4, "drop_last": True}, "need 4"),
        ({"num_samples": 3, "batch_size": 0}, "--data.batch_size is 0"),
    ],
)
def test_too_little_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ResumableBatches(seed=0, **options)
