"""Ridge regression from window to horizon in closed form, by sums over all windows that are never cut out.

    x~ = x - mean(x)    y~ = y - mean(x)        of each window of each target
    W  = (X~' X~ + lambda n I)^-1 X~' Y~        one matrix [L, H] for all targets, n windows
    y^ = W' x~ + mean(x)

X~'X~ and X~'Y~ hold sums of x[t + i] x[t + j] over the windows t. These depend on running sums of x[k] x[k + d] alone,
so that all of them take time O(N (L + H)) instead of O(N L (L + H)), and so does the error at any lambda: nothing is
sampled, and lambda is chosen on the validation part exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST = 1024
"""Rows of the lookback that the ridge uses at most, the newest ones; the time for its solution grows with the cube."""

LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1)
"""Penalties that are tried, as shares of the number of windows (on scaled data: of the variance of a row)."""

RUNS = 256
"""Runs of neighbouring windows that are summed at once."""


@dataclass(frozen=True)
class Moments:
    """Sums over windows of one span.

    Attributes:
        second: sum of w w' of windows w with x~ first and y~ behind, float64 [L + H, L + H].
        count: windows, of all targets together.
        lookback: L.
    """

    second: np.ndarray
    count: int
    lookback: int

    def error(self, weight: np.ndarray) -> float:
        """Mean squared error of a matrix [L, H] over all windows and steps."""
        a, b = self.second[: self.lookback, : self.lookback], self.second[: self.lookback, self.lookback :]
        total = np.trace(self.second) - np.trace(a)
        total += np.sum(weight * (a @ weight)) - 2 * np.sum(weight * b)
        return float(total / (self.count * weight.shape[1]))


def moments(values: np.ndarray, origins: np.ndarray, lookback: int, horizon: int) -> Moments:
    """Sums over windows, exact and without cutting one out.

    Args:
        values: scaled targets [K, N], finite, series one behind the other.
        origins: sorted numbers of the first target rows of the windows.
        lookback: L.
        horizon: H.

    Raises:
        ValueError: no windows.

    Example:
        >>> series = np.sin(np.arange(50.0))[None]
        >>> sums = moments(series, np.arange(4, 48), lookback=4, horizon=2)
        >>> sums.second.shape, sums.count
        ((6, 6), 44)
    """
    if len(origins) == 0:
        raise ValueError("There are no windows to fit the ridge on.")
    width = lookback + horizon
    begin, end = origins[0] - lookback, origins[-1] + horizon
    values, origins = values[:, begin:end], origins - begin
    # The mean of a window is taken off at the end; without that of the series the difference would be rounding.
    values = values - values.mean(axis=1, keepdims=True)
    breaks = np.flatnonzero(np.diff(origins) != 1) + 1
    first = origins[np.concatenate([[0], breaks])] - lookback
    last = origins[np.append(breaks - 1, len(origins) - 1)] - lookback
    second = np.zeros((width, width))
    place = np.arange(width)
    for column in values:
        for lag in range(width):
            sums = np.concatenate([[0.0], np.cumsum(column[: len(column) - lag] * column[lag:])])
            i = place[: width - lag]
            # Window t holds the products that begin at t + i: over a run of windows they are one stretch of sums.
            for chunk in range(0, len(first), RUNS):
                start, stop = first[chunk : chunk + RUNS, None], last[chunk : chunk + RUNS, None]
                second[i, i + lag] += (sums[stop + 1 + i] - sums[start + i]).sum(0)
    second = second + np.triu(second, 1).T
    centre = np.eye(width)
    centre[:, :lookback] -= 1 / lookback
    return Moments(centre @ second @ centre.T, len(origins) * len(values), lookback)


@dataclass(frozen=True)
class Ridge:
    """What was fitted: a matrix [L, H], its penalty, and its error on the validation part."""

    weight: np.ndarray
    penalty: float
    val_mse: float


def fit_ridge(train: Moments, val: Moments, penalties: Sequence[float] = LAMBDAS) -> Ridge:
    """The ridge whose penalty is the best of some on the validation part.

    Args:
        train: sums over the training windows.
        val: sums over the validation windows.
        penalties: lambda, as shares of the number of training windows.
    """
    size = train.lookback
    values, vectors = np.linalg.eigh(train.second[:size, :size])
    turned = vectors.T @ train.second[:size, size:]
    found = []
    for penalty in penalties:
        weight = vectors @ (turned / (values + penalty * train.count)[:, None])
        found.append(Ridge(weight, penalty, val.error(weight)))
    return min(found, key=lambda ridge: ridge.val_mse)
