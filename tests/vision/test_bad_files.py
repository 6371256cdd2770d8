"""Pictures that cannot be read, or that differ in size and colours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loaded import images, labels, ready
from PIL import Image

from experiments.vision import loading

Tree = Callable[..., Path]


@pytest.fixture
def with_bad_files(make_tree: Tree, cases: Path) -> Path:
    root = make_tree({"train/cat": 5, "train/dog": 5, "val/cat": 1, "val/dog": 1}, size=(32, 32))
    shutil.copy(cases / "truncated.png", root / "train/cat/03x.png")
    shutil.copy(cases / "not_an_image.png", root / "train/dog")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_v07_stop_names_the_file_and_the_option(with_bad_files: Path, workers: int) -> None:
    with pytest.raises(ValueError, match=r"cat/03x\.png is a damaged picture.*--data\.bad_files=skip") as caught:
        ready(path=with_bad_files, num_workers=workers)
    assert len(str(caught.value).splitlines()) == 1


def test_v07_skip_leaves_the_same_out_each_time(with_bad_files: Path, report: pytest.LogCaptureFixture) -> None:
    seen = []
    for workers in (0, 2):
        report.clear()
        data = ready(path=with_bad_files, num_workers=workers, bad_files="skip")
        assert "2 of 14 skipped" in report.text
        assert "cat/03x.png" in report.text and "dog/not_an_image.png" in report.text
        loader = data.train_dataloader()
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            values = images(loader)[:, :, 0, 0].tolist()
            assert len(values) == 10
            seen.append(sorted(values))
    assert seen == seen[:1] * 4


@pytest.mark.parametrize("cache", [None, "kept"])
def test_v07_a_link_to_nothing_is_a_bad_file(
    make_tree: Tree, cache: str | None, tmp_path: Path, report: pytest.LogCaptureFixture
) -> None:
    root = make_tree({"train/cat": 3, "train/dog": 3, "val/cat": 1, "val/dog": 1})
    (root / "train/cat/zz.png").symlink_to("/nowhere/x.png")
    options = {"path": root, "cache": cache and str(tmp_path / cache)}
    with pytest.raises(ValueError, match=r"zz\.png cannot be read: No such file.*--data\.bad_files=skip"):
        ready(**options)
    ready(**options, bad_files="skip")
    assert "1 of 9 skipped" in report.text


def test_v07_a_bad_test_file_stops_before_training(make_tree: Tree) -> None:
    root = make_tree({f"{part}/{name}": 2 for part in ("train", "val", "test") for name in ("cat", "dog")})
    (root / "test/dog/00.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test/dog/00\.png is empty"):
        ready("fit", path=root)


def test_a_class_lost_to_bad_files_is_reported(make_tree: Tree, report: pytest.LogCaptureFixture) -> None:
    root = make_tree({"train/cat": 3, "train/dog": 1, "val/cat": 1, "val/dog": 1})
    (root / "train/dog/00.png").write_bytes(b"")
    data = ready(path=root, bad_files="skip")
    assert "train part lost every picture of: dog" in report.text
    assert data.facts["classes"] == ["cat", "dog"]
    assert labels(data.val_dataloader()) == [0, 1]


def test_nothing_readable_is_refused(make_tree: Tree) -> None:
    root = make_tree({"train/cat": 1, "train/dog": 1, "val/cat": 1})
    for path in root.glob("train/*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="None of 2 pictures can be read"):
        ready(path=root, bad_files="skip")


def test_v03_a_folder_of_grey_and_colour_becomes_one_kind(tmp_path: Path, cases: Path) -> None:
    for place, name in (
        ("train/a", "grey_64"),
        ("train/b", "rgb_64"),
        ("val/a", "grey_alpha"),
        ("val/b", "cmyk_64"),
    ):
        target = tmp_path / place
        target.mkdir(parents=True)
        shutil.copy(next(cases.glob(f"{name}.*")), target)
    data = ready(path=tmp_path)
    assert images(data.train_dataloader()).shape == (2, 3, 64, 64)
    grey = images(data.train_dataloader())[labels(data.train_dataloader()).index(0)]
    assert (grey[:, :, 10] == 40).all()
    assert images(ready(path=tmp_path, channels=1).train_dataloader()).shape == (2, 1, 64, 64)


def test_wide_96x32_has_height_32_and_width_96(tmp_path: Path, cases: Path) -> None:
    for place in ("train/a", "train/b", "val/a"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(cases / "wide_96x32.png", tmp_path / place)
    data = ready(path=tmp_path)
    assert data.facts["image_size"] == [32, 96]
    assert images(data.train_dataloader()).shape == (2, 3, 32, 96)


def test_two_sizes_are_named_with_the_option(make_tree: Tree) -> None:
    root = make_tree({"train/cat": 2, "train/dog": 2, "val/cat": 1}, size=(8, 10))
    Image.new("RGB", (9, 7)).save(root / "train/dog/01.png")
    with pytest.raises(
        ValueError,
        match=r"cat/00\.png is 10 high and 8 wide, but .*dog/01\.png 7 high and 9 wide.*--data\.image_size",
    ):
        ready(path=root)
    assert ready(path=root, image_size=6).facts["image_size"] == [6, 6]


def test_one_by_one_and_odd_sizes_are_brought_to_one(tmp_path: Path, cases: Path) -> None:
    for place, name in (("train/a", "one_by_one"), ("train/b", "odd_50x50"), ("val/a", "exif_rotated_6")):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(next(cases.glob(f"{name}.*")), tmp_path / place)
    data = ready(path=tmp_path, image_size=(12, 10))
    dot = images(data.train_dataloader())[labels(data.train_dataloader()).index(0)]
    assert torch.equal(dot, torch.tensor([10, 20, 30], dtype=torch.uint8)[:, None, None].expand(3, 12, 10))


def test_v06_pictures_are_turned_in_training_too(tmp_path: Path, cases: Path) -> None:
    for place in ("train/a", "train/b", "val/a"):
        (tmp_path / place).mkdir(parents=True)
        shutil.copy(cases / "exif_rotated_6.jpg", tmp_path / place)
    data = ready(path=tmp_path)
    corners = images(data.train_dataloader())[0][:, [4, 4, 43, 43], [4, 27, 4, 27]].T.int()
    wanted = torch.tensor([[220, 30, 30], [30, 200, 30], [30, 30, 220], [230, 230, 40]])
    assert (corners - wanted).abs().max() <= 10


def test_a_constant_channel_has_no_deviation_of_zero(make_tree: Tree) -> None:
    root = make_tree({"train/a": 1, "train/b": 1, "val/a": 1})
    for path in root.rglob("*.png"):
        Image.new("RGB", (8, 8), (255, 255, 255)).save(path)
    facts = ready(path=root).facts
    assert (facts["mean"], facts["std"]) == ([1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_too_large_for_memory_give_the_same_batches(
    make_tree: Tree, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    root = make_tree({"train/cat": 7, "train/dog": 6, "val/cat": 2}, size=(9, 7))
    (root / "train/cat/03.png").write_bytes(b"")
    options = {"path": root, "image_size": (5, 6), "bad_files": "skip", "batch_size": 4}
    kept = ready(**options)
    monkeypatch.setattr(loading, "MEMORY", 100)
    read = ready(**options, num_workers=workers)
    assert isinstance(read.val_dataloader().dataset, loading.FilePictures)
    assert read.facts == kept.facts
    for one, other in (
        (read.train_dataloader(), kept.train_dataloader()),
        (read.val_dataloader(), kept.val_dataloader()),
    ):
        assert torch.equal(images(one), images(other)) and labels(one) == labels(other)
