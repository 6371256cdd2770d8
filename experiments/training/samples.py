"""What a trained model says of some fixed samples of the validation part: a table in the run folder, and in W&B.

The samples are spread evenly over the part and depend on the data alone, so that the tables of several runs line up.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure

from experiments.training.writing import write_figure, write_whole

if TYPE_CHECKING:
    from experiments.training.module import Experiment


class Samples(NamedTuple):
    """A table of what was said.

    Attributes:
        columns: their names; the first is the number of the sample in its part.
        rows: plain values, and matplotlib figures, which become files.
    """

    columns: list[str]
    rows: list[list[Any]]


def spread_evenly(total: int, count: int) -> list[int]:
    """At most ``count`` of the numbers 0 to total - 1.

    Example:
        >>> spread_evenly(10, 3), spread_evenly(2, 3)
        ([0, 3, 6], [0, 1])
    """
    count = min(count, total)
    return [number * total // count for number in range(count)]


def save_samples(model: Experiment, data: pl.LightningDataModule, count: int, folder: Path) -> Samples | None:
    """Writes ``samples.csv`` into a run folder, with its pictures in ``figures/samples``.

    Args:
        model: in evaluation mode.
        data: set up.
        count: rows of the table.
        folder: of the run.

    Returns:
        The table, with the files of pictures as paths in ``folder``; None where the task has none, or no rows are asked
        for.
    """
    with torch.no_grad():
        table = model.sample_table(data, count) if count else None
    if table is None:
        return None
    rows = [
        [_filed(cell, folder, f"{row[0]}-{name}") for name, cell in zip(table.columns, row, strict=True)]
        for row in table.rows
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([table.columns, *rows])
    write_whole(folder / "samples.csv", text.getvalue().encode(), "--run.root")
    return Samples(table.columns, rows)


def _filed(cell: Any, folder: Path, name: str) -> Any:
    if not isinstance(cell, Figure):
        return cell
    path = Path("figures", "samples", f"{name.replace(' ', '-')}.png")
    write_figure(folder / path, cell, "--run.root")
    return path
