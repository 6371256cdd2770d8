"""Watching the heads of a model while it trains."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from attnzoo.heads.health import Health
from experiments.training import head_figures
from experiments.training.module import Experiment
from experiments.training.probing import SAMPLES, ProbeSet
from experiments.training.wandb_rows import WandbRows
from experiments.training.writing import write_figure

log = logging.getLogger("experiments")


@dataclass(frozen=True)
class Monitoring:
    """How often the heads are measured; see attnzoo/heads/health.py for what.

    Args:
        every: optimiser steps from check to check.
        samples: validation samples that they are measured on, at least.
    """

    every: int = 500
    samples: int = SAMPLES

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"--head_monitor.{name} is {getattr(self, name)}; it must be at least 1.")


class HeadMonitor(pl.Callback):
    """Measures all heads from time to time: rows of a few numbers, a table of all, a heat map.

    The rows have the extremes and how many heads show each cause of degeneration, `heads/sink_max` or
    `heads/duplicate`; `figures/heads.csv` has every figure of every head, and `figures/heads.png` draws them, now and
    then and when training ends.
    """

    def __init__(self, options: Monitoring, figures: Path) -> None:
        self.options, self.figures = options, figures
        self._probes: ProbeSet | None = None
        self._steps = 0
        self._last: Health | None = None
        self._undrawn: Health | None = None
        self._draw_from = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the samples."""
        self._steps = trainer.global_step
        self._probes = probe_set(trainer, pl_module, self.options.samples)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure, where this batch ended an optimiser step that is due."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        if self._steps % self.options.every:
            return
        assert self._probes is not None and isinstance(pl_module, Experiment)
        health = self._probes.health(seed=self._steps)
        self._last = health
        pl_module.write(head_figures.summary(health))
        if trainer.is_global_zero:
            head_figures.append_rows(self.figures / "heads.csv", health, self._steps)
            self._undrawn = health
            if time.monotonic() >= self._draw_from:
                self._draw(trainer, self._steps)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the last figures, and say what they tell."""
        every = self.options.every
        step = self._steps - self._steps % every
        if self._undrawn is not None:
            self._draw(trainer, step)
        if self._last is None:
            log.info("Heads were not measured: the run was over before --head_monitor.every=%d steps.", every)
        else:
            said = head_figures.sentence(self._last)
            log.info("After step %d %s. Every figure is in %s.", step, said, self.figures / "heads.csv")

    def _draw(self, trainer: pl.Trainer, step: int) -> None:
        assert self._undrawn is not None
        begun, file = time.monotonic(), self.figures / "heads.png"
        write_figure(file, head_figures.picture(self._undrawn, f"heads after step {step}"), "--run.root", dpi=120)
        self._undrawn = None
        # Drawing takes longer than measuring: a hundredth of the time is enough for it.
        self._draw_from = time.monotonic() + 100 * (time.monotonic() - begun)
        for logger in trainer.loggers:
            if isinstance(logger, WandbRows):
                logger.log_figures({"heads": file}, step)


def probe_set(trainer: pl.Trainer, module: pl.LightningModule, samples: int) -> ProbeSet:
    """Validation samples of a run.

    Raises:
        ValueError: where the weights are split over processes, so that no head is whole anywhere.
    """
    assert isinstance(module, Experiment)
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        raise ValueError(
            "Heads cannot be measured where weights are split over processes (FSDP); leave --head_monitor and "
            "--head_reinit out, or take --trainer.strategy=ddp."
        )
    return ProbeSet(module, trainer.datamodule, samples)  # type: ignore[attr-defined]
