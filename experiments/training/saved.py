"""What stands in a checkpoint: where the model came from, in plain values, and how to read it back."""

from __future__ import annotations

import functools
import pickle
import pydoc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor

import attnzoo
from experiments.training import specs

if TYPE_CHECKING:
    from experiments.training.module import Experiment

E = TypeVar("E", bound="Experiment")

KEY = "experiment"
_OBJECTS = (
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_name",
)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what the numbers of a run depend on."""
    return {"attnzoo": attnzoo.__version__, "torch": str(torch.__version__), "lightning": pl.__version__}


def add_origin(checkpoint: dict[str, Any], model: Experiment, data: pl.LightningDataModule | None) -> None:
    """Write class, options, facts, data and versions into `checkpoint`, and take Lightning's objects out."""
    for key in _OBJECTS:
        checkpoint.pop(key, None)
    checkpoint[KEY] = {
        **describe_origin(model, data),
        "facts": specs.plain(model.facts, "facts"),
        "versions": dict(versions()),
    }


def describe_origin(model: Experiment, data: pl.LightningDataModule | None) -> dict[str, Any]:
    """Class and options of model and data, and the seed of the order of samples."""
    described = None if data is None else specs.describe(data)
    return {**specs.describe(model), "data": described, "seed": getattr(data, "order_seed", 0)}


def options(entry: dict[str, Any]) -> dict[str, Any]:
    """What `describe_origin` or `add_origin` gave, under the names that options have."""
    model = {key: entry[key] for key in ("class_path", "init_args")}
    return {"model": model, "data": entry["data"], "seed_everything": entry["seed"]}


def read(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint on the CPU, without running anything in it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: half a file, a file of another kind, one without weights, or one that holds objects.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a checkpoint in it, such as {path}/checkpoints/best.ckpt.")
    if not path.is_file():
        raise FileNotFoundError(
            f"No checkpoint at {path}; give a .ckpt file, such as runs/<preset>/<run>/checkpoints/best.ckpt."
        )
    with path.open("rb") as file:
        if file.read(2) != b"PK":  # how the archives of torch begin
            raise ValueError(f"{path} is refused: it is no checkpoint. Only tensors and plain values are read.")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"Unsupported (?:global|class): (?:GLOBAL )?(\S+)", str(error))
        what = f"it holds objects ({found[1]}), which would run code when loaded" if found else "it is no checkpoint"
        raise ValueError(f"{path} is refused: {what}. Only tensors and plain values are read.") from error
    except Exception as error:  # a damaged file may make the reader raise anything
        others = [path.with_name(f"{name}.ckpt") for name in ("best", "last")]
        there = [str(other) for other in others if other != path and other.is_file()]
        instead = f" Take {there[0]} instead." if there else ""
        raise ValueError(f"{path} is damaged or cut off, and cannot be read.{instead}") from error
    origin(checkpoint, str(path))
    weights = checkpoint.get("state_dict")
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path} holds no weights (no tensors under 'state_dict'); give a best.ckpt or last.ckpt.")
    return checkpoint


def origin(checkpoint: Any, name: str = "This checkpoint") -> dict[str, Any]:
    """The entry that `add_origin` has written."""
    entry: Any = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if not isinstance(entry, dict) or not {"class_path", "init_args", "facts"} <= entry.keys():
        raise ValueError(
            f"{name} was not written by an experiment of this project: it has no entry {KEY!r}. "
            "Give the best.ckpt or last.ckpt of a run."
        )
    return entry


def rebuild_model(base: type[E], checkpoint: dict[str, Any], name: str = "This checkpoint") -> E:
    """The model of a checkpoint with its (averaged) weights.

    Args:
        base: what it must be.
        checkpoint: its content.
        name: what a complaint calls it.

    Raises:
        ValueError: of another task, or weights that do not fit or are not finite.
    """
    entry = origin(checkpoint)
    found = pydoc.locate(entry["class_path"])
    if isinstance(found, type) and not issubclass(found, base):
        task = getattr(found, "task", "another")
        raise ValueError(f"{name} is of a {task} model, {found.__name__}; one of {base.__name__} was expected.")
    model = specs.rebuild(base, entry)
    model.facts = entry["facts"]
    model.configure_model()
    check_shapes(model.state_dict(), checkpoint["state_dict"])
    check_finite(checkpoint["state_dict"], name)
    model.load_state_dict(checkpoint["state_dict"])
    return model


def check_finite(weights: Mapping[str, Tensor], name: str) -> None:
    """Refuse weights that can give nothing but NaN.

    Raises:
        ValueError: with the name of the first of them.
    """
    for weight, value in weights.items():
        if not value.isfinite().all():
            raise ValueError(
                f"{name} is of no use: {weight} has values that are not finite. Give an earlier checkpoint, such as "
                "the best.ckpt of the run."
            )


def check_shapes(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit, in one line.

    Raises:
        ValueError: names that are missing or left over, or other shapes.
    """
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name].shape != theirs[name].shape:
            raise ValueError(
                f"{name} is {list(theirs[name].shape)} in the checkpoint and {list(ours[name].shape)} "
                "in this model; "
                "use the options that the checkpoint was trained with."
            )
    for names, where in (
        (ours.keys() - theirs.keys(), "the checkpoint"),
        (theirs.keys() - ours.keys(), "this model"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise ValueError(
                f"{len(names)} weight(s) are missing in {where}: {shown}{', ...' if len(names) > 3 else ''}; "
                "use the options that the checkpoint was trained with."
            )


def refuse_other_facts(saved: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse data that a saved model was not made for. Measured figures (floats) may differ.

    Raises:
        ValueError: with the first fact that differs.
    """
    for key in sorted(saved.keys() | found.keys()):
        ours, theirs = saved.get(key), found.get(key)
        if ours != theirs and not _measured(ours) and not _measured(theirs):
            raise ValueError(
                f"The model was trained on data with {key} = {_short(ours)}; "
                f"this data has {_short(theirs)}. "
                "Give data of the same kind by --data.path, or train a new model."
            )


def _measured(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list) and any(isinstance(item, float) for item in value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
