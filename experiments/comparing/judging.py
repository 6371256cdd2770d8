"""How sure a mean is, and whether two models differ, from a few seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats


class Difference(NamedTuple):
    """Of two models on the seeds that both have.

    Attributes:
        mean: of the differences, first minus second.
        p: of a paired t test, two-sided, not corrected for how many are looked at; None from fewer than two seeds,
            or where all differences are the same, for then their spread is not known.
        seeds: how many.
    """

    mean: float
    p: float | None
    seeds: int


def half_width(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half of the interval of the mean by Student's t; None for fewer than two values.

    Example:
        >>> round(half_width([1.0, 2.0, 3.0]), 4)
        2.4841
    """
    if len(values) < 2:
        return None
    spread = statistics.stdev(values) / len(values) ** 0.5
    return float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * spread


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Paired by seed; None where no seed is in both.

    Example:
        >>> difference({0: 1.0, 1: 2.0, 5: 9.0}, {0: 0.5, 1: 2.0}).mean
        0.25
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    gaps = [first[seed] - second[seed] for seed in shared]
    test = None
    if len(gaps) > 1 and max(gaps) - min(gaps) > 1e-12:
        test = float(stats.ttest_rel([first[seed] for seed in shared], [second[seed] for seed in shared]).pvalue)
    return Difference(statistics.mean(gaps), test, len(shared))
