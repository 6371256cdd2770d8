"""Files that stand at their place complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".pdf", ".svg", ".jpg")
"""Endings of files that figures are drawn into."""

_TEMPORARY = ".tmp"


def check_writable(path: Path, option: str) -> None:
    """Refuse a place that nothing can be written to, before the work whose result it is to hold. Leaves no trace.

    Args:
        path: a file, in a folder that need not exist yet.
        option: by which another place is given.

    Raises:
        OSError: with the reason.
    """
    try:
        place = next((parent for parent in (path, *path.parents) if parent.exists()), Path())
        if place == path:
            path.open("ab").close()
        else:
            with tempfile.TemporaryFile(dir=place):
                pass
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"{path} cannot be written: {reason}. Give another place by {option}.") from error


def write_whole(path: Path, content: bytes | memoryview, option: str | None = None) -> None:
    """Put `content` at `path`, so that at each moment the old file or the new one stands there complete.

    Args:
        path: the file; its folder is made. The file at the end of a link is meant, and a device or pipe is written to.
        content: all of it.
        option: by which another place is given, where there is one.

    Raises:
        OSError: the disk is full or refuses; the message has the path and the bytes needed. What stood there
            stays.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            with path.open("wb") as special:
                special.write(content)
            return
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = os.strerror(error.errno) if error.errno else str(error)
        free = f", {shutil.disk_usage(path.parent).free:,} are free" if error.errno == errno.ENOSPC else ""
        raise OSError(
            f"{path} could not be written: {reason} ({len(content):,} bytes needed{free}). "
            f"{'The earlier file is untouched' if path.exists() else 'No file was left there'}; "
            f"free space, or choose another place{f' by {option}' if option else ''}."
        ) from error
    _sync_folder(path.parent)


def write_figure(path: Path, figure: Figure, option: str, dpi: float | Literal["figure"] = "figure") -> None:
    """Draw `figure` into the file at `path`, of the kind that its ending names; see `write_whole`."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), bbox_inches="tight", dpi=dpi)
    write_whole(path, content.getbuffer(), option)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files that a killed process has left behind in `folder`."""
    for leftover in folder.glob(f".*{_TEMPORARY}"):
        leftover.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The new name is safe against a power cut only when the folder is on the disk as well.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
