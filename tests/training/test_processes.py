"""Two processes on the CPU: the same numbers as one, and nothing waits for ever."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent

PROGRAM = """
import json, sys, warnings
from pathlib import Path
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Subset
from training_toys import Rows, Toy, ToyData, trainer
from experiments.training.module import Step
from experiments.training.sampling import ResumableBatches, ResumableLoader

torch.set_num_threads(1)
folder, devices = Path(sys.argv[1]), int(sys.argv[2])

class Data(ToyData):
    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        batches = ResumableBatches(5, 2 if world == 2 else 5, seed=0, rank=rank, world_size=world)
        return ResumableLoader(Rows(5, 0.0), batch_sampler=batches)

    def val_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(Subset(Rows(5, 0.0), range(rank, 5, world)), batch_size=2)

class Given(Toy):
    def build_network(self, facts):
        network = super().build_network(facts)
        network.layers[1].p = 0.0
        return network

    def step(self, batch, stage):
        real = super().step(batch, stage)
        if stage == "train":
            return real
        return real._replace(loss_sum=torch.where(batch["id"] == 4, 6.0, 1.0).sum())

pl.seed_everything(0, verbose=False)
model = Given()
options = {"strategy": "ddp", "devices": 2} if devices == 2 else {}
made = trainer(folder, max_epochs=2, **options)
made.fit(model, datamodule=Data())
weights = {name: value.tolist() for name, value in model.state_dict().items()}
result = {"loss": float(made.callback_metrics["val/loss"]), "seen": model.seen, "steps": made.global_step,
          "mae": float(made.callback_metrics["val/mae"]), "weights": weights}
(folder / f"result-{made.global_rank}.json").write_text(json.dumps(result))
"""


def run_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", [str(program), str(folder), "1"])
    runpy.run_path(str(program), run_name="program")
    found: dict[str, Any] = json.loads((folder / "result-0.json").read_text())
    return found


def run_two(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(folder), "2"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_r01_r02_two_processes_give_the_numbers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R01, R02, 4, 8: 5 samples in unequal shares; loss 2.0, the same updates, every sample once an epoch."""
    one, two = run_here(tmp_path / "one", monkeypatch), run_two(tmp_path / "two")
    assert one["loss"] == two[0]["loss"] == two[1]["loss"] == 2.0
    assert two[0]["mae"] == pytest.approx(one["mae"], abs=1e-5)
    assert one["steps"] == two[0]["steps"] == 2
    for epoch in (0, 1):
        assert sorted(i for rank in two for i in rank["seen"][epoch]) == list(range(5))
    for name, value in one["weights"].items():
        assert torch.allclose(torch.tensor(two[0]["weights"][name]), torch.tensor(value), atol=1e-5)
        assert two[0]["weights"][name] == two[1]["weights"][name]
