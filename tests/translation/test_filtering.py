"""Lines from a pipe are those of a file, and are given out as they come."""

from __future__ import annotations

import gzip
import io
import os
import threading

import pytest

from experiments.translation.filtering import blocks_of
from experiments.translation.text import lines_of

TEXTS = {
    "plain": b"one\ntwo\n",
    "windows": b"one\r\ntwo\r\n",
    "no end": b"one\n\ntwo",
    "mark": "\ufeffone\ntwo\n".encode(),
    "other line ends": "a\u2028b\x0bc\x85d\ne\n".encode(),
    "gzip": gzip.compress("one\nzwölf\n".encode()),
    "empty": b"",
    "one blank line": b"\n",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("most", [1, 100])
def test_the_lines_are_those_of_a_file(name: str, most: int) -> None:
    blocks = list(blocks_of(io.BytesIO(TEXTS[name]), "utf-8", most))
    assert [line for block in blocks for line in block] == lines_of(TEXTS[name], "x")
    assert all(0 < len(block) <= most for block in blocks)


def test_two_bytes_a_letter() -> None:
    text = "eins\nzwölf\n"
    (block,) = blocks_of(io.BytesIO(text.encode("utf-16")), "utf-16", 10)
    assert block == ["eins", "zwölf"]


def test_a_letter_that_comes_in_two_pieces_and_lines_that_are_answered_as_they_come() -> None:
    out, into = os.pipe()
    with os.fdopen(out, "rb") as stream:
        blocks = blocks_of(stream, "utf-8", 10)
        letter = "ö".encode()
        os.write(into, b"one\nzw" + letter[:1])
        assert next(blocks) == ["one"]
        os.write(into, letter[1:] + b"lf\n")
        assert next(blocks) == ["zwölf"]
        threading.Thread(target=os.close, args=(into,)).start()
        assert list(blocks) == []


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match=r"line 2: byte 0xE4 .* --encoding"):
        list(blocks_of(io.BytesIO(b"one\nzw\xe4lf\n"), "utf-8", 10))
    with pytest.raises(ValueError, match="standard input is text in utf-16.*--encoding=utf-16"):
        list(blocks_of(io.BytesIO("one\n".encode("utf-16")), "utf-8", 10))
    with pytest.raises(ValueError, match="no such encoding"):
        list(blocks_of(io.BytesIO(b""), "utf-9", 10))
