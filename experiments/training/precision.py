"""Whether a processor has what a precision needs. Where it has not, torch computes all the same, many times slower."""

from __future__ import annotations

import logging
import time

import lightning.pytorch as pl
import torch

log = logging.getLogger("experiments")

_HALVES = {"bf16": torch.bfloat16, "16": torch.float16}


def warn_of_emulation(trainer: pl.Trainer) -> None:
    """Say it where half precision is slower than float32 on this processor."""
    dtype = _HALVES.get(trainer.precision.partition("-")[0])
    if dtype is None or trainer.strategy.root_device.type != "cpu":
        return
    slower = _product_time(dtype) / _product_time(torch.float32)
    if slower > 2:
        log.warning(
            "This processor has no instructions for %s: a product of matrices takes %.0f times as long as in float32. "
            "--trainer.precision=32-true is the quick one here.",
            str(dtype).removeprefix("torch."),
            slower,
        )


def _product_time(dtype: torch.dtype) -> float:
    """Seconds, the best of a few; measured, for neither torch nor its libraries tell this for every processor."""
    matrix = torch.ones(256, 256, dtype=dtype)
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - begun)
    return min(times)
