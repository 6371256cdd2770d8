"""Ridge in closed form against windows that were cut out, and the other baselines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.forecasting.baselines import DLinear, LastValue, RidgeForecast, SeasonalNaive
from experiments.forecasting.data import SeriesData
from experiments.forecasting.ridge import fit_ridge, moments
from experiments.forecasting.table import TableOptions

LOOKBACK, HORIZON = 7, 3


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(3, 2, (2, 90)).cumsum(axis=1)


def cut(values: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of all windows, less the mean of the window."""
    windows = np.stack([row[n - LOOKBACK : n + HORIZON] for row in values for n in numbers])
    windows = windows - windows[:, :LOOKBACK].mean(1, keepdims=True)
    return windows[:, :LOOKBACK], windows[:, LOOKBACK:]


@pytest.mark.parametrize("numbers", [range(7, 87), [7, 8, 9, 20, 21, 40, 60, 61, 62]], ids=["all", "with holes"])
def test_sums_are_those_of_the_windows(values: np.ndarray, numbers: list[int]) -> None:
    chosen = np.array(numbers)
    x, y = cut(values, chosen)
    whole = np.concatenate([x, y], axis=1)
    found = moments(values, chosen, LOOKBACK, HORIZON)
    np.testing.assert_allclose(found.second, whole.T @ whole, rtol=1e-9, atol=1e-7)
    assert found.count == len(x)


def test_many_runs_are_summed_in_chunks(values: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = np.arange(7, 87, 2)
    right = moments(values, chosen, LOOKBACK, HORIZON).second
    monkeypatch.setattr("experiments.forecasting.ridge.RUNS", 3)
    np.testing.assert_allclose(moments(values, chosen, LOOKBACK, HORIZON).second, right)


def test_the_error_is_that_of_the_windows(values: np.ndarray) -> None:
    chosen = np.arange(7, 87)
    x, y = cut(values, chosen)
    weight = np.random.default_rng(1).normal(size=(LOOKBACK, HORIZON))
    error = moments(values, chosen, LOOKBACK, HORIZON).error(weight)
    assert error == pytest.approx(np.mean((x @ weight - y) ** 2))


def test_the_ridge_solves_its_normal_equations_and_validation_chooses(values: np.ndarray) -> None:
    train, val = np.arange(7, 60), np.arange(60, 87)
    (x, y), (x_val, y_val) = cut(values, train), cut(values, val)
    right = {}
    for penalty in (1e-3, 1.0, 1e3):
        weight = np.linalg.solve(x.T @ x + penalty * len(x) * np.eye(LOOKBACK), x.T @ y)
        right[penalty] = (np.mean((x_val @ weight - y_val) ** 2), weight)
    best = min(right, key=lambda penalty: right[penalty][0])
    sums = (moments(values, part, LOOKBACK, HORIZON) for part in (train, val))
    found = fit_ridge(*sums, penalties=tuple(right))
    assert found.penalty == best
    assert found.val_mse == pytest.approx(right[best][0])
    np.testing.assert_allclose(found.weight, right[best][1], rtol=1e-6, atol=1e-8)


def test_the_module_forecasts_what_the_matrix_says(cases: Path) -> None:
    data = SeriesData(str(cases / "base_hourly.csv"), lookback=24, horizon=6, table=TableOptions(targets=["load"]))
    data.setup("fit")
    ridge = RidgeForecast(24, 6)
    fitted = ridge.fit(data)
    total = sum(((ridge(b["past"][:, :1]) - b["future"]) ** 2).sum().item() for b in data.val_dataloader())
    assert total / (len(data.windows("val")) * 6) == pytest.approx(fitted.val_mse, rel=1e-3)


def test_a_long_lookback_is_cut_to_its_newest_rows() -> None:
    ridge = RidgeForecast(4096, 2)
    assert len(ridge.weight) == 1024
    past = torch.zeros(1, 1, 4096)
    past[..., -1024:] = 5.0
    torch.testing.assert_close(ridge(past), torch.full((1, 1, 2), 5.0))


def test_last_value_and_season() -> None:
    past = torch.arange(10.0).view(1, 1, 10)
    assert LastValue(3)(past).tolist() == [[[9, 9, 9]]]
    assert SeasonalNaive(4, 6)(past).tolist() == [[[6, 7, 8, 9, 6, 7]]]


def test_dlinear_splits_by_a_moving_average() -> None:
    model = DLinear(8, 1, kernel=3)
    torch.testing.assert_close(model(torch.full((1, 2, 8), 3.0)), torch.full((1, 2, 1), 3.0))
    with torch.no_grad():
        model.rest.weight.zero_()
        model.trend.weight.copy_(torch.eye(8)[:1])
    past = torch.tensor([[[1.0, 2, 6, 0, 0, 0, 0, 0]]])
    assert model(past).item() == pytest.approx((1 + 1 + 2) / 3), "the first row is repeated at the end"
    assert DLinear(8, 4, from_zero=True)(torch.randn(2, 1, 8)).abs().max() == 0
