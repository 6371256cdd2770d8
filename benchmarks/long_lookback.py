"""What a mechanism makes of 4,096 point tokens: error and time on one series of ETTm1. A resumable job.

Six weeks of quarter hours in, a day out, one token a row, on what ridge leaves of it; 158 steps of four windows. The
week that is judged and the one that chooses the share of the branch follow the training part, so the published test
part is not looked at. ATTNZOO_DATA names the folder that holds `forecasting/ett`.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from benchmarks import runs
from benchmarks.machine import machine
from experiments.training.tables import show_table

PRESET = "forecaster-ettm1"
OPTIONS = [
    "--data.lookback=4096", "--data.horizon=96", "--data.table.targets=[OT]", "--data.split=[34560,672,672]",
    "--data.train_stride=48", "--data.batch_size=4", "--model.patch_size=1", "--model.dim=32",
    "--model.optim.warmup_steps=20", "--trainer.max_epochs=1", "--run.wandb=false", "--run.samples=0",
]  # fmt: skip
MECHANISMS = {
    "Softmax": [],
    "Local": ["--model.attention.window=257"],
    "Linear": [],
    "Linformer": ["--model.attention.rank=256"],
    "Performer": [],
}
"""As in `FIGURE=forecasting`, which takes the time of a step in turn: about 256 keys or features for each query."""


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is not done yet, for at most --minutes, and prints what is done."""
    names, minutes_left = runs.asked("long-lookback", __doc__, MECHANISMS, arguments)
    for name in names:
        piece = folder / f"{name}.json"
        if piece.is_file():
            continue
        words = [*OPTIONS, f"--model.attention={name}", *MECHANISMS[name]]
        done = runs.train(PRESET, folder / name, words, minutes=minutes_left())
        if done is None:
            break
        piece.write_text(json.dumps(done | {"machine": machine()}, indent=1) + "\n")
    table = Table("mechanism", "test MSE", "ridge", "share kept", "ms a step", "peak MiB", "minutes")
    pieces = [(name, path) for name in MECHANISMS if (path := folder / f"{name}.json").is_file()]
    for name, path in pieces:
        row = json.loads(path.read_text())
        metrics = row["metrics"]
        table.add_row(
            name, f"{metrics['test/mse']:.4f}", f"{metrics['test/mse_ridge']:.4f}", f"{metrics['test/share']:.2f}",
            f"{row['step_ms']:.0f}", f"{row['peak_memory_mib']:.0f}", f"{row['seconds'] / 60:.1f}",
        )  # fmt: skip
    show_table(table)
    print(f"{len(pieces)} of {len(MECHANISMS)} mechanisms are done")
    return 0
