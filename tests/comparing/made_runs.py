"""Run folders made up for tests: files as `fit` writes them, with scores that the test chooses."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, ImageDraw


def make_run(
    root: Path,
    mechanism: str = "Softmax",
    score: float | None = 0.9,
    *,
    seed: int = 0,
    preset: str = "vit",
    status: str = "finished",
    attention: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
    name: str = "",
    columns: dict[str, float] | None = None,
    steps: int = 40,
    picture: bool = False,
) -> Path:
    """One folder under `root/preset`, with the next number."""
    parent = root / preset
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(parent.iterdir()))
    folder = parent / f"{number:04d}-{name or f'{mechanism.lower()}-seed{seed}'}"
    folder.mkdir()
    spec = {"class_path": f"attnzoo.{mechanism}", "init_args": {"dropout": 0.0, **(attention or {})}}
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": 2, **(trainer or {})},
        "model": {"class_path": "experiments.vision.ImageClassifier",
                  "init_args": {"attention": spec, "dim": 64, "hidden_dim": None, **(model or {})}},
        "data": {"class_path": "experiments.vision.ImageData", "init_args": {"batch_size": 64}},
        "run": {"root": str(root), "preset": preset, "name": name or None},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    content = {
        "preset": preset, "task": "vision", "mechanism": mechanism, "seed": seed, "status": status, "seconds": 12.5,
        "steps": steps, "epochs": 2, "parameters": 119178, "peak_memory_mib": 600.0 + 10 * number,
        "step_ms": 20.0 + number,
        "flops_per_sample": 4e6, "visible_pairs": 0.3 if mechanism == "Local" else 1.0,
        "metrics": {"test/primary": score, "test/accuracy": score} if status == "finished" else {},
        **(results or {}),
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(content))
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["step", "epoch", "train/loss", "val/primary", *(columns or {})])
        rows.writeheader()
        for step in range(1, steps + 1):
            row: dict[str, Any] = {
                "step": step,
                "epoch": 0,
                "train/loss": 2.3 * math.exp(-step / 20) + 0.01 * (step % 3),
            }
            if step % 10 == 0:
                row |= {"val/primary": (score or 0.5) * (1 - math.exp(-step / 10)), **(columns or {})}
            rows.writerow(row)
    if picture:
        drawn = Image.new("RGB", (900, 700), "white")
        ImageDraw.Draw(drawn).ellipse([40 + 3 * number, 40, 600, 500], fill=(20 * number % 255, 80, 160))
        (folder / "figures").mkdir()
        drawn.save(folder / "figures" / "attention.png")
    return folder


def fifty(root: Path) -> None:
    """Ten mechanisms in four seeds with pictures, another preset, and what did not finish."""
    names = ("Softmax", "Flash", "Local", "Linear", "Performer", "Linformer", "Nystrom", "LSH", "MoBA", "Strided")
    for place, mechanism in enumerate(names):
        for seed in range(4):
            score = 0.95 - 0.01 * place + 0.004 * ((seed * 7 + place) % 4)
            size = {"window": 5} if mechanism == "Local" else None
            make_run(
                root, mechanism, score, seed=seed, attention=size, picture=True, steps=400, columns={"heads/dead": 1.0}
            )
    for seed in range(4):
        make_run(root, "Additive", 0.8 + 0.01 * seed, seed=seed, preset="forecaster")
        make_run(root, "Softmax", 0.7 + 0.02 * seed, seed=seed, preset="forecaster")
    make_run(root, "Axial", None, status="stopped")
    make_run(root, "Axial", None, status="failed", seed=1)
