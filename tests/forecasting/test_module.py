"""Training: ridge first, then what attention adds, and validation decides what stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_forecaster import QUICK

import experiments
from experiments.__main__ import main
from experiments.forecasting import Forecaster, SeriesData
from experiments.forecasting.table import TableOptions


def fit(root: Path, *options: str) -> dict[str, Any]:
    assert main(["fit", "--config=forecaster-csv", f"--run.root={root}", *QUICK, *options]) == 0
    (results,) = root.glob("*/*/results.json")
    return json.loads(results.read_text())["metrics"]


def test_baselines_stand_beside_the_model(cases: Path, tmp_path: Path) -> None:
    """F12: the report holds them, and the skill against each."""
    metrics = fit(tmp_path, f"--data.path={cases / 'base_hourly.csv'}", "--trainer.max_epochs=1")
    for name in ("ridge", "seasonal", "last"):
        assert metrics[f"test/skill_{name}"] == pytest.approx(1 - metrics["test/mse"] / metrics[f"test/mse_{name}"])
        assert metrics[f"test/mae_raw_{name}"] > 0
    for name in ("mae", "rmse_raw", "mase", "smape", "coverage", "width_raw", "pinball"):
        assert metrics[f"test/{name}"] >= 0
    assert metrics["test/primary"] == -metrics["test/mse"]


def test_weights_of_half_the_width_train_on_the_same_rows(cases: Path, tmp_path: Path) -> None:
    path = f"--data.path={cases / 'base_hourly.csv'}"
    half = fit(tmp_path, path, "--trainer.max_epochs=1", "--trainer.precision=bf16-true")
    assert half["test/mse_seasonal"] > 0
    assert half["test/mse"] < 1.2 * half["test/mse_ridge"] < half["test/mse_seasonal"]


def test_f12_a_model_that_repeats_its_last_input_has_no_skill(cases: Path, tmp_path: Path) -> None:
    """A base of the last value whose branch learns nothing is that model."""
    frozen = ["--model.base=last", "--model.optim.lr=1e-30", "--trainer.max_epochs=1"]
    metrics = fit(tmp_path, f"--data.path={cases / 'base_hourly.csv'}", *frozen)
    assert metrics["test/skill_last"] == pytest.approx(0, abs=1e-6)


def test_f10_training_on_a_flat_series_runs(cases: Path, tmp_path: Path) -> None:
    metrics = fit(tmp_path, f"--data.path={cases / 'constant_series.csv'}", "--trainer.max_epochs=2")
    assert metrics["test/mse"] is not None
    (checkpoint,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    model = experiments.load(checkpoint)
    assert model.facts["mean"][0] == 42.0 and model.facts["std"][0] == 1.0
    data = SeriesData(str(cases / "constant_series.csv"), lookback=24, horizon=6)
    data.setup("fit")
    batch = data.store.batch([40])
    past = torch.from_numpy(data.read().rows[0].values[16:40])[None]
    point, _ = model.predict(past, batch["calendar"])
    assert point[0, :, 0].numpy() == pytest.approx(42.0, abs=0.2)


def test_f09_mean_and_deviation_are_in_the_checkpoint(checkpoint: Path) -> None:
    entry = torch.load(checkpoint, weights_only=True)["experiment"]
    assert len(entry["facts"]["mean"]) == len(entry["facts"]["std"]) == 2
    assert json.loads(json.dumps(entry)) == entry


def test_the_ridge_is_in_the_checkpoint(checkpoint: Path, cases: Path) -> None:
    model = experiments.load(checkpoint)
    data = SeriesData(str(cases / "base_hourly.csv"), lookback=24, horizon=6, table=TableOptions(targets=["load"]))
    data.setup("fit")
    assert isinstance(model, Forecaster)
    fresh = Forecaster(dim=8, num_heads=2, depth=1, patch_size=6)
    fresh.facts = data.facts
    fresh.configure_model()
    fresh.fit_baselines(data)
    torch.testing.assert_close(model.network.baselines.ridge.weight, fresh.network.baselines.ridge.weight)


@pytest.mark.parametrize("ema", [[], ["--ema.decay=0.9"]], ids=["plain", "averaged"])
def test_validation_decides_how_much_of_the_branch_stays(cases: Path, tmp_path: Path, ema: list[str]) -> None:
    """The share in the checkpoint is the best one on the validation part, for the weights that are saved there."""
    table = ["--data.table.targets=[load]", f"--data.path={cases / 'base_hourly.csv'}"]
    fit(tmp_path, *table, "--trainer.max_epochs=2", "--model.base=last", *ema)
    (path,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    model = experiments.load(path)
    data = SeriesData(str(cases / "base_hourly.csv"), lookback=24, horizon=6, table=TableOptions(targets=["load"]))
    data.setup("fit")
    batch = data.store.batch(data.windows("val"))
    with torch.no_grad():
        parts = model.network(batch["past"], batch["calendar"])
    residual, branch = batch["future"] - parts.base, parts.branch
    best = float((residual * branch).sum() / branch.square().sum())
    assert float(model.network.share) == pytest.approx(min(1, max(0, best)), abs=1e-4)
    assert float(model.network.share) > 0


def test_a_branch_that_harms_is_left_out(cases: Path, tmp_path: Path) -> None:
    """At a rate that ruins the weights the ridge stands, and the run is as good as it."""
    table = [f"--data.path={cases / 'base_hourly.csv'}", "--data.table.targets=[load]", "--trainer.max_epochs=1"]
    metrics = fit(tmp_path, *table, "--model.optim.lr=5", "--model.dropout=0.5")
    assert metrics["test/mse"] <= 1.5 * metrics["test/mse_ridge"]
    assert metrics["test/share"] < 0.1


def test_without_a_base_the_branch_is_the_model(cases: Path, tmp_path: Path) -> None:
    metrics = fit(
        tmp_path, f"--data.path={cases / 'base_hourly.csv'}", "--model.base=none", "--model.branch=dlinear",
        "--trainer.max_epochs=30", "--model.optim.lr=0.02",
    )  # fmt: skip
    assert metrics["test/share"] == 1.0
    assert metrics["test/skill_last"] > 0.5


def test_the_quantiles_start_where_ridge_leaves_them(cases: Path) -> None:
    data = SeriesData(str(cases / "base_hourly.csv"), lookback=24, horizon=6, table=TableOptions(targets=["load"]))
    data.setup("fit")
    model = Forecaster(patch_size=6, quantiles=[0.25, 0.75])
    model.facts = data.facts
    model.configure_model()
    model.fit_baselines(data)
    batch = data.store.batch(data.windows("train"))
    _, quantiles, *_ = model.eval().network(batch["past"], batch["calendar"])
    for number, level in enumerate((0.25, 0.75)):
        below = (batch["future"] < quantiles[..., number]).float().mean()
        assert float(below) == pytest.approx(level, abs=0.02)


def test_f11_the_test_score_does_not_depend_on_the_batch_size(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = []
    for size in (1, 16, 64):
        assert (
            main(["test", f"--ckpt_path={checkpoint}", f"--data.batch_size={size}", "--trainer.accelerator=cpu"]) == 0
        )
        lines = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("test/"))
        scores.append(lines)
    assert scores[0] == scores[1] == scores[2]


def test_other_data_are_scaled_as_in_training(
    checkpoint: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten times the values are ten times the errors: the scale of the model is not fitted anew."""
    header, *lines = (cases / "base_hourly.csv").read_text().splitlines()
    rows = [f"{time},{10 * float(load)},{temp}" for time, load, temp in (line.split(",") for line in lines)]
    (tmp_path / "tenfold.csv").write_text("\n".join([header, *rows]))
    errors = []
    for path in (cases / "base_hourly.csv", tmp_path / "tenfold.csv"):
        assert main(["test", f"--ckpt_path={checkpoint}", f"--data.path={path}", "--trainer.accelerator=cpu"]) == 0
        lines = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("test/"))
        errors.append(float(lines["test/mae_last"]))
    assert errors[1] == pytest.approx(10 * errors[0], rel=1e-3)


def test_pictures_of_a_forecast_and_of_attention(checkpoint: Path) -> None:
    figures = checkpoint.parents[1] / "figures"
    assert {path.name for path in figures.glob("*.png")} == {"forecast.png", "attention.png"}


@pytest.mark.parametrize("levels", [[0.9, 0.1], [0.0, 0.5], [0.5, 0.5]])
def test_levels_that_cannot_be(levels: list[float]) -> None:
    with pytest.raises(ValueError, match="--model.quantiles"):
        Forecaster(quantiles=levels)


def test_predict_refuses_what_it_cannot_take(checkpoint: Path) -> None:
    model = experiments.load(checkpoint)
    assert isinstance(model, Forecaster)
    calendar = torch.zeros(1, 6, 2)
    with pytest.raises(ValueError, match=r"predict takes \[B, 24, 2\]"):
        model.predict(torch.zeros(1, 23, 2), calendar)
    with pytest.raises(ValueError, match="finite values"):
        model.predict(torch.full((1, 24, 2), torch.nan), calendar)
    with pytest.raises(ValueError, match=r"calendar features \[B, 6, 2\] of \['hour'\]"):
        model.predict(torch.zeros(1, 24, 2))
