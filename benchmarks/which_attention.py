"""Which attention for which task? Five tasks, every mechanism that fits, three seeds, and equal time: a resumable job.

First equal steps: the sweep of each preset, a whole seed of all tasks before the next one. Then equal time: the five
with the quickest steps, measured in turn in one process, for as many steps as take the time of those of plain Softmax.
docs/studies/which-attention.md says what is asked and how it is judged.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks import runs
from benchmarks.plots import quality
from benchmarks.steps import step_times
from experiments.comparing import files
from experiments.comparing.grouping import BASELINE
from experiments.comparing.judging import difference, half_width
from experiments.comparing.reading import SCORE
from experiments.training.tables import show_table

TASKS = ("vit", "translator", "translator-bahdanau", "forecaster", "listops")
SEEDS = 3
FASTEST = 5


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains what is missing, for at most --minutes; writes tables and a picture of what is done."""
    tasks, left = runs.asked("which-attention", __doc__, TASKS, arguments)
    for seed in range(SEEDS):
        for task in tasks:
            if left() == 0 or not sweep(task, seed + 1, folder / "steps", left()):
                return report(folder)
            if not equal_time(task, seed, folder, left):
                return report(folder)
    return report(folder)


def sweep(task: str, seeds: int, root: Path, minutes: float) -> bool:
    """Runs what is left of the sweep of a preset over attention; whether it came to its end."""
    words = [f"--config={task}", f"--seeds={seeds}", f"--run.root={root}", "--run.wandb=false", "--run.samples=0"]
    process = subprocess.Popen([sys.executable, "-m", "experiments", "sweep", *words])
    try:
        status = process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        process.wait()
        return False
    if status == 128 + signal.SIGTERM:
        return False
    if status not in (0, 1):  # 1: a run failed, which is a row of the sweep
        raise ValueError(f"the sweep of {task} ended with exit status {status}; what it said stands above")
    return True


def equal_time(task: str, seed: int, folder: Path, left: Callable[[], float]) -> bool:
    """Trains the fastest mechanisms of a task for the time of the baseline; whether all are done.

    How fast a step is, is measured once, so that all seeds have the same number of steps.
    """
    done = {run.results["mechanism"]: run for run in finished(folder / "steps" / task) if run.results["seed"] == 0}
    if BASELINE not in done:
        raise ValueError(f"{task}: {BASELINE} has no finished run to take the time of; see {folder / 'steps'}")
    checkpoints = {name: run.path / "checkpoints" / "best.ckpt" for name, run in done.items()}
    times = step_times(checkpoints, folder / "timed" / f"{task}.json")
    for name, steps in budgets(done[BASELINE].results["steps"], times).items():
        words = trial_words(folder / "steps" / "sweeps" / files.find(task, "attention").stem, name, seed)
        root = folder / "equal-time" / f"{task}-{name}-{seed}"
        longer = [f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1", "--run.wandb=false", "--run.samples=0"]
        if left() == 0 or runs.train(task, root, [*words, *longer], minutes=left()) is None:
            return False
    return True


def budgets(steps: int, times: dict[str, float]) -> dict[str, int]:
    """Steps of the fastest mechanisms in the time that those of the baseline take: name -> steps.

    Example:
        >>> budgets(100, {"Softmax": 3.0, "Local": 2.0})
        {'Local': 150}
    """
    quickest = sorted((each, name) for name, each in times.items())[:FASTEST]
    return {name: round(steps * times[BASELINE] / each) for each, name in quickest if name != BASELINE}


def trial_words(notes: Path, mechanism: str, seed: int) -> list[str]:
    """Options by which the sweep whose notes lie in a folder trains a mechanism."""
    trials = json.loads((notes / "plan.json").read_text(encoding="utf-8"))["trials"]
    (words,) = (trial["words"] for trial in trials if trial["label"] == mechanism and trial["seed"] == seed)
    return [word for word in words if not word.startswith(("--config=", "--run."))]


class Finished(NamedTuple):
    """A run that came to its end. Of one that another machine measured there is nothing but this.

    Attributes:
        path: its folder.
        results: `results.json`.
    """

    path: Path
    results: dict[str, Any]

    @property
    def score(self) -> float | None:
        """`test/primary`, larger is better; None where it was not measured or is no number."""
        value: float | None = self.results["metrics"].get(SCORE)
        return value if value is not None and math.isfinite(value) else None


def finished(folder: Path) -> list[Finished]:
    """Finished runs in a folder; none where none was begun."""
    found = (Finished(file.parent, json.loads(file.read_text("utf-8"))) for file in folder.glob("**/results.json"))
    return sorted(run for run in found if run.results["status"] == "finished")


def rows_of(task: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables of a task, "steps" and "seconds": a row for each mechanism, the best mean first.

    The runs of the baseline are the same in both. How long a step takes is known once it was measured in turn.
    """
    timed = folder / "timed" / f"{task}.json"
    times = json.loads(timed.read_text(encoding="utf-8"))["ms"] if timed.is_file() else {}
    equal_steps = finished(folder / "steps" / task)
    longer = [run for place in sorted(folder.glob(f"equal-time/{task}-[A-Z]*")) for run in finished(place)]
    same = [run for run in equal_steps if run.results["mechanism"] == BASELINE]
    return {"steps": _rows(equal_steps, times), "seconds": _rows([*longer, *same] if longer else [], times)}


def _rows(found: list[Finished], times: dict[str, float]) -> list[dict[str, Any]]:
    by_name: dict[str, dict[int, Finished]] = {}
    for run in found:
        if run.score is not None:
            by_name.setdefault(run.results["mechanism"], {})[run.results["seed"]] = run
    scores = {name: {seed: run.score or 0.0 for seed, run in own.items()} for name, own in by_name.items()}
    rows = []
    for name, own in by_name.items():
        against = None if name == BASELINE else difference(scores[name], scores.get(BASELINE, {}))
        results = [run.results for run in own.values()]
        rows.append({
            "mechanism": name, "seeds": len(own), "score": statistics.mean(scores[name].values()),
            "scores": [*scores[name].values()],
            "half_width": half_width(list(scores[name].values())),
            "difference": against._asdict() if against else None,
            "pairs": results[0]["visible_pairs"], "parameters": results[0]["parameters"], "steps": results[0]["steps"],
            "step_ms": times.get(name), "commits": sorted({str(row["commit"]) for row in results}),
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["score"], reverse=True)


def report(folder: Path) -> int:
    """Writes and prints what is done."""
    tables = {task: rows_of(task, folder) for task in TASKS}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    (folder / "tables.md").write_text(markdown(tables, folder), encoding="utf-8")
    timed = {task: [row for row in made["steps"] if row["step_ms"]] for task, made in tables.items()}
    if any(timed.values()):
        quality({task: rows for task, rows in timed.items() if rows}, folder / "quality.png")
    for task, made in tables.items():
        for kind, rows in made.items():
            if rows:
                table = Table(*HEADS, title=f"{task}, equal {kind}", title_justify="left")
                for row in rows:
                    table.add_row(*cells(row))
                show_table(table)
    print(progress(tables, folder))
    return 0


HEADS = (
    "mechanism",
    "pairs",
    "seeds",
    "test/primary",
    "difference",
    "p",
    "parameters",
    "steps",
    "ms a step",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of a table; the interval of the mean by Student's t, p of a paired t test on the same seeds."""
    places = max(4, 3 - math.floor(math.log10(abs(row["score"]) or 1.0)))  # four digits of a small error, too
    width = "" if row["half_width"] is None else f" ±{row['half_width']:.{places}f}"
    found = row["difference"]
    gap, p = ("", "") if found is None else (f"{found['mean']:+.{places}f}", found["p"])
    return [
        row["mechanism"], "" if row["pairs"] is None else f"{row['pairs']:.0%}", str(row["seeds"]),
        f"{row['score']:.{places}f}{width}", gap, p if isinstance(p, str) else "" if p is None else f"{p:.3f}",
        f"{row['parameters']:,}", str(row["steps"]), "" if row["step_ms"] is None else f"{row['step_ms']:.1f}",
    ]  # fmt: skip


def markdown(tables: dict[str, dict[str, list[dict[str, Any]]]], folder: Path) -> str:
    """The tables of the page."""
    lines = [progress(tables, folder), ""]
    for task, made in tables.items():
        for kind, rows in made.items():
            if rows:
                commits = ", ".join(sorted({commit for row in rows for commit in row["commits"]}))
                lines += [f"`{task}`, equal {kind}, commit {commits}:", ""]
                lines += [f"| {' | '.join(HEADS)} |", "|---" + "|---:" * (len(HEADS) - 1) + "|"]
                lines += [f"| {' | '.join(cells(row))} |" for row in rows] + [""]
    return "\n".join(lines)


def progress(tables: dict[str, dict[str, list[dict[str, Any]]]], folder: Path) -> str:
    """How many runs are done, of how many, task by task. How many fit a task is known once its sweep has begun."""
    parts: list[str] = []
    for task, made in tables.items():
        plan = folder / "steps" / "sweeps" / files.find(task, "attention").stem / "plan.json"
        if not plan.is_file():
            parts.append(f"{task} not begun")
            continue
        fitting = {trial["label"] for trial in json.loads(plan.read_text(encoding="utf-8"))["trials"]}
        longer = sum(row["seeds"] for row in made["seconds"] if row["mechanism"] != BASELINE)
        done = f"{sum(row['seeds'] for row in made['steps'])} of {SEEDS * len(fitting)} runs of equal steps"
        parts.append(f"{task} {done}, {longer} of equal time")
    return f"Done: {'; '.join(parts)}."
