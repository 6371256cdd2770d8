"""Finds the checkpoint that a command uses when none is named."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from experiments.training.runs import read_results


def newest_finished(tasks: Collection[str], root: str = "runs") -> Path:
    """``best.ckpt`` of the newest finished run of some tasks; ``last.ckpt`` where the run has never validated.

    Args:
        tasks: as in ``results.json``: vision, translation, forecasting, listops; any if empty.
        root: folder of all runs.

    Raises:
        ValueError: if no run of the task has finished.
    """
    found = []
    for results in Path(root).glob("*/*/results.json"):
        content = read_results(results.parent)
        if not content or (tasks and content["task"] not in tasks) or content["status"] != "finished":
            continue
        places = [results.parent / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
        found += [(results.stat().st_mtime, path) for path in places if path.is_file()][:1]
    if not found:
        raise ValueError(
            f"no finished {' or '.join(tasks)}{' ' if tasks else ''}run under {root}/; train one first, "
            f"or name a checkpoint by --ckpt=PATH (make: CKPT=PATH)"
        )
    return max(found)[1]
