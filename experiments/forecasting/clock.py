"""Time stamps: what they mean, how far apart rows are, and which stamps come next.

Stamps of a zone are instants, and a step below a day is measured in real time between them. From a day on it is
counted on the calendar, so that midnight stays midnight over a change of the clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pandas as pd

from experiments.forecasting.cells import Cells

_DAY = 86_400 * 10**9
_PARTS = re.compile(r"(\d{1,2})([/.\-])(\d{1,2})\2(\d{4})(?:([ T])(\d{1,2}:\d{2})(:\d{2})?)?")


def read_stamps(
    cells: Cells, column: str, *, date_format: str | None, zone: str | None, series: np.ndarray | None = None
) -> pd.DatetimeIndex:
    """The stamps of a column: instants in `zone` where one is given or offsets are written, else plain clock times.

    Args:
        cells: the table.
        column: its name.
        date_format: as of `strptime`, such as `%d.%m.%Y %H:%M`. None takes ISO 8601, or day and month in the one
            order that fits all rows, if it is certain.
        zone: name of a time zone, such as Europe/Berlin.
        series: number of the series of each row, where there are several: an hour that the clock shows twice is told
            apart by the rows before it.

    Raises:
        ValueError: a stamp that cannot be read, an order of day and month that is not certain, or a clock time that
            the zone does not have, with line, column and option.
    """
    raw = cells.frame[column]
    if pd.api.types.is_datetime64_any_dtype(raw):
        times = pd.DatetimeIndex(raw)
    else:
        times = _parse(cells, column, raw.astype(str).str.strip(), date_format)
    empty = np.flatnonzero(times.isna())
    if len(empty):
        raise ValueError(f"{cells.title}, {cells.at(int(empty[0]))}, column {column!r}: there is no time stamp.")
    if zone is None:
        return times
    return _in_zone(cells, column, times, zone, np.zeros(len(times), dtype=int) if series is None else series)


def _parse(cells: Cells, column: str, text: pd.Series, date_format: str | None) -> pd.DatetimeIndex:
    form = "ISO8601" if date_format is None else date_format
    zoned = text.str.contains(_OFFSET).to_numpy()
    _check_one_kind(cells, column, text, zoned)
    times = pd.to_datetime(text, format=form, errors="coerce", utc=bool(zoned.any()) or "%z" in form)
    wrong = np.flatnonzero(times.isna())
    if len(wrong) == 0:
        return pd.DatetimeIndex(times)
    row = int(wrong[0])
    if date_format is not None:
        raise ValueError(
            f"{cells.title}, {cells.at(row)}, column {column!r}: {text.iloc[row]!r} is no stamp of the form "
            f"{date_format!r} (--data.table.date_format)."
        )
    return pd.DatetimeIndex(pd.to_datetime(text, format=_certain_format(cells, column, text, wrong)))


_OFFSET = r"[T ]\d{1,2}(?::?\d{2}){0,2}(?:[.,]\d+)?\s?(?:Z|[+-]\d{2}(?::?\d{2})?)$"
"""The zone behind a time of day; without one, 31-01-2024 would have it too."""


def _check_one_kind(cells: Cells, column: str, text: pd.Series, zoned: np.ndarray) -> None:
    plain = np.flatnonzero(~zoned & (text != "").to_numpy())
    if len(plain) and zoned.any():
        a, b = int(np.flatnonzero(zoned)[0]), int(plain[0])
        raise ValueError(
            f"{cells.title}, {cells.at(max(a, b))}, column {column!r}: stamps with and without a zone are mixed, "
            f"{text.iloc[a]!r} in {cells.at(a)} and {text.iloc[b]!r} in {cells.at(b)}.\nOne form for all was expected; "
            "mend the stamps."
        )


def _certain_format(cells: Cells, column: str, text: pd.Series, wrong: np.ndarray) -> str:
    """The one order of day and month that fits all rows."""
    example = "--data.table.date_format, such as '%d.%m.%Y %H:%M'"
    found = text.str.extract(f"^{_PARTS.pattern}$")
    shape = found[1].fillna("") + found[4].fillna("") + found[6].notna().astype(str)
    # Where some rows are ISO 8601, the others are at fault.
    odd = wrong if len(wrong) < len(text) else np.flatnonzero(found[0].isna() | (shape != shape.iloc[0]))
    if len(odd):
        row = int(odd[0])
        raise ValueError(
            f"{cells.title}, {cells.at(row)}, column {column!r}: {text.iloc[row]!r} where a stamp such as 2024-01-31 "
            f"or 2024-01-31 13:00 was expected.\nName its form by {example}; the column of stamps is named by "
            "--data.table.time_column."
        )
    first, second = found[0].astype(int).to_numpy(), found[2].astype(int).to_numpy()
    day_first, month_first = np.flatnonzero(first > 12), np.flatnonzero(second > 12)
    if len(day_first) and len(month_first):
        a, b = int(day_first[0]), int(month_first[0])
        raise ValueError(
            f"{cells.title}, column {column!r}: {text.iloc[a]!r} in {cells.at(a)} has the day first, "
            f"{text.iloc[b]!r} in {cells.at(b)} the month. One form for all was expected; name it by {example}."
        )
    if not len(day_first) and not len(month_first):
        raise ValueError(
            f"{cells.title}, column {column!r}: {text.iloc[0]!r} in {cells.at(0)} and all others may have the day or "
            f"the month first. Name the form by {example}."
        )
    sign, between, seconds = found[1].iloc[0], found[4].iloc[0], found[6].iloc[0]
    date = sign.join(("%d", "%m", "%Y") if len(day_first) else ("%m", "%d", "%Y"))
    clock = "" if pd.isna(between) else f"{between}%H:%M"
    return f"{date}{clock}{'' if pd.isna(seconds) else ':%S'}"


def _in_zone(cells: Cells, column: str, times: pd.DatetimeIndex, zone: str, series: np.ndarray) -> pd.DatetimeIndex:
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(
            f"--data.table.time_zone={zone}: there is no such zone; a name such as Europe/Berlin was expected."
        ) from error
    if times.tz is not None:
        return times.tz_convert(zone)
    local = times.tz_localize(zone, nonexistent="NaT", ambiguous=np.ones(len(times), dtype=bool))
    missing = np.flatnonzero(local.isna())
    if len(missing):
        row = int(missing[0])
        raise ValueError(
            f"{cells.title}, {cells.at(row)}, column {column!r}: {times[row]} does not exist in {zone}, for the clock "
            "was put forward. Check --data.table.time_zone, or mend the stamp."
        )
    later = times.tz_localize(zone, ambiguous=np.zeros(len(times), dtype=bool))
    return _untangle(times, local, later, series)


def _untangle(
    times: pd.DatetimeIndex, first: pd.DatetimeIndex, second: pd.DatetimeIndex, series: np.ndarray
) -> pd.DatetimeIndex:
    """Where the clock shows an hour twice: the first time it is summer time, from where it jumps back winter time."""
    again = np.zeros(len(times), dtype=bool)
    before: dict[int, int] = {}
    for row in np.flatnonzero(first != second):
        last = before.get(int(series[row]))
        # The rows of one change lie within two hours; another one is a year away.
        near = last is not None and abs(times[row] - times[last]) < pd.Timedelta(hours=2)
        again[row] = near and (times[row] <= times[last] or again[last])
        before[int(series[row])] = row
    return first.where(~again, second)


@dataclass(frozen=True)
class Step:
    """How far apart rows are: `count` nanoseconds of real time, days, days from Monday to Friday, or months."""

    unit: Literal["time", "days", "business days", "months"]
    count: int

    def __str__(self) -> str:
        """In words, such as 15 minutes or 7 days."""
        if self.unit != "time":
            unit = self.unit if self.count != 1 else self.unit.removesuffix("s")
            return f"{self.count} {unit}"
        for name, size in (("hour", 3600 * 10**9), ("minute", 60 * 10**9), ("second", 10**9), ("millisecond", 10**6)):
            if self.count % size == 0:
                return f"{self.count // size} {name}{'' if self.count == size else 's'}"
        return f"{self.count} nanoseconds"

    def numbers(self, times: pd.DatetimeIndex, first: pd.Timestamp) -> tuple[np.ndarray, np.ndarray]:
        """How many steps each stamp is after `first`, rounded down, and whether it stands on a whole step."""
        if self.unit == "time":
            whole, rest = np.divmod(_nanoseconds(times) - _nanoseconds(pd.DatetimeIndex([first]))[0], self.count)
            return whole, rest == 0
        wall, start = times.tz_localize(None), first.tz_localize(None)
        if self.unit == "months":
            months = (wall.year - start.year) * 12 + wall.month - start.month
            last = bool(start.is_month_end)
            same = (wall.day == start.day) | (last & wall.is_month_end) | (wall.is_month_end & (wall.day < start.day))
            same = same & (wall - wall.normalize() == start - start.normalize())
            return np.asarray(months // self.count), np.asarray(same & (months % self.count == 0))
        if self.unit == "business days":
            days = np.busday_count(np.datetime64(start, "D"), wall.to_numpy().astype("datetime64[D]"))
            return days, np.asarray((wall.day_of_week < 5) & (wall - wall.normalize() == start - start.normalize()))
        # The clock is left aside: a day at midnight may begin at one where midnight does not exist.
        days = (wall.normalize() - start.normalize()).days
        return np.asarray(days // self.count), np.asarray(days % self.count == 0)

    def stamps(self, first: pd.Timestamp, numbers: np.ndarray) -> pd.DatetimeIndex:
        """The stamps so many steps after `first`."""
        if self.unit == "time":
            return first + pd.to_timedelta(np.asarray(numbers) * self.count, unit="ns")
        wall = first.tz_localize(None)
        if self.unit == "months":
            months = [wall + pd.DateOffset(months=int(n) * self.count) for n in numbers]
            stamps = pd.DatetimeIndex(months)
            stamps = stamps + pd.offsets.MonthEnd(0) if wall.is_month_end else stamps
        elif self.unit == "business days":
            clock = wall - wall.normalize()
            stamps = pd.DatetimeIndex(np.busday_offset(np.datetime64(wall, "D"), numbers)) + clock
        else:
            stamps = wall + pd.to_timedelta(np.asarray(numbers) * self.count, unit="D")
        if first.tz is None:
            return stamps
        return stamps.tz_localize(first.tz, nonexistent="shift_forward", ambiguous=np.ones(len(stamps), dtype=bool))

    def season(self) -> int:
        """Rows of the cycle that such data usually have: a day below a day, a week of days, else a year."""
        if self.unit == "time":
            return max(1, _DAY // self.count) if self.count < _DAY else 1
        if self.unit == "months":
            return max(1, 12 // self.count)
        return {"business days": {1: 5}, "days": {1: 7, 7: 52}}[self.unit].get(self.count, 1)


def find_step(times: pd.DatetimeIndex) -> Step | None:
    """The most frequent distance of sorted stamps; None for fewer than two.

    Example:
        >>> str(find_step(pd.date_range("2024-01-01", periods=5, freq="15min")))
        '15 minutes'
        >>> str(find_step(pd.date_range("2023-01-31", periods=5, freq="ME")))
        '1 month'
    """
    if len(times) < 2:
        return None
    apart = _most_frequent(np.diff(_nanoseconds(times)))
    wall = times.tz_localize(None)
    days = np.diff(wall.to_numpy().astype("datetime64[D]").astype(np.int64))
    if apart < _DAY and _most_frequent(days) < 1:
        return Step("time", apart)
    usual = _most_frequent(days)
    if usual >= 28 and (np.unique(wall.day).size == 1 or bool(wall.is_month_end.all())):
        return Step("months", _most_frequent(np.diff(np.asarray(wall.year * 12 + wall.month))))
    whole_days = np.unique(wall - wall.normalize()).size == 1 or times.tz is not None
    if not whole_days:
        return Step("time", apart)
    weekend_free = len(times) > 5 and bool((wall.day_of_week < 5).all())
    return Step("business days", 1) if usual == 1 and weekend_free and (days == 3).any() else Step("days", usual)


def _most_frequent(distances: np.ndarray) -> int:
    values, counts = np.unique(distances, return_counts=True)
    return int(values[counts.argmax()])


def _nanoseconds(times: pd.DatetimeIndex) -> np.ndarray:
    return times.as_unit("ns").asi8


CALENDAR = {"hour": 24.0, "weekday": 7.0, "day": 31.0, "yearday": 366.0, "month": 12.0}
"""Calendar features, and how many values the cycle of each has."""

CYCLES = {"hour": 1, "weekday": 7, "day": 31, "yearday": 365, "month": 365}
"""How many days the cycle of each takes."""

CalendarName = Literal["hour", "weekday", "day", "yearday", "month"]


def calendar_values(times: pd.DatetimeIndex, name: str) -> np.ndarray:
    """A feature of the calendar as the clock on the wall shows it; whole numbers from 0, the hour with its fraction."""
    if name == "hour":
        return np.asarray(times.hour + times.minute / 60 + times.second / 3600, dtype=np.float64)
    values = {
        "weekday": times.day_of_week,
        "day": times.day - 1,
        "yearday": times.day_of_year - 1,
        "month": times.month - 1,
    }
    return np.asarray(values[name], dtype=np.float64)


def calendar_features(times: pd.DatetimeIndex, names: list[str]) -> np.ndarray:
    """Sine and cosine of each feature over its cycle: float64 [rows, 2 x names]."""
    angles = [2 * np.pi * calendar_values(times, name) / CALENDAR[name] for name in names]
    parts = [part for angle in angles for part in (np.sin(angle), np.cos(angle))]
    return np.stack(parts, axis=1) if parts else np.zeros((len(times), 0))


def usual_calendar(step: Step | None, span: pd.Timedelta | None = None) -> list[str]:
    """The features that vary at this step and whose cycle was seen twice.

    Seen once, a date is a name for its rows: what happened on it cannot be told from what happens on it.

    Args:
        step: of the rows.
        span: from the first to the last row that is learned from; any if None.
    """
    if step is None:
        return []
    if step.unit == "time":
        names = ["hour", "weekday", "yearday"] if step.count < _DAY else ["yearday"]
    elif step.unit == "months":
        names = ["month"] if step.count < 12 else []
    else:
        names = ["weekday", "yearday"] if step.count == 1 else ["yearday"]
    return [name for name in names if span is None or span >= pd.Timedelta(days=2 * CYCLES[name])]
