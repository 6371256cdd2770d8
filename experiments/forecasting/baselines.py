"""What a forecaster must beat: the last value, the value a season ago, ridge, and DLinear.

Shapes: B windows, K targets, L lookback, H horizon; scaled, time last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.forecasting.data import SeriesData
from experiments.forecasting.ridge import LONGEST, Moments, Ridge, fit_ridge, moments


class LastValue(nn.Module):
    """The last value, for the whole horizon."""

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon = horizon

    def forward(self, past: Tensor) -> Tensor:
        """[B, K, L] -> [B, K, H]."""
        return past[..., -1:].expand(*past.shape[:-1], self.horizon)


class SeasonalNaive(nn.Module):
    """The value a season ago, the last known season over and over.

    Example:
        >>> SeasonalNaive(season=3, horizon=4)(torch.arange(5.0)[None, None])
        tensor([[[2., 3., 4., 2.]]])
    """

    def __init__(self, season: int, horizon: int) -> None:
        super().__init__()
        self.season, self.horizon = season, horizon

    def forward(self, past: Tensor) -> Tensor:
        """[B, K, L] -> [B, K, H]."""
        place = torch.arange(self.horizon, device=past.device) % self.season
        return past[..., -self.season :][..., place]


class RidgeForecast(nn.Module):
    """The closed-form ridge, see `experiments.forecasting.ridge`; zeros (the mean of the window) until `fit`.

    Args:
        lookback: rows that it is given; it uses the last `LONGEST` of them at most.
        horizon: H.
    """

    def __init__(self, lookback: int, horizon: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", torch.zeros(min(lookback, LONGEST), horizon))

    def fit(self, data: SeriesData) -> Ridge:
        """Fit on the training windows, with the penalty that is best on the validation windows."""
        size, horizon = self.weight.shape
        train, val = (window_moments(data, part, size, horizon) for part in ("train", "val"))
        fitted = fit_ridge(train, val)
        self.weight.copy_(torch.from_numpy(fitted.weight))
        return fitted

    def forward(self, past: Tensor) -> Tensor:
        """[B, K, L] -> [B, K, H]."""
        past = past[..., -len(self.weight) :]
        mean = past.mean(-1, keepdim=True)
        return (past - mean) @ self.weight + mean


def window_moments(data: SeriesData, part: str, lookback: int, horizon: int) -> Moments:
    """Sums over the windows of a part, of which `ridge.moments` makes and judges any ridge."""
    values = data.store.values[: data.store.targets].double().numpy()
    return moments(values, data.windows(part), lookback, horizon)


class DLinear(nn.Module):
    """A moving average and what is left of it, each mapped from window to horizon by one matrix for all targets.

    Zeng et al. 2022, "Are Transformers Effective for Time Series Forecasting?", arXiv:2205.13504.

    Args:
        lookback: L.
        horizon: H.
        kernel: rows that the average is taken over, odd; the first and last rows are repeated at the ends.
        from_zero: begin with a forecast of 0, what is left by another; else with the mean of the window.
    """

    def __init__(self, lookback: int, horizon: int, kernel: int = 25, from_zero: bool = False) -> None:
        super().__init__()
        self.average = nn.AvgPool1d(kernel, stride=1)
        self.padding = (kernel // 2, kernel // 2)
        self.trend, self.rest = nn.Linear(lookback, horizon), nn.Linear(lookback, horizon)
        for linear in (self.trend, self.rest):
            nn.init.constant_(linear.weight, 0.0 if from_zero else 1 / lookback)
            nn.init.zeros_(linear.bias)

    def forward(self, past: Tensor) -> Tensor:
        """[B, K, L] -> [B, K, H]."""
        trend = self.average(nn.functional.pad(past, self.padding, mode="replicate"))
        return self.trend(trend) + self.rest(past - trend)


class Baselines(nn.Module):
    """The closed-form baselines side by side, saved with the model that is compared with them.

    Args:
        lookback: L.
        horizon: H.
        season: rows of the cycle.
    """

    def __init__(self, lookback: int, horizon: int, season: int) -> None:
        super().__init__()
        self.ridge = RidgeForecast(lookback, horizon)
        self.seasonal = SeasonalNaive(season, horizon)
        self.last = LastValue(horizon)

    def forward(self, past: Tensor) -> dict[str, Tensor]:
        """[B, K, L] -> the forecast of each, [B, K, H]."""
        return {name: module(past) for name, module in self.named_children()}
