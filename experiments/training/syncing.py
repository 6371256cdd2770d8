"""The command `sync`: sends what W&B has logged offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.training.options import call
from experiments.training.runs import being_trained
from experiments.training.usage import python
from experiments.training.wandb_rows import logged_in


def sync(argv: list[str]) -> int:
    """Sends offline runs. Arguments: see ``_sync``."""
    return call(_sync, argv, "python -m experiments sync")


def _sync(root: str = "runs", dry_run: bool = False) -> int:
    """Send what W&B has logged offline; what has been sent is not sent again.

    Args:
        root: folder of all runs.
        dry_run: only say what would be sent.
    """
    waiting = waiting_folders(Path(root).expanduser())
    # W&B marks as sent what it has sent up to now, and would never send the rest.
    growing = [folder for folder in waiting if being_trained(folder.parents[1])]
    waiting = [folder for folder in waiting if folder not in growing]
    for folder in growing:
        print(f"not yet, for its run is being trained: {folder}")
    if not waiting:
        print(f"nothing to send: no run under {root} that has ended waits to be sent")
        return 0
    for folder in waiting:
        print(folder)
    if dry_run:
        print(f"{len(waiting)} would be sent")
        return 0
    if not logged_in():
        raise ValueError(
            f"W&B does not know you: {python()} -m wandb login, or set WANDB_API_KEY; then {len(waiting)} can be sent."
        )
    # wandb itself puts those of one run into the order of time.
    done = subprocess.run([sys.executable, "-m", "wandb", "sync", *map(str, waiting)], check=False)
    left = [folder for folder in waiting if _unsent(folder)]
    if left and not done.returncode:  # wandb calls it no failure when the server refuses
        raise ValueError(
            f"{len(left)} of {len(waiting)} were not sent; W&B says above why. The same command tries again."
        )
    return done.returncode


def waiting_folders(root: Path) -> list[Path]:
    """Folders of offline logs under ``root`` that wandb has not marked as sent."""
    return [folder for folder in sorted(root.glob("*/*/wandb/offline-run-*")) if _unsent(folder)]


def _unsent(folder: Path) -> bool:
    return any(folder.glob("*.wandb")) and not any(folder.glob("*.synced"))
