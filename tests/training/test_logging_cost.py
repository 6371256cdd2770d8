"""How the time in loggers is told from the time of training."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from benchmarks.__main__ import main
from benchmarks.logging_cost import Watch


class Slow(DummyLogger):
    """Takes 5 ms for each row."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.005)


def test_only_epochs_after_the_first_count() -> None:
    """Three epochs of two steps, a row a step: 4 steps and at least 20 ms in the logger."""
    watch, trainer = Watch(), pl.Trainer(logger=Slow(), accelerator="cpu", enable_checkpointing=False)
    module: Any = None
    watch.on_fit_start(trainer, module)
    for epoch in range(3):
        trainer.fit_loop.epoch_progress.current.completed = epoch
        watch.on_train_epoch_start(trainer, module)
        for _ in range(2):
            time.sleep(0.005)
            trainer.logger.log_metrics({})  # type: ignore[union-attr]
            watch.on_train_batch_end()
        watch.on_validation_start(trainer, module)
        trainer.logger.log_metrics({})  # type: ignore[union-attr]
    assert watch.steps == 4
    assert 0.02 <= watch.logging <= watch.epochs - 0.02


def test_one_epoch_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("logging", ["--epochs=1"])
    assert "at least 2; got 1" in capsys.readouterr().err
