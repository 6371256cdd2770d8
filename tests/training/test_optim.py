"""Learning rates by optimiser steps, and which weights decay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from training_toys import Toy, ToyData, trainer

from experiments.training.optim import Optim, split_parameters, total_steps


class Rates(pl.Callback):
    """Notes the rate that each optimiser step uses, with its epoch."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.epochs: list[int] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.epochs.append(trainer.current_epoch)


def rates(tmp_path: Path, optim: Optim, count: int, **options: Any) -> Rates:
    spy = Rates()
    made = trainer(tmp_path, [spy], **options)
    made.fit(Toy(optim=optim), datamodule=ToyData(count=count, batch_size=1))
    return spy


def test_r03_warm_up_counts_optimiser_steps_not_batches(tmp_path: Path) -> None:
    """R03, 16, 17: warm-up 4 to 0.1, accumulation 4, 32 batches."""
    optim = Optim(lr=0.1, warmup_steps=4, schedule="constant")
    spy = rates(tmp_path, optim, 32, accumulate_grad_batches=4, max_epochs=1)
    assert len(spy.rates) == 8
    assert spy.rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_r04_the_schedule_moves_within_an_epoch(tmp_path: Path) -> None:
    """R04: the same without accumulation, 2 epochs of 16 batches."""
    spy = rates(tmp_path, Optim(lr=0.1, warmup_steps=4), 16, max_epochs=2)
    assert len(spy.rates) == 32
    assert spy.rates[3] == pytest.approx(0.1)
    assert spy.epochs[3] == 0
    assert len(set(spy.rates)) == 32


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 12),
        ({"max_epochs": 3, "limit_train_batches": 7}, 21),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 15),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": -1, "max_steps": 7}, 7),
    ],
)
def test_predicted_steps_are_those_taken(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    """25: a short last group of accumulated batches is a step, too."""
    made = trainer(tmp_path, **options)
    made.fit(Toy(), datamodule=ToyData())
    assert made.global_step == steps
    assert total_steps(made) == steps


def test_cosine_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--trainer.max_epochs"):
        trainer(tmp_path, max_epochs=-1).fit(Toy(), datamodule=ToyData())


def test_closed_forms() -> None:
    cosine = Optim(lr=1, warmup_steps=2, min_lr_ratio=0.2)
    assert cosine.factor(2, 11) == 1
    assert cosine.factor(7, 11) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert cosine.factor(12, 11) == pytest.approx(0.2)
    root = Optim(lr=1, warmup_steps=4, schedule="inverse_sqrt")
    assert [root.factor(step, None) for step in (1, 4, 16, 64)] == [0.25, 1, 0.5, 0.25]
    assert Optim(warmup_steps=0, schedule="constant").factor(1, None) == 1
    assert Optim(warmup_steps=0, schedule="inverse_sqrt").factor(1, None) == 1
    assert Optim(warmup_steps=0).factor(1, 9) == 1


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"warmup_steps": -1}, {"min_lr_ratio": 1.5}])
def test_impossible_options_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--model.optim.{next(iter(wrong))}"):
        Optim(**wrong)


def test_no_decay_on_norms_biases_embeddings_and_tables() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.linear = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.convolution = nn.Conv2d(1, 2, 3)
            self.class_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.places = nn.Parameter(torch.zeros(1, 7, 4))
            self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

        def no_weight_decay(self) -> set[str]:
            return {"places"}

    net = Net()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    decayed, spared = split_parameters(net)
    assert {names[id(p)] for p in decayed} == {"linear.weight", "convolution.weight"}
    assert {names[id(p)] for p in spared} == {
        "words.weight", "linear.bias", "norm.weight", "norm.bias", "convolution.bias", "class_token", "places",
    }  # fmt: skip
    groups = Optim(weight_decay=0.3).optimizer(net).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
