"""What `export` writes of a forecaster: one network on scaled values, and a page on how rows are scaled."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from experiments.forecasting.network import ForecastNetwork
from experiments.training.exporting import Part

ABOUT = """model.pt2 and model.onnx forecast scaled values.

past       float32 [batch, columns, lookback], oldest first; columns in the order of "columns" in scaling.json
calendar   float32 [batch, horizon, features], only where the model was trained with "calendar" features: of each
           the sine and cosine for the stamps to come
forecast   float32 [batch, targets, horizon]; the targets are the first columns
quantiles  float32 [batch, targets, horizon, levels], only where the model has "quantiles", in rising order

scaled = (value - mean) / std, and back by value = scaled * std + mean, with "mean" and "std" of scaling.json: a row for
each of "series", or one row for all.
"""


class ScaledForecast(nn.Module):
    """Forecast, and quantiles where there are some, in evaluation."""

    def __init__(self, network: ForecastNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, past: Tensor, calendar: Tensor | None = None) -> tuple[Tensor, ...]:
        """[B, C, L] and [B, H, F] -> [B, K, H] and [B, K, H, Q]."""
        if calendar is None:
            calendar = past.new_zeros(past.shape[0], self.network.horizon, 0)
        point, quantiles, *_ = self.network(past, calendar)
        return (point,) if quantiles is None else (point, quantiles)


def parts(network: ForecastNetwork, facts: dict[str, Any]) -> list[Part]:
    """One network, for any number of windows."""
    columns, features = len(facts["targets"]) + len(facts["inputs"]), 2 * len(facts["calendar"])

    def windows(count: int) -> tuple[Tensor, ...]:
        past = torch.randn(count, columns, facts["lookback"])
        return (past, torch.rand(count, facts["horizon"], features)) if features else (past,)

    names = ["past", "calendar"] if features else ["past"]
    outputs = ["forecast"] if network.spread is None else ["forecast", "quantiles"]
    free: tuple[dict[int, str | tuple[str, int]], ...] = tuple({0: "batch"} for _ in names)
    return [Part("model", ScaledForecast(network), windows(2), free, names, outputs, windows(5))]


def texts(facts: dict[str, Any], quantiles: list[float]) -> dict[str, str]:
    """How values are scaled."""
    columns = [*facts["targets"], *facts["inputs"]]
    rows = {name: torch.tensor(facts[name]).reshape(-1, len(columns)).tolist() for name in ("mean", "std")}
    kept = {name: facts[name] for name in ("targets", "lookback", "horizon", "calendar", "series")}
    content = {"columns": columns, **kept, "quantiles": quantiles, **rows}
    return {"README.txt": ABOUT, "scaling.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n"}
