"""Every mechanism of the catalogue in `vit-cifar10-cpu` for two epochs, by its name alone. A resumable job.

The recipe was chosen for `Softmax`, and two epochs are a beginning: this says that each one trains on real pictures,
and what a step costs. ATTNZOO_DATA names the folder that holds `vision/cifar10-jpeg`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.table import Table

from attnzoo import CATALOGUE
from benchmarks import runs
from benchmarks.choice import chosen
from benchmarks.machine import machine
from benchmarks.steps import step_times
from experiments.training.tables import show_table

PRESET = "vit-cifar10-cpu"
EPOCHS = 2


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is not done yet, for at most --minutes, and prints what is done."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=cifar-mechanisms", description=__doc__)
    parser.add_argument("--minutes", type=float, default=150.0, help="of training in this call; the next one goes on")
    parser.add_argument("--only", default="", help="mechanisms, by name, with commas between; all if left out")
    parser.add_argument("--batches", type=int, default=None, help="of an epoch, to try it; all if left out")
    options = parser.parse_args(arguments)
    names = chosen(parser, options.only) or list(CATALOGUE)
    further = [f"--trainer.max_epochs={EPOCHS}", "--model.optim.warmup_steps=100", "--run.wandb=false"]
    if options.batches is not None:
        further += [f"--trainer.limit_{part}_batches={options.batches}" for part in ("train", "val", "test")]
        folder = folder / f"first-{options.batches}-batches"
    end = time.monotonic() + 60 * options.minutes
    for name in names:
        piece = folder / f"{name}.json"
        if piece.is_file():
            continue
        words = [*further, f"--model.attention={name}"]
        done = runs.train(PRESET, folder / name, words, minutes=max((end - time.monotonic()) / 60, 0))
        if done is None:
            break
        piece.write_text(json.dumps(done | {"machine": machine()}, indent=1) + "\n")
    table = Table("mechanism", "pairs with a weight", "test accuracy", "parameters", "ms a step", "peak MiB")
    pieces = {name: folder / f"{name}.json" for name in CATALOGUE}
    rows = {name: json.loads(piece.read_text()) for name, piece in pieces.items() if piece.is_file()}
    best = {name: Path(row["folder"]) / "checkpoints" / "best.ckpt" for name, row in rows.items()}
    times = step_times(best, folder / "steps.json")
    for name, row in rows.items():
        pairs = "" if row["visible_pairs"] is None else f"{row['visible_pairs']:.0%}"
        cells = (f"{row['metrics']['test/accuracy']:.4f}", f"{row['parameters']:,}", f"{times[name]:.0f}")
        table.add_row(name, pairs, *cells, f"{row['peak_memory_mib']:.0f}")
    show_table(table)
    print(f"{len(rows)} of {len(CATALOGUE)} mechanisms are done")
    return 0
