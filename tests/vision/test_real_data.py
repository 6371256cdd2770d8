"""Real data, where ATTNZOO_DATA names the folder that holds it."""

import os
from pathlib import Path

import pytest
import torch

from experiments.vision import ImageData

CIFAR = Path(os.environ.get("ATTNZOO_DATA", "")) / "vision" / "cifar10-jpeg"


@pytest.mark.skipif(not CIFAR.is_dir(), reason="set ATTNZOO_DATA to the folder that holds vision/cifar10-jpeg")
def test_cifar_10_from_parquet_files() -> None:
    data = ImageData(path=str(CIFAR), batch_size=256)
    data.setup("test")
    labels = torch.cat([batch["label"] for batch in data.test_dataloader()])
    assert torch.bincount(labels).tolist() == [1000] * 10
    batch = next(iter(data.test_dataloader()))
    assert batch["image"].shape == (256, 3, 32, 32)
    assert batch["image"].dtype == torch.uint8
    # Natural pictures: neither dark nor bright, and the three colours differ.
    mean = batch["image"].float().mean((0, 2, 3)) / 255
    assert 0.35 < mean.min() < mean.max() < 0.6
