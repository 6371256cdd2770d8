"""The embedded default of the translator: exact match, length generalisation, and where the attention looks."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

import experiments
from benchmarks import runs
from benchmarks.machine import machine
from experiments.training.loggers import read_rows
from experiments.training.tables import show_table
from experiments.translation.alignment import agreement, align
from experiments.translation.numbers import alignment, sets

PRESETS = ("translator", "translator-bahdanau")
SEEDS = range(3)


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains both networks for three seeds; a run of another commit does not count."""
    argparse.ArgumentParser(prog="make reproduce FIGURE=numbers").parse_args(arguments)  # takes none
    here = machine()
    table = Table("network", "seed", "exact match", "longest forms", "right word", "within one", "steps", "seconds")
    rows = []
    for preset in PRESETS:
        for seed in SEEDS:
            piece = folder / str(here["commit"]) / f"{preset}-{seed}"
            done = runs.train(preset, piece, [f"--seed_everything={seed}"])
            assert done is not None
            place = Path(done["folder"])
            found = word_agreement(place / "checkpoints" / "best.ckpt")
            longest = runs.test(place, [f"--config={preset}", "--data.test=long"])["test/exact_match"]
            exact = done["metrics"]["test/exact_match"]
            rows.append({
                "preset": preset, "seed": seed, "exact_match": exact, "long_exact_match": longest, **found,
                "steps": done["steps"], "seconds": done["seconds"], "wall": done["wall"], "learned": learned(place),
            })  # fmt: skip
            shares = (f"{value:.2%}" for value in (exact, longest, found["exact"], found["near"]))
            table.add_row(preset, str(seed), *shares, str(done["steps"]), f"{done['wall']:.0f}")
    show_table(table)
    show_table(equal_work(rows))
    means = {p: statistics.mean(row["exact_match"] for row in rows if row["preset"] == p) for p in PRESETS}
    (folder / "result.json").write_text(json.dumps({"means": means, "rows": rows, "machine": here}, indent=2) + "\n")
    return 0


class Learned(NamedTuple):
    """What a run knew: after so many steps, of so many seconds of training in all, exact match in validation."""

    step: int
    seconds: float
    exact_match: float


def learned(folder: Path) -> list[Learned]:
    """Every validation of a run; time is that of the steps, without validation."""
    found, steps, seconds = [], 0, 0.0
    for row in read_rows(folder / "metrics.csv"):
        if row.get("val/exact_match"):
            step = int(row["step"])
            seconds += (step - steps) * float(row["throughput/step_ms"]) / 1000
            steps = step
            found.append(Learned(step, seconds, float(row["val/exact_match"])))
    return found


def equal_work(rows: list[dict[str, Any]]) -> Table:
    """Exact match in validation, mean over seeds, after the same steps and within the same seconds of training."""
    runs_of = {preset: [row["learned"] for row in rows if row["preset"] == preset] for preset in PRESETS}
    table = Table("work", *PRESETS, title="exact match in validation at equal work")

    def mean(preset: str, least: Callable[[Learned], bool]) -> str:
        known = [max((each.exact_match for each in run if least(each)), default=0.0) for run in runs_of[preset]]
        return f"{statistics.mean(known):.3f}"

    for step in sorted({each.step for run in runs_of[PRESETS[0]] for each in run}):
        table.add_row(f"{step} steps", *(mean(preset, lambda each: each.step <= step) for preset in PRESETS))  # noqa: B023
    slowest = max(each.seconds for found in runs_of.values() for run in found for each in run)
    for seconds in range(10, int(slowest) + 10, 10):
        table.add_row(f"{seconds} s", *(mean(preset, lambda each: each.seconds <= seconds) for preset in PRESETS))  # noqa: B023
    return table


def word_agreement(checkpoint: Path) -> dict[str, float]:
    """How often the most read English word is the right one, over the German words of the 1,000 test numbers.

    The German words are given one by one; "und" stands for no English word and is left out.
    """
    model = experiments.load(checkpoint)
    pairs = [alignment(number) for number in sets()["test"]]
    sources = model.coded([" ".join(pair.english) for pair in pairs])  # type: ignore[attr-defined]
    targets = model.target_vocabulary.encode([" ".join(pair.german) for pair in pairs])  # type: ignore[attr-defined]
    return agreement(align(model, sources, targets), [pair.source for pair in pairs])  # type: ignore[arg-type]
