"""The forecaster on three ETT sets, four horizons, three seeds, beside the ridge of the same table: a resumable job.

ATTNZOO_DATA names the folder that holds `forecasting/ett`. The lookback is 512 for every run, as in the first table of
`FIGURE=ridge`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich import print as show
from rich.table import Table

from benchmarks import runs
from benchmarks.machine import machine
from benchmarks.ridge import FIXED, HORIZONS, SETS

SEEDS = (0, 1, 2)
SHOWN = ("mse", "mse_ridge", "mae", "mae_ridge", "share")


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is not done yet, for at most --minutes, and prints what is done."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=ett", description=__doc__)
    parser.add_argument("--minutes", type=float, default=150.0, help="of training in this call; the next one goes on")
    parser.add_argument("--only", default=",".join(SETS), help=f"some of {','.join(SETS)}")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - set(SETS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    end = time.monotonic() + 60 * options.minutes
    # Seeds outside, so that each call leaves whole rows of one seed.
    for seed, name, horizon in ((s, n, h) for s in SEEDS for n in names for h in HORIZONS):
        piece = folder / f"{name}-{horizon}-{seed}"
        words = [f"--data.horizon={horizon}", f"--data.lookback={FIXED}", f"--seed_everything={seed}"]
        left = (end - time.monotonic()) / 60
        done = runs.train(f"forecaster-{name.lower()}", piece, words, minutes=max(left, 0))
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
    show(table)
    for name, values in means.items():
        if len(values) == len(HORIZONS):
            print(f"{name}: mean over horizons {statistics.mean(values):.4f}")
    print(f"{count} of {len(SETS) * len(HORIZONS) * len(SEEDS)} runs are done")
    return 0


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None
