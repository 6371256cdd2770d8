"""The forecaster on three ETT sets, four horizons, three seeds, beside the ridge of the same table: a resumable job.

ATTNZOO_DATA names the folder that holds `forecasting/ett`. The lookback is 512 for every run, as in the first table of
`FIGURE=ridge`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import runs
from benchmarks.machine import machine
from benchmarks.ridge import FIXED, HORIZONS, SETS
from experiments.training.tables import show_table

SEEDS = (0, 1, 2)
SHOWN = ("mse", "mse_ridge", "mae", "mae_ridge", "share")


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is not done yet, for at most --minutes, and prints what is done."""
    names, minutes_left = runs.asked("ett", __doc__, SETS, arguments)
    # Seeds outside, so that each call leaves whole rows of one seed.
    for seed, name, horizon in ((s, n, h) for s in SEEDS for n in names for h in HORIZONS):
        piece = folder / f"{name}-{horizon}-{seed}"
        words = [f"--data.horizon={horizon}", f"--data.lookback={FIXED}", f"--seed_everything={seed}"]
        if (piece / "tested.json").is_file():
            continue
        done = runs.train(f"forecaster-{name.lower()}", piece, words, minutes=minutes_left())
        if done is None:
            break
        figures = {key: done["metrics"][f"test/{key}"] for key in SHOWN}
        content = {**figures, "seconds": done["seconds"], "machine": machine()}
        (piece / "tested.json").write_text(json.dumps(content) + "\n")
    table = Table(
        "set", "horizon", "seeds", "test MSE (each seed)", "ridge", "test MAE", "ridge", "share kept", "minutes"
    )
    means: dict[str, list[float]] = {}
    count = 0
    for name in SETS:
        for horizon in HORIZONS:
            found = [_read(folder / f"{name}-{horizon}-{seed}" / "tested.json") for seed in SEEDS]
            rows = [row for row in found if row is not None]
            count += len(rows)
            if not rows:
                continue
            means.setdefault(name, []).append(statistics.mean(row["mse"] for row in rows))
            each = ", ".join(f"{row['mse']:.4f}" for row in rows)
            table.add_row(
                name, str(horizon), str(len(rows)), f"{means[name][-1]:.4f} ({each})", f"{rows[0]['mse_ridge']:.4f}",
                f"{statistics.mean(row['mae'] for row in rows):.4f}", f"{rows[0]['mae_ridge']:.4f}",
                f"{statistics.mean(row['share'] for row in rows):.2f}",
                f"{statistics.mean(row['seconds'] for row in rows) / 60:.1f}",
            )  # fmt: skip
    show_table(table)
    for name, values in means.items():
        if len(values) == len(HORIZONS):
            print(f"{name}: mean over horizons {statistics.mean(values):.4f}")
    print(f"{count} of {len(SETS) * len(HORIZONS) * len(SEEDS)} runs are done")
    return 0


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None
