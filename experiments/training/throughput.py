"""How fast training goes: samples or tokens per second, and seconds per optimiser step."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from experiments.training.module import Experiment
from experiments.training.runs import peak_memory_mib


class Throughput(pl.Callback):
    """Measures each epoch, without validation and without its first step, which loads and warms up.

    Writes `throughput/<samples or tokens>` per second, `throughput/step_ms` and the peak of memory so far at the end of
    an epoch.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.seconds = 0.0
        self.steps = 0
        self._counts: list[Tensor] = []
        self._steps = 0
        self._times: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        self._counts, self._times, self._steps = [], [], 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the watch at the second batch."""
        if self._steps == 1:
            self._times.append(_now(pl_module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; stop the watch at the last one."""
        self._steps += 1
        if self._steps > 1:
            self._counts.append(outputs["count"])
        if trainer.is_last_batch and self._counts:
            self._times.append(_now(pl_module))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave a validation inside the epoch out of the time."""
        if len(self._times) == 1:
            self._times[0] -= _now(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on after it."""
        if len(self._times) == 1:
            self._times[0] += _now(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the figures of this epoch."""
        if len(self._times) < 2:
            return
        assert isinstance(pl_module, Experiment)
        seconds = self._times[1] - self._times[0]
        count = float(torch.stack(self._counts).sum()) * trainer.world_size
        self.count += count
        self.seconds += seconds
        self.steps += self._steps - 1
        pl_module.write(
            {
                f"throughput/{pl_module.unit}": round(count / seconds, 2),
                "throughput/step_ms": round(1000 * seconds / (self._steps - 1), 3),
                **_memory(pl_module.device),
            }
        )

    @property
    def per_second(self) -> float | None:
        """Samples or tokens per second over all epochs, None before the first is complete."""
        return round(self.count / self.seconds, 2) if self.seconds else None

    @property
    def step_ms(self) -> float | None:
        """Milliseconds a step over all epochs, None before the first is complete."""
        return round(1000 * self.seconds / self.steps, 3) if self.seconds else None


def _memory(device: torch.device) -> dict[str, float]:
    found = {"memory/peak_mib": peak_memory_mib()}
    if device.type == "cuda":
        found["memory/gpu_peak_mib"] = round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return found


def _now(module: pl.LightningModule) -> float:
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()
