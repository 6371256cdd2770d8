"""Where data sets lie: as a path is named from here, or in the folder that ATTNZOO_DATA names."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

VARIABLE = "ATTNZOO_DATA"


def locate(path: str | Path, domain: str, option: str = "--data.path", *, otherwise: str | None = None) -> Path:
    """A file or folder as it is named from here, or else in the folder of data sets or in its folder of a domain.

    Args:
        path: relative or absolute; `~` is the home folder.
        domain: name of a folder in that of ATTNZOO_DATA: `vision`, `translation` or `forecasting`.
        option: what named the path, for the message.
        otherwise: what to say where there is none.

    Raises:
        ValueError: it is in none of these places; with the nearest name that is in one of them.
    """
    wanted = Path(path).expanduser()
    root = os.environ.get(VARIABLE)
    places = [wanted]
    if root and not wanted.is_absolute():
        places += [Path(root).expanduser() / wanted, Path(root).expanduser() / domain / wanted]
    for place in places:
        if place.exists():
            return place
    if otherwise:
        raise ValueError(f"{option}={path}: {otherwise}")
    if root:
        tried = "" if wanted.is_absolute() else f", nor in {root} ({VARIABLE}) or its {domain}"
    else:
        tried = "" if wanted.is_absolute() else f"; {VARIABLE}, which names a folder of data sets, is not set"
    raise ValueError(f"{option}={path}: there is no such file or folder{tried}.{_nearest(places)}")


def _nearest(places: list[Path]) -> str:
    for place in places:
        there = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
        near = difflib.get_close_matches(place.name, there, n=1)
        if near:
            return f" Did you mean {place.parent / near[0]}?"
    return ""
