"""Clipping sees true gradients in every mode, and splitting a batch does not change the update."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from training_toys import Toy, ToyData, trainer

from experiments.training.checkpoints import WholeFiles
from experiments.training.loggers import CsvRows
from experiments.training.module import Stage, Step
from experiments.training.optim import Optim


class Slope(nn.Module):
    """One number whose gradient is 10."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.full_like(x[:, 0], 10.0)


class Steep(Toy):
    """Mean loss with gradient norm 10."""

    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        return Slope()

    def step(self, batch: Any, stage: Stage) -> Step:
        assert self.network is not None
        out = self.network(batch["x"])
        return Step(out.sum(), torch.tensor(len(out)), outputs=(out, batch["y"]))


class ClippedNorm(pl.Callback):
    """Notes the gradient as the optimiser gets it."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))


@pytest.mark.parametrize("precision", ["32", "16-mixed", "bf16-mixed"])
def test_r05_clipping_and_norm_are_of_unscaled_gradients(tmp_path: Path, precision: str) -> None:
    """R05, 19, 20: norm 10, clip 1, with a scaler, with bfloat16 and in float32."""
    plugins: list[Any] = [WholeFiles()]
    if precision != "32":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if precision == "16-mixed" else None
        plugins.append(MixedPrecision(precision, "cpu", scaler))  # type: ignore[arg-type]
    spy = ClippedNorm()
    made = trainer(
        tmp_path, [spy], max_epochs=1, plugins=plugins, logger=[CsvRows(tmp_path / "metrics.csv")],
        accumulate_grad_batches=2,
    )  # fmt: skip
    made.fit(Steep(), datamodule=ToyData())
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["grad_norm"]) for row in rows] == pytest.approx([10.0] * 5, rel=0.02)
    assert [float(row["grad_norm_clipped"]) for row in rows] == pytest.approx([1.0] * 5, rel=0.01)
    assert spy.norms == pytest.approx([1.0] * len(spy.norms), rel=0.01)
    assert spy.norms


class Manual(Toy):
    """Optimises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.steps += 1
        return {}


def test_r06_clipping_is_refused_with_manual_optimisation(tmp_path: Path) -> None:
    """R06: before step 1, with both options named."""
    model = Manual()
    with pytest.raises(MisconfigurationException, match=r"manual optimization.*gradient_clip_val=1.0"):
        trainer(tmp_path).fit(model, datamodule=ToyData())
    assert model.steps == 0


@pytest.mark.parametrize("count", [8, 7])
def test_splitting_a_batch_does_not_change_the_update(tmp_path: Path, count: int) -> None:
    """Of 7 samples the last batch has one: each sample must count the same."""

    class NoDropout(Toy):
        def build_network(self, facts: dict[str, Any]) -> nn.Module:
            network = copy.deepcopy(start)
            for module in network.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            return network

    torch.manual_seed(0)
    start = Toy().build_network({"inputs": 3})
    # Plain gradient descent shows the size of a gradient, which Adam would hide.
    ends = []
    for size, groups in ((count, 1), (2, 4)):
        model = NoDropout(optim=Optim(lr=0.1, warmup_steps=0, schedule="constant"))
        model.configure_optimizers = lambda model=model: torch.optim.SGD(model.parameters(), lr=0.1)
        model.on_train_start = lambda: None
        data = ToyData(count=count, batch_size=size, noise=0.0)
        made = trainer(tmp_path / str(size), max_epochs=1, accumulate_grad_batches=groups, gradient_clip_val=None)
        made.fit(model, datamodule=data)
        assert made.global_step == 1
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-6), name
        assert name.endswith("weight") is False or not torch.equal(value, start.state_dict()[name[8:]])
