"""The ridge row: closed-form ridge on the three ETT sets, by the published protocol, as two tables that are not mixed.

ATTNZOO_DATA names the folder that holds `forecasting/ett`. The penalty is always chosen on the validation part; the
lookback is 512 in the first table, and in the second the one of 336, 512 and 720 that is best on the validation part.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import machine
from experiments.forecasting.baselines import window_moments
from experiments.forecasting.data import SeriesData
from experiments.forecasting.ridge import fit_ridge
from experiments.forecasting.windows import Split
from experiments.training.tables import show_table

HOURLY: Split = (8640, 2880, 2880)
SETS: dict[str, tuple[str, Split]] = {
    "ETTh1": ("ett/ETTh1.csv", HOURLY),
    "ETTh2": ("ett/ETTh2.csv", HOURLY),
    "ETTm1": ("ett/ETTm1.csv.gz", (34560, 11520, 11520)),
}
"""Name -> (file, rows of training, validation and test)."""

HORIZONS = (96, 192, 336, 720)
FIXED = 512
LOOKBACKS = (336, 512, 720)


def fitted(path: str, split: Split, lookback: int, horizon: int) -> dict[str, float]:
    """Validation and test MSE, scaled, of the ridge whose penalty is best in validation."""
    data = SeriesData(path, lookback=lookback, horizon=horizon, split=split)
    parts = {part: window_moments(data, part, lookback, horizon) for part in ("train", "val", "test")}
    ridge = fit_ridge(parts["train"], parts["val"])
    return {"val": ridge.val_mse, "test": parts["test"].error(ridge.weight), "penalty": ridge.penalty}


def measure(folder: Path, arguments: list[str]) -> int:
    """Fits what is not fitted yet, and prints both tables."""
    argparse.ArgumentParser(prog="make reproduce FIGURE=ridge", description=__doc__).parse_args(arguments)  # takes none
    found: dict[str, dict[str, Any]] = {}
    for name, (path, split) in SETS.items():
        for horizon in HORIZONS:
            piece = folder / f"{name}-{horizon}.json"
            if not piece.is_file():
                rows = {str(lookback): fitted(path, split, lookback, horizon) for lookback in LOOKBACKS}
                piece.parent.mkdir(parents=True, exist_ok=True)
                piece.write_text(json.dumps({"lookbacks": rows, "machine": machine()}) + "\n")
            found.setdefault(name, {})[str(horizon)] = json.loads(piece.read_text())["lookbacks"]
    show_table(
        _table(
            f"test MSE, lookback {FIXED}", {n: {h: row[str(FIXED)] for h, row in r.items()} for n, r in found.items()}
        )
    )
    chosen = {
        name: {horizon: min(row.values(), key=lambda one: one["val"]) for horizon, row in rows.items()}
        for name, rows in found.items()
    }
    show_table(_table("test MSE, lookback by validation", chosen))
    return 0


def _table(title: str, rows: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table("set", *map(str, HORIZONS), "mean", title=title)
    for name, row in rows.items():
        values = [row[str(horizon)]["test"] for horizon in HORIZONS]
        table.add_row(name, *(f"{value:.4f}" for value in values), f"{statistics.mean(values):.4f}")
    return table
