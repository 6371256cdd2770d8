"""How long `import attnzoo` takes, against `import torch`, each in a fresh process, in turn."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import track

from benchmarks.machine import machine

PAIRS = 11


def _seconds(module: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def measure(folder: Path, arguments: list[str]) -> int:
    """Prints the median ratio and its spread, and writes `result.json`."""
    argparse.ArgumentParser(prog="make reproduce FIGURE=import").parse_args(arguments)  # takes none
    _seconds("attnzoo")  # the first import reads the disk
    pairs = [(_seconds("attnzoo"), _seconds("torch")) for _ in track(range(PAIRS), "pairs")]
    ratios = sorted(ours / torchs for ours, torchs in pairs)
    result = {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_min": round(ratios[0], 4),
        "ratio_max": round(ratios[-1], 4),
        "import_torch_seconds": round(statistics.median(torchs for _, torchs in pairs), 3),
        "pairs": PAIRS,
        "machine": machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0
