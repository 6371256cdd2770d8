"""Training runs as pieces of a figure: started, stopped after a while, taken up again, tested on several sets."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def asked(
    figure: str, description: str | None, choices: Iterable[str], arguments: list[str]
) -> tuple[list[str], Callable[[], float]]:
    """What a job of several runs is asked for: some of its choices, and the minutes of training that are left."""
    parser = argparse.ArgumentParser(prog=f"make reproduce FIGURE={figure}", description=description)
    parser.add_argument("--minutes", type=float, default=150.0, help="of training in this call; the next one goes on")
    parser.add_argument("--only", default=",".join(choices), help=f"some of {','.join(choices)}")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - set(choices):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    end = time.monotonic() + 60 * options.minutes
    return names, lambda: max((end - time.monotonic()) / 60, 0)


def train(preset: str, root: Path, options: list[str], *, minutes: float | None = None) -> dict[str, Any] | None:
    """Trains a preset to its end, going on with the run in ``root`` if there is one.

    Args:
        preset: name of a config.
        root: folder of the run; one run alone lives there.
        options: of `fit`.
        minutes: when to stop; the next call goes on. None for no limit.

    Returns:
        What `results.json` says, with "wall" (seconds of all commands) and "folder"; None if it is not done.
    """
    root.mkdir(parents=True, exist_ok=True)
    found = sorted(root.glob("*/*/results.json"))
    done = json.loads(found[-1].read_text()) if found else {}
    spent = root / "wall.json"
    wall = json.loads(spent.read_text()) if spent.is_file() else 0.0
    if done.get("status") != "finished":
        begun = sorted(root.glob("*/*/checkpoints/last.ckpt"))
        words = [f"--ckpt_path={begun[-1]}"] if begun else []
        start = time.perf_counter()
        command = [sys.executable, "-m", "experiments", "fit", f"--config={preset}", f"--run.root={root}"]
        process = subprocess.Popen([*command, *options, *words])
        try:
            process.wait(None if minutes is None else 60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
        wall += time.perf_counter() - start
        spent.write_text(json.dumps(wall))
        # Minus the signal where it came before the run could answer it.
        if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise ValueError(f"{preset} ended with exit status {process.returncode}; what it said stands above")
        found = sorted(root.glob("*/*/results.json"))
        done = json.loads(found[-1].read_text()) if found else {}
    if done.get("status") != "finished":
        return None
    return done | {"wall": wall, "folder": str(found[-1].parent)}


def test(folder: Path, options: list[str]) -> dict[str, float]:
    """Test figures of the best checkpoint of a run, by `python -m experiments test`."""
    command = [sys.executable, "-m", "experiments", "test", f"--ckpt_path={folder / 'checkpoints' / 'best.ckpt'}"]
    said = subprocess.run(
        [*command, *options], check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
    ).stdout
    rows = (line.split() for line in said.splitlines() if line.startswith("test/"))
    return {name: float(value) for name, value in rows}
