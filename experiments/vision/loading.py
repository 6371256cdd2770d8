"""Decoding pictures once, into one tensor where it fits, and measuring them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import PIL
import torch
import torchvision
from rich import get_console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from experiments.vision.cache import PictureCache
from experiments.vision.pictures import to_tensor
from experiments.vision.sources import Pictures

BadFiles = Literal["stop", "skip"]
MEMORY = 2 * 2**30
"""Bytes that the decoded pictures of one part may take; a larger part is read again in every epoch."""
PROGRESS_FROM = 500
_CHUNK = 64


Samples: TypeAlias = "DecodedPictures | FilePictures"


@dataclass(frozen=True)
class Loaded:
    """A part that was read through once: its samples, and what is known of them.

    `good` are the places of the samples among the pictures asked for; the others are `skipped`, each with a reason.
    `mean` and `std` are per channel, for pixels from 0 to 1; `std` is 1 where a channel is constant.
    """

    samples: Samples
    labels: Sequence[int]
    good: list[int]
    skipped: list[str]
    mean: list[float]
    std: list[float]


class DecodedPictures(Dataset[dict[str, Tensor]]):
    """Samples from memory: "image" uint8 [C, H, W] and "label" int64."""

    def __init__(self, images: Tensor, labels: Sequence[int]) -> None:
        self.images = images
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """A whole batch by one look into memory, to be collated by ``collate``."""
        chosen = torch.tensor(indices)
        return {"image": self.images[chosen], "label": self.labels[chosen]}


def collate(samples: Any) -> Any:
    """A batch of samples; ``DecodedPictures`` gives batches as they are."""
    return samples if isinstance(samples, dict) else default_collate(samples)


class FilePictures(Dataset[dict[str, Tensor]]):
    """The same samples, each decoded when it is asked for."""

    def __init__(self, pictures: Pictures, size: tuple[int, int], channels: int) -> None:
        self.pictures = pictures
        self.size = size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = to_tensor(self.pictures.read(index), self.size, self.channels)
        return {"image": image, "label": torch.tensor(self.pictures.labels[index])}


def first_size(pictures: Pictures, bad_files: BadFiles) -> tuple[int, int]:
    """Height and width of the first picture that can be read."""
    for index in range(len(pictures)):
        try:
            width, height = pictures.read(index).size
        except ValueError as error:
            _stop_or_go_on(error, bad_files)
        else:
            return height, width
    raise ValueError(f"None of {len(pictures)} pictures can be read, from {pictures.name(0)} on.")


def load(
    part: str,
    pictures: Pictures,
    size: tuple[int, int],
    channels: int,
    *,
    resize: bool,
    bad_files: BadFiles,
    num_workers: int,
    cache: PictureCache | None = None,
) -> Loaded:
    """Read every picture of a part once.

    Args:
        part: what reports call it.
        pictures: what to read.
        size: height and width that samples have.
        channels: 1 or 3.
        resize: bring pictures to `size`; otherwise another size is refused.
        bad_files: what to do about a file that cannot be read.
        num_workers: processes that decode.
        cache: keeps what fits into memory once it is decoded.

    Raises:
        ValueError: a file that cannot be read (under "stop"), pictures of two sizes, or nothing left.
    """
    fits = len(pictures) * channels * size[0] * size[1] <= MEMORY
    mark = pictures.fingerprint() if fits and cache is not None else None
    if cache is None or mark is None:
        return _decode(part, pictures, size, channels, resize, bad_files, num_workers, fits)
    path = cache.path(mark, size, channels, resize, bad_files, PIL.__version__, torchvision.__version__)
    content = cache.read(path)
    if content is None:
        loaded = _decode(part, pictures, size, channels, resize, bad_files, num_workers, fits)
        assert isinstance(loaded.samples, DecodedPictures)
        good, images = loaded.good, loaded.samples.images
        found = {"good": good, "skipped": loaded.skipped, "mean": loaded.mean, "std": loaded.std}
        cache.write(path, found | {"images": images})
        return loaded
    images = content.pop("images")
    del content["digest"]
    kept = pictures.select(content["good"])
    return Loaded(DecodedPictures(images, kept.labels), kept.labels, **content)


def _decode(
    part: str,
    pictures: Pictures,
    size: tuple[int, int],
    channels: int,
    resize: bool,
    bad_files: BadFiles,
    num_workers: int,
    fits: bool,
) -> Loaded:
    reader = _Reader(pictures, size if resize else None, channels)
    chunks = DataLoader(reader, batch_size=_CHUNK, num_workers=num_workers, collate_fn=list)
    images = torch.empty((len(pictures) if fits else 0, channels, *size), dtype=torch.uint8)
    good: list[int] = []
    skipped: list[str] = []
    total, squares = torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64)
    quiet = len(pictures) < PROGRESS_FROM or not get_console().is_terminal
    label = f"Reading {len(pictures):,} pictures ({part})"
    index = 0
    for chunk in track(chunks, description=label, disable=quiet, transient=True):
        whole: list[Tensor] = []
        for image in chunk:
            if isinstance(image, str):
                _stop_or_go_on(ValueError(image), bad_files)
                skipped.append(image)
            elif image.shape[-2:] != size:
                raise ValueError(_two_sizes(pictures, good, index, image, size))
            else:
                whole.append(image)
                good.append(index)
            index += 1
        if whole:
            block = torch.stack(whole)
            pixels = block.flatten(2).double() / 255
            total += pixels.mean(2).sum(0)
            squares += pixels.square().mean(2).sum(0)
            if fits:
                images[len(good) - len(whole) : len(good)] = block
    if not good:
        raise ValueError(f"The {part} part has no picture that can be read, from {pictures.name(0)} on.")
    kept = pictures.select(good)
    samples: Samples = FilePictures(kept, size, channels)
    if fits:
        samples = DecodedPictures(images[: len(good)], kept.labels)
    mean = total / len(good)
    std = (squares / len(good) - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std < 1e-6, 1.0, std)
    return Loaded(samples, kept.labels, good, skipped, mean.tolist(), std.tolist())


class _Reader(Dataset[Tensor | str]):
    """Pixels, or the message of what is wrong: raised in a worker it would come as a long traceback."""

    def __init__(self, pictures: Pictures, size: tuple[int, int] | None, channels: int) -> None:
        self.pictures = pictures
        self.size = size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return to_tensor(self.pictures.read(index), self.size, self.channels)
        except ValueError as error:
            return str(error)


def _stop_or_go_on(error: ValueError, bad_files: BadFiles) -> None:
    if bad_files == "stop":
        raise ValueError(f"{error} Mend it, remove it, or skip such files: --data.bad_files=skip.") from error


def _two_sizes(pictures: Pictures, good: list[int], index: int, image: Tensor, size: tuple[int, int]) -> str:
    first = pictures.name(good[0]) if good else "the training part"
    height, width = image.shape[-2:]
    return (
        f"{first} is {size[0]} high and {size[1]} wide, but {pictures.name(index)} {height} high and {width} "
        "wide; expected one size. Bring all to one with --data.image_size=[height,width]."
    )
