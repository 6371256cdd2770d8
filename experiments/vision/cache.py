"""Decoded pictures on disk, by what they were decoded from: the next run maps them into memory and decodes nothing."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("experiments")

_FORM = "attnzoo pictures 1"


class PictureCache:
    """Files named by a hash of their causes, each whole or not there at all.

    A file is written under another name and then renamed, so that several processes may use one folder. It holds a
    digest of its pixels: a damaged one is told from a whole one, and made anew.

    Args:
        folder: where files lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, *causes: object) -> Path:
        """The file of what follows from ``causes``, whether it is there or not."""
        digest = hashlib.blake2b(repr((_FORM, *causes)).encode(), digest_size=16).hexdigest()
        return self.folder / f"pictures-{digest}.pt"

    def read(self, path: Path) -> dict[str, Any] | None:
        """What was written, its ``images`` mapped from the file; None where there is none, or a damaged one."""
        if not path.is_file():
            return None
        try:
            content = torch.load(path, mmap=True, weights_only=True)
            whole = content["digest"] == _digest(content["images"])
        except Exception:  # whatever a damaged file makes torch say
            whole = False
        if not whole:
            log.warning("%s is damaged and is made anew.", path)
            return None
        return content

    def write(self, path: Path, content: dict[str, Any]) -> None:
        """Keep plain values, and ``images``: uint8 of any shape. Where that fails, it is said."""
        content = content | {"digest": _digest(content["images"])}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
            try:
                with os.fdopen(handle, "wb") as file:
                    torch.save(content, file)
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch says the latter of a full disk
            log.warning(
                "Nothing could be kept in %s (%s); name another folder by --data.cache, or none: null.",
                path.parent,
                str(error).splitlines()[0],
            )


def user_folder() -> Path:
    """Where the user's programs keep what they can make anew."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "attnzoo"


def _digest(images: Tensor) -> str:
    return hashlib.blake2b(images.numpy(), digest_size=16).hexdigest()
