"""What comes after the rows of a table, or after a moment in it: the window, the stamps to come, the forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from experiments.forecasting.clock import Step, calendar_features
from experiments.forecasting.module import Forecaster
from experiments.forecasting.policies import Rows, straight_lines
from experiments.forecasting.table import Table


@dataclass(frozen=True)
class Ahead:
    """The forecast of one series.

    Attributes:
        rows: the series.
        origin: number of the first row that is forecast; the rows before it were seen.
        index: stamps to come, or numbers of rows where there are no stamps.
        point: [H, K] in the data's own units.
        quantiles: [H, K, Q], or None.
    """

    rows: Rows
    origin: int
    index: pd.DatetimeIndex | pd.RangeIndex
    point: np.ndarray
    quantiles: np.ndarray | None


def check_step(model: Forecaster, table: Table) -> None:
    """Refuse a table whose rows are further apart, or nearer, than those of training."""
    assert model.facts is not None
    trained, found = model.facts["step"], None if table.step is None else str(table.step)
    if found != trained and (model.facts["calendar"] or None not in (found, trained)):
        raise ValueError(
            f"{table.title}: the step is {found or 'not known'}, and the model was trained on {trained or 'none'}. "
            "Give a table with the same step, or train a model on this one."
        )


def look_ahead(model: Forecaster, table: Table, rows: Rows, missing: str, start: str | None) -> Ahead:
    """Forecast a series.

    Args:
        model: a trained one.
        table: that the series is of.
        rows: the series.
        missing: the policy at missing values that the table was read with.
        start: first moment to be forecast; None goes on after the last row.

    Raises:
        ValueError: too few rows before it, a value missing there, no such moment, or an unknown series.
    """
    facts = model.facts
    assert facts is not None
    origin = len(rows.values) if start is None else _row_of(table, rows, start)
    lookback, horizon = facts["lookback"], facts["horizon"]
    name = f" of series {rows.name!r}" if rows.name else ""
    if origin < lookback:
        raise ValueError(
            f"{table.title}: {origin} rows{name} before the first to be forecast, {lookback} needed (the lookback that "
            "the model was trained with). Give more rows, or a later --start."
        )
    # Filled anew from what was known by then, so that nothing of what is to be forecast is in it.
    past = np.where(rows.known, rows.values, np.nan)[:origin]
    past = straight_lines(past) if not np.isnan(rows.values[:origin]).any() or missing == "fill" else past
    bad = np.argwhere(np.isnan(past[-lookback:]))
    if len(bad):
        row, column = bad[0]
        line = rows.lines[origin - lookback + row]
        raise ValueError(
            f"{table.title}: {[*table.targets, *table.inputs][column]!r}{name} is missing in the last {lookback} rows, "
            f"first {f'in {table.unit} {line}' if line else 'in a gap'}. --data.table.missing=fill (or gaps) fills it."
        )
    series = _series_number(facts, rows.name, table.title)
    index, calendar = _stamps(table.step, rows, origin, horizon, facts["calendar"])
    window = torch.from_numpy(past[None, -lookback:])
    point, quantiles = model.predict(window, torch.from_numpy(calendar)[None], series)
    return Ahead(rows, origin, index, point[0].numpy(), None if quantiles is None else quantiles[0].numpy())


def _row_of(table: Table, rows: Rows, start: str) -> int:
    if rows.times is None:
        raise ValueError(f"--start={start}: {table.title} has no time stamps; leave it out, or give --time_column.")
    try:
        moment = pd.Timestamp(start)
        moment = moment.tz_localize(rows.times.tz) if moment.tz is None else moment.tz_convert(rows.times.tz)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--start={start}: a moment such as 2024-03-31 or '2024-03-31 06:00' was expected.") from error
    if moment == _stamps(table.step, rows, len(rows.times), 1, [])[0][0]:
        return len(rows.times)
    place = int(rows.times.searchsorted(moment))
    if place == len(rows.times) or rows.times[place] != moment:
        raise ValueError(
            f"--start={start}: {table.title} has no row at {moment}; its stamps go from {rows.times[0]} to "
            f"{rows.times[-1]}, {table.step} apart."
        )
    return place


def _stamps(
    step: Step | None, rows: Rows, origin: int, horizon: int, calendar: list[str]
) -> tuple[pd.DatetimeIndex | pd.RangeIndex, np.ndarray]:
    """The stamps to come, and their features of the calendar."""
    if step is None or rows.times is None:
        return pd.RangeIndex(origin, origin + horizon), np.zeros((horizon, 0))
    first = rows.times[0]
    last = step.numbers(rows.times[origin - 1 : origin], first)[0][0]
    stamps = step.stamps(first, last + np.arange(1, horizon + 1))
    return stamps, calendar_features(stamps, calendar)


def _series_number(facts: dict[str, Any], name: str, title: str) -> int:
    if facts["scaling"] != "series":
        return 0
    if name not in facts["series"]:
        raise ValueError(
            f"{title}: series {name!r} was not in training, and the model has a scale for each series. Others "
            "are forecast by a model that has --data.scaling=column."
        )
    return int(facts["series"].index(name))
