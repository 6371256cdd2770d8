"""What logging costs: the share of a run's epochs that it waits in its loggers, `metrics.csv` and W&B offline.

The default presets, which log every step. W&B's own process works beside the training and is not in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.table import Table

from benchmarks.machine import machine
from experiments.training import console
from experiments.training.cli import ExperimentCLI
from experiments.training.tables import show_table
from experiments.training.wandb_rows import WandbRows

PRESETS = ("vit", "translator", "translator-bahdanau", "forecaster")


class Watch(pl.Callback):
    """Adds up the time of epochs without validation, and of that the time within loggers; the first epoch is left out.

    The first row opens the run and is no part of a step.
    """

    def __init__(self) -> None:
        self.epochs = self.logging = 0.0
        self.steps = 0
        self._counts = False
        self._begun = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stand before every logger."""
        for logger in trainer.loggers:
            for name in ("log_metrics", "save"):
                setattr(logger, name, self._timed(getattr(logger, name)))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._counts, self._begun = trainer.current_epoch > 0, time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Count."""
        self.steps += self._counts

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation ends the steps of an epoch."""
        if self._counts:
            self.epochs += time.perf_counter() - self._begun
        self._counts = False

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                if self._counts:
                    self.logging += time.perf_counter() - begun

        return timed


def watched(preset: str, epochs: int) -> dict[str, float]:
    """Trains a preset for a few epochs, without its test, and gives the times."""
    with tempfile.TemporaryDirectory() as folder:
        cli = ExperimentCLI(
            [f"--config={preset}", f"--run.root={folder}", f"--trainer.max_epochs={epochs}", "--run.wandb=true"],
            resume=True,
        )
        watch = Watch()
        cli.trainer.callbacks.append(watch)
        try:
            cli.trainer.fit(cli.model, cli.datamodule)
        finally:
            for logger in cli.trainer.loggers:
                if isinstance(logger, WandbRows):
                    logger.finish(exit_code=0)
    return {
        "steps": watch.steps, "step_ms": 1000 * watch.epochs / watch.steps,
        "logging_ms": 1000 * watch.logging / watch.steps, "share": watch.logging / watch.epochs,
    }  # fmt: skip


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures, writes `result.json` and prints the table."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=logging", description=__doc__)
    parser.add_argument("--epochs", type=int, default=4, help="of each preset, from 2 up (4)")
    options = parser.parse_args(arguments)
    if options.epochs < 2:
        parser.error(f"--epochs: the first one is left out, so at least 2; got {options.epochs}")
    console.quieten()
    rows = {preset: watched(preset, options.epochs) for preset in PRESETS}
    folder.mkdir(parents=True, exist_ok=True)
    result = {"presets": rows, "machine": machine()}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = Table("preset", "steps", "step, ms", "of it logging, ms", "share")
    for name, row in rows.items():
        cells = (f"{row['step_ms']:.1f}", f"{row['logging_ms']:.2f}", f"{row['share']:.2%}")
        table.add_row(name, str(row["steps"]), *cells)
    show_table(table)
    return 0
