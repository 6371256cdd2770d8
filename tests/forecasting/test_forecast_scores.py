"""Scores against the plain formulas, whatever the batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from experiments.forecasting.scores import Scores, pinball
from experiments.forecasting.share import BranchShare

NAMES = ["ridge", "seasonal", "last"]
LEVELS = [0.1, 0.5, 0.9]


def windows(count: int = 65, targets: int = 2, horizon: int = 4) -> dict[str, Tensor]:
    scale = torch.tensor([[2.0, 30.0]]).expand(count, -1)
    return {
        "past": torch.randn(count, targets, 8),
        "future": torch.randn(count, targets, horizon),
        "known": torch.rand(count, targets, horizon) > 0.1,
        "naive": torch.tensor([[0.7, 11.0]]).expand(count, -1),
        "std": scale,
        "mean": scale + 5,
        "window": torch.arange(count),
    }


def score(batch: dict[str, Tensor], forecasts: dict[str, Tensor], quantiles: Tensor | None, size: int) -> Scores:
    metric = Scores(batch["future"].shape[-1], NAMES, LEVELS)
    for begin in range(0, len(batch["future"]), size):
        part = slice(begin, begin + size)
        metric.update(
            {name: value[part] for name, value in forecasts.items()},
            None if quantiles is None else quantiles[part],
            {name: value[part] for name, value in batch.items()},
        )
    return metric


@pytest.fixture
def forecasts() -> dict[str, Tensor]:
    return {name: torch.randn(65, 2, 4) for name in ("model", *NAMES)}


def test_f11_the_score_does_not_depend_on_the_batch_size(forecasts: dict[str, Tensor]) -> None:
    batch, quantiles = windows(), torch.randn(65, 2, 4, 3).sort(-1).values
    right = score(batch, forecasts, quantiles, 65).compute()
    for size in (1, 16, 64):
        found = score(batch, forecasts, quantiles, size).compute()
        for name, value in right.items():
            assert float(found[name]) == pytest.approx(float(value), rel=1e-6), name


def test_scores_are_those_of_the_formulas(forecasts: dict[str, Tensor]) -> None:
    batch = windows()
    found = {name: float(value) for name, value in score(batch, forecasts, None, 16).compute().items()}
    known = batch["known"]
    std, mean, naive = (batch[name][..., None].expand_as(known)[known].double() for name in ("std", "mean", "naive"))
    value = batch["future"][known].double()
    for name, tail in (("model", ""), *((name, f"_{name}") for name in NAMES)):
        error = forecasts[name][known].double() - value
        raw, forecast = error * std, forecasts[name][known].double() * std + mean
        relative = 200 * raw.abs() / (forecast.abs() + (value * std + mean).abs())
        right = {
            "mse": error.square().mean(), "mae": error.abs().mean(), "mae_raw": raw.abs().mean(),
            "rmse_raw": raw.square().mean().sqrt(), "smape": relative.mean(), "mase": (raw.abs() / naive).mean(),
        }  # fmt: skip
        for statistic, number in right.items():
            assert found[f"{statistic}{tail}"] == pytest.approx(float(number), rel=1e-5), (name, statistic)
    assert found["skill_ridge"] == pytest.approx(1 - found["mse"] / found["mse_ridge"])


def test_means_by_step(forecasts: dict[str, Tensor]) -> None:
    batch = windows()
    steps = score(batch, forecasts, None, 16).by_step()["model"]
    for step in range(4):
        known = batch["known"][..., step]
        error = (forecasts["model"][..., step] - batch["future"][..., step])[known]
        assert float(steps["mae"][step]) == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert set(steps) == {"mse", "mae", "mae_raw", "rmse_raw", "smape", "mase"}


def test_f12_a_model_that_repeats_the_last_value_has_no_skill_against_it(forecasts: dict[str, Tensor]) -> None:
    forecasts["model"] = forecasts["last"]
    found = score(windows(), forecasts, None, 65).compute()
    assert float(found["skill_last"]) == 0.0
    assert float(found["mse"]) == float(found["mse_last"])


def test_what_is_missing_does_not_count(forecasts: dict[str, Tensor]) -> None:
    batch = windows()
    right = score(batch, forecasts, None, 65).compute()
    batch["future"] = torch.where(batch["known"], batch["future"], 1e6)
    for name, value in score(batch, forecasts, None, 65).compute().items():
        assert float(value) == float(right[name]), name


def test_processes_add_up_to_one(forecasts: dict[str, Tensor]) -> None:
    """What torchmetrics gathers is the batches of all processes, one after the other."""
    batch, quantiles = windows(), torch.randn(65, 2, 4, 3).sort(-1).values
    whole = score(batch, forecasts, quantiles, 10)
    mine, theirs = Scores(4, NAMES, LEVELS), score(batch, forecasts, quantiles, 10)
    for name in ("sums", "counts", "bands"):
        parts = getattr(theirs, name)
        setattr(mine, name, torch.cat([torch.cat(parts[::2]), torch.cat(parts[1::2])]))
    mine._update_count = 1
    for name, value in whole.compute().items():
        assert float(mine.compute()[name]) == pytest.approx(float(value), rel=1e-9)


def test_a_flat_series_has_scores() -> None:
    batch = windows(3) | {"future": torch.zeros(3, 2, 4), "naive": torch.full((3, 2), math.nan)}
    found = score(batch, dict.fromkeys(("model", *NAMES), torch.zeros(3, 2, 4)), None, 3).compute()
    assert math.isnan(found["mase"])
    assert all(math.isfinite(value) for name, value in found.items() if "mase" not in name)
    assert float(found["skill_last"]) == 0.0


def test_coverage_width_and_loss_of_quantiles() -> None:
    """Ten values 0 to 9 under a band from 2 to 7, in units of 2."""
    batch = windows(10, horizon=1)
    batch = {name: value[:, :1] for name, value in batch.items() if value.dim() > 1}
    batch["known"] = torch.ones(10, 1, 1, dtype=torch.bool)
    batch["future"] = torch.arange(10.0).view(10, 1, 1)
    quantiles = torch.tensor([2.0, 5.0, 7.0]).expand(10, 1, 1, 3)
    found = score(batch, dict.fromkeys(("model", *NAMES), batch["future"]), quantiles, 4).compute()
    assert float(found["coverage"]) == pytest.approx(0.6)
    assert float(found["width_raw"]) == pytest.approx(10.0)
    low = (0.9 * (2 + 1) + 0.1 * sum(range(8))) / 10
    middle = 0.5 * (5 + 4 + 3 + 2 + 1 + 0 + 1 + 2 + 3 + 4) / 10
    high = (0.1 * sum(range(8)) + 0.9 * (1 + 2)) / 10
    assert float(found["pinball"]) == pytest.approx((low + middle + high) / 3, rel=1e-6)


def test_the_pinball_loss_is_least_at_the_quantile() -> None:
    values = torch.arange(101.0)
    candidates = torch.arange(101.0)
    loss = pinball(candidates[None, :, None], values[:, None], [0.9]).mean((0, 2))
    assert int(loss.argmin()) == 90


def test_the_best_share_of_a_branch() -> None:
    batch = windows()
    base, branch = torch.randn(65, 2, 4), torch.randn(65, 2, 4)
    batch["future"] = base + 0.3 * branch + 0.1 * torch.randn(65, 2, 4)
    metric = BranchShare(4)
    for part in (slice(0, 20), slice(20, 65)):
        metric.update(base[part], branch[part], {name: value[part] for name, value in batch.items()})
    found = {name: float(value) for name, value in metric.compute().items()}
    known = batch["known"]
    errors = {
        share: (batch["future"] - base - share * branch)[known].square().mean().item()
        for share in torch.linspace(0, 1, 1001).tolist()
    }
    assert found["share"] == pytest.approx(min(errors, key=errors.__getitem__), abs=1e-3)
    assert found["mse"] == pytest.approx(min(errors.values()), rel=1e-4)
    assert (found["mse_base"], found["mse_whole"]) == pytest.approx((errors[0.0], errors[1.0]), rel=1e-5)


@pytest.mark.parametrize(("sign", "share"), [(-1.0, 0.0), (3.0, 1.0)])
def test_a_share_stays_between_nothing_and_all(sign: float, share: float) -> None:
    batch = windows()
    branch = torch.randn(65, 2, 4)
    batch["future"] = sign * branch
    metric = BranchShare(4)
    metric.update(torch.zeros(65, 2, 4), branch, batch)
    assert float(metric.compute()["share"]) == share


def told(residual: torch.Tensor, order: list[int] | None = None, size: int = 7) -> dict[str, float]:
    """What a branch of ones is worth to windows [N, 1, 4] that are this far from their base."""
    metric, numbers = BranchShare(4), torch.arange(len(residual))
    for part in (numbers if order is None else torch.tensor(order)).split(size):
        batch = {"future": residual[part], "known": torch.ones(len(part), 1, 4, dtype=torch.bool), "window": part}
        metric.update(torch.zeros(len(part), 1, 4), torch.ones(len(part), 1, 4), batch)
    return {name: float(value) for name, value in metric.compute().items()}


def test_a_branch_stays_only_where_it_gains_more_than_one_standard_error() -> None:
    """By hand: a share of 0.25 gains 0.0625 in the mean, in 16 stretches of 4 windows with a deviation of its own."""
    drift = torch.linspace(-1, 1, 16).repeat_interleave(4)[:, None, None].expand(64, 1, 4)
    for width, kept in ((0.5, True), (4.0, False)):
        residual = 0.25 + width * drift
        gains = 2 * 0.25 * residual[::4, 0, 0] - 0.25**2
        certainty = float(gains.mean() / (gains.std() / 4))
        assert (certainty > 1) == kept
        found = told(residual)
        assert found["gain_in_errors"] == pytest.approx(certainty, rel=1e-4)
        assert found["share"] == pytest.approx(0.25 if kept else 0.0, abs=1e-6)
        assert found["mse"] <= found["mse_base"]


def test_neither_batches_nor_processes_change_what_a_branch_is_worth() -> None:
    residual = 0.5 + torch.randn(60, 1, 4)
    whole = told(residual, size=60)
    assert told(residual, size=7) == whole
    assert told(residual, order=[*range(1, 60, 2), *range(0, 60, 2)]) == whole


def test_too_few_windows_cannot_speak_for_a_branch() -> None:
    assert told(torch.ones(2, 1, 4))["share"] == 0.0
    assert told(torch.ones(3, 1, 4))["share"] == 1.0


def test_windows_of_which_nothing_is_known_do_not_speak() -> None:
    """With 2 of 20 known there is no deviation to judge by; with 3 there is."""
    for count, share in ((2, 0.0), (3, 1.0)):
        metric, known = BranchShare(4), torch.zeros(20, 1, 4, dtype=torch.bool)
        known[:count] = True
        batch = {"future": torch.ones(20, 1, 4), "known": known, "window": torch.arange(20)}
        metric.update(torch.zeros(20, 1, 4), torch.ones(20, 1, 4), batch)
        assert float(metric.compute()["share"]) == share
