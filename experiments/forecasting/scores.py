"""Scores over windows, exact whatever the size of batches and the number of processes.

Each batch leaves float32 sums over its windows; they are added up in float64. Shapes: B windows, K targets, H horizon,
Q quantiles, M models (the forecaster and its baselines).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss
from torchmetrics import Metric

Loss = Literal["mse", "mae", "huber"]

MODEL = "model"
STATISTICS = ("mse", "mae", "mse_raw", "mae_raw", "smape", "mase")
"""What is measured of each model at each step of the horizon; "raw" is in the data's own units."""


class Scores(Metric):
    """Errors of a forecaster and of its baselines side by side.

    MSE and MAE are of scaled values, as in the literature; MAE, RMSE in the data's own units; sMAPE from 0 to 200
    (0 where forecast and value are both 0); MASE by the mean absolute difference of rows a season apart before the
    test part. Skill is 1 - MSE / MSE of the baseline: 0 is no better, 1 is perfect. Targets that are missing or were
    filled do not count.

    Args:
        horizon: H.
        baselines: names of the baselines.
        quantiles: levels of the quantiles, rising.
    """

    full_state_update = False

    def __init__(self, horizon: int, baselines: Sequence[str], quantiles: Sequence[float] = ()) -> None:
        super().__init__()
        self.horizon, self.models, self.quantiles = horizon, [MODEL, *baselines], list(quantiles)
        # Batch by batch, since one float32 sum over all windows would depend on the size of the batches.
        self.sums: list[Tensor]
        self.counts: list[Tensor]
        self.bands: list[Tensor]
        for name in ("sums", "counts", "bands"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, forecasts: Mapping[str, Tensor], quantiles: Tensor | None, batch: Mapping[str, Tensor]) -> None:
        """Scaled forecasts [B, K, H] of each model, quantiles [B, K, H, Q], and a batch as of `Store.batch`."""
        value, known = batch["future"], batch["known"]
        std, mean, naive = (batch[name][..., None] for name in ("std", "mean", "naive"))
        counts = known.sum((0, 1)).float()
        scaled_naive = torch.where(known & naive.isfinite(), 1 / naive.nan_to_num(1.0), 0.0)
        self.counts.append(torch.stack([counts, (scaled_naive > 0).sum((0, 1)).float()])[None])
        rows = []
        for name in self.models:
            error = torch.where(known, forecasts[name] - value, 0.0)
            raw = error * std
            size = (forecasts[name] * std + mean).abs() + (value * std + mean).abs()
            relative = torch.where(size > 0, 200 * raw.abs() / size.clamp(min=torch.finfo(size.dtype).tiny), 0.0)
            parts = (error.square(), error.abs(), raw.square(), raw.abs(), relative, raw.abs() * scaled_naive)
            rows.append(torch.stack([part.sum((0, 1)).float() for part in parts]))
        self.sums.append(torch.stack(rows)[None])
        if quantiles is not None:
            self.bands.append(self._bands(quantiles, value, known, std)[None])

    def _bands(self, quantiles: Tensor, value: Tensor, known: Tensor, std: Tensor) -> Tensor:
        lowest, highest = quantiles[..., 0], quantiles[..., -1]
        inside = (value >= lowest) & (value <= highest)
        loss = pinball(quantiles, value, self.quantiles).mean(-1)
        parts = (inside.float(), (highest - lowest) * std, loss)
        return torch.stack([torch.where(known, part, 0.0).sum((0, 1)).float() for part in parts])

    def by_step(self) -> dict[str, dict[str, Tensor]]:
        """Mean of each statistic at each step of the horizon, float64 [H]: model -> statistic -> means."""
        sums, counts = (_total(part) for part in (self.sums, self.counts))
        found = {}
        for number, name in enumerate(self.models):
            means = {
                statistic: sums[number, place] / counts[int(statistic == "mase")]
                for place, statistic in enumerate(STATISTICS)
            }
            means["rmse_raw"] = means.pop("mse_raw").sqrt()
            found[name] = means
        return found

    def compute(self) -> dict[str, Tensor]:
        """Means over all steps: of the model without prefix, of the baselines as `<statistic>_<baseline>`."""
        sums, counts = (_total(part).sum(-1) for part in (self.sums, self.counts))
        found: dict[str, float] = {}
        for number, name in enumerate(self.models):
            tail = "" if name == MODEL else f"_{name}"
            for place, statistic in enumerate(STATISTICS):
                value = float(sums[number, place]) / max(float(counts[int(statistic == "mase")]), 1.0)
                if statistic == "mase" and not counts[1]:
                    value = math.nan  # every series is flat: there is nothing to measure by
                if statistic == "mse_raw":
                    statistic, value = "rmse_raw", math.sqrt(value)
                found[f"{statistic}{tail}"] = value
        for name in self.models[1:]:
            found[f"skill_{name}"] = skill(found["mse"], found[f"mse_{name}"])
        if len(self.bands):  # a list, or what was gathered of it
            coverage, width, loss = (_total(self.bands).sum(-1) / counts[0].clamp(min=1)).tolist()
            found |= {"coverage": coverage, "width_raw": width, "pinball": loss}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


def errors(forecast: Tensor, value: Tensor, loss: Loss) -> Tensor:
    """Loss of each number of a forecast, in the shape of both."""
    error = forecast - value
    if loss == "mse":
        return error.square()
    if loss == "mae":
        return error.abs()
    return huber_loss(forecast, value, reduction="none")


def skill(error: float, baseline: float) -> float:
    """1 - error / baseline; 0 where both are 0.

    Example:
        >>> skill(0.5, 2.0), skill(0.0, 0.0)
        (0.75, 0.0)
    """
    if baseline == 0:
        return 0.0 if error == 0 else -math.inf
    return 1 - error / baseline


def pinball(quantiles: Tensor, value: Tensor, levels: Sequence[float]) -> Tensor:
    """Loss of each quantile [..., Q] at values [...]: (level - [value < quantile]) (value - quantile).

    Koenker and Bassett 1978, "Regression Quantiles".

    Example:
        >>> pinball(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0]), [0.1, 0.9])
        tensor([[0.1000, 0.1000]])
    """
    level = torch.tensor(levels, device=value.device, dtype=quantiles.dtype)
    error = value[..., None] - quantiles
    return torch.maximum(level * error, (level - 1) * error)


def _total(parts: list[Tensor] | Tensor) -> Tensor:
    """Sum over batches, of all processes where they have been gathered, in float64 on the CPU."""
    whole = parts if isinstance(parts, Tensor) else torch.cat(parts)
    return whole.cpu().double().sum(0)
