"""Pictures that are decoded once: the same again from the cache, anew where anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import images, labels, ready
from PIL import Image

from experiments.vision import loading

Tree = Callable[..., Path]
TREE = {"train/a": 3, "train/b": 2, "val/a": 1, "test/b": 1}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was decoded, in order."""
    seen: list[Any] = []
    read = loading.to_tensor

    def counted(image: Image.Image, *rest: Any) -> torch.Tensor:
        seen.append(image)
        return read(image, *rest)

    monkeypatch.setattr(loading, "to_tensor", counted)
    return seen


def test_a_second_run_decodes_nothing_and_reads_the_same(make_tree: Tree, tmp_path: Path, decoded: list[Any]) -> None:
    root = make_tree(TREE)
    first = ready(path=root, cache=str(tmp_path / "kept"))
    assert len(decoded) == 7
    again = ready(path=root, cache=str(tmp_path / "kept"))
    assert len(decoded) == 7
    assert again.facts == first.facts
    for loader in ("val_dataloader", "test_dataloader", "train_dataloader"):
        assert torch.equal(images(getattr(again, loader)()), images(getattr(first, loader)()))
        assert labels(getattr(again, loader)()) == labels(getattr(first, loader)())
    assert len(list((tmp_path / "kept").iterdir())) == 3


@pytest.mark.parametrize("options", [{"image_size": 16}, {"channels": 1}, {"image_size": 8}])
def test_another_size_or_colour_is_another_file(
    options: dict[str, Any], make_tree: Tree, tmp_path: Path, decoded: list[Any]
) -> None:
    root = make_tree(TREE)
    ready(path=root, cache=str(tmp_path / "kept"))
    data = ready(path=root, cache=str(tmp_path / "kept"), **options)
    assert len(decoded) == 14
    assert images(data.val_dataloader()).shape[-1] == options.get("image_size", 8)


def test_a_picture_that_changed_is_seen(make_tree: Tree, tmp_path: Path) -> None:
    root = make_tree(TREE)
    ready(path=root, cache=str(tmp_path / "kept"))
    Image.new("RGB", (8, 8), (1, 2, 3)).save(root / "val" / "a" / "00.png")
    found = images(ready(path=root, cache=str(tmp_path / "kept")).val_dataloader())
    assert found[0, :, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("damage", ["cut off", "one bit"])
def test_a_damaged_file_is_made_anew(
    damage: str, make_tree: Tree, tmp_path: Path, report: pytest.LogCaptureFixture
) -> None:
    root = make_tree({"train/a": 4, "train/b": 2})
    whole = images(ready(path=root, cache=str(tmp_path / "kept")).test_dataloader())
    pixels = whole.numpy().tobytes()
    (path,) = (path for path in (tmp_path / "kept").iterdir() if pixels in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(pixels) + 5] ^= 1
    path.write_bytes(content if damage == "one bit" else content[: len(content) // 2])
    assert torch.equal(images(ready(path=root, cache=str(tmp_path / "kept")).test_dataloader()), whole)
    assert f"{path} is damaged and is made anew" in report.text
    assert pixels in path.read_bytes()


def test_bad_files_are_reported_again_and_never_hidden(
    make_tree: Tree, tmp_path: Path, cases: Path, report: pytest.LogCaptureFixture
) -> None:
    """V07, from the cache."""
    root = make_tree({"train/a": 4, "train/b": 4, "val/a": 1})
    (root / "train" / "a" / "bad.png").write_bytes((cases / "truncated.png").read_bytes())
    kept = str(tmp_path / "kept")
    for _ in range(2):
        report.clear()
        data = ready(path=root, cache=kept, bad_files="skip")
        assert len(labels(data.train_dataloader())) == 8
        assert "1 of 10 skipped" in report.text and "bad.png" in report.text
    with pytest.raises(ValueError, match=r"bad\.png is a damaged picture"):
        ready(path=root, cache=kept)


def test_a_folder_that_cannot_be_written_is_said_and_costs_no_run(
    make_tree: Tree, tmp_path: Path, report: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    data = ready(path=make_tree(TREE), cache=str(tmp_path / "file" / "kept"))
    assert labels(data.val_dataloader()) == [0]
    assert "Nothing could be kept in" in report.text and "--data.cache" in report.text


def test_nothing_is_kept_of_digits_or_where_there_is_no_cache(
    make_tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    ready(path=make_tree(TREE), cache=None)
    ready()
    assert not (tmp_path / "home").exists()
    ready(path=tmp_path / "pictures")
    assert len(list((tmp_path / "home" / "attnzoo").iterdir())) == 3
