"""Encodings that a text gives away by its first bytes."""

from __future__ import annotations

import codecs

_MARKS = {  # UTF-32 first, for its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def marked(start: bytes) -> str | None:
    """The encoding whose byte order mark stands at the start, None where there is none of UTF-16 or UTF-32.

    Example:
        >>> marked("text".encode("utf-16")), marked(b"text")
        ('utf-16', None)
    """
    return next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
