"""Pictures of what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

_MARKS = "os^vDP*X"


def curves(result: dict[str, Any], path: Path) -> None:
    """Time of training, memory of training and time of decoding by length, each mechanism one line."""
    figure, axes = pyplot.subplots(1, 3, figsize=(18, 8), layout="constrained")
    panels = [
        ("training", "seconds", "forward and backward, ms", 1000.0),
        ("training", "bytes", "live memory, MiB", 1 / 2**20),
        ("decoding", "seconds", "16 steps of decoding, ms", 1000.0),
    ]
    names = list({name: None for mode in ("training", "decoding") for name in result[mode]})
    colours = pyplot.get_cmap("turbo")
    for axis, (mode, what, label, factor) in zip(axes, panels, strict=True):
        for number, name in enumerate(names):
            row = result[mode].get(name)
            if row is None or not row[what]:
                continue
            lengths = sorted(map(int, row[what]))
            values = [row[what][str(length)] for length in lengths]
            middle = [factor * (value["median"] if isinstance(value, dict) else value) for value in values]
            colour = "black" if name.startswith("Softmax") else colours(number / max(1, len(names) - 1))
            style = "--" if "causal" in name else "-"
            axis.plot(
                lengths, middle, style, marker=_MARKS[number % len(_MARKS)], markersize=4, color=colour, label=name
            )
            if what == "seconds":
                low, high = ([factor * value[key] for value in values] for key in ("q1", "q3"))
                axis.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_title(label)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def quality(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The scores of each mechanism by the time of a step: a mark for the mean, a dot for each seed."""
    columns = min(3, len(tables))
    lines = math.ceil((len(tables) + 1) / columns)  # one more for the legend
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.6 * lines), layout="constrained", squeeze=False
    )
    names = sorted({row["mechanism"] for rows in tables.values() for row in rows})
    colours = pyplot.get_cmap("turbo")
    shown = {}
    for axis, (title, rows) in zip(axes.flat, tables.items(), strict=False):
        for row in rows:
            number = names.index(row["mechanism"])
            colour = "black" if row["mechanism"] == "Softmax" else colours(number / max(1, len(names) - 1))
            (shown[row["mechanism"]],) = axis.plot(
                row["step_ms"], row["score"], _MARKS[number % len(_MARKS)], color=colour, linestyle="none"
            )
            axis.plot([row["step_ms"]] * len(row["scores"]), row["scores"], ".", color=colour, markersize=3)
        axis.set_title(title)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel("ms a step")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("test/primary, larger is better")
    for axis in axes.flat[len(tables) :]:
        axis.set_axis_off()
    axes.flat[len(tables)].legend([shown[name] for name in names], names, loc="center", ncols=2, frameon=False)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
