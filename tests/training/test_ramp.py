"""The weight of head diversity along a run: where it stands, what is logged, and that a resumed run is the same."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from training_toys import SignalAt, Toy, ToyData, trainer

import experiments
from attnzoo import DiversityKind, EncoderBlock, HeadDiversity
from experiments.__main__ import main
from experiments.training import saved
from experiments.training.checkpoints import BestAndLast, Stopped
from experiments.training.module import Stage, Step
from experiments.training.ramp import DiversityRamp, share

WEIGHT = 0.5


class Blocks(nn.Module):
    """Three tokens through two blocks with dropout."""

    def __init__(self, kind: DiversityKind) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        term = HeadDiversity(WEIGHT, kind)
        self.blocks = nn.ModuleList(EncoderBlock(4, 2, dropout=0.2, head_diversity=term) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, aux = self.embed(x.unsqueeze(-1)), x.new_zeros(())
        for block in self.blocks:
            tokens, more = block(tokens)
            aux = aux + more
        return self.head(tokens).sum((1, 2)), aux


class Diverse(Toy):
    """Toy with a term for its heads; `overlap`, which draws from the generator."""

    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        self.rows: dict[int, dict[str, float]] = {}
        self.shares: list[float] = []
        return Blocks("overlap")

    def step(self, batch: Any, stage: Stage) -> Step:
        assert isinstance(self.network, Blocks)
        predicted, aux = self.network(batch["x"])
        if stage == "train":
            term = self.network.blocks[0].head_diversity
            assert term is not None
            self.shares.append(2 * term.strength.item() / WEIGHT)
        loss = (predicted - batch["y"]).square().sum()
        return Step(loss, torch.tensor(len(predicted)), aux, outputs=(predicted, batch["y"]))

    def write(self, values: dict[str, float], step: int | None = None) -> None:
        at = self.trainer.global_step if step is None else step
        self.rows.setdefault(at, {}).update(values)


def run(folder: Path, *callbacks: pl.Callback, resume: Path | None = None, seed: int = 0, **options: Any) -> Diverse:
    pl.seed_everything(seed, verbose=False)
    model = Diverse()
    made = trainer(folder, [DiversityRamp(), BestAndLast(), *callbacks], **options)
    with contextlib.suppress(Stopped):
        made.fit(model, datamodule=ToyData(), ckpt_path=resume)
    return model


def test_it_rises_over_a_tenth_and_is_off_in_the_last_fifth() -> None:
    assert [share(done, 200) for done in (0, 10, 20, 100, 159, 160, 199)] == [0, 0.5, 1, 1, 1, 0, 0]
    assert [share(done, 3) for done in range(3)] == [0, 1, 1]  # a short run has one step to rise


def test_what_is_logged_is_the_term_and_what_is_added_is_its_weight_times_it(tmp_path: Path) -> None:
    """20 steps: it is 0 in the first, half in the second, whole from the third to the 16th, and then off."""
    model = run(tmp_path)
    assert model.shares == pytest.approx([0, 0.5, *14 * [1], *4 * [0.0]])
    heard = {step: row["train/head_diversity"] for step, row in model.rows.items() if "train/head_diversity" in row}
    assert list(heard) == list(range(2, 17))
    for step, value in heard.items():
        assert 0 < value <= 1
        assert model.rows[step]["train/aux"] == pytest.approx(WEIGHT * model.shares[step - 1] * value, rel=1e-4)
    assert [model.rows[step]["train/aux"] for step in (1, 17, 20)] == [0, 0, 0]


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    """Three batches a step: the weight stands still within it, and the mean of what they say is logged once."""
    model = run(tmp_path, accumulate_grad_batches=3)
    assert len(model.shares) == 20
    assert model.shares[:3] == [0, 0, 0]
    assert model.shares[3:10] == [1, 1, 1, 1, 1, 1, 1]
    heard = {step: row["train/head_diversity"] for step, row in model.rows.items() if "train/head_diversity" in row}
    assert list(heard) == [2, 3, 4, 5, 6, 7]
    assert model.rows[2]["train/aux"] == pytest.approx(WEIGHT * heard[2], rel=1e-4)


@pytest.mark.parametrize("step", [1, 9, 17])
def test_r10_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, step: int) -> None:
    """R10: weights, optimiser, every logged value, whether it was stopped on the ramp, behind it or where it is off."""
    whole = run(tmp_path / "whole")
    first = run(tmp_path / "parts", SignalAt(step))
    second = run(tmp_path / "parts", resume=tmp_path / "parts" / "last.ckpt", seed=5)
    assert len(first.shares) == step
    assert first.shares + second.shares == whole.shares
    assert {**first.rows, **second.rows} == whole.rows
    one, two = (saved.read(tmp_path / folder / "last.ckpt") for folder in ("whole", "parts"))
    for name, value in one["state_dict"].items():
        assert torch.equal(value, two["state_dict"][name])
    assert one["callbacks"] == two["callbacks"]


def test_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, [DiversityRamp()], max_epochs=-1, max_steps=-1)
    model = Diverse(optim=experiments.training.optim.Optim(schedule="constant"))
    with pytest.raises(ValueError, match=r"--model\.head_diversity .* must know where the run ends; set --trainer"):
        made.fit(model, datamodule=ToyData())


def test_by_the_command_line(tmp_path: Path) -> None:
    """In the table of the run, beside the loss; in the checkpoint; and nothing is drawn where it is off."""
    words = [
        "--config=vit",
        f"--run.root={tmp_path}",
        "--run.wandb=false",
        "--run.samples=0",
        "--trainer.accelerator=cpu",
    ]
    words += ["--trainer.max_steps=10", "--model.depth=1", "--model.dim=16", "--data.batch_size=32"]
    options = ["--model.head_diversity=0.03", "--model.head_diversity_kind=cka"]
    assert main(["fit", *words, *options]) == 0
    (folder,) = tmp_path.glob("vit/*")
    with (folder / "metrics.csv").open(newline="") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    assert [step for step, row in rows.items() if row["train/head_diversity"]] == list(range(2, 9))
    for step in range(2, 9):
        expected = 0.03 * float(rows[step]["train/head_diversity"])
        assert float(rows[step]["train/aux"]) == pytest.approx(expected, rel=1e-4)
    model = experiments.load(folder / "checkpoints" / "last.ckpt")
    assert (model.hparams["head_diversity"], model.hparams["head_diversity_kind"]) == (0.03, "cka")
    assert not any("diversity" in name for name in model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["translator", "translator-bahdanau", "translator-dates", "forecaster", "listops"])
def test_in_every_experiment(preset: str, tmp_path: Path) -> None:
    words = [
        f"--config={preset}",
        f"--run.root={tmp_path}",
        "--run.wandb=false",
        "--run.samples=0",
        "--trainer.accelerator=cpu",
    ]
    words += ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"]
    heads = ["--model.num_heads=4"]
    assert main(["fit", *words, *heads, "--model.head_diversity=0.03", "--model.head_diversity_kind=projected"]) == 0
    (metrics,) = tmp_path.glob("*/*/metrics.csv")
    with metrics.open(newline="") as file:
        heard = [float(row["train/head_diversity"] or "nan") for row in csv.DictReader(file) if row["train/loss"]]
    assert 0 < heard[1] < 1


@pytest.mark.slow
def test_wrong_words_are_answered_in_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--config=vit", f"--run.root={tmp_path}", "--run.wandb=false", "--run.samples=0"]
    assert main([*words, "--model.head_diversity=-1"]) == 1
    assert "head_diversity: the weight must be a number from 0 up, got -1" in capsys.readouterr().err
    assert main([*words, "--model.head_diversity_kind=projekted"]) == 2
    assert "projected" in capsys.readouterr().err
