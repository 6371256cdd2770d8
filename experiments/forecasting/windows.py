"""From series to windows: parts in time, a scaler that knows the training rows only, and batches cut from memory.

Shapes: N rows, C columns of which the first K are targets, L lookback, H horizon, B windows, F calendar features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.forecasting.clock import calendar_features
from experiments.forecasting.numerals import LARGEST
from experiments.forecasting.policies import Rows
from experiments.forecasting.table import Table

PARTS = ("train", "val", "test")
Scaling = Literal["column", "series", "none"]
Split = tuple[float | None, float | None, float | None]


def borders(rows: int, split: Split) -> dict[str, tuple[int, int]]:
    """First row and end of each part of a series.

    Args:
        rows: of the series.
        split: for training, validation and test a share of the rows (up to 1), a number of rows, or None for the
            rest (one of them at most). Rows that are left over at the end are not used.

    Raises:
        ValueError: for shares and numbers that do not fit.

    Example:
        >>> borders(966, (0.7, None, 0.2))
        {'train': (0, 676), 'val': (676, 773), 'test': (773, 966)}
    """
    if sum(size is None for size in split) > 1 or any(size is not None and size < 0 for size in split):
        raise ValueError(
            f"--data.split is {list(split)}; expected three: shares up to 1, rows, or null for the rest (once)."
        )
    given = [None if size is None else int(size * rows) if size <= 1 else int(size) for size in split]
    taken = sum(size for size in given if size is not None)
    if taken > rows:
        raise ValueError(f"--data.split={list(split)} asks for {taken} rows, and there are {rows}.")
    sizes = [rows - taken if size is None else size for size in given]
    ends = np.cumsum(sizes).tolist()
    return {part: (end - size, end) for part, size, end in zip(PARTS, sizes, ends, strict=True)}


def origins(rows: Rows, part: tuple[int, int], *, lookback: int, horizon: int, targets: int) -> np.ndarray:
    """Where windows start to forecast: the numbers of their first target rows.

    Targets stay within the part, the lookback reaches back wherever there are rows. Windows are left out that need a
    value that is missing and was not filled: of any column in the lookback, of the targets in the horizon.

    Args:
        rows: one series.
        part: its first row and end.
        lookback: L.
        horizon: H.
        targets: K.
    """
    first, last = max(part[0], lookback), part[1] - horizon
    if last < first:
        return np.zeros(0, dtype=np.int64)
    found = np.arange(first, last + 1)
    bad = np.isnan(rows.values)
    any_bad, target_bad = (_before(mask.any(axis=1)) for mask in (bad, bad[:, :targets]))
    behind = any_bad[found] - any_bad[found - lookback]
    ahead = target_bad[found + horizon] - target_bad[found]
    return found[(behind == 0) & (ahead == 0)]


def _before(mask: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(mask)])


@dataclass(frozen=True)
class Scaler:
    """Mean and deviation of training rows, for all series alike or for each: float64 [1 or S, C].

    The deviation is the population form; that of a flat column is 1, on the way there and on the way back.

    Example:
        >>> scaler = Scaler.fit([np.array([[42.0], [42.0]])], "column")
        >>> scaler.apply(np.array([[42.0]])), scaler.undo(np.array([[0.5]]))
        (array([[0.]]), array([[42.5]]))
    """

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def fit(cls, series: Sequence[np.ndarray], scaling: Scaling) -> Scaler:
        """From the training rows [N, C] of each series; missing values (NaN) do not count."""
        columns = series[0].shape[1]
        if scaling == "none":
            return cls(np.zeros((1, columns)), np.ones((1, columns)))
        groups = [np.concatenate(series)] if scaling == "column" else list(series)
        means, deviations = [], []
        for values in groups:
            there = ~np.isnan(values)
            count = np.maximum(there.sum(0), 1)
            mean = np.where(there, values, 0.0).sum(0) / count
            std = np.sqrt(np.where(there, (values - mean) ** 2, 0.0).sum(0) / count)
            means.append(mean)
            # What is left of a flat column is rounding, and would be blown up.
            deviations.append(np.where(std > 1e-12 * np.abs(mean), std, 1.0))
        return cls(np.stack(means), np.stack(deviations))

    def apply(self, values: np.ndarray, series: int = 0) -> np.ndarray:
        """Rows in the data's units [..., C] -> scaled."""
        place = series if len(self.mean) > 1 else 0
        return (values - self.mean[place]) / self.std[place]

    def undo(self, values: np.ndarray, series: int = 0) -> np.ndarray:
        """Scaled targets [..., K], K up to C -> in the data's units."""
        place, count = series if len(self.mean) > 1 else 0, values.shape[-1]
        return values * self.std[place, :count] + self.mean[place, :count]


def check_scaled(table: Table, scaler: Scaler) -> None:
    """Raises ``ValueError`` for the first value that scaling makes so large that float32 does not hold its square."""
    for number, row in enumerate(table.rows):
        far = np.argwhere(np.nan_to_num(np.abs(scaler.apply(row.values, number))) > LARGEST)
        if len(far):
            place, column = far[0]
            raise ValueError(
                f"{table.title}, {table.unit} {row.lines[place]}, column {[*table.targets, *table.inputs][column]!r}: "
                f"{row.values[place, column]:g} is more than {LARGEST:g} deviations from the mean of the training "
                "rows. Mend it, or leave the column out."
            )


def naive_error(values: np.ndarray, season: int) -> np.ndarray:
    """Mean absolute difference of rows a season apart, the divisor of MASE: [N, K] -> [K]; NaN where it is 0."""
    apart = np.abs(values[season:] - values[:-season])
    there = ~np.isnan(apart)
    mean = np.where(there, apart, 0.0).sum(0) / np.maximum(there.sum(0), 1)
    return np.where(mean > 0, mean, np.nan)


class Store:
    """All series one behind the other, scaled, in memory; cuts batches of windows.

    Args:
        rows: the series.
        scaler: of their values.
        calendar: float [N, F] for each series.
        naive: divisors of MASE in the data's units, [K] for each series.
        targets: K.
        lookback: L.
        horizon: H.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        scaler: Scaler,
        calendar: Sequence[np.ndarray],
        naive: Sequence[np.ndarray],
        *,
        targets: int,
        lookback: int,
        horizon: int,
    ) -> None:
        self.lookback, self.horizon, self.targets = lookback, horizon, targets
        scaled = [scaler.apply(row.values, number) for number, row in enumerate(rows)]
        known = np.concatenate([row.known for row in rows])
        values = np.nan_to_num(np.concatenate(scaled))
        self.values = torch.from_numpy(np.ascontiguousarray(values.T, dtype=np.float32))  # [C, N]
        self.known = torch.from_numpy(np.ascontiguousarray(known.T))
        self.calendar = torch.from_numpy(np.concatenate(calendar).astype(np.float32))  # [N, F]
        self.naive = torch.from_numpy(np.stack(naive).astype(np.float32))  # [S, K]
        self.std = torch.from_numpy(scaler.std[:, :targets].astype(np.float32))
        self.mean = torch.from_numpy(scaler.mean[:, :targets].astype(np.float32))
        lengths = [len(row.values) for row in rows]
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self.series = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
        self._last = None if known.all() else torch.from_numpy(_last_known(known, self.starts).T.copy())

    def batch(self, numbers: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """Windows by the numbers of their first target rows.

        Returns:
            "past" [B, C, L] and "future" [B, K, H], scaled; "known" bool [B, K, H], False where the future is
            missing or was filled; "calendar" [B, H, F]; "naive" [B, K], "mean" and "std" [B, K] in the data's units;
            "window" [B], their numbers.
        """
        at = torch.as_tensor(numbers)
        width = self.lookback + self.horizon
        whole = self.values.unfold(1, width, 1)[:, at - self.lookback].transpose(0, 1)  # [B, C, L + H]
        past = whole[..., : self.lookback]
        if self._last is not None:
            past = self._as_known_then(past, at)
        ahead = at[:, None] + torch.arange(self.horizon)
        series = self.series[at]
        scale = series if len(self.std) > 1 else torch.zeros_like(series)
        return {
            "past": past.contiguous(),
            "future": whole[:, : self.targets, self.lookback :].contiguous(),
            "known": self.known[: self.targets, ahead].transpose(0, 1).contiguous(),
            "calendar": self.calendar[ahead],
            "naive": self.naive[series],
            "mean": self.mean[scale],
            "std": self.std[scale],
            "window": at,
        }

    def _as_known_then(self, past: Tensor, at: Tensor) -> Tensor:
        """The last rows of the lookback, where they were filled towards a value of the future: the last known value."""
        assert self._last is not None
        last = self._last[:, at - 1].T  # [B, C]
        column = torch.arange(past.shape[1])
        value = torch.where(last >= 0, self.values[column, last.clamp(min=0)], 0.0)  # 0 is the mean
        place = at[:, None] + torch.arange(-self.lookback, 0)
        return torch.where(place[:, None] > last[..., None], value[..., None], past)


def _last_known(known: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """For each row the last one up to it whose value is known, -1 if there is none in its series: int64 [N, C]."""
    last = np.maximum.accumulate(np.where(known, np.arange(len(known))[:, None], -1), axis=0)
    first = np.repeat(starts, np.diff(np.append(starts, len(known))))
    return np.where(last >= first[:, None], last, -1)


def learned_span(rows: Sequence[Rows], split: Split) -> pd.Timedelta | None:
    """From the first to the last stamp of the training parts; None where there are no stamps."""
    parts = [row.times[slice(*borders(len(row.values), split)["train"])] for row in rows if row.times is not None]
    parts = [part for part in parts if len(part)]
    return max(part[-1] for part in parts) - min(part[0] for part in parts) if parts else None


def features(row: Rows, names: list[str]) -> np.ndarray:
    """The calendar of each row, [N, F]; none where it has no stamps."""
    if row.times is None or not names:
        return np.zeros((len(row.values), 0))
    return calendar_features(row.times, names)


class Windows(Dataset[int]):
    """The windows of a part: gives the numbers that `Store.batch` takes."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return int(self.numbers[index])
