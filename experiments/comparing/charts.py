"""Figures of a page about runs, by plotly: curves of learning, quality against cost, cost by length.

Names come from folders and configs that others may have written, and plotly reads marks in its texts, so all are
escaped.
"""

from __future__ import annotations

import colorsys
import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from experiments.comparing.grouping import Group, Variant
from experiments.comparing.judging import half_width
from experiments.comparing.reading import Run

POINTS = 200
"""Of a curve; longer ones are thinned by the mean of neighbours, so that a page of many runs stays light."""

_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon")
_DASHES = ("solid", "dash", "dot", "dashdot")


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name that can be told from its neighbours, on white and on black."""
    found = {}
    for number, name in enumerate(names):
        red, green, blue = colorsys.hls_to_rgb(number * 0.381966 % 1, 0.5, 0.6)
        found[name] = f"rgb({round(255 * red)},{round(255 * green)},{round(255 * blue)})"
    return found


def learning(group: Group, column: str, palette: dict[str, str]) -> go.Figure:
    """A curve for each run: the figure of `column` of `metrics.csv` by optimiser step."""
    figure = go.Figure()
    for number, variant in enumerate(group.variants):
        first = True
        for seed, run in variant.runs.items():
            steps, values = _curve(run, column)
            if not steps:
                continue
            figure.add_scatter(
                x=steps, y=values, mode="lines" if len(steps) > 1 else "markers", name=_short(variant.label),
                legendgroup=str(number), showlegend=first, meta=variant.label,
                line={"color": palette[variant.label], "width": 1.6, "dash": _DASHES[number % len(_DASHES)]},
                hovertemplate=f"{html.escape(variant.label)}, seed {seed}<br>step %{{x}}: %{{y:.4f}}<extra></extra>",
            )  # fmt: skip
            first = False
    figure.update_layout(xaxis_title="optimiser step", yaxis_title=html.escape(column))
    return figure


def quality(group: Group, cost: Callable[[Variant], float | None], title: str, palette: dict[str, str]) -> go.Figure:
    """The mean score of each variant, with its interval, by what it costs."""
    figure = go.Figure()
    for number, variant in enumerate(group.variants):
        scores, x = list(variant.scores.values()), cost(variant)
        if not scores or x is None:
            continue
        mean, width = sum(scores) / len(scores), half_width(scores)
        label = html.escape(variant.label)
        figure.add_scatter(
            x=[x], y=[mean], mode="markers", name=_short(variant.label), meta=variant.label,
            marker={"color": palette[variant.label], "size": 11, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
            error_y={"type": "data", "array": [width or 0.0], "visible": width is not None, "thickness": 1},
            hovertemplate=f"{label}<br>%{{x:,.4g}} {html.escape(title)}<br>%{{y:.4f}}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(xaxis_title=html.escape(title), yaxis_title="test/primary")
    return figure


def cost_by_length(speed: Path) -> dict[str, tuple[str, go.Figure]]:
    """What `make bench` has measured, by the length of a sequence: name -> (where it comes from, figure)."""
    if not speed.is_file():
        return {}
    content = json.loads(speed.read_text(encoding="utf-8"))
    machine = content["machine"]
    source = f"make bench on {machine['cores']} cores of {machine['processor']}, commit {machine['commit']}"
    figures = {}
    for name, kind, unit, value in (
        ("time of a training step", "training", "seconds", lambda case, n: case["seconds"][n]["median"]),
        ("memory of a training step", "training", "MiB", lambda case, n: case["bytes"][n] / 2**20),
        ("time of 16 decoding steps", "decoding", "seconds", lambda case, n: case["seconds"][n]["median"]),
    ):
        cases = content.get(kind, {})
        palette = colours(list(content["training"]))
        figure = go.Figure()
        for number, (label, case) in enumerate(cases.items()):
            lengths = sorted(case["bytes" if unit == "MiB" else "seconds"], key=int)
            figure.add_scatter(
                x=[int(length) for length in lengths], y=[value(case, length) for length in lengths],
                mode="lines+markers", name=_short(label), meta=label,
                line={"color": palette.get(label), "dash": _DASHES[number % len(_DASHES)]},
            )  # fmt: skip
        figure.update_layout(xaxis_title="tokens", yaxis_title=unit, xaxis_type="log", yaxis_type="log")
        figures[name] = (source, figure)
    return figures


def _short(label: str) -> str:
    """For a legend, which takes its room from the figure."""
    return html.escape(label if len(label) <= 30 else f"{label[:29]}…")


def _curve(run: Run, column: str) -> tuple[list[float], list[float]]:
    points = [(float(row["step"]), float(row[column])) for row in run.rows if row.get(column)]
    size = -(-len(points) // POINTS)
    pieces = [points[start : start + size] for start in range(0, len(points), max(1, size))]
    means: list[Any] = [[sum(part) / len(piece) for part in zip(*piece, strict=True)] for piece in pieces]
    return [round(step, 1) for step, _ in means], [round(value, 6) for _, value in means]
