"""Figures of heads as a table, a picture and rows of a file."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from attnzoo.heads.degenerate import Limits, causes, degenerate
from attnzoo.heads.figures import Head, HeadHealth, Health
from experiments.training.writing import write_whole

COLUMNS = {
    "norm": "norm", "effective_keys": "keys", "visible_keys": "of", "unevenness": "uneven", "sink": "sink",
    "first_token": "first", "distance": "distance", "content": "content", "entropy": "entropy",
}  # fmt: skip
"""Figure -> head of its column."""

ALL_COLUMNS = COLUMNS | {"nearest": "twin", "redundancy": "CKA", "ablation": "ablation"}

LEGEND = (
    "norm: output, by the mean of its site; keys: effective number of keys, of: how many a query sees; uneven: 0 where "
    "all keys weigh alike\n"
    "sink, first: share on the key most used, on the first one; distance: in tokens; content: share that follows the "
    "input and not the place; entropy: in nats\n"
    "twin: the head most like it, CKA: how like, up to 1; ablation: rise of the loss without the head"
)
"""What the columns mean."""

PANELS = {
    "norm": "relative output norm\n(dead below 0.1)",
    "effective_keys": "effective number of keys",
    "sink": "share on one key\n(sink above 0.95)",
    "redundancy": "CKA with the nearest head\n(duplicate above 0.95)",
    "content": "content, not place",
    "ablation": "rise of the loss without it,\nby the loss (log; useless below 0.001)",
}
"""Figure -> title of its panel."""

USELESS = Limits().useless


def verdicts(health: Health) -> dict[Head, str]:
    """Causes that each head shows; whether it is of use, where that was measured, and which of two duplicates goes."""
    measured = health.loss is not None and all(entry.ablation is not None for entry in health.heads)
    flagged = {one.head for one in degenerate(health)} if measured else set()
    said = {}
    for entry in health.heads:
        shown = ", ".join(causes(entry))
        if shown and measured:
            useless = entry.ablation is not None and entry.ablation <= USELESS * abs(health.loss or 0.0)
            other = f", but head {entry.nearest} goes first" if useless else ", but of use"
            shown += ": degenerate" if entry.head in flagged else other
        said[entry.head] = shown
    return said


def table(health: Health) -> Table:
    """One row a head; below it what the figures of a site leave out, or mean there."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("site", "head"):
        made.add_column(name, no_wrap=True)
    for name in ALL_COLUMNS.values():
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    before, judged = "", verdicts(health)
    for entry in health.heads:
        site = entry.head.site
        cells = [_number(getattr(entry, name)) for name in COLUMNS]
        twin = "" if entry.nearest is None else str(entry.nearest)
        rise = "" if entry.ablation is None or not health.loss else f"{100 * entry.ablation / abs(health.loss):+.2f} %"
        said = judged[entry.head]
        style = "red" if said.endswith("degenerate") else "yellow" if said else ""
        made.add_row(
            Text(site if site != before else ""), str(entry.head.number), *cells, twin, _number(entry.redundancy), rise,
            Text(said, style=style),
        )  # fmt: skip
        before = site
    return made


def notes(health: Health) -> list[str]:
    """Why figures are missing, by the names of their columns; each reason once."""
    found: dict[str, list[str]] = {}
    for site, reasons in health.notes.items():
        columns: dict[str, list[str]] = {}
        for figure, reason in reasons.items():
            columns.setdefault(reason, []).append(ALL_COLUMNS.get(figure, figure))
        for reason, names in columns.items():
            found.setdefault(f"{', '.join(names)}: {reason}", []).append(site)
    return [f"{text} ({', '.join(sites)})" for text, sites in found.items()]


def picture(health: Health, title: str) -> Figure:
    """A heat map for each figure, sites from top to bottom, heads from left to right."""
    sites = list(dict.fromkeys(entry.head.site for entry in health.heads))
    count = max(entry.head.number for entry in health.heads) + 1
    panels = [name for name in PANELS if any(getattr(entry, name) is not None for entry in health.heads)]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (1.6 + columns * (1.4 + 0.34 * count), 0.7 + rows * (1.3 + 0.3 * len(sites)))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9, parse_math=False)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, panels, strict=False):
        values = np.full((len(sites), count), np.nan)
        for entry in health.heads:
            value = getattr(entry, name)
            values[sites.index(entry.head.site), entry.head.number] = np.nan if value is None else value
        if name == "ablation":
            # Below a hundredth of what counts as useless all is the same; so is a loss that falls.
            values = np.maximum(values / abs(health.loss or 1.0), USELESS / 100)
        image = axis.imshow(values, aspect="auto", cmap="viridis", norm=_scale(name, values))
        figure.colorbar(image, ax=axis, location="bottom", shrink=0.9).ax.tick_params(labelsize=6)
        axis.set_title(PANELS[name], fontsize=7)
        axis.set_xticks(range(count), map(str, range(count)), fontsize=6)
        axis.set_xlabel("head", fontsize=7)
        axis.set_facecolor("lightgrey")  # where there is no such head, or no such figure
    axes[0, 0].set_yticks(range(len(sites)), sites)
    for row in axes:
        row[0].tick_params(axis="y", labelsize=7)
    for entry in health.heads:
        if causes(entry):
            axes[0, 0].text(entry.head.number, sites.index(entry.head.site), "x", ha="center", va="center", color="red")
    figure.supxlabel("x: shows a cause of degeneration", fontsize=7)
    return figure


def _scale(name: str, values: np.ndarray[Any, Any]) -> Normalize:
    if name in ("sink", "redundancy", "content"):
        return Normalize(0, 1)
    if name == "ablation":
        return LogNorm(USELESS / 100, max(1.0, float(np.nanmax(values))))
    return Normalize(0, float(np.nanmax(values)) if np.isfinite(values).any() else 1.0)


def append_rows(path: Path, health: Health, step: int) -> None:
    """Writes all figures of this step behind those of earlier steps; rows of later ones, left by a killed run, go."""
    names = ["step", "site", "head", *(name for name in HeadHealth.__dataclass_fields__ if name != "head")]
    kept: list[dict[str, Any]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if int(row["step"]) < step]
    rows = [
        {"step": step, "site": entry.head.site}
        | {name: getattr(entry, name) for name in names[3:]}
        | {"head": entry.head.number}
        for entry in health.heads
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows([*kept, *rows])
    write_whole(path, text.getvalue().encode(), "--run.root")


def summary(health: Health) -> dict[str, float]:
    """A few numbers over all heads, for the rows of a run: extremes, and how many heads show each cause."""
    found: dict[str, float] = {}
    for name, least in (("norm", True), ("effective_keys", True), ("sink", False), ("redundancy", False)):
        values = [value for entry in health.heads if (value := getattr(entry, name)) is not None]
        if values:
            found[f"heads/{name}_{'min' if least else 'max'}"] = min(values) if least else max(values)
            found[f"heads/{name}_mean"] = math.fsum(values) / len(values)
    return found | {f"heads/{cause}": float(count) for cause, count in _counts(health).items()}


def sentence(health: Health) -> str:
    """How many heads show a cause of degeneration, and which: `3 of 16 heads show a cause ...: 2 uniform, 1 sink`."""
    flagged = sum(bool(causes(entry)) for entry in health.heads)
    which = ", ".join(f"{count} {cause}" for cause, count in _counts(health).items() if count)
    return f"{flagged} of {len(health.heads)} heads show a cause of degeneration{f': {which}' if which else ''}"


def _counts(health: Health) -> dict[str, int]:
    shown = [cause for entry in health.heads for cause in causes(entry)]
    return {cause: shown.count(cause) for cause in ("dead", "uniform", "sink", "duplicate")}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
