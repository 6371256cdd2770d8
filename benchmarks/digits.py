"""The preset `vit` against a support vector machine, on the same five stratified random splits of the digits.

Both get the same four fifths; the ViT sets a tenth of them aside to choose its checkpoint, the SVM chooses its two
options by five-fold cross-validation within them. Neither sees the test fifth before it is judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

from benchmarks.machine import machine
from experiments.training.tables import show_table
from experiments.vision import ImageData

SEEDS = range(5)
GRID = {"C": [1, 3, 10, 30], "gamma": [0.5, 1, 2, 4, 8]}
"""Gamma is divided by the 64 pixels, which run from 0 to 1."""


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is still missing for this commit, prints both beside each other, writes `result.json`."""
    argparse.ArgumentParser(prog="make reproduce FIGURE=digits").parse_args(arguments)  # takes none
    here = machine()
    rows = []
    for seed in SEEDS:
        piece = folder / f"seed{seed}.json"
        # Of changed code nothing is known to be the same.
        clean = here["commit"] is not None and not here["commit"].endswith("+")
        if not piece.is_file() or not clean or json.loads(piece.read_text())["commit"] != here["commit"]:
            piece.parent.mkdir(parents=True, exist_ok=True)
            svm, pictures = _svm(seed)
            vit = _vit(folder, seed, pictures)
            piece.write_text(json.dumps({"commit": here["commit"], "pictures": pictures, "vit": vit, "svm": svm}))
        rows.append(json.loads(piece.read_text()))
    table = Table("seed", "ViT", "RBF SVM", "seconds, whole command", "peak MiB")
    for seed, row in zip(SEEDS, rows, strict=True):
        vit = row["vit"]
        counts = [f"{correct} of {row['pictures']}" for correct in (vit["correct"], row["svm"])]
        table.add_row(str(seed), *counts, f"{vit['wall']:.1f}", f"{vit['peak_memory_mib']:.0f}")
    vit = [row["vit"]["correct"] / row["pictures"] for row in rows]
    svm = [row["svm"] / row["pictures"] for row in rows]
    table.add_row("mean", f"{statistics.mean(vit):.4f}", f"{statistics.mean(svm):.4f}")
    result = {
        "vit_mean": statistics.mean(vit),
        "vit_deviation": statistics.stdev(vit),
        "svm_mean": statistics.mean(svm),
        "longest_command_seconds": max(row["vit"]["wall"] for row in rows),
        "peak_memory_mib": max(row["vit"]["peak_memory_mib"] for row in rows),
        "pieces": rows,
        "machine": here,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    show_table(table)
    return 0


def _vit(folder: Path, seed: int, pictures: int) -> dict[str, Any]:
    root = folder / "runs"
    start = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "-m", "experiments", "fit", "--config=vit"),
            *(f"--seed_everything={seed}", f"--data.split_seed={seed}", f"--run.root={root}"),
        ],
        check=True,
    )
    wall = time.perf_counter() - start
    newest = max(root.glob("vit/*/results.json"), key=lambda path: path.stat().st_mtime)
    results = json.loads(newest.read_text())
    assert results["seed"] == seed
    return {
        # Counts, since the metric is a float32 that hides a tie.
        "correct": round(results["metrics"]["test/accuracy"] * pictures),
        "wall": wall,
        "peak_memory_mib": results["peak_memory_mib"],
    }


def _svm(seed: int) -> tuple[int, int]:
    """Correct, of how many."""
    data = ImageData(split_seed=seed, batch_size=2048)
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    (train,), (val,), (test,) = (list(loader) for loader in loaders)
    pixels, labels = (torch.cat([train[key], val[key]]) for key in ("image", "label"))
    grid = {"C": GRID["C"], "gamma": [gamma / 64 for gamma in GRID["gamma"]]}
    search = GridSearchCV(SVC(kernel="rbf"), grid, cv=5)
    search.fit(_flat(pixels), labels.numpy())
    right = search.predict(_flat(test["image"])) == test["label"].numpy()
    return int(right.sum()), len(right)


def _flat(pixels: torch.Tensor) -> Any:
    return (pixels.flatten(1).float() / 255).numpy()
