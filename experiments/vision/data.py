"""Pictures and labels as batches: handwritten digits, a folder, parquet files or a data set of a hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.training.data_folder import locate
from experiments.training.sampling import ResumableBatches, ResumableLoader, in_turn, share_of
from experiments.vision.augment import OFF, Augment
from experiments.vision.cache import PictureCache, user_folder
from experiments.vision.folders import find_folder
from experiments.vision.loading import BadFiles, Loaded, collate, first_size, load
from experiments.vision.sources import Source, digits, split
from experiments.vision.tables import HUB, find_hub, find_parquet, has_parquet
from experiments.vision.torchvision_sets import TORCHVISION, find_torchvision

log = logging.getLogger("experiments")

# A fit ends with a test: what is wrong with that part is said before training, not after.
_PARTS = {"fit": ("train", "val", "test"), "validate": ("val",), "test": ("test",)}


class ImageData(lightning.LightningDataModule):
    """Labelled pictures in batches of {"image": uint8 [B, C, H, W], "label": int64 [B]}.

    Training batches come in an order that follows from (`order_seed`, epoch) alone. Where they are augmented
    (see `Augment`) the pixels are floats from 0 to 1, and mixed labels are float [B, classes].

    Args:
        path: None takes the 1,797 handwritten digits of scikit-learn, a fifth of them as test. Otherwise a
            folder with `train/<class>/*` (and `val`, `test`), with `<class>/*`, or with parquet files named
            train*, val*, test*; `hub:NAME`, a data set of a hub, or `hub:NAME:CONFIGURATION` of one that has
            several; or `torchvision:CIFAR10`, which is downloaded. A folder that is not found from here is looked
            for in the one that ATTNZOO_DATA names, and in its `vision`.
        batch_size: pictures in a batch, of each process.
        image_size: height and width in pixels that pictures are brought to; one number for both. None keeps
            their own, which must then be the same for all.
        channels: 3 colours or 1 grey. None: 1 for the digits, else 3.
        val_fraction: share of the training part used as validation where there is none of its own.
        split_seed: the random, stratified splits follow from it.
        bad_files: at a file that cannot be read, stop, or skip it and say so.
        label_column: in tables, the column of labels; None looks for `label`, or the one that names classes.
        num_workers: processes that read pictures ahead; 0 reads in the main process.
        cache: folder that keeps decoded pictures; auto for attnzoo in the user's cache folder, null for none.
        augment: what happens to training pictures.

    Raises:
        ValueError: an option out of range; from `setup`, whatever is wrong with the data, by name.

    Example:
        >>> data = ImageData(batch_size=32)
        >>> data.setup("fit")
        >>> next(iter(data.val_dataloader()))["image"].shape
        torch.Size([32, 1, 8, 8])
    """

    def __init__(
        self,
        path: str | None = None,
        batch_size: int = 64,
        image_size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] | None = None,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        bad_files: BadFiles = "stop",
        label_column: str | None = None,
        num_workers: int = 0,
        cache: str | None = "auto",
        augment: Augment = OFF,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"--data.batch_size is {batch_size}; expected 1 or more.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"--data.val_fraction is {val_fraction}; expected a share between 0 and 1.")
        if path == "":
            raise ValueError("--data.path is empty; give a folder, or null for the handwritten digits.")
        sides = (image_size, image_size) if isinstance(image_size, int) else image_size
        if sides is not None and min(sides) < 1:
            raise ValueError(f"--data.image_size is {image_size}; expected 1 pixel or more.")
        self.path = path
        self.batch_size = batch_size
        self.image_size = image_size
        self.channels = channels
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.bad_files = bad_files
        self.label_column = label_column
        self.num_workers = num_workers
        self.cache = cache
        self.augment = augment
        self.order_seed = 0
        self._wanted_size = sides
        self._source: Source | None = None
        self._size: tuple[int, int] | None = None
        self._loaded: dict[str, Loaded] = {}

    def setup(self, stage: str) -> None:
        """Find the pictures and read those that the stage needs; a second call changes nothing."""
        self._read(*_PARTS.get(stage, ()))

    @property
    def facts(self) -> dict[str, Any]:
        """What a model must know of the data, as plain values.

        "classes" (names, by number), "image_size" [H, W], "channels", and "mean" and "std" per channel of the
        training pixels, from 0 to 1.
        """
        train = self._part("train")
        return {
            "classes": list(self._find().classes),
            "image_size": list(self._sizes()),
            "channels": self._channels(),
            "mean": train.mean,
            "std": train.std,
        }

    def train_dataloader(self) -> ResumableLoader:
        samples = self.augment.on_reading(self._part("train").samples)
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        batches = ResumableBatches(len(samples), self.batch_size, seed=self.order_seed, rank=rank, world_size=world)
        return ResumableLoader(samples, batch_sampler=batches, **self._loader_options())

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order("val")

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order("test")

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Augment training batches, where the model will use them."""
        if self.trainer is None or not self.trainer.training:
            return batch
        return self.augment(batch, len(self._find().classes))

    def _in_order(self, part: str) -> DataLoader[dict[str, Tensor]]:
        options = self._loader_options() | {"persistent_workers": self.num_workers > 0}
        samples = self._part(part).samples
        batches = in_turn(len(samples), self.batch_size, **share_of(self.trainer))
        return DataLoader(samples, batch_sampler=batches, **options)

    def _loader_options(self) -> dict[str, Any]:
        return {"num_workers": self.num_workers, "collate_fn": collate, "pin_memory": torch.cuda.is_available()}

    def _find(self) -> Source:
        if self._source is None:
            source = split(self._look(), val_fraction=self.val_fraction, seed=self.split_seed)
            sizes = ", ".join(f"{len(source.parts[part]):,} {part}" for part in _PARTS["fit"])
            log.info("Data: %s: %s pictures in %d classes.", source.title, sizes, len(source.classes))
            for note in source.notes:
                log.warning(note)
            if self.label_column is not None and not source.has_columns:
                log.warning("--data.label_column has no effect: %s has no columns to choose from.", source.title)
            self._source = source
        return self._source

    def _look(self) -> Source:
        if self.path is None:
            return digits()
        if self.path.startswith(HUB):
            return find_hub(self.path.removeprefix(HUB), self.label_column)
        if self.path.startswith(TORCHVISION):
            return find_torchvision(self.path.removeprefix(TORCHVISION))
        root = locate(self.path, "vision")
        if not root.is_dir():
            raise ValueError(
                f"--data.path={root} is a file; give the folder, which holds train/<class>/* or <class>/*."
            )
        return find_parquet(root, self.label_column) if has_parquet(root) else find_folder(root)

    @property
    def _cache(self) -> PictureCache | None:
        if self.cache is None:
            return None
        return PictureCache(user_folder() if self.cache == "auto" else Path(self.cache).expanduser())

    def _sizes(self) -> tuple[int, int]:
        if self._size is None:
            source = self._find()
            own = self._wanted_size or source.image_size
            self._size = own or first_size(source.parts["train"], self.bad_files)
        return self._size

    def _channels(self) -> int:
        return self.channels or self._find().channels

    def _part(self, part: str) -> Loaded:
        self._read(part)
        return self._loaded[part]

    def _read(self, *parts: str) -> None:
        source = self._find()
        skipped: list[str] = []
        count = 0
        for part in parts:
            if part in self._loaded:
                continue
            if part == "test" and source.parts["test"] is source.parts["val"]:
                self._loaded["test"] = self._part("val")
                continue
            pictures = source.parts[part]
            loaded = self._loaded[part] = load(
                part,
                pictures,
                self._sizes(),
                self._channels(),
                resize=self._wanted_size is not None,
                bad_files=self.bad_files,
                num_workers=self.num_workers,
                cache=self._cache,
            )
            skipped += loaded.skipped
            count += len(pictures)
            for lost in sorted(set(pictures.labels) - set(loaded.labels)):
                log.warning("The %s part lost every picture of: %s.", part, source.classes[lost])
        if skipped:
            log.warning("%d of %d skipped:\n  %s", len(skipped), count, "\n  ".join(skipped))
