"""Finding parallel text: sets by name in a folder, a table, a data set of a hub, or one that is generated."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.training.data_folder import locate
from experiments.translation import dates, numbers
from experiments.translation.text import Pairs, pair_up, read_pair, read_table

log = logging.getLogger("experiments")

HUB = "hub:"
_BEGINNINGS = {"train": ("train",), "val": ("val", "dev"), "test": ("test",)}
_GENERATED = {"numbers": numbers, "dates": dates}

CorpusName = Literal["numbers", "dates"]
Read = Callable[[], Pairs]


class Form(NamedTuple):
    """How text is written down.

    Attributes:
        languages: of source and target, as endings of files or names of columns.
        columns: names of the columns of tables from the left; None where none are needed.
        encoding: of files.
        target_encoding: of target files; None for the same.
    """

    languages: tuple[str, str]
    columns: list[str] | None = None
    encoding: str = "utf-8"
    target_encoding: str | None = None


DOMAIN = "translation"
"""The folder of texts in a folder of data sets."""


@dataclass(frozen=True)
class Corpus:
    """What a place offers, none of it read yet.

    Attributes:
        title: its name.
        languages: of source and target.
        sets: of pairs, by name.
        complaints: for parts that it cannot give, what to say when they are asked for.
    """

    title: str
    languages: tuple[str, str]
    sets: dict[str, Read]
    complaints: dict[str, str] = field(default_factory=dict)

    def choose(self, part: str, wanted: str | None, form: Form) -> Read | None:
        """The set that is to be a part: the one named, or a table, or else the first whose name begins so.

        Args:
            part: train, val or test.
            wanted: name of a set or of a table, or None.
            form: how files are written.

        Returns:
            None where nothing is wanted and there is no such set.

        Raises:
            ValueError: nothing of that name.
        """
        if wanted is None:
            names = [name for name in sorted(self.sets) if name.startswith(_BEGINNINGS[part])]
            if len(names) > 1:
                log.info("The %s part is %s; --data.%s may name %s.", part, names[0], part, ", ".join(names[1:]))
            if not names and part in self.complaints:
                raise ValueError(self.complaints[part])
            return self.sets[names[0]] if names else None
        if wanted in self.sets:
            return self.sets[wanted]
        if not self.sets:
            return from_files([wanted], part, form)
        near = difflib.get_close_matches(wanted, self.sets, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Its sets are {', '.join(sorted(self.sets))}."
        return from_files([wanted], part, form, f"neither a set of {self.title} nor a file of this name. {hint}")


NO_CORPUS = Corpus("", ("", ""), {})
"""Where files alone say what is read."""


def from_files(files: Sequence[str], part: str, form: Form, otherwise: str | None = None) -> Read:
    """One table, or a source and a target file.

    Raises:
        ValueError: another number of files, or one that is not there (`otherwise` says what else it could be).
    """
    option = f"--data.{part}"
    if len(files) not in (1, 2):
        raise ValueError(f"{option} names {len(files)} files; expected one table, or a source and a target file.")
    paths = [locate(file, DOMAIN, option, otherwise=otherwise) for file in files]
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{option}={path} is a folder; expected a file. --data.path takes folders.")
    if part == "train" and len(paths) == 2 and paths[0].samefile(paths[1]):
        log.warning("%s names %s twice: the text is translated into itself.", option, paths[0])
    return _reader(paths, form)


def generated(name: CorpusName) -> Corpus:
    """A corpus that is made by code."""
    module = _GENERATED[name]

    def read(part: str) -> Pairs:
        source, target = module.texts(part)
        return Pairs(f"{name}, {part}", source, target, (), range(1, len(source) + 1))

    return Corpus(name, module.LANGUAGES, {part: partial(read, part) for part in module.SIZES})


def find(path: str, form: Form) -> Corpus:
    """What lies at a path: a folder of sets, one table, or `hub:NAME`, a data set of a hub.

    Raises:
        ValueError: there is no such thing, or no text in these languages in it.
    """
    if path.startswith(HUB):
        return _hub(path, form)
    root = locate(path, DOMAIN)
    if root.is_file():
        return Corpus(str(root), form.languages, {"train": _reader([root], form)})
    files: dict[str, dict[str, Path]] = {}
    for file in sorted(root.iterdir()):
        name, _, language = file.name.removesuffix(".gz").removesuffix(".txt").rpartition(".")
        if not name.startswith(sum(_BEGINNINGS.values(), ())) or not file.is_file():
            continue
        if language in files.setdefault(name, {}):
            raise ValueError(f"{root} holds {files[name][language].name} and {file.name}; move one of them away.")
        files[name][language] = file
    sets: dict[str, Read] = {}
    for name, found in files.items():
        if set(form.languages) <= set(found):
            sets[name] = _reader([found[language] for language in form.languages], form)
        elif "tsv" in found:
            sets[name] = _reader([found["tsv"]], form)
    return Corpus(str(root), form.languages, sets, _complaints(root, files, sets, form))


def _complaints(root: Path, files: dict[str, dict[str, Path]], sets: dict[str, Read], form: Form) -> dict[str, str]:
    """For training text that is not there, and for a part of which one side is missing."""
    complaints = {}
    for part, beginnings in _BEGINNINGS.items():
        found = {name: by_ending for name, by_ending in files.items() if name.startswith(beginnings)}
        half = any(language in by_ending for by_ending in found.values() for language in form.languages)
        if not found.keys() & sets.keys() and (half or part == "train"):
            there = sorted(file.name for by_ending in (found or files).values() for file in by_ending.values())
            source, target = form.languages
            complaints[part] = (
                f"{root} holds {', '.join(there[:6]) or 'no files named train*, val* or test*'}; expected "
                f"{part}*.{source} and {part}*.{target}, or {part}*.tsv, plain or .gz. Name the endings by "
                f"--data.source_language and --data.target_language, or other files by --data.{part}."
            )
    return complaints


def _reader(paths: list[Path], form: Form) -> Read:
    if len(paths) == 1:
        return partial(read_table, paths[0], form.languages, form.columns, form.encoding)
    return partial(read_pair, *paths, form.encoding, form.target_encoding)


def _hub(path: str, form: Form) -> Corpus:
    import datasets  # takes a second; only who needs it pays

    name, _, config = path.removeprefix(HUB).partition(":")
    try:
        tables = datasets.load_dataset(name, config or None)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--data.path={path}: {reason}. Check it, or give a local folder.") from error
    sets = {part: partial(_rows, path, part, rows, form) for part, rows in tables.items()}
    complaint = f"{path} has the parts {', '.join(tables)}; expected one named train."
    return Corpus(path, form.languages, sets, {"train": complaint})


def _rows(path: str, part: str, rows: Any, form: Form) -> Pairs:
    columns = rows.column_names
    nested = "translation" in columns
    cells = rows["translation"][:] if nested else []
    names = list(cells[0]) if nested and cells else columns
    if not set(form.languages) <= set(names):
        raise ValueError(
            f"{path}, {part} part has {', '.join(names)}; expected {' and '.join(form.languages)}. "
            "Name two of them by --data.source_language and --data.target_language."
        )
    sides = [[cell[name] for cell in cells] if nested else rows[name][:] for name in form.languages]
    source, target = ([text or "" for text in side] for side in sides)
    return pair_up(f"{path}, {part} part", source, target)
