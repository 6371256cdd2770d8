"""Starting a new run from the weights of another."""

from __future__ import annotations

import logging

from torch import nn

from experiments.training import saved

log = logging.getLogger("experiments")


def start_from(network: nn.Module, classes: list[str], path: str, replace_head: bool) -> None:
    """Copies the weights of a checkpoint into a network; all but the head where the classes are others.

    Args:
        network: has a ``head``.
        classes: of the new run.
        path: the checkpoint.
        replace_head: whether a new head is wanted where the classes differ.

    Raises:
        ValueError: if the classes differ and ``replace_head`` is off, or if weights do not fit.
    """
    checkpoint = saved.read(path)
    before = saved.origin(checkpoint)["facts"].get("classes")
    if before is None:
        raise ValueError(f"{path} is no image classifier; give the best.ckpt of a vision run by --model.init_from")
    weights = {
        name.removeprefix("network."): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("network.")
    }
    own = network.state_dict()
    if before != classes:
        if not replace_head:
            what = f"{len(before)} classes" if len(before) != len(classes) else f"other classes ({_some(before)})"
            raise ValueError(
                f"{path} was trained on {what}; this data has {len(classes)} ({_some(classes)}). "
                f"Start with a new head by --model.replace_head=true"
            )
        weights |= {name: value for name, value in own.items() if name.startswith("head.")}
        log.info("The head is new, for %d classes instead of %d; all else is from %s.", len(classes), len(before), path)
    saved.check_shapes(own, weights)
    network.load_state_dict(weights)


def _some(classes: list[str]) -> str:
    return ", ".join(classes[:4]) + (", ..." if len(classes) > 4 else "")
