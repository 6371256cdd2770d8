"""What is said to a user whose command does not fit: what came, what was expected, the nearest right word.

Imports nothing heavy, so that a wrong word is answered at once.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"


class UsageError(Exception):
    """A command line or a config file that cannot be understood; ends with exit status 2."""


def python() -> str:
    """How this Python is called from here, for commands that are shown to be typed."""
    path = Path(sys.executable)
    # Not resolved: .venv/bin/python is a link to a Python that knows nothing of the project.
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def nearest(word: str, known: Iterable[str]) -> str:
    """`Did you mean ...?` with the nearest of `known`, or an empty string."""
    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    begun = [name for name in by_lower if word and name.startswith(word.lower())]
    found = begun or difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[found[0]]}?" if found else ""


def presets() -> dict[str, str]:
    """Short names of the presets in `configs/`, each with the first comment line of its file."""
    found = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return found


def preset_lines() -> list[str]:
    """A line for each preset, names and texts below each other."""
    found = presets()
    width = max(map(len, found), default=0) + 2
    return [f"  {name:<{width}}{text}" for name, text in found.items()]


def config_path(name: str) -> Path:
    """The file of a preset's short name, or the file at this path.

    Raises:
        UsageError: there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    known = presets()
    if name in known:
        return CONFIGS / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")]) if path.parent.is_dir() else ""
        near = near or nearest(path.stem, known)
        raise UsageError(f"--config={name}: there is no such file.{near}\nPresets: {', '.join(known)}")
    raise UsageError(
        f"--config={name}: there is no preset of this name.{nearest(name, known)}\nPresets: {', '.join(known)}"
    )


def short(message: str, lines: int = 3, width: int = 300) -> str:
    """At most `lines` lines of `message`, none of them endless."""
    kept = [re.sub(r"\s+", " ", line).strip() for line in message.strip().splitlines() if line.strip()]
    if len(kept) > lines:
        kept = [*kept[: lines - 1], " ".join(kept[lines - 1 :])]
    return "\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in kept)
