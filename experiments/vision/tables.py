"""Pictures in tables: parquet files in a folder, or a data set of a hub, both through `datasets`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from experiments.vision.pictures import decode_picture, read_picture
from experiments.vision.sources import Pictures, Source, file_state, fingerprint

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub:"
_PART_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(("val", "valid", "validation", "dev"), "val")
_LABEL_NAMES = ("label", "labels")
_FILES = {"string", "large_string", "binary", "large_binary"}


@dataclass(frozen=True)
class RowShelf:
    """Pictures in a column of encoded files."""

    rows: Dataset
    column: str
    title: str

    def name(self, number: int) -> str:
        return f"{self.title}, row {number}"

    def read(self, number: int) -> Image.Image:
        cell = self.rows[number][self.column]
        if cell is None:
            raise ValueError(f"{self.name(number)} is empty; a picture was expected.")
        if cell["bytes"] is None:
            return read_picture(cell["path"])
        return decode_picture(cell["bytes"], self.name(number))

    @cached_property
    def _fingerprint(self) -> str:
        tables = self.rows.with_format("arrow").iter(batch_size=1000)
        cells = (cell for table in tables for cell in table[self.column].to_pylist())
        contents = (b"" if cell is None else cell["bytes"] or file_state(cell["path"]) for cell in cells)
        return fingerprint(itertools.chain([self.title], contents))

    def fingerprint(self) -> str:
        """Of the encoded pictures themselves."""
        return self._fingerprint


def has_parquet(root: Path) -> bool:
    """Whether a folder holds parquet files, at any depth."""
    return next(root.rglob("*.parquet"), None) is not None


def find_parquet(root: Path, label_column: str | None) -> Source:
    """Find pictures in parquet files whose names begin with train, val (valid, validation, dev) or test.

    Args:
        root: the folder; files may lie deeper.
        label_column: name of the column of labels; None looks for it.

    Returns:
        The parts found.

    Raises:
        ValueError: no training file, another name, a damaged file, or columns that do not fit.
    """
    import datasets  # takes a second; only who needs it pays

    files: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.parquet")):
        beginning = path.name.replace("_", "-").replace(".", "-").split("-")[0]
        if beginning not in _PART_NAMES:
            raise ValueError(f"{path}: --data.path expects parquet files named train*, val* or test*.")
        files.setdefault(_PART_NAMES[beginning], []).append(str(path))
    datasets.disable_progress_bars()
    try:
        tables = datasets.load_dataset("parquet", data_files=files)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"{root}: a parquet file cannot be read: {reason}") from error
    finally:
        datasets.enable_progress_bars()
    return _source(str(root), tables, label_column)


def find_hub(name: str, label_column: str | None) -> Source:
    """Find pictures in a data set of a hub, which is downloaded once and kept in the hub's cache.

    Args:
        name: `owner/name`, or `owner/name:configuration` where it has several.
        label_column: name of the column of labels; None looks for it.

    Raises:
        ValueError: it cannot be had, or its parts or columns do not fit.
    """
    import datasets

    where, _, configuration = name.partition(":")
    if not where:
        raise ValueError(f"--data.path={HUB}{name} names no data set; expected {HUB}OWNER/NAME.")
    try:
        tables = datasets.load_dataset(where, configuration or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if several := re.search(r"available configs: \[(.*?)\]", str(error), re.DOTALL):
            raise ValueError(
                f"--data.path={HUB}{name} has the configurations {several[1]}; name one, as {HUB}{where}:CONFIGURATION."
            ) from error
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--data.path={HUB}{name}: {reason}. Check it, or give a local folder.") from error
    return _source(f"{HUB}{name}", tables, label_column)


def _source(title: str, tables: dict[str, Dataset], label_column: str | None) -> Source:
    notes: list[str] = []
    known = {_PART_NAMES[name]: rows for name, rows in tables.items() if name in _PART_NAMES}
    if "train" not in known:
        raise ValueError(f"{title} has the parts {', '.join(tables)}; a part named train was expected.")
    for name in tables:
        if name not in _PART_NAMES:
            notes.append(f"Passed over in {title}: the part {name!r}.")
    picture = _picture_column(title, known["train"])
    label = _label_column(title, known["train"], label_column)
    classes = _classes(title, known["train"], label)
    parts: dict[str, Pictures] = {}
    for part, rows in known.items():
        labels = rows[label][:]
        if part != "train" and set(labels) <= {-1, None}:
            notes.append(f"Passed over: the {part} part of {title}, which has no labels.")
            continue
        shelf = RowShelf(_encoded(rows, picture), picture, f"{title}, {part} part")
        parts[part] = Pictures(shelf, range(len(rows)), _numbers(shelf.title, labels, classes))
    return Source(title, list(classes.values()), parts, notes, heap=list(parts) == ["train"], has_columns=True)


def _picture_column(title: str, rows: Dataset) -> str:
    from datasets import Image as Picture

    found = [name for name, feature in rows.features.items() if isinstance(feature, Picture)]
    found = found or [name for name in ("image", "img") if name in rows.features]
    if len(found) != 1:
        raise ValueError(f"{title} has the columns {', '.join(rows.features)}; expected one of pictures.")
    kind = rows.features[found[0]]
    files = kind.keys() <= {"bytes", "path"} if isinstance(kind, dict) else getattr(kind, "dtype", None) in _FILES
    if not (files or isinstance(kind, Picture)):
        # Lists of numbers would be taken for pictures of 16 bits.
        raise ValueError(f"{title}: column {found[0]!r} holds {kind}; expected encoded pictures, or paths of files.")
    return found[0]


def _label_column(title: str, rows: Dataset, wanted: str | None) -> str:
    from datasets import ClassLabel

    if wanted is not None:
        found = [wanted] if wanted in rows.features else []
    else:
        found = [name for name in _LABEL_NAMES if name in rows.features]
        found = found or [name for name, feature in rows.features.items() if isinstance(feature, ClassLabel)]
    if len(found) != 1:
        raise ValueError(
            f"{title} has the columns {', '.join(rows.features)}; name the one of labels with "
            f"--data.label_column{'' if wanted is None else f', {wanted!r} is none of them'}."
        )
    return found[0]


def _classes(title: str, rows: Dataset, label: str) -> dict[Any, str]:
    """The names of the classes by what stands in the column, in the order of their numbers."""
    from datasets import ClassLabel

    feature = rows.features[label]
    if isinstance(feature, ClassLabel):
        return dict(enumerate(feature.names))
    cells = rows[label][:]
    if not all(isinstance(value, int | str) for value in cells):
        kind = getattr(feature, "dtype", feature)
        raise ValueError(f"{title}: column {label!r} holds {kind}; expected one whole number or name a picture.")
    values = set(cells)
    return {value: str(value) for value in sorted(values)}


def _numbers(title: str, labels: Iterable[Any], classes: dict[Any, str]) -> list[int]:
    number = {value: k for k, value in enumerate(classes)}
    labels = list(labels)
    for row, value in enumerate(labels):
        if value not in number:
            raise ValueError(f"{title}, row {row}: label {value!r} is none of the {len(classes)} classes in training.")
    return [number[value] for value in labels]


def _encoded(rows: Dataset, column: str) -> Dataset:
    """The pictures as the files they are, so that they are decoded here and nowhere else."""
    from datasets import Image as Picture

    return rows.select_columns([column]).cast_column(column, Picture(decode=False))
