"""What a run takes from a checkpoint: its options, and that none of them is changed in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from experiments.training import saved
from experiments.training.module import Experiment


def run_config(checkpoint: Path, resume: bool) -> dict[str, Any]:
    """Options for going on: those of the run. For testing, or a file that stands alone: those in it."""
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if resume and config.is_file():
        options: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
        return options
    return saved.options(saved.origin(saved.read(checkpoint)))


def refuse_differences(
    path: Path, content: dict[str, Any], model: Experiment, data: pl.LightningDataModule, resume: bool
) -> None:
    """Stop where options are not those of the checkpoint.

    Raises:
        ValueError: with each difference. Testing compares the network alone: other data may be tested.
    """
    theirs, ours = saved.options(saved.origin(content)), saved.options(saved.describe_origin(model, data))
    # How many processes read the data changes no number.
    free = ("data.num_workers",) if resume else ("data", "seed_everything", "model.optim")
    differences = [
        f"--{name} was {there!r} there and is {here!r} here"
        for name, (there, here) in sorted(_differing(theirs, ours).items())
        if not name.startswith(free)
    ]
    if differences:
        raise ValueError(
            f"{path} was trained with other options. {'; '.join(differences)}.\n"
            "Leave them out, or let those given now win by --run.override_ckpt=true."
        )


def _differing(theirs: Any, ours: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in theirs.keys() | ours.keys():
            # The names that the user types have no `init_args` in them.
            inner = prefix if key == "init_args" else ".".join(filter(None, (prefix, key)))
            found |= _differing(theirs.get(key), ours.get(key), inner)
        return found
    return {} if theirs == ours else {prefix: (theirs, ours)}
