"""CIFAR-10 and CIFAR-100 as torchvision downloads them."""

from __future__ import annotations

import os
from pathlib import Path

from torchvision import datasets

from experiments.vision.cache import user_folder
from experiments.vision.sources import ArrayShelf, Pictures, Source

TORCHVISION = "torchvision:"
NAMES = ("CIFAR10", "CIFAR100")


def find_torchvision(name: str) -> Source:
    """A data set by its class in torchvision, in the folder that ATTNZOO_DATA names or the user's cache folder.

    Raises:
        ValueError: another name, or it is not there and cannot be downloaded.
    """
    if name not in NAMES:
        raise ValueError(f"--data.path={TORCHVISION}{name}: expected {TORCHVISION}{' or '.join(NAMES)}.")
    root = Path(os.environ.get("ATTNZOO_DATA") or user_folder())
    parts = {}
    classes: list[str] = []
    for part, train in (("train", True), ("test", False)):
        try:
            found = getattr(datasets, name)(root, train=train, download=True)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"--data.path={TORCHVISION}{name}: {str(error).splitlines()[0]} Download it where there is a network, "
                f"into {root}, or name a folder or a hub."
            ) from error
        shelf = ArrayShelf(found.data, f"{name}, {part} part, picture")
        parts[part] = Pictures(shelf, range(len(shelf.arrays)), list(found.targets))
        classes = list(found.classes)
    return Source(f"{TORCHVISION}{name}", classes, parts, image_size=(32, 32))
