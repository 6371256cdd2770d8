"""Small experiments that the tests of the training system run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, Metric

from attnzoo import Mechanism, MultiheadAttention, Softmax
from experiments.__main__ import main
from experiments.training.checkpoints import BestAndLast, WholeFiles
from experiments.training.losses import cross_entropy_sum
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim
from experiments.training.sampling import ResumableBatches, ResumableLoader, share_of


class Rows:
    """Row i: [x0, x1, x2, i] -> y, plus noise drawn when it is read."""

    def __init__(self, count: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 3, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        return {"x": x + self.noise * torch.rand(3), "y": x.sum(), "id": torch.tensor(index)}


class ToyData(pl.LightningDataModule):
    """Sums of three numbers."""

    def __init__(
        self,
        count: int = 20,
        batch_size: int = 2,
        val_count: int = 5,
        noise: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.count, self.batch_size, self.val_count = count, batch_size, val_count
        self.noise, self.num_workers = noise, num_workers
        self.order_seed = 0
        self.facts: dict[str, Any] = {"inputs": 3, "mean": [0.25]}

    def train_dataloader(self) -> ResumableLoader:
        batches = ResumableBatches(self.count, self.batch_size, seed=self.order_seed, **share_of(self.trainer))
        return ResumableLoader(Rows(self.count, self.noise), batch_sampler=batches, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(self.val_count, 0.0), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


class Net(nn.Module):
    """Three tokens, one attention, dropout."""

    def __init__(self, attention: Callable[[int, int], Mechanism]) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.attention = MultiheadAttention(4, 2, attention)
        self.layers = nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.unsqueeze(-1))
        return self.layers(tokens + self.attention(tokens)).sum((1, 2))


class Toy(Experiment):
    """Regression on `ToyData`.

    Args:
        attention: mechanism.
        optim: optimiser and schedule.
        width: not used, to be changed.
    """

    task = "toy"

    def __init__(
        self,
        attention: Callable[[int, int], Mechanism] = Softmax,
        optim: Optim = Optim(lr=0.01, warmup_steps=4),  # noqa: B008
        width: int = 8,
    ) -> None:
        super().__init__(optim=optim)
        self.attention = attention
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        return Net(self.attention)

    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        return {"mae": MeanAbsoluteError()}

    def primary(self, values: dict[str, float]) -> float:
        return -values["mae"]

    def step(self, batch: Any, stage: Stage) -> Step:
        assert self.network is not None
        predicted = self.network(batch["x"])
        loss = (predicted - batch["y"]).square().sum()
        if stage == "train":
            self.seen.append(batch["id"].tolist())
            self.losses.append(float(loss.detach()))
        return Step(loss, torch.tensor(len(predicted)), outputs=(predicted, batch["y"]))


class TokenToy(Toy):
    """Classes with padding, to test smoothed sums."""

    def step(self, batch: Any, stage: Stage) -> Step:
        assert self.network is not None
        logits = torch.stack([self.network(batch["x"]), self.network(-batch["x"])], dim=-1)
        targets = torch.where(batch["y"] > 0, 0, 1).masked_fill(batch["id"] % 3 == 0, -100)
        return Step(*cross_entropy_sum(logits, targets, smoothing=0.1), outputs=(logits[:, 0], batch["y"]))


def trainer(folder: Path, callbacks: list[pl.Callback] | None = None, **options: Any) -> pl.Trainer:
    """A quiet trainer that writes checkpoints to `folder`."""
    keeper = next((c for c in callbacks or [] if isinstance(c, BestAndLast)), None)
    keeper = keeper or BestAndLast()
    keeper.folder = folder
    options = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
        "plugins": [WholeFiles()],
    } | options
    return pl.Trainer(callbacks=[*[c for c in callbacks or [] if c is not keeper], keeper], **options)


class SignalAt(pl.Callback):
    """Sends a signal to this process in optimiser step `step`."""

    def __init__(self, step: int, number: int = 15) -> None:
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def fit(config: Path, *words: str) -> int:
    """The exit status of `fit` with a config, its runs in a folder beside it."""
    return main(["fit", f"--config={config}", f"--run.root={config.parent / 'runs'}", "--run.wandb=false", *words])


def folders(config: Path) -> list[Path]:
    """Folders of the runs that `fit` has made."""
    return sorted((config.parent / "runs" / "toy").iterdir())
