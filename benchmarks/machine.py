"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.training.runs import commit

ROOT = Path(__file__).parents[1]


def machine() -> dict[str, Any]:
    """Processor, cores, versions and commit, as plain values."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
    }


def library() -> str | None:
    """What names the library and the benchmarks as they are in git, whatever else changed; None if they are not."""
    rests_on = ["attnzoo", "benchmarks"]
    changed = _git("status", "--porcelain", "--", *rests_on)
    trees = _git("rev-parse", *(f"HEAD:{folder}" for folder in rests_on))
    return trees.replace("\n", " ") if trees and changed == "" else None


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
