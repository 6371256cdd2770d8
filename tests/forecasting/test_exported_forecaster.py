"""A forecaster as a file: with the scaling beside it, it says what `predict` says."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest
import torch

import experiments
from experiments.__main__ import main


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--data.calendar=[month]", "--model.quantiles=[]"]])
def test_the_file_and_its_scaling_give_the_forecast(options: list[str], tmp_path: Path) -> None:
    words = [f"--run.root={tmp_path}", "--run.wandb=false", "--run.samples=0", "--trainer.max_epochs=1"]
    assert main(["fit", "--config=forecaster", *words, *options]) == 0
    (ckpt,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    assert main(["export", f"--ckpt={ckpt}", f"--out={tmp_path / 'out'}"]) == 0
    model = experiments.load(ckpt)
    facts = json.loads((tmp_path / "out" / "scaling.json").read_text())
    generator = torch.Generator().manual_seed(0)
    past = 350 + 10 * torch.rand(3, facts["lookback"], 1, generator=generator)
    calendar = torch.rand(3, facts["horizon"], 2 * len(facts["calendar"]), generator=generator)
    mean, std = (torch.tensor(facts[name])[0] for name in ("mean", "std"))
    fed = {"past": ((past - mean) / std).transpose(1, 2).numpy()}
    if facts["calendar"]:
        fed["calendar"] = calendar.numpy()
    found = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx").run(None, fed)
    point, quantiles = model.predict(past, calendar)
    mine = torch.from_numpy(found[0]).transpose(1, 2) * std + mean
    torch.testing.assert_close(mine.double(), point.double(), rtol=1e-6, atol=1e-3)
    assert (quantiles is None) == (len(found) == 1)
    if quantiles is not None:
        levels = torch.from_numpy(found[1]).transpose(1, 2) * std[:, None] + mean[:, None]
        torch.testing.assert_close(levels.double(), quantiles.double(), rtol=1e-6, atol=1e-3)
