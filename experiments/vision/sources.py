"""What a source of pictures offers before any is read, and how it is split in training, validation, test."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TEST_FRACTION = 0.2
"""Share of the pictures kept for the test where a source has one part only."""


class Shelf(Protocol):
    """Where pictures lie, by number."""

    def name(self, number: int) -> str:
        """What an error message calls the picture."""

    def read(self, number: int) -> Image.Image:
        """The picture, RGB or grey; ValueError with its name where it cannot be read."""

    def fingerprint(self) -> str | None:
        """Changes when a picture does; None where decoding costs nothing."""


@dataclass(frozen=True)
class Pictures:
    """Labelled pictures that are not read yet: `numbers` on a shelf, and the class number of each."""

    shelf: Shelf
    numbers: Sequence[int]
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.shelf.name(self.numbers[index])

    def read(self, index: int) -> Image.Image:
        return self.shelf.read(self.numbers[index])

    def fingerprint(self) -> str | None:
        """Changes when one of the pictures does, or their order; None where decoding costs nothing."""
        shelf = self.shelf.fingerprint()
        return None if shelf is None else fingerprint((shelf, list(self.numbers)))

    def select(self, chosen: Sequence[int]) -> Pictures:
        """The pictures at some places, in that order."""
        return Pictures(self.shelf, [self.numbers[i] for i in chosen], [self.labels[i] for i in chosen])


@dataclass(frozen=True)
class Source:
    """What was found: class names in the order of their numbers, the parts, and what the user should know.

    `parts` has "train", perhaps "val" and "test". `channels` and `image_size` (height, width) are what the
    pictures have where that is known without reading them. A `heap` has no parts of its own: its test is to
    be drawn from it. `has_columns` says that one of several columns can give the classes.
    """

    title: str
    classes: list[str]
    parts: dict[str, Pictures]
    notes: list[str] = field(default_factory=list)
    channels: int = 3
    image_size: tuple[int, int] | None = None
    heap: bool = False
    has_columns: bool = False


@dataclass(frozen=True)
class ArrayShelf:
    """Pictures in memory, uint8 [N, H, W] or, in colours, [N, H, W, 3]."""

    arrays: np.ndarray
    title: str

    def name(self, number: int) -> str:
        return f"{self.title} {number}"

    def read(self, number: int) -> Image.Image:
        return Image.fromarray(self.arrays[number])

    def fingerprint(self) -> None:
        """Arrays need no decoding."""


def fingerprint(causes: Iterable[object]) -> str:
    """One hash of all of them, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for cause in causes:
        digest.update(cause if isinstance(cause, bytes) else repr(cause).encode())
    return digest.hexdigest()


def file_state(path: str | Path) -> bytes:
    """Changes when a file does; a link to nothing has a state too, so that it comes as far as being named."""
    file = Path(path)
    state = file.stat() if file.is_file() else None
    return repr((str(path), state and (state.st_size, state.st_mtime_ns))).encode()


def digits() -> Source:
    """The 1,797 handwritten digits (8x8, 17 grey levels) that come with scikit-learn; one part."""
    found = load_digits()
    shelf = ArrayShelf(np.rint(found.images * (255 / 16)).astype(np.uint8), "digit")
    pictures = Pictures(shelf, range(len(shelf.arrays)), found.target.tolist())
    classes = [str(name) for name in found.target_names]
    title = "handwritten digits of scikit-learn"
    return Source(title, classes, {"train": pictures}, channels=1, image_size=(8, 8), heap=True)


def split(source: Source, *, val_fraction: float, seed: int) -> Source:
    """Give a source all three parts: a fifth of a heap is its test, else a missing test is the validation.

    Args:
        source: what was found.
        val_fraction: share of the training pictures that becomes validation where the source has none.
        seed: the random, stratified split follows from it.

    Returns:
        The source with "train", "val" and "test", and notes on what was missing.

    Raises:
        ValueError: there is one class, or one has too few pictures to be split.
    """
    if len(source.classes) < 2:
        raise ValueError(
            f"{source.title} has one class, {source.classes[0]!r}; two are needed. "
            "--data.path expects train/<class>/<picture> or <class>/<picture>."
        )
    parts, notes = dict(source.parts), list(source.notes)
    if source.heap:
        parts["train"], parts["test"] = _divide(parts["train"], TEST_FRACTION, seed, source, "test")
    if "val" not in parts:
        parts["train"], parts["val"] = _divide(parts["train"], val_fraction, seed, source, "val")
    for name, pictures in parts.items():
        present = set(pictures.labels)
        missing = [title for number, title in enumerate(source.classes) if number not in present]
        if missing:
            notes.append(f"The {name} part has no picture of: {', '.join(missing)}.")
    if "test" not in parts:
        parts["test"] = parts["val"]
        notes.append("There is no test part: the test runs on the validation part.")
    return replace(source, parts=parts, notes=notes, heap=False)


def _divide(pictures: Pictures, fraction: float, seed: int, source: Source, other: str) -> tuple[Pictures, Pictures]:
    counts = Counter(pictures.labels)
    label, least = min(counts.items(), key=lambda item: item[1])
    if least < 2:
        all_of = Counter(source.parts["train"].labels)[label]
        left = "" if all_of == least else f" left, of {all_of}, behind the test"
        raise ValueError(
            f"Class {source.classes[label]!r} has {least} picture{left} where two are needed, for train and {other}. "
            "Add pictures, or lay val/ and test/ folders beside train/ in --data.path."
        )
    size = min(max(math.ceil(fraction * len(pictures)), len(counts)), len(pictures) - len(counts))  # room for all
    rest, taken = train_test_split(range(len(pictures)), test_size=size, stratify=pictures.labels, random_state=seed)
    return pictures.select(rest), pictures.select(taken)
