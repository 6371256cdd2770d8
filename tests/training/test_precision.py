"""Half precision on a processor that has no instructions for it is said before the first step."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from training_toys import Toy, ToyData, trainer

from experiments.training import precision
from experiments.training.console import Report


@pytest.mark.parametrize(
    ("chosen", "slower", "said"),
    [
        ("bf16-mixed", 50.0, ["no instructions for bfloat16: a product of matrices takes 50 times as long"]),
        ("bf16-true", 2.5, ["--trainer.precision=32-true is the quick one here"]),
        ("16-true", 9.0, ["no instructions for float16"]),
        ("bf16-mixed", 0.6, []),
        ("32-true", 50.0, []),
    ],
)
def test_a_slow_precision_is_said(
    chosen: str,
    slower: float,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(precision, "_product_time", lambda dtype: 1.0 if dtype == torch.float32 else slower)
    with caplog.at_level("WARNING", logger="experiments"):
        precision.warn_of_emulation(pl.Trainer(accelerator="cpu", precision=chosen, logger=False))  # type: ignore[arg-type]
    found = [record.getMessage() for record in caplog.records if record.name == "experiments"]
    assert len(found) == len(said)
    for message, part in zip(found, said, strict=True):
        assert part in message


def test_it_is_said_when_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precision, "_product_time", lambda dtype: 1.0 if dtype == torch.float32 else 9.0)
    report = Report("toy", str(tmp_path))
    with caplog.at_level("WARNING", logger="experiments"):
        trainer(tmp_path, [report], max_steps=1, precision="bf16-mixed", enable_progress_bar=True).fit(
            Toy(), datamodule=ToyData()
        )
    assert "takes 9 times as long as in float32" in caplog.text


def test_products_are_timed_in_each_type() -> None:
    times = [precision._product_time(dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert all(0 < time < 10 for time in times)
