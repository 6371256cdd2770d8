"""Experiments over the zoo: translation, vision and forecasting on one training system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.training.module import Experiment


def load(path: str | Path) -> Experiment:
    """The trained model of a checkpoint, ready to ``predict``, from the file alone: no config, no data, on the CPU.

    Args:
        path: a ``best.ckpt`` or ``last.ckpt`` of a run.

    Raises:
        ValueError: for a file that is no checkpoint of an experiment, or holds objects.
        FileNotFoundError: if there is no such file.

    After ``make train EXP=vit``::

        model = load("runs/vit/0001-softmax-seed0/checkpoints/best.ckpt")
        model.predict("examples/seven.png").argmax()  # tensor(7)
    """
    from experiments.training.module import Experiment

    return Experiment.from_checkpoint(path)
