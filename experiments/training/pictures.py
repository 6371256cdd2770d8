"""Pictures of attention, drawn from the best weights when training has ended."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch

from experiments.training.module import Experiment


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
        folder.mkdir(parents=True, exist_ok=True)
        files[name] = folder / f"{name.replace('/', '-')}.png"
        figure.savefig(files[name], bbox_inches="tight")
    return files
