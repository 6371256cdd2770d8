"""Using a trained forecaster on a table: a CSV of forecasts with their stamps, a picture, and scores on the past."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table as Grid

from experiments.forecasting.ahead import Ahead, check_step, look_ahead
from experiments.forecasting.data import SeriesData
from experiments.forecasting.drawing import draw_panels
from experiments.forecasting.module import Forecaster
from experiments.forecasting.policies import Duplicates, Gaps, Missing
from experiments.forecasting.scores import MODEL, Scores, skill
from experiments.forecasting.table import Table
from experiments.training import saved, specs
from experiments.training.console import speak
from experiments.training.finding import newest_finished
from experiments.training.options import call
from experiments.training.writing import check_writable, write_figure, write_whole

log = logging.getLogger("experiments")

SHOWN_LOOKBACKS = 2
"""How much history the picture shows, in lookbacks."""


def forecast(argv: list[str]) -> int:
    """Forecasts a table. Arguments: see ``_forecast``."""
    speak()
    log.addFilter(_rename)
    try:
        return call(_forecast, argv, "python -m experiments forecast")
    except (ValueError, FileNotFoundError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(_own_options(str(error))) from error
    finally:
        log.removeFilter(_rename)


def _rename(record: logging.LogRecord) -> bool:
    """What the readers log, with the options of this command."""
    record.msg, record.args = _own_options(record.getMessage()), None
    return True


def _own_options(message: str) -> str:
    """A message of the readers, with the options of training named as those of this command, where it has them."""
    known = inspect.signature(_forecast).parameters

    def own(found: re.Match[str]) -> str:
        name, value = found[1], found[2] or ""
        return f"--{name}{value}" if name in known else f"{found[0]} in training"

    message = re.sub(r"--data\.path\b", "--csv", message)
    return re.sub(r"--data\.(?:table\.)?(\w+)(=(?:'[^']*'|\[[^]]*\]|[\w/+-]+))?", own, message)


def _forecast(
    csv: str,
    ckpt: str | None = None,
    out: str | None = None,
    start: str | None = None,
    backtest: bool = False,
    separator: str | None = None,
    decimal: str | None = None,
    date_format: str | None = None,
    time_zone: str | None = None,
    encoding: str | None = None,
    time_column: str | None = None,
    series_column: str | None = None,
    missing: Missing | None = None,
    gaps: Gaps | None = None,
    duplicates: Duplicates | None = None,
) -> int:
    """Forecast what comes after a table, or from a moment in it; columns are found by name.

    Args:
        csv: file of the table, CSV or parquet, or hub:NAME.
        ckpt: checkpoint; the best one of the newest finished forecasting run if null.
        out: file of the forecasts (.csv), a picture (.png) goes beside it; in the run's forecasts/ if null.
        start: first moment to be forecast, such as 2024-03-31 or "2024-03-31 06:00"; null goes on after the last row.
        backtest: also score the model and its baselines on the test part of the table, by the split of training.
        separator: between cells; like all that follow: as in training if null.
        decimal: sign before the fraction.
        date_format: form of the stamps, such as "%d.%m.%Y %H:%M".
        time_zone: zone of the stamps, such as Europe/Berlin.
        encoding: of the text.
        time_column: column of time stamps.
        series_column: column that names the series.
        missing: at missing values stop, drop or fill.
        gaps: at missing stamps stop, drop, fill or keep.
        duplicates: at stamps that occur more than once stop, first, last, mean or keep.
    """
    if out is not None and Path(out).suffix != ".csv":
        raise ValueError(f"--out={out}: forecasts are written as .csv")
    given = {
        "separator": separator, "decimal": decimal, "date_format": date_format, "time_zone": time_zone,
        "encoding": encoding, "time_column": time_column, "series_column": series_column, "missing": missing,
        "gaps": gaps, "duplicates": duplicates,
    }  # fmt: skip
    path = Path(ckpt) if ckpt else newest_finished(["forecasting"])
    console = Console(highlight=False, soft_wrap=True, markup=False)
    # First, for the newest run may not be the one that was meant, and what follows may not fit it.
    console.print(f"{csv}, by {path}")
    target = Path(out) if out else _beside(path) / f"{Path(csv.removesuffix('.gz')).stem.replace(':', '-')}.csv"
    check_writable(target, "--out")
    model = Forecaster.from_checkpoint(path)
    data = _data(model, path, csv, {name: value for name, value in given.items() if value is not None})
    table = data.read()
    check_step(model, table)
    found = [look_ahead(model, table, rows, data.table.missing, start) for rows in table.rows]
    if Path(csv).exists() and any(
        file.exists() and file.samefile(csv) for file in (target, target.with_suffix(".png"))
    ):
        raise ValueError(f"--out={out} is the table itself, which would be lost; give another file")
    written = _frame(model, table, data.table.series_column, found)
    if not np.isfinite(written.select_dtypes("number").to_numpy()).all():
        raise ValueError(f"{csv}: the forecast is not finite; are there numbers in the table that are far too large?")
    write_whole(target, written.to_csv(index=False, float_format="%.7g", lineterminator="\n").encode(), "--out")
    write_figure(target.with_suffix(".png"), _draw(model, table, found, table.title), "--out", dpi=120)
    console.print(written.head(3).to_string(index=False), f"... {len(written)} rows", sep="\n")
    console.print(f"forecast: {target}\npicture: {target.with_suffix('.png')}")
    if backtest:
        scores = _backtest(model, data)
        steps = target.with_name(f"{target.stem}-scores.csv")
        _by_step(scores).to_csv(steps, index=False, float_format="%.7g")
        console.print(f"backtest on {len(data.windows('test')):,} windows of the test part:")
        _print_scores(console, scores)
        console.print(f"scores by step: {steps}")
    return 0


def _data(model: Forecaster, path: Path, csv: str, given: dict[str, Any]) -> SeriesData:
    """The table, read as in training, but for what was given."""
    facts = model.facts
    assert facts is not None
    data = specs.rebuild(SeriesData, saved.origin(saved.read(path), str(path))["data"])
    named = {} if data.table.series_in_rows else {"targets": facts["targets"], "inputs": facts["inputs"]}
    options = {name: getattr(data, name) for name in ("lookback", "horizon", "split", "scaling", "batch_size")}
    made = SeriesData(
        csv, **options, season=facts["season"], calendar=facts["calendar"], table=replace(data.table, **named, **given)
    )
    made.adopt(facts)
    return made


def _frame(model: Forecaster, table: Table, series_column: str | None, found: list[Ahead]) -> pd.DataFrame:
    frames = []
    for ahead in found:
        columns: dict[str, Any] = {}
        if ahead.rows.name:
            columns[series_column or "series"] = ahead.rows.name
        columns["row" if table.time_column is None else table.time_column or "time"] = _written(ahead.index)
        for number, name in enumerate(table.targets):
            columns[name] = ahead.point[:, number]
            if ahead.quantiles is not None:
                for place, level in enumerate(model.quantiles):
                    columns[f"{name}_q{level:g}"] = ahead.quantiles[:, number, place]
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _written(index: pd.DatetimeIndex | pd.RangeIndex) -> list[str] | pd.RangeIndex:
    """Stamps as text: with their offset where they have a zone, for an hour may come twice."""
    if isinstance(index, pd.RangeIndex):
        return index
    if index.tz is not None:
        return [stamp.isoformat(sep=" ") for stamp in index]
    days_only = bool((index == index.normalize()).all())
    return [str(stamp.date() if days_only else stamp) for stamp in index]


def _draw(model: Forecaster, table: Table, found: list[Ahead], title: str) -> Any:
    assert model.facts is not None
    shown = SHOWN_LOOKBACKS * model.facts["lookback"]
    panels = []
    for ahead in found:
        index = ahead.index
        every = pd.RangeIndex(len(ahead.rows.values)) if isinstance(index, pd.RangeIndex) else ahead.rows.times
        assert every is not None
        begin, end = max(0, ahead.origin - shown), ahead.origin + len(index)
        for number, name in enumerate(table.targets):
            values = ahead.rows.values[:, number]
            panel: dict[str, Any] = {
                "title": f"{ahead.rows.name} {name}".strip(),
                "past_x": every[begin : ahead.origin],
                "past": values[begin : ahead.origin],
                "future_x": index,
                "forecast": ahead.point[:, number],
                "truth": values[ahead.origin : end] if end <= len(values) else None,
            }
            if ahead.quantiles is not None:
                low, high = ahead.quantiles[:, number, 0], ahead.quantiles[:, number, -1]
                band = f"quantiles {model.quantiles[0]:g} to {model.quantiles[-1]:g}"
                panel |= {"low": low, "high": high, "band": band}
            panels.append(panel)
    return draw_panels(panels, title)


def _backtest(model: Forecaster, data: SeriesData) -> Scores:
    (scores,) = model.build_metrics(model.facts or {}).values()
    assert isinstance(scores, Scores)
    for batch in data.test_dataloader():
        with torch.no_grad():
            scores.update(*model.step(batch, "test").outputs)
    return scores


def _by_step(scores: Scores) -> pd.DataFrame:
    columns: dict[str, Any] = {"step": np.arange(1, scores.horizon + 1)}
    for name, statistics in scores.by_step().items():
        columns |= {f"{name}_{statistic}": values.numpy() for statistic, values in statistics.items()}
    return pd.DataFrame(columns)


def _print_scores(console: Console, scores: Scores) -> None:
    values = {name: float(value) for name, value in scores.compute().items()}
    shown = ("mse", "mae", "mae_raw", "rmse_raw", "mase", "smape")
    grid = Grid("", *shown, "skill of the model", box=None)
    for name in scores.models:
        tail = "" if name == MODEL else f"_{name}"
        better = "" if name == MODEL else f"{skill(values['mse'], values[f'mse{tail}']):.4f}"
        grid.add_row(name, *(f"{values[f'{statistic}{tail}']:.4f}" for statistic in shown), better)
    console.print(grid)
    if "coverage" in values:
        low, high = scores.quantiles[0], scores.quantiles[-1]
        console.print(
            f"quantiles {low:g} to {high:g} hold {values['coverage']:.3f} of what came ({high - low:.3g} wanted), "
            f"mean width {values['width_raw']:.4g}"
        )


def _beside(checkpoint: Path) -> Path:
    """The folder of forecasts of the run that a checkpoint belongs to, or beside a checkpoint that stands alone."""
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "forecasts"
