"""Shares of processes: batches by tokens in balance, evaluation complete and nothing twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from experiments.training.sampling import in_turn
from experiments.translation.batching import TokenBatches


@pytest.mark.parametrize("world", [2, 4, 8])
def test_batches_by_tokens_are_balanced_over_processes(world: int) -> None:
    """Within 5 %: the tokens of each process in an epoch, and what all wait for in its steps."""
    draw = np.random.default_rng(0)
    source = np.clip(np.exp(draw.normal(2.9, 0.6, 20_000)).astype(np.int64), 2, 128)
    target = np.clip((source * draw.normal(1.1, 0.2, len(source))).astype(np.int64), 2, 130)
    work = []
    for rank in range(world):
        plan = TokenBatches(source, target, 4096, seed=0, rank=rank, world_size=world).plan(0)
        work.append([len(rows) * max(source[rows].max(), target[rows].max()) for rows in plan])
    shares = np.array(work, dtype=np.float64)
    each = shares.sum(1)
    assert each.max() / each.mean() < 1.05
    assert each.min() / each.mean() > 0.95
    # The slowest process of a step is what the others wait for.
    assert shares.max(0).sum() / shares.mean(0).sum() < 1.05


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("samples", [1, 2, 5, 16, 21, 144])
def test_evaluation_counts_every_sample_once(world: int, samples: int) -> None:
    """1, 2, 8: 21 on two processes too; equally many batches, and none over the size by more than one."""
    shares = [in_turn(samples, 4, rank=rank, world_size=world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert all(0 < len(batch) <= 5 for share in shares for batch in share)
    seen = sorted(itertools.chain(*(itertools.chain(*share) for share in shares)))
    # Too few for all are judged by each as a whole: every metric is a ratio of sums.
    assert seen == (list(range(samples)) if samples >= world else sorted([*range(samples)] * world))


def test_one_process_evaluates_as_a_plain_loader_does() -> None:
    assert in_turn(5, 2) == [[0, 1], [2, 3], [4]]
    assert in_turn(4, 2) == [[0, 1], [2, 3]]
