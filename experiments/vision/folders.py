"""Finding pictures in folders: `train/<class>/*`, `val/<class>/*`, `test/<class>/*`, or `<class>/*` alone."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

from experiments.vision.pictures import is_picture, read_picture
from experiments.vision.sources import Pictures, Source, file_state, fingerprint

PARTS = ("train", "val", "test")
_LIKE_PARTS = {*PARTS, "training", "valid", "validation", "dev", "testing"}
# Folders that systems make and their file viewers do not show.
_SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"}


@dataclass(frozen=True)
class FileShelf:
    """Picture files."""

    paths: list[Path]

    def name(self, number: int) -> str:
        return str(self.paths[number])

    def read(self, number: int) -> Image.Image:
        return read_picture(self.paths[number])

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(file_state(path) for path in self.paths)

    def fingerprint(self) -> str:
        """Of names, sizes and times of the files: to read them would take as long as to decode them."""
        return self._fingerprint


def find_folder(root: Path) -> Source:
    """Find the pictures of a folder; the classes are the sub-folders of its training part, sorted by name.

    Hidden files and folders, and files that are no pictures, are passed over. Pictures deeper in a class
    folder belong to it.

    Args:
        root: a folder with `train` (and perhaps `val`, `test`) in it, or with class folders.

    Returns:
        Its parts ("train" alone for class folders).

    Raises:
        ValueError: no pictures, a part that is not known, or a class in `val` or `test` that `train` lacks.
    """
    folders = _visible_folders(root)
    notes: list[str] = []
    if "train" not in folders:
        return _from_classes(root, folders, notes)
    others = [name for name in folders if name not in PARTS]
    if others:
        raise ValueError(
            f"{root} holds {others[0]}/ beside train/; expected train, val and test only. "
            "Rename it, or move it out of --data.path."
        )
    found = {part: _class_files(root / part, notes) for part in PARTS if part in folders}
    classes = sorted(found["train"])
    _require(classes, root / "train")
    parts = {}
    for part, files in found.items():
        unknown = sorted(set(files) - set(classes))
        if unknown:
            raise ValueError(
                f"{root / part} holds class {unknown[0]!r}, which {root / 'train'} has no picture of "
                f"(it has {_few(classes)}). Rename the folder in --data.path or add training pictures."
            )
        _require(list(files), root / part)
        parts[part] = _pictures(files, classes)
    return Source(str(root), classes, parts, notes)


def _from_classes(root: Path, folders: list[str], notes: list[str]) -> Source:
    parts = [name for name in folders if name.lower() in _LIKE_PARTS]
    if parts:
        raise ValueError(
            f"{root} holds {_few(parts)} but no train/. Those are parts of the data, not classes; "
            "name them train, val and test, or rename the class."
        )
    files = _class_files(root, notes)
    classes = sorted(files)
    _require(classes, root)
    return Source(str(root), classes, {"train": _pictures(files, classes)}, notes, heap=True)


def _require(classes: list[str], folder: Path) -> None:
    if not classes:
        raise ValueError(
            f"{folder} holds no pictures in class folders; --data.path expects train/<class>/<picture> "
            "or <class>/<picture>."
        )


def _pictures(files: dict[str, list[Path]], classes: list[str]) -> Pictures:
    number = {name: k for k, name in enumerate(classes)}
    pairs = [(path, number[name]) for name in sorted(files) for path in files[name]]
    return Pictures(FileShelf([path for path, _ in pairs]), range(len(pairs)), [label for _, label in pairs])


def _class_files(folder: Path, notes: list[str]) -> dict[str, list[Path]]:
    """Picture files by class folder; what was passed over goes into `notes`."""
    found: dict[str, list[Path]] = {}
    passed_over: Counter[str] = Counter()
    for name in _visible_folders(folder):
        pictures = []
        for path in _visible_files(folder / name):
            if is_picture(path):
                pictures.append(path)
            else:
                passed_over[path.suffix or path.name] += 1
        if pictures:
            _require_text(folder, name)
            found[name] = pictures
        else:
            notes.append(f"{folder / name} holds no picture: it is no class.")
    if passed_over:
        kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(passed_over.items()))
        notes.append(f"Passed over in {folder}, as they are no pictures: {kinds}.")
    loose = sum(is_picture(entry.name) for entry in os.scandir(folder) if entry.is_file())
    if loose:
        notes.append(f"Passed over in {folder}, as they lie in no class folder: {loose} pictures.")
    return found


def _require_text(folder: Path, name: str) -> None:
    # A class is written to checkpoints, tables and pictures, none of which takes bytes that are no text.
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise ValueError(f"{folder} holds the class folder {shown}, whose name is no UTF-8. Rename it.") from None


def _visible_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and _is_visible(entry.name))


def _visible_files(folder: Path) -> list[Path]:
    files = []
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        # A link to a folder above would bring the same pictures again and again.
        here = os.path.realpath(place)
        if here in visited:
            folders[:] = []
            continue
        visited.add(here)
        folders[:] = sorted(name for name in folders if _is_visible(name))
        files += [Path(place, name) for name in sorted(names) if not name.startswith(".")]
    return files


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name not in _SYSTEM_FOLDERS


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
