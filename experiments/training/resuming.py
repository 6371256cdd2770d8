"""What a run takes from a checkpoint: its options, and that none of them is changed in silence."""

from __future__ import annotations

import pydoc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from experiments.training import saved, specs
from experiments.training.module import Experiment

OF_TRAINING = (
    "accumulate_grad_batches",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "precision",
)
"""Options of the trainer that change what a step does. How long to train may be changed freely."""


def config_of_run(checkpoint: Path) -> Path | None:
    """The options of the run that a checkpoint stands in, or None where the file stands alone."""
    config = checkpoint.resolve().parent.parent / "config.yaml"
    return config if config.is_file() else None


def refuse_other_model(path: Path, content: dict[str, Any], model: Experiment, preset: str | None) -> None:
    """Stop where a checkpoint is of another kind of model than the options.

    Raises:
        ValueError: with both kinds.
    """
    theirs, ours = saved.origin(content)["class_path"], specs.describe(model)["class_path"]
    if theirs != ours:
        task = getattr(pydoc.locate(theirs), "task", "foreign")
        there, here = (name.rpartition(".")[2] for name in (theirs, ours))
        given = f"--config={preset} is of" if preset else "the options are of"
        raise ValueError(
            f"{path} is a {task} checkpoint ({there}), and {given} a {model.task} model ({here}).\n"
            f"Leave --config out, or give the checkpoint of a {here}."
        )


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


def refuse_other_training(folder: Path, now: dict[str, Any]) -> None:
    """Stop where a run that goes on in its folder would train in another way than before.

    Args:
        folder: of the run; its `config.yaml` has the options until now.
        now: all options of now, as they would be written there.

    Raises:
        ValueError: with each difference.
    """
    before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    differences = {}
    for name in ("ema", *(f"trainer.{option}" for option in OF_TRAINING)):
        section, _, option = name.rpartition(".")
        there, here = ((all_of.get(section, {}) if section else all_of).get(option) for all_of in (before, now))
        if there != here:
            differences[name] = (there, here)
    if differences:
        said = "; ".join(f"--{name} was {there!r} and is {here!r} now" for name, (there, here) in differences.items())
        raise ValueError(
            f"The run in {folder} was trained with other options. {said}.\n"
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
