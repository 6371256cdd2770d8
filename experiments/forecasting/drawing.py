"""Pictures: history, forecast and band; and what the tokens attended to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnzoo import Mechanism, record
from experiments.forecasting.network import ForecastNetwork
from experiments.training.pictures import as_written, first_maps

log = logging.getLogger("experiments")

MAX_PANELS = 8
"""Series and targets that are drawn at most."""

HISTORY, FORECAST, TRUTH = "#444444", "#c8501e", "#2a7fb8"


@as_written
def draw_panels(panels: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """One panel a series and target.

    Args:
        panels: each with "title", "past_x", "past", "future_x", "forecast", and perhaps "truth", "low" and "high"
            with "band", the words for them.
        title: of the picture.
    """
    panels = panels[:MAX_PANELS]
    figure = Figure(figsize=(9, 0.6 + 2.4 * len(panels)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        # From the last known value on, so that history and forecast are one line.
        x = _joined(panel["past_x"][-1:], panel["future_x"])
        axes.plot(panel["past_x"], panel["past"], color=HISTORY, linewidth=1, label="history")
        if panel.get("truth") is not None:
            truth = _joined(panel["past"][-1:], panel["truth"])
            axes.plot(x, truth, color=TRUTH, linewidth=1, label="what came")
        if panel.get("low") is not None:
            axes.fill_between(
                panel["future_x"],
                panel["low"],
                panel["high"],
                color=FORECAST,
                alpha=0.2,
                linewidth=0,
                label=panel["band"],
            )
        axes.plot(x, _joined(panel["past"][-1:], panel["forecast"]), color=FORECAST, linewidth=1.4, label="forecast")
        axes.set_title(panel["title"], fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee")
        axes.set_axisbelow(True)
        for label in axes.get_xticklabels():
            label.set_fontsize(8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _joined(first: Any, rest: Any) -> Any:
    return first.append(rest) if hasattr(first, "append") else np.concatenate([first, rest])


def forecast_figure(
    batch: Mapping[str, Tensor],
    forecast: Tensor,
    quantiles: Tensor | None,
    targets: Sequence[str],
    title: str = "first window of the validation part",
) -> Figure:
    """The forecast of the first window of a batch as of `Store.batch`, in the data's own units."""
    std, mean = batch["std"][0].cpu(), batch["mean"][0].cpu()
    lookback, horizon = batch["past"].shape[-1], forecast.shape[-1]
    panels = []
    for number, name in enumerate(targets[:MAX_PANELS]):

        def own(values: Tensor, number: int = number) -> np.ndarray:
            return (values.float().cpu() * std[number] + mean[number]).numpy()

        panel: dict[str, Any] = {
            "title": name,
            "past_x": np.arange(-lookback, 0),
            "past": own(batch["past"][0, number]),
            "future_x": np.arange(horizon),
            "forecast": own(forecast[0, number]),
            "truth": own(batch["future"][0, number]),
        }
        if quantiles is not None:
            low, high = own(quantiles[0, number, :, 0]), own(quantiles[0, number, :, -1])
            panel |= {"low": low, "high": high, "band": "lowest to highest quantile"}
        panels.append(panel)
    return draw_panels(panels, f"{title}; 0 is the first row to be forecast")


def attention_figure(network: ForecastNetwork, batch: Mapping[str, Tensor]) -> Figure | None:
    """Attention of the first row of tokens, mean over heads, block by block; None where there is no such map."""
    if not any(isinstance(module, Mechanism) for module in network.modules()):
        return None
    network.eval()
    with torch.no_grad(), record(network) as sites:
        network(batch["past"], batch["calendar"])
    try:
        maps = [found.float().mean(0).cpu().numpy() for found in first_maps(sites)]
    except ValueError as error:
        log.info("No attention picture: %s", error)
        return None
    figure = Figure(figsize=(0.6 + 3.2 * len(maps), 3.6), layout="constrained")
    for number, (axes, weights) in enumerate(zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True)):
        image = axes.imshow(weights, cmap="viridis", vmin=0)
        axes.set(title=f"block {number}", xlabel="token looked at", ylabel="token" if number == 0 else "")
        figure.colorbar(image, ax=axes, shrink=0.7)
    return figure
