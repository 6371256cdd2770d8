"""Folders of pictures: which are found, what class they are, and what is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from loaded import labels, ready

from experiments.vision.data import ImageData
from experiments.vision.folders import find_folder

Tree = Callable[..., Path]


def test_v08_v09_classes_are_those_of_training(cases: Path, report: pytest.LogCaptureFixture) -> None:
    data = ready(path=cases / "tree")
    assert data.facts["classes"] == ["cat", "dog", "owl"]
    assert sorted(labels(data.train_dataloader())) == [0, 0, 1, 1, 2, 2]
    assert set(labels(data.val_dataloader())) == {0, 2}
    assert "val part has no picture of: dog" in report.text
    assert "Passed over" in report.text and ".db" in report.text


def test_v08_what_systems_put_into_folders_is_no_picture(make_tree: Tree) -> None:
    root = make_tree({"train/cat": 3, "train/dog": 3, "val/cat": 1, "val/dog": 1})
    picture = root / "train/cat/00.png"
    for place in (
        "cat/._00.png",
        ".hidden/a.png",
        "__MACOSX/cat/a.png",
        "cat/@eaDir/a.png",
        "cat/.thumbs/a.png",
    ):
        target = root / "train" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    (root / "train/cat/desktop.ini").write_text("no picture")
    data = ready(path=root)
    assert sorted(labels(data.train_dataloader())) == [0, 0, 0, 1, 1, 1]
    assert data.facts["classes"] == ["cat", "dog"]


def test_a_folder_without_pictures_is_no_class_and_is_reported(
    make_tree: Tree, report: pytest.LogCaptureFixture
) -> None:
    root = make_tree({"train/ape": 2, "train/bee": 0, "train/cat": 2, "val/ape": 1, "val/cat": 1})
    assert ready(path=root).facts["classes"] == ["ape", "cat"]
    assert "train/bee holds no picture" in report.text


def test_pictures_outside_a_class_are_reported(make_tree: Tree, report: pytest.LogCaptureFixture) -> None:
    root = make_tree({"train/ape": 2, "train/cat": 2, "val/ape": 1, "val/cat": 1})
    shutil.copy(root / "train/ape/00.png", root / "train/stray.png")
    assert len(labels(ready(path=root).train_dataloader())) == 4
    assert "lie in no class folder: 1" in report.text


@pytest.mark.parametrize("part", ["val", "test"])
def test_v09_a_class_that_training_lacks_is_refused(make_tree: Tree, part: str) -> None:
    root = make_tree({"train/cat": 2, "train/dog": 2, "val/cat": 1, f"{part}/owl": 1})
    with pytest.raises(ValueError, match=rf"{part} holds class 'owl'.*cat, dog"):
        ready(path=root)


def test_missing_parts_are_made_and_said(make_tree: Tree, report: pytest.LogCaptureFixture) -> None:
    data = ready(path=make_tree({"train/cat": 10, "train/dog": 10}), val_fraction=0.2)
    assert sorted(labels(data.train_dataloader())) == [0] * 8 + [1] * 8
    assert sorted(labels(data.val_dataloader())) == [0, 0, 1, 1]
    assert labels(data.test_dataloader()) == labels(data.val_dataloader())
    assert "the test runs on the validation part" in report.text


def test_own_parts_are_used(make_tree: Tree) -> None:
    counts = {"train/cat": 4, "train/dog": 3, "val/cat": 2, "val/dog": 1, "test/cat": 1, "test/dog": 2}
    data = ready(path=make_tree(counts))
    assert labels(data.val_dataloader()) == [0, 0, 1]
    assert labels(data.test_dataloader()) == [0, 1, 1]
    assert sorted(labels(data.train_dataloader())) == [0] * 4 + [1] * 3


def test_class_folders_alone_are_split_in_three(make_tree: Tree) -> None:
    data = ready(path=make_tree({"cat": 20, "dog": 20}), val_fraction=0.25)
    counts = [
        len(labels(loader)) for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]
    assert counts == [24, 8, 8]
    assert labels(data.test_dataloader()).count(0) == 4


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"val/cat": 1, "test/cat": 1}, "no train/"),
        ({"train/cat": 2, "train/dog": 2, "validation/cat": 2}, "holds validation/ beside train/"),
        ({"train/cat": 0}, "no pictures in class folders"),
        ({"train/cat": 5}, "one class, 'cat'"),
        ({"train/cat": 5, "train/dog": 1}, "'dog' has 1 picture where two are needed, for train and val"),
        ({"cat": 2, "dog": 2}, r"has 1 picture left, of 2, behind the test where two are needed, for train and val"),
        ({"cat": 5, "dog": 1}, r"'dog' has 1 picture where two are needed, for train and test"),
    ],
)
def test_layouts_that_cannot_be_meant_are_refused(make_tree: Tree, counts: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ready(path=make_tree(counts))


def test_a_file_is_no_folder_and_no_path_is_none(make_tree: Tree) -> None:
    path = make_tree({"train/cat": 2}) / "train" / "cat" / "00.png"
    with pytest.raises(ValueError, match=r"00\.png is a file; give the folder"):
        ready(path=path)
    with pytest.raises(ValueError, match=r"--data\.path is empty"):
        ImageData(path="")


def test_a_wrong_path_is_met_with_the_nearest(make_tree: Tree) -> None:
    root = make_tree({"train/cat": 2})
    with pytest.raises(
        ValueError, match=r"--data\.path=.*/picturs: there is no such file or folder\. Did you mean .*/pictures\?"
    ):
        ready(path=root.with_name("picturs"))


@pytest.mark.parametrize("names", [("Train", "test"), ("training", "validation"), ("cat", "test")])
def test_v09_a_part_of_another_name_is_no_class(make_tree: Callable[..., Path], names: tuple[str, str]) -> None:
    root = make_tree({f"{name}/{kind}": 2 for name in names for kind in ("a", "b")})
    with pytest.raises(ValueError, match="parts of the data, not classes"):
        find_folder(root)


def test_a_class_is_named_in_utf8(make_tree: Callable[..., Path]) -> None:
    root = make_tree({"cat": 2, "dog": 2})
    (root / "dog").rename(os.fsdecode(os.fsencode(root) + b"/b\xe9b\xe9"))
    with pytest.raises(ValueError, match=r"class folder b\\xe9b\\xe9, whose name is no UTF-8"):
        ready(path=root)


def test_a_column_of_labels_that_does_not_exist_is_said(make_tree: Tree, report: pytest.LogCaptureFixture) -> None:
    ready(path=make_tree({"cat": 4, "dog": 4}), label_column="kind")
    assert "--data.label_column has no effect" in report.text


def test_v08_a_link_to_a_folder_above_brings_no_picture_twice(make_tree: Callable[..., Path]) -> None:
    root = make_tree({"cat": 3, "dog": 3})
    (root / "cat" / "loop").symlink_to(root / "cat", target_is_directory=True)
    assert len(find_folder(root).parts["train"]) == 6
