"""What a file is by its first bytes, where it is not the text that it was taken for."""

from __future__ import annotations

from pathlib import Path

from experiments.training.marks import marked

_COMPRESSED = (".gz", ".bz2", ".zip", ".xz", ".zst", ".tar", ".tgz")
"""Endings by which pandas unpacks a file."""

_FORMATS = {
    b"PK\x03\x04": "an Excel workbook (.xlsx) or another zip archive; save the sheet as CSV, or name the archive .zip",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook (.xls); save the sheet as CSV",
    b"PAR1\x15": "a parquet file; name it .parquet",
    b"\x1f\x8b": "compressed by gzip; name it .csv.gz",
    b"BZh91AY&SY": "compressed by bzip2; name it .csv.bz2",
    b"\xfd7zXZ": "compressed by xz; name it .csv.xz",
    b"%PDF-": "a PDF; write its table as CSV",
}


def check_text(file: Path, encoding: str) -> None:
    """Refuses a file that is no text, or text of an encoding that its first bytes give away.

    Raises:
        ValueError: what it is, and what to do.
    """
    if file.suffix.lower() in _COMPRESSED:
        return
    with file.open("rb") as opened:
        start = opened.read(1024)
    for signature, what in _FORMATS.items():
        if start.startswith(signature):
            raise ValueError(f"{file.name} is no text but {what}.")
    if encoding.lower().replace("_", "-").startswith(("utf-16", "utf-32", "utf16", "utf32")):
        return
    if found := marked(start):
        raise ValueError(
            f"{file.name} is text in {found} (by its byte order mark); give --data.table.encoding={found}."
        )
    if b"\0" in start:
        order = "le" if start[1:2] == b"\0" else "be"
        raise ValueError(
            f"{file.name} holds zero bytes, as no text in {encoding} does. If it is text in UTF-16, give "
            f"--data.table.encoding=utf-16-{order}; otherwise write the table as CSV."
        )
