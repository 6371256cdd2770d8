"""The presets for CIFAR-10 on a CPU, whole, on the 10,000 test pictures. A resumable job.

ATTNZOO_DATA names the folder that holds `vision/cifar10-jpeg`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from benchmarks import runs
from benchmarks.machine import machine
from experiments.training.tables import show_table

PRESETS = ("vit-cifar10-cpu", "vit-cifar10-tiny")


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is not done yet, for at most --minutes, and prints what is done."""
    names, minutes_left = runs.asked("cifar", __doc__, PRESETS, arguments)
    pieces = {name: folder / f"{name}.json" for name in PRESETS}
    for name in names:
        if pieces[name].is_file():
            continue
        done = runs.train(name, folder / name, ["--run.wandb=false"], minutes=minutes_left())
        if done is None:
            break
        pieces[name].write_text(json.dumps(done | {"machine": machine()}, indent=1) + "\n")
    table = Table("preset", "parameters", "epochs", "minutes", "test accuracy", "top 5", "validation")
    for name, piece in pieces.items():
        if piece.is_file():
            row = json.loads(piece.read_text())
            scores = (row["metrics"]["test/accuracy"], row["metrics"]["test/top5"], row["best_val_primary"])
            counts = (f"{row['parameters']:,}", str(row["epochs"]), f"{row['wall'] / 60:.0f}")
            table.add_row(name, *counts, *(f"{score:.4f}" for score in scores))
    show_table(table)
    print(f"{sum(piece.is_file() for piece in pieces.values())} of {len(PRESETS)} presets are done")
    return 0
