"""Lines from a pipe: as they come, and many at once where many are there."""

from __future__ import annotations

import codecs
import queue
import threading
from collections.abc import Iterator
from typing import BinaryIO

from experiments.translation.text import check_text, lines_of

CHUNK = 1 << 16
"""Bytes asked for at once; a pipe gives what it has."""

ENOUGH = 1 << 20
"""Bytes that are not added to, whatever else has come."""

_GZIP = b"\x1f\x8b"


def blocks_of(stream: BinaryIO, encoding: str, most: int) -> Iterator[list[str]]:
    """Blocks of lines: each holds what has come by the time that the one before was dealt with.

    So one who types, or another program that waits for an answer, gets it line by line, and a long text goes through in
    large blocks. The text is read as ``lines_of`` reads a file: byte order mark, line ends, gzip.

    Args:
        stream: bytes.
        encoding: any that Python knows.
        most: lines of a block at most.

    Raises:
        ValueError: no such encoding, bytes that it does not have, or what is no text.
    """
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise ValueError(
            f"--encoding={encoding}: there is no such encoding; utf-8, latin-1, cp1252 are some"
        ) from error
    came: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(stream, came), daemon=True).start()
    data = _next(came)
    if data.startswith(_GZIP):
        while piece := _next(came):
            data += piece
        lines = lines_of(data, "standard input", encoding, "--encoding")
        yield from (lines[first : first + most] for first in range(0, len(lines), most))
        return
    check_text(data, "standard input", encoding, "--encoding")
    ended, begun, rest, count = not data, False, "", 0
    while True:
        while not ended and len(data) < ENOUGH and not came.empty():
            piece = _next(came)
            ended, data = not piece, data + piece
        try:
            text = decoder.decode(data, final=ended)
        except UnicodeDecodeError as error:
            line = count + 1 + error.object[: error.start].decode(encoding, "ignore").count("\n")
            raise ValueError(
                f"standard input, line {line}: byte 0x{error.object[error.start]:02X} cannot be read; {encoding} text "
                "was expected, give --encoding"
            ) from error
        if text and not begun:
            text, begun = text.removeprefix("\ufeff"), True
        *lines, rest = (rest + text).split("\n")
        if ended and rest:
            lines.append(rest)
        for first in range(0, len(lines), most):
            yield [line.removesuffix("\r") for line in lines[first : first + most]]
        count += len(lines)
        if ended:
            return
        data = _next(came)
        ended = not data


def _read(stream: BinaryIO, came: queue.SimpleQueue[bytes | BaseException]) -> None:
    read = getattr(stream, "read1", stream.read)
    try:
        while data := read(CHUNK):
            came.put(data)
        came.put(b"")
    except BaseException as error:
        came.put(error)


def _next(came: queue.SimpleQueue[bytes | BaseException]) -> bytes:
    data = came.get()
    if isinstance(data, BaseException):
        raise data
    return data
