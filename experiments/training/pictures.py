"""Pictures of attention, drawn from the best weights when training has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
import torch
from matplotlib import rc_context
from torch import Tensor

from attnzoo import Call
from experiments.training.module import Experiment
from experiments.training.writing import write_figure

LONGEST_MAP = 1024
"""Tokens; a map is read column by column, so that its time grows with the cube of their number."""


as_written = rc_context({"text.parse_math": False})
"""Decorates what draws: a dollar sign in the name of a class, a column or a file, or in a word, begins no formula."""


def first_maps(sites: Mapping[str, list[Call]]) -> list[Tensor]:
    """The attention map of the first call of each site for the first of its batch: [H, T, S] each.

    Raises:
        ValueError: more tokens than ``LONGEST_MAP``, or a mechanism that is not linear in v, which has no map.
    """
    longest = max(max(calls[0].q.shape[2], calls[0].k.shape[2]) for calls in sites.values())
    if longest > LONGEST_MAP:
        raise ValueError(f"{longest:,} tokens would take too long; up to {LONGEST_MAP:,} are drawn")
    return [calls[0].map()[0] for calls in sites.values()]


def save_pictures(model: Experiment, data: pl.LightningDataModule, folder: Path) -> dict[str, Path]:
    """Draw the task's pictures for the first validation batch as PNG files.

    Args:
        model: in evaluation mode.
        data: set up.
        folder: where `<name>.png` go.

    Returns:
        The files by the names that the task gave, empty where the task draws none.
    """
    batch = model.receive(next(iter(data.val_dataloader())), data)
    with torch.no_grad():
        figures = model.attention_pictures(batch)
    files = {}
    for name, figure in figures.items():
        files[name] = folder / f"{name.replace('/', '-')}.png"
        write_figure(files[name], figure, "--run.root")
    return files
