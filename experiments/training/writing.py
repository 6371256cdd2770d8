"""Files that stand at their place complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_TEMPORARY = ".tmp"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Put `content` at `path`, so that at each moment the old file or the new one stands there complete.

    Raises:
        OSError: the disk is full or refuses; the message has the path and the bytes needed. What stood there
            stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = os.strerror(error.errno) if error.errno else str(error)
        free = f", {shutil.disk_usage(path.parent).free:,} are free" if error.errno == errno.ENOSPC else ""
        raise OSError(
            f"{path} could not be written: {reason} ({len(content):,} bytes needed{free}). "
            f"{'The earlier file is untouched' if path.exists() else 'No file was left there'}; "
            "free space, or choose another disk by --run.root."
        ) from error
    _sync_folder(path.parent)


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
