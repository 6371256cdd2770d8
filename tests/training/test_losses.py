"""Smoothed cross entropy, and exact means over unequal batches."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_toys import Toy, ToyData, trainer

from experiments.training.loggers import CsvRows
from experiments.training.losses import cross_entropy_sum
from experiments.training.module import Stage, Step

PAD = 3


def mean(logits: list[list[float]], targets: list[int], smoothing: float) -> float:
    total, count = cross_entropy_sum(torch.tensor(logits), torch.tensor(targets), smoothing=smoothing, ignore_index=PAD)
    return float(total / count)


def test_t01_smoothing_passes_padding_over() -> None:
    """T01, 22: 0.8678 and 0.2454 are the fault."""
    two = [[2.0, 0, 0, 0], [0, 0, 0, 5.0]]
    assert mean(two, [0, PAD], 0.1) == pytest.approx(0.4908, abs=5e-5)
    assert mean([*two, [0, 1.0, 0, 0]], [0, PAD, 1], 0.1) == pytest.approx(0.6547, abs=5e-5)


def test_t02_mean_is_over_real_tokens() -> None:
    """T02: 0.1807 is the fault; one row of six or six rows of one."""
    logits = [[2.0, 0, 0, 0], [0, 1.0, 0, 0], *[[0, 0, 0, 5.0]] * 4]
    targets = [0, 1, *[PAD] * 4]
    assert mean(logits, targets, 0.0) == pytest.approx(0.5422, abs=5e-5)
    rows = [
        cross_entropy_sum(torch.tensor([row]), torch.tensor([target]), ignore_index=PAD)
        for row, target in zip(logits, targets, strict=True)
    ]
    total, count = (sum(part) for part in zip(*rows, strict=True))
    assert float(total / count) == pytest.approx(0.5422, abs=5e-5)


def test_smoothing_formula_is_that_of_torch() -> None:
    """23: the smoothed target is (1 - s) * target + s / C."""
    logits = torch.randn(5, 4)
    targets = torch.tensor([0, 1, 2, 3, 1])
    soft = 0.9 * torch.nn.functional.one_hot(targets, 4) + 0.1 / 4
    by_hand = -(soft * logits.log_softmax(-1)).sum()
    assert torch.allclose(cross_entropy_sum(logits, targets, smoothing=0.1)[0], by_hand)
    one_hot = torch.nn.functional.one_hot(targets, 4).double()
    total, count = cross_entropy_sum(logits, one_hot, smoothing=0.1)
    assert torch.allclose(total, by_hand)
    assert int(count) == 5


def test_the_plain_loss_is_logged_beside_the_smoothed_one(tmp_path: Path) -> None:
    class Plain(Toy):
        def step(self, batch: Any, stage: Stage) -> Step:
            return super().step(batch, stage)._replace(plain_sum=torch.tensor(2.0 * len(batch["id"])))

    made = trainer(tmp_path, max_epochs=1, logger=CsvRows(tmp_path / "metrics.csv"))
    made.fit(Plain(), datamodule=ToyData())
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert {float(row["train/nll"]) for row in rows if row["train/nll"]} == {2.0}


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        cross_entropy_sum(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long))


class Given(Toy):
    """Loss of a validation sample: 1, for the last one 6."""

    def step(self, batch: dict[str, Tensor], stage: Stage) -> Step:
        losses = torch.where(batch["id"] == 4, 6.0, 1.0)
        real = super().step(batch, stage)
        return real if stage == "train" else real._replace(loss_sum=losses.sum())


def test_r01_validation_loss_is_the_mean_over_samples(tmp_path: Path) -> None:
    """R01 on one process: 2.667, the mean of the batch means, is the fault."""
    made = trainer(tmp_path, max_epochs=1)
    made.fit(Given(), datamodule=ToyData())
    assert float(made.callback_metrics["val/loss"]) == 2.0


def test_aux_is_added_once_and_reported_apart(tmp_path: Path) -> None:
    class WithAux(Toy):
        def step(self, batch: Any, stage: Stage) -> Step:
            return super().step(batch, stage)._replace(aux=torch.tensor(0.5))

    losses = []
    for kind in (Toy, WithAux):
        torch.manual_seed(0)
        model = kind()
        made = trainer(tmp_path / kind.__name__, max_epochs=1)
        seen: list[float] = []
        original = model.training_step

        def spy(batch: Any, index: int, original: Any = original, seen: list[float] = seen) -> Any:
            out = original(batch, index)
            seen.append(float(out["loss"].detach()))
            return out

        model.training_step = spy
        made.fit(model, datamodule=ToyData())
        losses.append(seen)
    assert losses[1] == pytest.approx([loss + 0.5 for loss in losses[0]])
