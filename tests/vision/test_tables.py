"""Pictures in parquet files and in data sets of a hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from loaded import images, labels, ready

from experiments.vision.loading import load
from experiments.vision.tables import find_parquet


@pytest.fixture
def parquet(tmp_path: Path, cases: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write pictures as tables: `parquet(train=[("rgb_64.png", 1), ...], test=...)`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(names: list[str] | None = None, label: str = "label", **parts: list[tuple[str, Any]]) -> Path:
        root = tmp_path / "table"
        root.mkdir(exist_ok=True)
        for part, rows in parts.items():
            pictures = [{"bytes": (cases / name).read_bytes(), "path": name} for name, _ in rows]
            table = datasets.Dataset.from_dict({"img": pictures, label: [value for _, value in rows]})
            table = table.cast_column("img", datasets.Image(decode=False))
            if names:
                table = table.cast_column(label, datasets.ClassLabel(names=names))
            table.to_parquet(root / f"{part}-00000-of-00001.parquet")
        return root

    return write


ROWS = [("rgb_64.png", 0), ("grey_64.png", 1), ("cmyk_64.jpg", 1), ("rgba_hidden_colour.png", 0)]


def test_parquet_files_with_class_names(parquet: Callable[..., Path]) -> None:
    data = ready(path=parquet(names=["plain", "odd"], train=ROWS, validation=ROWS[:1], test=ROWS[2:]))
    assert data.facts["classes"] == ["plain", "odd"]
    assert labels(data.val_dataloader()) == [0]
    assert labels(data.test_dataloader()) == [1, 0]
    pictures = images(data.test_dataloader())
    assert (pictures[0, :, 32, 5].int() - torch.tensor([255, 0, 0])).abs().max() <= 8
    assert (pictures[1, :, :, :32] == 255).all()


def test_parquet_files_with_numbers_or_words_for_classes(parquet: Callable[..., Path]) -> None:
    rows = [(name, ("b", "a")[value]) for name, value in ROWS]
    data = ready(path=parquet(train=rows, val=rows, test=rows))
    assert (data.facts["classes"], labels(data.test_dataloader())) == (["a", "b"], [1, 0, 0, 1])
    rows = [(name, (10, 9)[value]) for name, value in ROWS]
    data = ready(path=parquet(train=rows, val=rows, test=rows))
    assert (data.facts["classes"], labels(data.test_dataloader())) == (["9", "10"], [1, 0, 0, 1])


@pytest.mark.parametrize(
    ("options", "parts", "message"),
    [
        ({}, {"extra": ROWS}, r"expects parquet files named train\*, val\* or test\*"),
        ({}, {"test": ROWS}, "a part named train was expected"),
        (
            {},
            {"train": ROWS, "test": [("rgb_64.png", 7)]},
            "test part, row 0: label 7 is none of the 2 classes",
        ),
        ({"label": "kind"}, {"train": ROWS}, r"columns img, kind; .* --data\.label_column"),
        (
            {},
            {"train": [*ROWS, ("truncated.png", 0)], "test": ROWS},
            r"train part, row 4 is a damaged picture",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    parquet: Callable[..., Path],
    options: dict[str, str],
    parts: dict[str, list[tuple[str, Any]]],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        ready(path=parquet(**options, **parts))


def test_a_test_part_without_labels_is_passed_over(
    parquet: Callable[..., Path], report: pytest.LogCaptureFixture
) -> None:
    hidden = [(name, -1) for name, _ in ROWS]
    data = ready(path=parquet(names=["plain", "odd"], train=ROWS, val=ROWS[:2], test=hidden))
    assert labels(data.test_dataloader()) == labels(data.val_dataloader()) == [0, 1]
    assert "test part" in report.text and "has no labels" in report.text


def test_the_label_column_can_be_named(parquet: Callable[..., Path]) -> None:
    root = parquet(label="kind", train=ROWS, val=ROWS, test=ROWS)
    assert labels(ready(path=root, label_column="kind").test_dataloader()) == [0, 1, 1, 0]
    with pytest.raises(ValueError, match=r"--data\.label_column, 'sort' is none of them"):
        ready(path=root, label_column="sort")


def test_a_damaged_parquet_file_is_named(parquet: Callable[..., Path]) -> None:
    root = parquet(train=ROWS)
    (root / "test.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(ValueError, match=r"table.*cannot be read") as caught:
        ready(path=root)
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_on_a_hub(monkeypatch: pytest.MonkeyPatch, parquet: Callable[..., Path]) -> None:
    root = parquet(names=["plain", "odd"], train=ROWS * 3, test=ROWS)
    tables = datasets.load_dataset("parquet", data_files={"train": str(next(root.glob("train*")))})
    asked = []

    def from_hub(name: str, configuration: str | None) -> Any:
        asked.append((name, configuration))
        return {"train": tables["train"], "unlabelled": tables["train"]}

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    data = ready(path="hub:someone/pictures")
    assert asked == [("someone/pictures", None)]
    assert data.facts["classes"] == ["plain", "odd"]
    assert len(labels(data.test_dataloader())) == 3  # a fifth of 12, there being one part only
    ready(path="hub:someone/pictures:small")
    assert asked[1] == ("someone/pictures", "small")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("Couldn't reach it on the Hub."), r"hub:a/b: Couldn't reach it on the Hub\. Check it"),
        (RuntimeError("Dataset scripts are no longer supported"), "scripts are no longer supported"),
        (datasets.exceptions.DatasetGenerationError("An error occurred"), "An error occurred"),
        (
            ValueError(
                "Config name is missing.\nPlease pick one among the available configs: ['x', 'y']\nExample: ..."
            ),
            r"has the configurations 'x', 'y'; name one, as hub:a/b:CONFIGURATION",
        ),
    ],
)
def test_a_hub_that_gives_nothing_is_said_in_a_line(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str, configuration: str | None) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", nothing)
    with pytest.raises(ValueError, match=message) as caught:
        ready(path="hub:a/b")
    assert len(str(caught.value).splitlines()) == 1


def test_a_hub_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="hub: names no data set; expected hub:OWNER/NAME"):
        ready(path="hub:")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [[[0, 255], [255, 0]]] * 4, "label": [0, 1, 0, 1]}, "column 'image' holds List.*encoded pictures"),
        ({"image": [[0, 255]] * 4, "label": [0, 1, 0, 1]}, "column 'image' holds List.*encoded pictures"),
        ({"image": [b"x"] * 4, "label": [[0], [1], [0, 1], [1]]}, "column 'label' holds List.*one whole number"),
        ({"image": [b"x"] * 4, "label": [0.5, 1.0, 0.5, 1.0]}, "column 'label' holds float64.*one whole number"),
    ],
)
def test_columns_of_another_kind_are_refused(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=message):
        find_parquet(tmp_path, None)


def test_cifar10_is_read_as_it_is(cifar10: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    source = find_parquet(cifar10, None)
    assert source.classes == ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert {part: len(pictures) for part, pictures in source.parts.items()} == {"train": 50_000, "test": 10_000}
    some = source.parts["test"].select(range(500))  # the classes come in turn
    loaded = load("test", some, (32, 32), 3, resize=False, bad_files="stop", num_workers=0)
    assert [loaded.labels.count(number) for number in range(10)] == [50] * 10
    # of all 60,000: .4913 .4821 .4465
    assert loaded.mean == pytest.approx([0.49, 0.48, 0.45], abs=0.02)
