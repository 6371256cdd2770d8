"""ImageData on the digits: splits, facts and batches; order and augmentation in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from loaded import images, labels, ready
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from experiments.vision.augment import Augment
from experiments.vision.data import ImageData

Tree = Callable[..., Path]


def test_digits_are_split_as_scikit_learn_splits_them() -> None:
    data = ready(split_seed=3)
    found = load_digits()
    rest, test = train_test_split(range(1797), test_size=0.2, stratify=found.target, random_state=3)
    train, val = train_test_split(rest, test_size=0.1, stratify=found.target[rest], random_state=3)
    wanted = torch.tensor(found.images[test]).mul(255 / 16).round().to(torch.uint8)[:, None]
    assert torch.equal(images(data.test_dataloader()), wanted)
    assert labels(data.test_dataloader()) == found.target[test].tolist()
    assert labels(data.val_dataloader()) == found.target[val].tolist()
    assert sorted(labels(data.train_dataloader())) == sorted(found.target[train].tolist())
    assert wanted.max() == 255


def test_facts_are_plain_values_of_the_training_pixels() -> None:
    data = ready()
    facts = data.facts
    pixels = images(data.train_dataloader()).double() / 255
    assert facts["classes"] == [str(digit) for digit in range(10)]
    assert (facts["image_size"], facts["channels"]) == ([8, 8], 1)
    assert facts["mean"] == pytest.approx([pixels.mean().item()])
    assert facts["std"] == pytest.approx([pixels.std(correction=0).item()])
    assert all(type(value) is float for value in facts["mean"] + facts["std"])
    assert ready("test").facts == facts


def test_batches_are_dicts_of_bytes_and_numbers() -> None:
    batch = next(iter(ready(batch_size=5).train_dataloader()))
    assert set(batch) == {"image", "label"}
    assert (batch["image"].dtype, batch["label"].dtype) == (torch.uint8, torch.int64)
    assert (batch["image"].shape, batch["label"].shape) == ((5, 1, 8, 8), (5,))


def test_splits_follow_their_seed_and_setup_can_be_called_again() -> None:
    data = ready()
    before = data.facts, labels(data.test_dataloader())
    data.setup("fit")
    assert (data.facts, labels(data.test_dataloader())) == before
    assert labels(ready(split_seed=0).test_dataloader()) == before[1]
    assert labels(ready(split_seed=1).test_dataloader()) != before[1]


def test_digits_in_another_size_and_colours() -> None:
    data = ready(image_size=(16, 12), channels=3)
    batch = next(iter(data.val_dataloader()))
    assert batch["image"].shape[1:] == (3, 16, 12)
    assert torch.equal(batch["image"][:, 0], batch["image"][:, 2])
    assert (data.facts["image_size"], data.facts["channels"], len(data.facts["mean"])) == ([16, 12], 3, 3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"image_size": 0}, "image_size"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"--data\.{name} is .*; expected"):
        ImageData(**options)


class Recorder(lightning.LightningModule):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.train_batches: list[dict[str, Tensor]] = []
        self.val_batches: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.train_batches.append(batch)
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.val_batches.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Recorder]:
    def run(seed: int = 0, path: Path | None = None, workers: int = 0, **augment: Any) -> Recorder:
        data = ImageData(
            path and str(path),
            batch_size=16 if path else 256,
            num_workers=workers,
            augment=Augment(**augment),
        )
        data.order_seed = seed
        module = Recorder()
        lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
        ).fit(module, data)
        return module

    return run


@pytest.fixture
def white(make_tree: Tree) -> Path:
    """40 training pictures that are all the same, so that what was drawn is all that tells batches apart."""
    root = make_tree({"train/a": 20, "train/b": 20, "val/a": 1}, size=(16, 16))
    for path in root.rglob("*.png"):
        Image.new("RGB", (16, 16), "white").save(path)
    return root


quiet = pytest.mark.filterwarnings(
    "ignore:The '(train|val)_dataloader' does not have many workers",
    "ignore:This DataLoader will create 4 worker processes",
)


@quiet
def test_v12_validation_is_neither_moved_nor_mixed(train: Callable[..., Recorder]) -> None:
    module = train(rotate=10.0, mixup=0.4)
    plain = ready(batch_size=256)
    assert all(batch["label"].shape == (len(batch["image"]), 10) for batch in module.train_batches)
    assert module.train_batches[0]["image"].is_floating_point()
    for batch, wanted in zip(module.val_batches, [*plain.val_dataloader()] * 2, strict=True):
        assert torch.equal(batch["image"], wanted["image"]) and torch.equal(batch["label"], wanted["label"])


@quiet
@pytest.mark.parametrize("workers", [0, 4])
def test_r14_augmentation_repeats_with_the_seed_and_never_within_a_run(
    train: Callable[..., Recorder], white: Path, workers: int
) -> None:
    def draws(seed: int) -> list[bytes]:
        module = train(seed, white, workers, erase=1.0)
        return [picture.numpy().tobytes() for batch in module.train_batches for picture in batch["image"]]

    first = draws(0)
    assert len(first) == 80
    assert len(set(first)) > 70, "boxes of few pixels may be met again, lists may not"
    assert draws(0) == first
    assert not set(zip(draws(1), first, strict=True)) & {(one, one) for one in first}


def draws_of(path: Path, rank: int, epoch: int) -> list[bytes]:
    """What one of two processes draws in one epoch, batch by batch."""
    data = ready(path=path, batch_size=4, augment=Augment(erase=1.0))
    data.trainer = SimpleNamespace(global_rank=rank, world_size=2, training=True)
    loader = data.train_dataloader()
    loader.batch_sampler.set_epoch(epoch)
    return [data.on_after_batch_transfer(batch, 0)["image"].numpy().tobytes() for batch in loader]


def test_r14_no_two_processes_epochs_or_batches_draw_the_same(white: Path) -> None:
    found = [draw for rank in (0, 1) for epoch in (0, 1) for draw in draws_of(white, rank, epoch)]
    assert len(found) == 20
    assert len(set(found)) == 20
    assert draws_of(white, 1, 1) == found[-5:]


def test_training_order_follows_its_seed_and_every_picture_comes_once() -> None:
    orders = []
    for seed in (0, 0, 1):
        data = ready(batch_size=100)
        data.order_seed = seed
        loader = data.train_dataloader()
        assert len(loader) == 13
        orders.append(images(loader))
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])
    pictures = [tuple(picture.flatten().tolist()) for picture in orders[0]]
    assert sorted(pictures) == sorted(tuple(p.flatten().tolist()) for p in orders[2])
    assert len(pictures) == 1293
