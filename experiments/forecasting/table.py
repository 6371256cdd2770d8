"""Tables of series: which columns are what, in three layouts, brought to one form.

Wide: one row a moment, a column for each target. Long: the same with a column that names the series. One series a
row: a name, then its values from the oldest to the newest, without stamps (the M4 competition).
"""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.forecasting.cells import Cells, read_cells
from experiments.forecasting.clock import Step, read_stamps
from experiments.forecasting.numerals import numbers
from experiments.forecasting.policies import Duplicates, Gaps, Missing, Policies, Rows, clean

log = logging.getLogger("experiments")

TIME_NAMES = ("timestamp", "date", "time", "datetime", "ds", "month", "week", "day", "year")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b")
"""What a date looks like, where its column has another name and stands first."""

VALUE = "value"
"""The name of the one target where each row is a series."""


@dataclass(frozen=True)
class TableOptions:
    r"""How a table is written, and what is done about its faults. Of text alone: separator, decimal, encoding, header.

    Args:
        targets: columns to be forecast, by name; null takes all columns but those of time and series.
        inputs: further columns that the model sees up to the start of the forecast; null takes all others.
        time_column: the column of time stamps; null looks for one named timestamp, date, time and the like, or for
            dates in the first column. "none": rows are only counted.
        series_column: the column that names the series, where several stand in one file (long form).
        series_in_rows: each row is a series: a name, then its values; the targets are then named "value".
        separator: between cells, one character; "\s+" for any white space.
        decimal: sign before the fraction, "." or ",".
        date_format: form of the stamps, such as "%d.%m.%Y %H:%M"; null reads 2024-01-31 13:00 and what is certain.
        time_zone: zone of the stamps, such as Europe/Berlin; null takes them as they are.
        encoding: of the text.
        header: whether the first line names the columns.
        missing_marks: what else stands for a missing value, such as "-9999".
        missing: at missing values stop, drop the windows that need them, or fill them in straight lines.
        gaps: at missing stamps stop, drop or fill likewise, or keep the rows as neighbours.
        duplicates: at stamps that occur more than once stop, take the first, the last or the mean, or keep all rows.
    """

    targets: list[str] | None = None
    inputs: list[str] | None = None
    time_column: str | None = None
    series_column: str | None = None
    series_in_rows: bool = False
    separator: str = ","
    decimal: str = "."
    date_format: str | None = None
    time_zone: str | None = None
    encoding: str = "utf-8"
    header: bool = True
    missing_marks: tuple[str, ...] = ()
    missing: Missing = "stop"
    gaps: Gaps = "stop"
    duplicates: Duplicates = "stop"

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise ValueError(f"--data.table.decimal is {self.decimal!r}; '.' or ',' was expected.")
        if len(self.separator) != 1 and self.separator != r"\s+":
            raise ValueError(
                f"--data.table.separator is {self.separator!r}; one character was expected, or '\\s+' for white space."
            )
        if self.separator == self.decimal:
            raise ValueError(
                f"--data.table.separator and --data.table.decimal are both {self.decimal!r}; give the separator of the "
                "file, such as ';'."
            )
        if self.targets is not None and not self.targets:
            raise ValueError("--data.table.targets is empty; name a column, or leave it out to forecast all.")
        for option, names in (("targets", self.targets), ("inputs", self.inputs)):
            twice = next((name for place, name in enumerate(names or []) if name in (names or [])[:place]), None)
            if twice is not None:
                raise ValueError(f"--data.table.{option} names {twice!r} twice; name each column once.")


@dataclass(frozen=True)
class Table:
    """Series that have been brought into order.

    Attributes:
        title: where they came from.
        targets: names of the columns to be forecast; they are the first columns of the values.
        inputs: names of the other columns.
        step: how far apart rows are; None without stamps.
        rows: the series.
        unit: what a place is counted in, "line" or "row".
        time_column: the name of the column of stamps, None without one.
    """

    title: str
    targets: list[str]
    inputs: list[str]
    step: Step | None
    rows: list[Rows]
    unit: str = "line"
    time_column: str | None = None

    @property
    def zone(self) -> str | None:
        """The zone of the stamps."""
        times = self.rows[0].times
        return None if times is None or times.tz is None else str(times.tz)


def read_table(path: str, options: TableOptions) -> Table:
    """Read a table and bring it into order.

    Args:
        path: see `read_cells`.
        options: how it is written and what to do about faults.

    Raises:
        ValueError: whatever is wrong and has no policy that says otherwise: file, line, column, what was found, what
            was expected, and the option that changes it.
    """
    cells = read_cells(
        path, separator=options.separator, encoding=options.encoding, header=options.header, decimal=options.decimal
    )
    if options.series_in_rows:
        return _order(cells, _series_in_rows(cells, options), [VALUE], [], options, None)
    time = _time_column(cells, options)
    targets, inputs = _value_columns(cells, options, time)
    columns = [
        numbers(cells, name, decimal=options.decimal, missing_marks=options.missing_marks)
        for name in (*targets, *inputs)
    ]
    values = np.stack(columns, axis=1)
    times = None
    if time is not None:
        series = None if options.series_column is None else pd.factorize(cells.frame[options.series_column])[0]
        times = read_stamps(cells, time, date_format=options.date_format, zone=options.time_zone, series=series)
    whole = Rows("", times, values, ~np.isnan(values), cells.lines)
    return _order(cells, _by_series(cells, whole, options), targets, inputs, options, time)


def from_frame(title: str, frame: pd.DataFrame, time: str, targets: list[str], options: TableOptions) -> Table:
    """A table that is in memory, by the same policies."""
    cells = Cells(frame, np.arange(1, len(frame) + 1), title, "row")
    values = frame[targets].to_numpy(dtype=np.float64)
    rows = Rows("", pd.DatetimeIndex(frame[time]), values, ~np.isnan(values), cells.lines)
    return _order(cells, [rows], targets, [], options, time)


def _order(
    cells: Cells, rows: list[Rows], targets: list[str], inputs: list[str], options: TableOptions, time: str | None
) -> Table:
    policies = Policies(options.missing, options.gaps, options.duplicates, cells.title, cells.unit, [*targets, *inputs])
    for row in rows:
        empty = [name for name, known in zip(policies.columns, row.known.any(0), strict=True) if not known]
        if empty:
            series = f" of series {row.name!r}" if row.name else ""
            raise ValueError(
                f"{cells.title}: column {empty[0]!r}{series} has no value at all; leave it out by naming the others in "
                "--data.table.targets and --data.table.inputs."
            )
    rows, step = clean(rows, policies)
    return Table(cells.title, targets, inputs, step, rows, cells.unit, time)


def _column(cells: Cells, wanted: str, option: str) -> str:
    """A column by its name."""
    names = list(cells.frame.columns)
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{cells.title}: column {wanted!r} was not found; found: {', '.join(names)}.{hint} "
            f"It is named by --data.table.{option}."
        )
    return wanted


def _time_column(cells: Cells, options: TableOptions) -> str | None:
    if options.time_column == "none":
        return None
    if options.time_column is not None:
        return _column(cells, options.time_column, "time_column")
    frame = cells.frame
    typed = [name for name in frame if pd.api.types.is_datetime64_any_dtype(frame[name])]
    named = [name for name in frame if name.lower() in TIME_NAMES]
    # As pandas writes an index: without a name.
    shaped = [name for name in frame.columns[:1] if _DATE.match(str(next(iter(frame[name].dropna()), "")).strip())]
    found = typed or named or shaped
    if not found:
        log.warning(
            "%s has no column of time stamps by name (%s): its rows are counted. --data.table.time_column names it.",
            cells.title, ", ".join(map(str, frame.columns)),
        )  # fmt: skip
        return None
    return str(found[0])


def _value_columns(cells: Cells, options: TableOptions, time: str | None) -> tuple[list[str], list[str]]:
    taken = {time}
    if options.series_column is not None:
        taken.add(_column(cells, options.series_column, "series_column"))
    others = [name for name in cells.frame if name not in taken]
    if options.targets is None and options.inputs is None:
        targets, inputs = others, []
    elif options.targets is None:
        inputs = [_column(cells, name, "inputs") for name in options.inputs or []]
        targets = [name for name in others if name not in inputs]
    else:
        targets = [_column(cells, name, "targets") for name in options.targets]
        wanted = [name for name in others if name not in targets] if options.inputs is None else options.inputs
        inputs = [_column(cells, name, "inputs") for name in wanted]
    both = [name for name in (*targets, *inputs) if name in taken or (name in targets and name in inputs)]
    if both:
        raise ValueError(
            f"{cells.title}: column {both[0]!r} is asked for twice; each is the stamp, the series, a target or an "
            "input (--data.table.time_column, series_column, targets, inputs)."
        )
    if not targets:
        raise ValueError(
            f"{cells.title} has the columns {', '.join(cells.frame.columns)}; one of numbers was expected."
        )
    return targets, inputs


def _by_series(cells: Cells, whole: Rows, options: TableOptions) -> list[Rows]:
    if options.series_column is None:
        return [whole]
    names = cells.frame[options.series_column].astype(str).str.strip()
    empty = np.flatnonzero((names == "") | cells.frame[options.series_column].isna())
    if len(empty):
        raise ValueError(
            f"{cells.title}, {cells.at(int(empty[0]))}, column {options.series_column!r}: a series without a name."
        )
    codes, unique = pd.factorize(names)
    series = []
    for code, name in enumerate(unique):
        part = whole.select(np.flatnonzero(codes == code))
        series.append(Rows(str(name), part.times, part.values, part.known, part.lines))
    return series


def _series_in_rows(cells: Cells, options: TableOptions) -> list[Rows]:
    columns = list(cells.frame.columns)
    names = cells.frame[columns[0]].astype(str).str.strip()
    values = np.stack(
        [numbers(cells, name, decimal=options.decimal, missing_marks=options.missing_marks) for name in columns[1:]],
        axis=1,
    )
    series = []
    for row, name in enumerate(names):
        there = np.flatnonzero(~np.isnan(values[row]))
        if not len(there):
            raise ValueError(f"{cells.title}, {cells.at(row)}: series {name!r} has no value.")
        own = values[row, : there[-1] + 1, None]  # empty cells at the end fill up a shorter series
        series.append(Rows(name, None, own, ~np.isnan(own), np.full(len(own), cells.lines[row])))
    return series
