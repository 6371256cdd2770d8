"""Pictures whose names and words come from users."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from experiments.forecasting.drawing import draw_panels
from experiments.translation.alignment import Alignment
from experiments.translation.drawing import alignment_figure
from experiments.vision.drawing import attention_figures
from experiments.vision.network import PictureFacts, VisionTransformer

NAME = "a$_$b"


def of_words(name: str) -> Figure:
    return alignment_figure([Alignment([name, "b"], ["c", name], torch.full((2, 2), 0.5))], name)


def of_series(name: str) -> Figure:
    times = np.arange(4)
    panel = {"title": name, "past_x": times, "past": times, "future_x": times + 4, "forecast": times, "low": times}
    return draw_panels([panel | {"high": times, "band": name}], name)


def of_classes(name: str) -> Figure:
    network = VisionTransformer(PictureFacts(8, 8, 1, 10, [0.3], [0.4]), dim=16, depth=1, num_heads=2)
    return attention_figures(network, torch.rand(1, 1, 8, 8), name)["attention"]


@pytest.mark.parametrize("draw", [of_words, of_series, of_classes])
def test_dollar_signs_are_no_formulas(draw: Callable[[str], Figure]) -> None:
    drawn = io.BytesIO()
    draw(NAME).savefig(drawn, format="svg")
    assert drawn.tell() > 1000
