"""Starting a new run from the weights of another."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from attnzoo.positions import Learned2D
from experiments.training import saved

log = logging.getLogger("experiments")


def start_from(
    network: nn.Module, head: str | tuple[str, ...], classes: list[str], path: str, replace_head: bool
) -> None:
    """Copies the weights of a checkpoint into a network; all but the head where the classes are others.

    A learned grid of places is resized where pictures or patches are of another size.
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
        log.info("The head is new, for %d classes; all else is from %s.", len(classes), path)
    elif before != classes:
        if not replace_head:
            what = f"{len(before)} classes" if len(before) != len(classes) else f"other classes ({_some(before)})"
            raise ValueError(
                f"{path} was trained on {what}; this data has {len(classes)} ({_some(classes)}). "
                f"Start with a new head by --model.replace_head=true"
            )
        weights |= {name: value for name, value in own.items() if name.startswith(head)}
        log.info("The head is new, for %d classes instead of %d; all else is from %s.", len(classes), len(before), path)
    position = getattr(network, "position", None)
    if isinstance(position, Learned2D) and "position.table" in weights:
        patch = entry["init_args"]["patch_size"]
        rows, columns = (side // patch for side in entry["facts"]["image_size"])
        if (rows, columns) != position.grid:
            weights["position.table"] = _resized(weights["position.table"], (rows, columns), position)
            log.info("The learned grid of places is resized: %dx%d to %dx%d.", rows, columns, *position.grid)
    saved.check_shapes(own, weights)
    network.load_state_dict(weights)


def _resized(table: Tensor, grid: tuple[int, int], wanted: Learned2D) -> Tensor:
    """The table of one grid for another; left as it is where it is of no such grid, to be refused with its shape."""
    old = Learned2D(table.shape[1], grid, wanted.prefix_tokens)
    if old.table.shape != table.shape:
        return table
    old.load_state_dict({"table": table})
    return old.resized(wanted.grid).table.detach()


def _some(classes: list[str]) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
