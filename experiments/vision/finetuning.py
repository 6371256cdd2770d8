"""Starting a new run from the weights of another."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from attnzoo.positions import Learned2D
from experiments.training import saved

log = logging.getLogger("experiments")

PLACES = {"position.table", "model.pos_embed"}
"""Learned places, prefix tokens first and then row by row: ours, and those of Vision Transformers of timm."""


def start_from(
    network: nn.Module, head: str | tuple[str, ...], classes: list[str], path: str, replace_head: bool
) -> None:
    """Copies the weights of a checkpoint into a network; all but the head where the classes are others.

    Learned places are resized on their grid where pictures or patches are of another size.
    A checkpoint of ``MaskedPatches`` gives its encoder; it has no head, so that is new without being asked for.

    Args:
        network: what is to be trained.
        head: how the names of its weights begin that belong to single classes.
        classes: of the new run.
        path: the checkpoint.
        replace_head: whether a new head is wanted where the classes differ.

    Raises:
        ValueError: if the classes differ and ``replace_head`` is off, or if weights do not fit.
    """
    checkpoint = saved.read(path)
    entry = saved.origin(checkpoint)
    saved.check_finite(checkpoint["state_dict"], path)
    before = entry["facts"].get("classes")
    if before is None:
        raise ValueError(f"{path} is no image classifier; give the best.ckpt of a vision run by --model.init_from")
    masked = entry["class_path"].endswith(".MaskedPatches")
    prefix = "network.encoder." if masked else "network."
    weights = {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
    own = network.state_dict()
    if masked:
        weights |= {name: value for name, value in own.items() if name.startswith(("head.", "sequence_pool."))}
        said = f"The head is new, for {len(classes)} classes; all else is from {path}."
    elif before != classes:
        if not replace_head:
            what = f"{len(before)} classes" if len(before) != len(classes) else f"other classes ({_some(before)})"
            raise ValueError(
                f"{path} was trained on {what}; this data has {len(classes)} ({_some(classes)}). "
                f"Start with a new head by --model.replace_head=true"
            )
        weights |= {name: value for name, value in own.items() if name.startswith(head)}
        instead = f" instead of {len(before)}" if len(before) != len(classes) else ", which are others"
        said = f"The head is new, for {len(classes)} classes{instead}; all else is from {path}."
    else:
        said = f"All weights are from {path}."
    for name in PLACES & own.keys() & weights.keys() if network.grid else ():
        patch = [side // cells for side, cells in zip(network.size, network.grid, strict=True)]
        patch = [entry["init_args"].get("patch_size", side) for side in patch]
        grid = [side // length for side, length in zip(entry["facts"]["image_size"], patch, strict=True)]
        if grid != list(network.grid):
            weights[name] = _resized(weights[name], grid, network.grid)
            said += " Learned places are resized: {}x{} to {}x{}.".format(*grid, *network.grid)
    saved.check_shapes(own, weights)
    network.load_state_dict(weights)
    log.info(said)


def _resized(table: Tensor, grid: list[int], wanted: tuple[int, int]) -> Tensor:
    """A table [places, E] or [1, places, E] of one grid for another; left as it is where it is of no such grid."""
    rows = table.flatten(0, -2)
    prefix = len(rows) - grid[0] * grid[1]
    if prefix < 0 or table.dim() > 3:
        return table  # to be refused with its shape
    old = Learned2D(rows.shape[1], (grid[0], grid[1]), prefix)
    old.load_state_dict({"table": rows})
    return old.resized(wanted).table.detach().view(*table.shape[:-2], -1, table.shape[-1])


def _some(classes: list[str]) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
