"""Results on disk, by what they follow from: what was made once is read the next time."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers

log = logging.getLogger("experiments")

_DIGEST = 16


class Cache:
    """Files named by a hash of their causes, each whole or not there at all.

    A file is written under another name and then renamed, so that several processes may use one folder. It begins
    with a digest of its content: a damaged one is told from a whole one, and made anew.

    Args:
        folder: where files lie; None makes everything anew each time.

    Example:
        >>> Cache(None).get("greeting", ["hello"], lambda: b"HELLO")
        b'HELLO'
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def get(self, kind: str, causes: Iterable[str], make: Callable[[], bytes]) -> bytes:
        """What `make` gives, or gave when it was called with the same causes.

        Args:
            kind: first part of the file's name.
            causes: all that the result follows from, beside the version of `tokenizers`.
            make: makes the result.
        """
        if self.folder is None:
            return make()
        path = self.folder / f"{kind}-{_hash([tokenizers.__version__, kind, *causes])}"
        if path.is_file():
            content = path.read_bytes()
            digest, result = content[:_DIGEST], content[_DIGEST:]
            if digest == _digest(result):
                return result
            log.warning("%s is damaged and is made anew.", path)
        result = make()
        self._write(path, result)
        return result

    def _write(self, path: Path, result: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_digest(result) + result)
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "Nothing could be kept in %s (%s); name another folder by --data.cache, or none: null.",
                path.parent,
                error.strerror,
            )


def user_folder() -> Path:
    """Where the user's programs keep what they can make anew."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "attnzoo"


def _hash(causes: Iterable[str]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for cause in causes:
        data = cause.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _digest(result: bytes) -> bytes:
    return hashlib.blake2b(result, digest_size=_DIGEST).digest()
