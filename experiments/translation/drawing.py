"""Pictures of soft alignments."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.training.pictures import as_written
from experiments.translation.alignment import Alignment

CELL = 0.24
"""Inches of a token on either axis."""


@as_written
def alignment_figure(alignments: Sequence[Alignment], title: str = "") -> Figure:
    """One panel for each pair: source tokens along the top, target tokens down the side; dark is much.

    Args:
        alignments: at least one.
        title: over all panels.
    """
    widths = [max(8, len(pair.source)) for pair in alignments]
    tallest = max(len(pair.target) for pair in alignments)
    figure = Figure(
        figsize=(sum(CELL * width + 1.6 for width in widths), CELL * tallest + 2.0), layout="constrained", dpi=120
    )
    figure.suptitle("\n".join(filter(None, (title, "what was read (top) for each token written (side)"))), fontsize=9)
    panels = figure.subplots(1, len(alignments), squeeze=False, width_ratios=widths)[0]
    for axis, pair in zip(panels, alignments, strict=True):
        shown = axis.imshow(pair.weights.numpy(), cmap="Greys", vmin=0, vmax=1, aspect="equal")
        axis.set_xticks(range(len(pair.source)), pair.source, rotation=60, ha="left", fontsize=8)
        axis.set_yticks(range(len(pair.target)), pair.target, fontsize=8)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_color("lightgrey")
    figure.colorbar(shown, ax=panels, shrink=0.6, label="weight").ax.tick_params(labelsize=7)
    return figure
