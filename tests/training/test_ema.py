"""The average of the weights beside the weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from training_toys import Toy, ToyData, trainer

from attnzoo import Performer
from experiments.training import saved
from experiments.training.ema import Ema, EmaWeights


class Watch(pl.Callback):
    """Notes the weights after each optimiser step, and those that validation sees."""

    def __init__(self) -> None:
        self.raw: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.after: list[Tensor] = []

    def weight(self, module: Any) -> Tensor:
        return module.network.embed.weight.detach().clone()

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.raw.append(self.weight(module))

    def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_step == len(self.raw):
            self.raw.append(self.weight(module))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == len(self.raw):
            self.raw.append(self.weight(module))

    def on_validation_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.validated.append(self.weight(module))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.after.append(self.weight(module))


@pytest.mark.parametrize("groups", [1, 3])
def test_average_has_the_closed_form_and_is_what_is_validated(tmp_path: Path, groups: int) -> None:
    watch = Watch()
    torch.manual_seed(0)
    model = Toy()
    made = trainer(tmp_path, [watch, EmaWeights(Ema(0.9))], accumulate_grad_batches=groups)
    made.fit(model, datamodule=ToyData())
    average = watch.raw[0]
    for step, raw in enumerate(watch.raw[1:], start=1):
        decay = min(0.9, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * raw
    assert len(watch.raw) == made.global_step + 1
    assert torch.allclose(watch.validated[-1], average, atol=1e-6)
    # Validation gives the trained weights back, and training ends on the average.
    assert torch.equal(watch.after[-1], watch.raw[-1])
    assert torch.equal(watch.weight(model), watch.validated[-1])
    content = saved.read(tmp_path / "last.ckpt")
    assert torch.equal(content["raw_state_dict"]["network.embed.weight"], watch.raw[-1])
    assert torch.equal(content["state_dict"]["network.embed.weight"], watch.validated[-1])


def test_features_drawn_anew_are_taken_as_they_are(tmp_path: Path) -> None:
    """A Performer that redraws: the average holds the features of the last draw, not a mean of two draws."""
    model = Toy(functools.partial(Performer, redraw_every=3))
    made = trainer(tmp_path, [EmaWeights(Ema(0.9))], max_steps=8)
    made.fit(model, datamodule=ToyData())
    content = saved.read(tmp_path / "last.ckpt")
    name = "network.attention.mechanism.projection"
    assert not torch.equal(content["raw_state_dict"][name], Performer(2, 2).projection)
    assert torch.equal(content["state_dict"][name], content["raw_state_dict"][name])


def test_without_the_option_a_resumed_run_goes_on_from_the_trained_weights(tmp_path: Path) -> None:
    """40: never from the average."""
    trainer(tmp_path, [EmaWeights(Ema(0.9))], max_epochs=1).fit(Toy(), datamodule=ToyData())
    raw = saved.read(tmp_path / "last.ckpt")["raw_state_dict"]["network.embed.weight"]
    seen: list[Tensor] = []

    class First(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
            seen.append(module.network.embed.weight.detach().clone())

    with pytest.warns(UserWarning, match="EmaWeights"):
        trainer(tmp_path, [First()]).fit(Toy(), datamodule=ToyData(), ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(seen[0], raw)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"--ema\.decay"):
        Ema(decay)
