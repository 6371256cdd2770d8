"""The command `sync`: sends what W&B has logged offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.training.options import call
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
    if not waiting:
        print(f"nothing to send: no run under {root} has been logged offline and not been sent")
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
    return subprocess.run([sys.executable, "-m", "wandb", "sync", *map(str, waiting)], check=False).returncode


def waiting_folders(root: Path) -> list[Path]:
    """Folders of offline logs under ``root`` that wandb has not marked as sent."""
    return [folder for folder in sorted(root.glob("*/*/wandb/offline-run-*")) if not any(folder.glob("*.synced"))]
