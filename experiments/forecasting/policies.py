"""What happens to double stamps, gaps and missing values: stop and say where, or do what was asked and say how often.

Shapes: N rows, C columns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from experiments.forecasting.clock import Step, find_step

log = logging.getLogger("experiments")

Missing = Literal["stop", "drop", "fill"]
Gaps = Literal["stop", "drop", "fill", "keep"]
Duplicates = Literal["stop", "first", "last", "mean", "keep"]


@dataclass(frozen=True)
class Rows:
    """One series.

    Attributes:
        name: of the series, empty where there is one without a name.
        times: stamps [N], None where rows are only counted.
        values: float64 [N, C], NaN where a value is missing and was not filled.
        known: bool [N, C], False where a value was missing, filled or not.
        lines: int64 [N], where each row stands; 0 for a row that was put into a gap.
    """

    name: str
    times: pd.DatetimeIndex | None
    values: np.ndarray
    known: np.ndarray
    lines: np.ndarray

    def select(self, chosen: np.ndarray) -> Rows:
        """Some of the rows, by number or mask."""
        times = None if self.times is None else self.times[chosen]
        return Rows(self.name, times, self.values[chosen], self.known[chosen], self.lines[chosen])


@dataclass(frozen=True)
class Policies:
    """What was asked for, and how places are called in messages.

    Attributes:
        missing, gaps, duplicates: see `TableOptions`.
        title: of the file.
        unit: "line" or "row".
        columns: names of the C columns.
    """

    missing: Missing
    gaps: Gaps
    duplicates: Duplicates
    title: str
    unit: str
    columns: Sequence[str]


def clean(rows: list[Rows], policies: Policies) -> tuple[list[Rows], Step | None]:
    """Bring series into order: sorted, single, evenly spaced stamps, and values by the policy.

    Args:
        rows: the series as they stand in the file.
        policies: what to do.

    Returns:
        The series, and the one step of all of them (None without stamps).

    Raises:
        ValueError: where a policy is to stop; all that is wrong of one kind, counted, with the first place.
    """
    if rows[0].times is not None:
        rows = _sort(rows, policies)
        rows = _single(rows, policies)
    step = _step(rows, policies)
    missing = [~row.known for row in rows]
    if step is not None:
        rows = _even(rows, step, policies)
    return _complete(rows, policies, sum(int(part.sum()) for part in missing)), step


def _sort(rows: list[Rows], policies: Policies) -> list[Rows]:
    ordered = []
    moved = 0
    for row in rows:
        assert row.times is not None
        back = int((row.times[1:] < row.times[:-1]).sum())
        moved += back
        ordered.append(row.select(np.argsort(row.times.asi8, kind="stable")) if back else row)
    if moved:
        log.warning("%s: rows were not in the order of time (%d steps back); they were sorted.", policies.title, moved)
    return ordered


def _single(rows: list[Rows], policies: Policies) -> list[Rows]:
    repeated = [_repeated(row) for row in rows]
    extra = sum(int(mask.sum()) for mask in repeated)
    if extra == 0:
        return rows
    stamps, first, line = 0, "", 0
    for row, mask in zip(rows, repeated, strict=True):
        assert row.times is not None
        double = row.times[mask].unique()
        stamps += len(double)
        if len(double) and not first:
            first, line = f"{double[0]}{_of(row)}", int(row.lines[np.flatnonzero(mask)[0]])
    twice = "1 time stamp occurs" if stamps == 1 else f"{stamps} time stamps occur"
    said = f"{twice} more than once ({extra} extra row{_s(extra)}), first {first}"
    if policies.duplicates == "stop":
        raise ValueError(
            f"{policies.title}: {said} in {policies.unit} {line}.\n--data.table.duplicates=first, last or mean makes "
            "one row of them, keep leaves them; several series in a file are told apart by --data.table.series_column."
        )
    log.warning("%s: %s; --data.table.duplicates=%s.", policies.title, said, policies.duplicates)
    if policies.duplicates == "keep":
        if policies.gaps != "keep":
            raise ValueError(
                f"{policies.title}: --data.table.duplicates=keep leaves rows that are not evenly spaced; it needs "
                "--data.table.gaps=keep."
            )
        return rows
    return [_merge(row, policies.duplicates) for row in rows]


def _repeated(row: Rows) -> np.ndarray:
    assert row.times is not None
    return np.concatenate([[False], row.times[1:] == row.times[:-1]])


def _merge(row: Rows, policy: Duplicates) -> Rows:
    assert row.times is not None
    starts = np.flatnonzero(~_repeated(row))
    if policy == "first":
        return row.select(starts)
    if policy == "last":
        return row.select(np.append(starts[1:], len(row.times)) - 1)
    counts = np.add.reduceat(row.known.astype(np.int64), starts, axis=0)
    sums = np.add.reduceat(np.where(row.known, row.values, 0.0), starts, axis=0)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Rows(row.name, row.times[starts], means, counts > 0, row.lines[starts])


def _step(rows: list[Rows], policies: Policies) -> Step | None:
    found: dict[Step, str] = {}
    for row in rows:
        step = None if row.times is None else find_step(row.times.unique())
        if step is not None:
            found.setdefault(step, row.name)
    if len(found) > 1:
        said = " and ".join(f"{step} in series {name!r}" for step, name in list(found.items())[:2])
        raise ValueError(
            f"{policies.title}: the series have different steps, {said}. Make one file of those with the same step."
        )
    return next(iter(found), None)


def _even(rows: list[Rows], step: Step, policies: Policies) -> list[Rows]:
    """Put a row of missing values where a stamp is missing, unless rows are to stay as they are."""
    placed = []
    for row in rows:
        assert row.times is not None
        numbers, whole = step.numbers(row.times, row.times[0])
        off = np.flatnonzero(~whole)
        if len(off) and policies.gaps != "keep":
            place = int(off[0])
            raise ValueError(
                f"{policies.title}: most rows are {step} apart, but {len(off)} stamp{_s(len(off))}{_of(row)} "
                f"{'lies' if len(off) == 1 else 'lie'} between two steps, "
                f"first {row.times[place]} in {policies.unit} {row.lines[place]}.\n"
                "Mend them, or take the rows as they are by --data.table.gaps=keep."
            )
        placed.append(numbers)
    absent = [_absent(numbers) for numbers in placed]
    count = sum(map(len, absent))
    if count == 0 or (policies.gaps == "keep" and policies.duplicates == "keep"):
        if policies.gaps == "keep":
            _say_kept(rows, step, policies)
        return rows
    said = _describe_gaps(rows, placed, absent, step, policies)
    if policies.gaps == "stop":
        naive = rows[0].times is not None and rows[0].times.tz is None and step.unit == "time"
        clock = " Local clock times need their zone, such as --data.table.time_zone=Europe/Berlin." if naive else ""
        raise ValueError(
            f"{policies.title}: {said}.\n--data.table.gaps=fill fills it in straight lines, drop leaves out windows "
            f"over it, keep takes the rows as neighbours.{clock}"
        )
    log.warning("%s: %s; --data.table.gaps=%s.", policies.title, said, policies.gaps)
    if policies.gaps == "keep":
        return rows
    return [
        _with_rows(row, step, numbers, gap, policies.gaps == "fill")
        for row, numbers, gap in zip(rows, placed, absent, strict=True)
    ]


def _absent(numbers: np.ndarray) -> np.ndarray:
    full = np.ones(int(numbers.max()) + 1, dtype=bool)
    full[numbers] = False
    return np.flatnonzero(full)


def _say_kept(rows: list[Rows], step: Step, policies: Policies) -> None:
    uneven = 0
    for row in rows:
        assert row.times is not None
        uneven += int((np.diff(step.numbers(row.times, row.times[0])[0]) != 1).sum())
    if uneven:
        log.warning(
            "%s: %d rows are not %s after the one before; rows are kept as they are (--data.table.gaps=keep).",
            policies.title, uneven, step,
        )  # fmt: skip


def _describe_gaps(
    rows: list[Rows], placed: list[np.ndarray], absent: list[np.ndarray], step: Step, policies: Policies
) -> str:
    count = sum(map(len, absent))
    gaps = sum(int((np.diff(numbers) > 1).sum()) for numbers in placed)
    which = next(place for place, gap in enumerate(absent) if len(gap))
    row = rows[which]
    assert row.times is not None
    first = int(absent[which][0])
    stamp = step.stamps(row.times[0], np.array([first]))[0]
    after = int(row.lines[np.flatnonzero(placed[which] > first)[0]])
    kinds = "is 1 gap" if gaps == 1 else f"are {gaps} gaps"
    missing = "1 row is missing" if count == 1 else f"{count} rows are missing"
    return f"the step is {step} and there {kinds}, {missing}: first {stamp}{_of(row)}, before {policies.unit} {after}"


def _with_rows(row: Rows, step: Step, numbers: np.ndarray, absent: np.ndarray, fill: bool) -> Rows:
    assert row.times is not None
    total, columns = int(numbers.max()) + 1, row.values.shape[1]
    values, known = np.full((total, columns), np.nan), np.zeros((total, columns), dtype=bool)
    lines = np.zeros(total, dtype=np.int64)
    values[numbers], known[numbers], lines[numbers] = row.values, row.known, row.lines
    if fill and len(absent):
        values[absent] = straight_lines(values)[absent]
    return Rows(row.name, step.stamps(row.times[0], np.arange(total)), values, known, lines)


def _complete(rows: list[Rows], policies: Policies, count: int) -> list[Rows]:
    if count == 0:
        return rows
    said = _describe_missing(rows, policies)
    if policies.missing == "stop":
        raise ValueError(
            f"{policies.title}: values are missing: {said}.\n--data.table.missing=drop leaves out the windows that "
            "need them, fill fills them in straight lines."
        )
    log.warning("%s: values are missing: %s; --data.table.missing=%s.", policies.title, said, policies.missing)
    if policies.missing == "drop":
        return rows
    filled = []
    for row in rows:
        read = (row.lines > 0)[:, None] & ~row.known
        filled.append(
            Rows(row.name, row.times, np.where(read, straight_lines(row.values), row.values), row.known, row.lines)
        )
    return filled


def _describe_missing(rows: list[Rows], policies: Policies) -> str:
    parts = []
    for number, column in enumerate(policies.columns):
        places = [row.lines[~row.known[:, number] & (row.lines > 0)] for row in rows]
        count = sum(map(len, places))
        if count:
            first = int(min(part.min() for part in places if len(part)))
            parts.append(f"{column} {count} (first in {policies.unit} {first})")
    return ", ".join(parts)


def straight_lines(values: np.ndarray) -> np.ndarray:
    """NaN filled along straight lines between neighbours, and at the ends with the nearest value: [N, C]."""
    filled = values.copy()
    for number in range(values.shape[1]):
        column = values[:, number]
        there = np.flatnonzero(~np.isnan(column))
        if len(there):
            filled[:, number] = np.interp(np.arange(len(column)), there, column[there])
    return filled


def _of(row: Rows) -> str:
    return f" of series {row.name!r}" if row.name else ""


def _s(count: int) -> str:
    return "" if count == 1 else "s"
