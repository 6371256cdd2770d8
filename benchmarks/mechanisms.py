"""Every mechanism of the catalogue in the preset `vit` on digits, one token a pixel, by its name alone.

64 tokens, so that a mechanism that picks its pairs has something to pick from. The recipe was chosen for `Softmax` on
16 tokens and is the same for all, so this says that each one trains, and is no contest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from attnzoo import CATALOGUE, Mask, attention_map
from attnzoo.catalogue import construct
from benchmarks.choice import chosen
from benchmarks.machine import library, machine
from experiments.training.tables import show_table

SITE = {"causal": False, "max_len": 64, "grid": (8, 8), "prefix_tokens": 0}
OPTIONS = ["--config=vit", "--model.patch_size=1", "--trainer.max_epochs=20", "--run.wandb=false"]


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what this state of the library has not trained yet, prints the table, writes `result.json`."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=mechanisms", description=__doc__)
    parser.add_argument("--only", default="", help="mechanisms, by name, with commas between; all if left out")
    only = chosen(parser, parser.parse_args(arguments).only)
    here, now = machine(), library()
    rows = {}
    for name in CATALOGUE:
        piece = folder / f"{name}.json"
        known = piece.is_file() and now is not None and json.loads(piece.read_text())["library"] == now
        if only and name not in only and not known:
            continue
        if not known:
            piece.parent.mkdir(parents=True, exist_ok=True)
            piece.write_text(json.dumps({"library": now, "commit": here["commit"], **_train(name, folder / "runs")}))
        rows[name] = json.loads(piece.read_text())
    result = {"mechanisms": rows, "options": OPTIONS, "machine": here}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table("mechanism", "pairs with a weight", "test accuracy", "parameters", "seconds")
    for name, row in rows.items():
        cells = [f"{row['pairs']:.0%}", f"{row['accuracy']:.4f}", f"{row['parameters']:,}", f"{row['seconds']:.0f}"]
        table.add_row(name, *cells)
    show_table(table)
    return 0


def _train(name: str, root: Path) -> dict[str, Any]:
    before = set(root.glob("vit/*/results.json"))
    start = time.perf_counter()
    command = [sys.executable, "-m", "experiments", "fit", *OPTIONS, f"--model.attention={name}", f"--run.root={root}"]
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    (written,) = set(root.glob("vit/*/results.json")) - before
    results = json.loads(written.read_text())
    return {
        "accuracy": results["metrics"]["test/accuracy"],
        "parameters": results["parameters"],
        "seconds": seconds,
        "pairs": _pairs(name),
    }


def _pairs(name: str) -> float:
    """Share of the 64 x 64 pairs that have a weight, over four heads of random queries and keys."""
    module = construct(CATALOGUE[name], 4, 16, **SITE).eval()
    q, k = torch.randn(2, 1, 4, 64, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights = attention_map(module, q, q if module.traits.shared_qk else k, Mask())
    return weights.count_nonzero().item() / weights.numel()
