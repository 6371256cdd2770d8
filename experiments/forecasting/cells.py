"""Cells of a file, still without meaning: CSV, parquet, or a data set of a hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.forecasting.signatures import check_text

HUB = "hub:"
MISSING = ("", "na", "n/a", "nan", "null", "none", "<na>")
"""Words that stand for a missing value, in any case."""

_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}\b.*|\d{4}-\d{2}")
"""What a stamp looks like."""

_SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


@dataclass(frozen=True)
class Cells:
    """A table as it was found.

    Attributes:
        frame: one column for each of the file, named as there.
        lines: int64 [rows], where each row stands: lines of a text file count from 1, the header included, rows of
            other files count from 1.
        title: what to call the file in a message.
        unit: "line" or "row".
        separator: between the cells of a text file; None in other files.
    """

    frame: pd.DataFrame
    lines: np.ndarray
    title: str
    unit: str
    separator: str | None = None

    def at(self, row: int) -> str:
        """Where a row stands, for a message."""
        return f"{self.unit} {self.lines[row]}"


def read_cells(path: str, *, separator: str, encoding: str, header: bool, decimal: str = ".") -> Cells:
    """Read a table without giving its cells a meaning; cells of text files stay text.

    Args:
        path: a CSV file (also compressed, by its ending: .gz, .bz2, .zip, .xz), a .parquet file, or `hub:NAME`.
        separator: between the cells of a CSV file.
        encoding: of a CSV file.
        header: whether the first line of a CSV file names the columns; without it they are 0, 1, 2, ...
        decimal: the sign before the fraction, by which a first line of values is told from one of names.

    Raises:
        ValueError: no rows, two columns of one name, a first line of values, a line with too many cells, bytes of
            another encoding, a file that is no text, or a separator that does not separate.
        FileNotFoundError: no such file.
    """
    if path.startswith(HUB):
        return _read_hub(path.removeprefix(HUB))
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"--data.path={path} is a folder; a CSV or parquet file was expected.")
    if not file.is_file():
        raise FileNotFoundError(f"--data.path={path}: there is no such file. Give a CSV or parquet file, or {HUB}NAME.")
    if file.suffix == ".parquet":
        return _typed(pd.read_parquet(file).reset_index(), file.name)
    return _read_text(file, separator, encoding, header, decimal)


def _read_hub(name: str) -> Cells:
    import datasets  # takes a second; only who needs it pays

    try:
        tables = datasets.load_dataset(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--data.path={HUB}{name}: {reason}. Check it, or give a local file.") from error
    if "train" not in tables:
        raise ValueError(f"{HUB}{name} has the parts {', '.join(tables)}; a part named train was expected.")
    return _typed(tables["train"].to_pandas(), f"{HUB}{name}")


def _typed(frame: pd.DataFrame, title: str) -> Cells:
    frame = frame.drop(columns="index") if "index" in frame and frame["index"].equals(pd.Series(frame.index)) else frame
    frame.columns = [str(name) for name in frame.columns]
    if frame.empty:
        raise ValueError(f"{title} has no rows.")
    return Cells(frame, np.arange(1, len(frame) + 1), title, "row")


def _read_text(file: Path, separator: str, encoding: str, header: bool, decimal: str) -> Cells:
    check_text(file, encoding)
    try:
        frame = pd.read_csv(
            file, sep=separator, encoding="utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding,
            header=None, dtype=str, na_filter=False, skip_blank_lines=False, skipinitialspace=True,
        )  # fmt: skip
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{file.name} is empty; lines of numbers were expected.") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file.name} is not {encoding}: {error.reason} at byte {error.start} "
            f"(0x{error.object[error.start]:02X}). Name its encoding by --data.table.encoding, such as latin-1."
        ) from error
    except UnicodeError as error:
        raise ValueError(
            f"{file.name} is not {encoding}: {error}. Name its encoding by --data.table.encoding."
        ) from error
    except LookupError as error:
        raise ValueError(
            f"--data.table.encoding={encoding}: {error}; an encoding such as utf-8 was expected."
        ) from error
    except pd.errors.ParserError as error:
        raise ValueError(_too_many_cells(file.name, str(error), separator)) from error
    names = [str(name).strip() for name in frame.iloc[0]] if header else [str(n) for n in range(frame.shape[1])]
    _check_names(file.name, names, separator, header, decimal)
    frame = frame.iloc[1:] if header else frame
    frame.columns = names
    filled = (frame != "").any(axis=1).to_numpy()
    lines = np.arange(1, len(filled) + 1) + int(header)
    frame, lines = frame[filled].reset_index(drop=True), lines[filled]  # blank lines are no rows
    if frame.empty:
        raise ValueError(f"{file.name} has a header and no rows; lines of numbers were expected.")
    return Cells(frame, lines, file.name, "line", separator)


def _too_many_cells(title: str, message: str, separator: str) -> str:
    counts = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message)
    if counts is None:
        return f"{title} cannot be read as a table: {message}"
    expected, line, found = counts.groups()
    return (
        f"{title}, line {line}: {found} cells where the lines before have {expected}, with {_name(separator)} as "
        "separator.\nMend the line, or name the separator by --data.table.separator (and the sign of the fraction by "
        "--data.table.decimal)."
    )


def _check_names(title: str, names: list[str], separator: str, header: bool, decimal: str) -> None:
    if len(names) == 1:
        other = next((sign for sign in _SEPARATORS if sign not in (separator, decimal) and sign in names[0]), None)
        if other is not None:
            raise ValueError(
                f"{title}, line 1: one column, {names[0]!r}, with {_name(separator)} as separator. "
                f"Is it {_name(other)}? Then give --data.table.separator={other!r}."
            )
    values = _kind_of_values(names, decimal) if header else None
    if values is not None:
        raise ValueError(
            f"{title}, line 1: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: {values} where the names of "
            "the columns were expected.\nIf it has no line of names, give --data.table.header=false; the columns are "
            "then 0, 1, 2, ..."
        )
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"{title}, line 1: two columns are named {twice!r}; give each a name of its own.")


def _kind_of_values(names: list[str], decimal: str) -> str | None:
    """What stands in a first line without names: numbers and stamps alone, or both beside other text; else None."""
    numeric = [is_number(name.replace(decimal, ".")) for name in names]
    stamps = [_DATE.fullmatch(name) is not None for name in names]
    if all(numeric):
        return "numbers"
    return "numbers or stamps" if all(map(max, numeric, stamps)) or (any(numeric) and any(stamps)) else None


def _name(separator: str) -> str:
    return _SEPARATORS.get(separator, repr(separator))


def is_number(text: str) -> bool:
    """Whether Python reads it as one."""
    try:
        float(text)
    except ValueError:
        return False
    return True
