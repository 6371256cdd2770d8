"""Finds the checkpoint that a command uses when none is named."""

from __future__ import annotations

import json
from pathlib import Path


def newest_finished(task: str | None, root: str = "runs") -> Path:
    """``best.ckpt`` of the newest finished run of a task.

    Args:
        task: as in ``results.json``: vision, translation, forecasting; any if None.
        root: folder of all runs.

    Raises:
        ValueError: if no run of the task has finished.
    """
    found = []
    for results in Path(root).glob("*/*/results.json"):
        best = results.parent / "checkpoints" / "best.ckpt"
        content = json.loads(results.read_text(encoding="utf-8"))
        if task in (None, content["task"]) and content["status"] == "finished" and best.is_file():
            found.append((results.stat().st_mtime, best))
    if not found:
        raise ValueError(
            f"no finished {task + ' ' if task else ''}run under {root}/; train one first, "
            f"or name a checkpoint by --ckpt=PATH (make: CKPT=PATH)"
        )
    return max(found)[1]
