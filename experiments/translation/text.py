"""Reading parallel text: bytes to lines, lines to pairs, and messages that name file, line and byte."""

from __future__ import annotations

import gzip
import logging
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.training.marks import marked

log = logging.getLogger("experiments")

_GZIP = b"\x1f\x8b"
_FORMATS = {
    b"PK\x03\x04": "a zip archive, as .xlsx, .docx and .odt files are",
    b"\xd0\xcf\x11\xe0": "a document of an old Office (.doc, .xls)",
    b"BZh91AY&SY": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"%PDF-": "a PDF",
}


class Pairs(NamedTuple):
    """Parallel text of one part, without the pairs that are blank on a side.

    Attributes:
        name: what messages call it.
        source: one text a pair.
        target: its translations, in the same order.
        skipped: numbers of the lines that were left out, from 1.
        lines: number of the line of each pair, from 1.
    """

    name: str
    source: list[str]
    target: list[str]
    skipped: tuple[int, ...]
    lines: Sequence[int]

    def select(self, chosen: Sequence[int], name: str) -> Pairs:
        """Some of the pairs, by place, under another name."""
        source, target, lines = ([side[i] for i in chosen] for side in (self.source, self.target, self.lines))
        return Pairs(name, source, target, (), lines)


def clean(text: str) -> str:
    r"""`text` in one form: NFC, one space for each run of white space, none at the edges.

    What looks the same is then the same to vocabularies, splits and scores. NFC changes no letter that is seen;
    NFKC would.

    Example:
        >>> clean(" Scho\u0308n,\u00a0 ja ")
        'Schön, ja'
    """
    return unicodedata.normalize("NFC", " ".join(text.split()))


def lines_of(data: bytes, name: str, encoding: str = "utf-8", option: str = "--data.encoding") -> list[str]:
    """The lines of a text as they stand, without their ends.

    Only LF and CR LF end a line: a text may hold other signs that Python takes for line ends. A byte order mark
    at the start is dropped, and the last line may lack its end.

    Args:
        data: content of a file, plain or compressed by gzip.
        name: what messages call the file.
        encoding: any that Python knows.
        option: the option that messages name.

    Raises:
        ValueError: damaged compression, what `check_text` refuses, no such encoding, or a byte that it does not have,
            with its line.
    """
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{name} is compressed by gzip and damaged: {error}. Get the file anew.") from error
    check_text(data, name, encoding, option)
    try:
        text = data.decode(encoding)
    except LookupError as error:
        raise ValueError(f"{option}={encoding}: there is no such encoding; utf-8, latin-1, cp1252 are some.") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].decode(encoding, "ignore").count("\n") + 1
        raise ValueError(
            f"{name}, line {line}: byte 0x{data[error.start]:02X} cannot be read; {encoding} text was expected.\n"
            f"Name the file's encoding by {option}=latin-1, cp1252, ..., or convert it."
        ) from error
    lines = text.removeprefix("\ufeff").split("\n")
    if not lines[-1]:
        del lines[-1]
    return [line.removesuffix("\r") for line in lines]


def check_text(data: bytes, name: str, encoding: str, option: str) -> None:
    """Refuses bytes whose beginning shows that they are no text, or text of another encoding.

    Raises:
        ValueError: what they are, and what to do.
    """
    what = next((what for signature, what in _FORMATS.items() if data.startswith(signature)), None)
    if what is not None:
        raise ValueError(f"{name} is no text but {what}; lines of plain text were expected, in a file as such or .gz.")
    if encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32", "utf16", "utf32")):
        return
    if found := marked(data[:4]):
        raise ValueError(f"{name} is text in {found} (by its byte order mark); give {option}={found}.")
    if b"\0" in data[:1024]:
        order = "le" if data[1:2] == b"\0" else "be"
        raise ValueError(
            f"{name} holds zero bytes, as no text in {encoding} does. If it is text in UTF-16, give "
            f"{option}=utf-16-{order}; lines of plain text were expected."
        )


def read_lines(path: str | Path, encoding: str = "utf-8", option: str = "--data.encoding") -> list[str]:
    """`lines_of` a file."""
    return lines_of(Path(path).read_bytes(), str(path), encoding, option)


def pair_up(name: str, source: Sequence[str], target: Sequence[str], first_line: int = 1) -> Pairs:
    """Pairs of lines that belong together, each cleaned; where either is blank both are left out, and counted.

    Args:
        name: what messages call the text.
        source: lines.
        target: as many lines.
        first_line: number of the first one.

    Raises:
        ValueError: no pair is left.
    """
    kept: list[tuple[int, str, str]] = []
    skipped: list[int] = []
    for number, (left, right) in enumerate(zip(map(clean, source), map(clean, target), strict=True), first_line):
        if left and right:
            kept.append((number, left, right))
        else:
            skipped.append(number)
    if not kept:
        raise ValueError(f"{name} holds no pairs ({len(skipped)} blank lines); expected a sentence on each side.")
    if skipped:
        log.warning(
            "%d of %d pairs skipped: %s, blank on one side or both in %s.",
            len(skipped),
            len(source),
            name,
            spell_lines(skipped),
        )
    lines, sources, targets = (list(column) for column in zip(*kept, strict=True))
    return Pairs(name, sources, targets, tuple(skipped), lines)


def read_pair(source: Path, target: Path, encoding: str = "utf-8", target_encoding: str | None = None) -> Pairs:
    """Line n of one file with line n of the other.

    Raises:
        ValueError: unequal numbers of lines, and what `lines_of` and `pair_up` refuse.
    """
    sources = read_lines(source, encoding)
    targets = read_lines(target, target_encoding or encoding, "--data.target_encoding")
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources):,} lines and {target} has {len(targets):,}; "
            "expected as many, for line n of one is the translation of line n of the other."
        )
    return pair_up(f"{source} with {target.name}", sources, targets)


def read_table(
    path: Path, languages: tuple[str, str], columns: Sequence[str] | None = None, encoding: str = "utf-8"
) -> Pairs:
    """Two columns of a file whose lines are cells with tabs between them; quotes mean nothing.

    Columns are found by name where there are names: those in the first line, if both languages stand there, else
    those given. Without names the first column is the source and the second the target.

    Args:
        path: the file.
        languages: names of the source column and of the target column.
        columns: names of the columns from the left.
        encoding: of the file.

    Raises:
        ValueError: a column that is not there, a line with too few cells, and what `lines_of` refuses.
    """
    rows = [line.split("\t") for line in read_lines(path, encoding)]
    headed = bool(rows) and bool(set(languages) & set(rows[0]))
    names = rows[0] if headed else columns
    if names is not None and not set(languages) <= set(names):
        raise ValueError(
            f"{f'{path}, line 1,' if headed else '--data.columns'} names {', '.join(names)}; expected "
            f"{languages[0]} and {languages[1]} among them. "
            "--data.source_language and --data.target_language say which two are wanted."
        )
    left, right = (0, 1) if names is None else (list(names).index(language) for language in languages)
    least = 1 + max(left, right)
    body = rows[headed:]
    for number, cells in enumerate(body, 1 + headed):
        if len(cells) < least and any(cell.strip() for cell in cells):
            raise ValueError(
                f"{path}, line {number} has {len(cells)} column(s), {' '.join(cells)[:40]!r}; expected {least} or "
                "more with tabs between them. --data.columns names the columns."
            )
    # A line without any text has no cells either.
    full = [cells if len(cells) >= least else [""] * least for cells in body]
    source, target = ([cells[column] for cells in full] for column in (left, right))
    return pair_up(str(path), source, target, 1 + headed)


def spell_lines(numbers: Sequence[int]) -> str:
    """`line 3`, or `lines 3, 7, 10` and how many more."""
    shown = ", ".join(map(str, numbers[:10]))
    more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return f"line{'s' if len(numbers) > 1 else ''} {shown}{more}"
