"""Results of single runs in git: a figure of many runs goes on from them on another machine.

`runs/` is not in git, and a job of ten hours should not begin anew where it is lost. One line of JSON for each file,
so that what a commit adds can be read; sorted by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.training.writing import write_whole


def restore(record: Path, folder: Path) -> int:
    """Writes the files of a record that a folder does not hold.

    Returns:
        How many those were.
    """
    missing = {name: content for name, content in _read(record).items() if not (folder / name).exists()}
    for name, content in missing.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return len(missing)


def keep(record: Path, folder: Path, pieces: Iterable[str]) -> None:
    """Writes into a record what the JSON files of a folder hold that some patterns name; the rest of it stays.

    The results of a run that was stopped or failed are none.
    """
    known = _read(record)
    now = dict(known)
    for file in {file for pattern in pieces for file in folder.glob(pattern)}:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("status", "finished") == "finished":
            now[file.relative_to(folder).as_posix()] = content
    if now != known:
        lines = (json.dumps({"file": name, "content": now[name]}) + "\n" for name in sorted(now))
        write_whole(record, "".join(lines).encode())


def _read(record: Path) -> dict[str, Any]:
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    return {row["file"]: row["content"] for row in map(json.loads, lines)}
