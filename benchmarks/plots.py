"""Pictures of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


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
    marks = "os^vDP*X"
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
            axis.plot(lengths, middle, style, marker=marks[number % 8], markersize=4, color=colour, label=name)
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
