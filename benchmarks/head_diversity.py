"""Does it help to keep heads different? Two kinds of term, three weights, three seeds, four presets: a resumable job.

Each run is compared with a control of the same compute, which has the term at a weight of 1e-12: the same numbers are
drawn and computed, and nothing is moved. docs/studies/head-diversity.md says what is asked and how it is judged.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from rich.table import Table

from benchmarks import examples, runs
from benchmarks.examples import Difference
from benchmarks.machine import machine
from experiments.training.tables import show_table

matplotlib.use("Agg")
from matplotlib import pyplot

PRESETS = {
    "vit": [],
    "translator": [],
    "translator-bahdanau": ["--model.num_heads=4"],  # one head cannot differ from itself
    "forecaster": [],
}
KINDS = ("projected", "cka")
WEIGHTS = (0.01, 0.03, 0.1)
SEEDS = range(3)
CONTROL = "control"
CONDITIONS = {CONTROL: ("projected", 1e-12)} | {f"{k}-{weight}": (k, weight) for k in KINDS for weight in WEIGHTS}
LARGE = "translator-multi30k"
LARGE_PAIR = (CONTROL, "projected-0.03")


class Run(NamedTuple):
    """One training."""

    preset: str
    condition: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder, and for --only."""
        return f"{self.preset}-{self.condition}-{self.seed}"

    @property
    def options(self) -> list[str]:
        """Of `fit`."""
        kind, weight = CONDITIONS[self.condition]
        term = [f"--model.head_diversity={weight}", f"--model.head_diversity_kind={kind}"]
        return [*PRESETS.get(self.preset, []), *term, f"--seed_everything={self.seed}", "--run.wandb=false"]


STUDY = [
    *(Run(preset, condition, seed) for seed in SEEDS for preset in PRESETS for condition in CONDITIONS),
    *(Run(LARGE, condition, 0) for condition in LARGE_PAIR),
]
"""All runs, a whole seed before the next one, so that what is done so far can be compared."""


def measure(folder: Path, arguments: list[str]) -> int:
    """Trains and judges what is missing, for at most --minutes; writes tables and pictures of what is done."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=head-diversity", description=__doc__)
    parser.add_argument("--minutes", type=float, default=150.0, help="of this call; the next one goes on (150)")
    parser.add_argument("--only", default="", help="runs whose names begin so, with commas between; all if left out")
    parser.add_argument("--epochs", type=int, help="a trial of so few; it is kept apart from the study")
    options = parser.parse_args(arguments)
    begins = tuple(options.only.split(","))
    chosen = [run for run in STUDY if run.name.startswith(begins)]
    if not chosen:
        parser.error(f"--only: no run begins with {options.only}; they are called {STUDY[0].name} and so on")
    folder = folder if options.epochs is None else folder / f"trial-{options.epochs}-epochs"
    end = time.monotonic() + 60 * options.minutes
    for run in chosen:
        piece = folder / run.name / "judged.json"
        if piece.is_file():
            continue
        left = (end - time.monotonic()) / 60
        fewer = [] if options.epochs is None else [f"--trainer.max_epochs={options.epochs}"]
        done = runs.train(run.preset, piece.parent, [*run.options, *fewer], minutes=left) if left > 0 else None
        if done is None:
            break
        found = examples.measure(Path(done["folder"]) / "checkpoints" / "best.ckpt")
        if run.preset != LARGE:  # only there BLEU is drawn from the texts, and what is kept in git should be small
            found |= {"lines": None, "references": None}
        content = {"run": run._asdict(), "metrics": done["metrics"], "wall": done["wall"], **found}
        piece.write_text(json.dumps(content | {"machine": machine()}) + "\n")
    judged = {run: piece for run in STUDY if (piece := _read(folder / run.name / "judged.json"))}
    rows = compare(judged)
    result = {"done": len(judged), "of": len(STUDY), "rows": rows, "commits": _commits(judged)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "table.md").write_text(markdown(rows, len(judged)))
    if any(row["difference"] is not None for row in rows):
        draw(rows, folder / "differences.png")
    _show(rows)
    trial = "" if options.epochs is None else f" as a trial of {options.epochs} epochs"
    print(f"{len(judged)} of {len(STUDY)} runs are done{trial}")
    return 0


def compare(judged: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each preset and condition: mean score over seeds, likeness, difference to the control."""
    rows = []
    for preset in [*PRESETS, LARGE]:
        for condition in CONDITIONS:
            own = {run.seed: piece for run, piece in judged.items() if run[:2] == (preset, condition)}
            base = {run.seed: piece for run, piece in judged.items() if run[:2] == (preset, CONTROL)}
            shared = sorted(own.keys() & base.keys())
            if not own:
                continue
            row: dict[str, Any] = {
                "preset": preset, "condition": condition, "seeds": sorted(own), "paired_seeds": shared,
                "primary": _mean([piece["metrics"]["test/primary"] for piece in own.values()]),
                "loss": _mean([piece["metrics"]["test/loss"] for piece in own.values()]),
                "alike": {kind: _mean([piece["alike"][kind] for piece in own.values()]) for kind in KINDS},
                "difference": None,
            }  # fmt: skip
            if condition != CONTROL and shared:
                scores = ([piece[seed]["scores"] for seed in shared] for piece in (base, own))
                row["difference"] = examples.difference(*scores, block=own[shared[0]]["block"])._asdict()
                if preset == LARGE:
                    texts = [piece[shared[0]]["lines"] for piece in (base, own)]
                    row["bleu"] = examples.bleu_difference(*texts, own[shared[0]]["references"])
            rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]], done: int) -> str:
    """The table of a page."""
    head = [
        "preset",
        "term",
        "seeds",
        "test/primary",
        "test/loss",
        "difference to the control",
        "p",
        "projected",
        "CKA",
    ]
    lines = [f"{done} of {len(STUDY)} runs measured.", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    for row in rows:
        if "bleu" in row:
            control, treated, p = row["bleu"]
            lines += [
                "",
                f"{row['preset']}: BLEU {control:.2f} without, {treated:.2f} with {row['condition']}, p {p:.3f}",
            ]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    gap, p = "", ""
    if row["difference"] is not None:
        found = Difference(*(round(value, 12) for value in Difference(**row["difference"])))  # 3e-19 is 0
        gap, p = f"{found.mean:+.2g} ({found.low:+.2g} to {found.high:+.2g})", f"{found.p:.3f}"
    likeness = [f"{row['alike'][kind]:.3f}" for kind in KINDS]
    means = [f"{row[key]:.4f}" for key in ("primary", "loss")]
    return [row["preset"], row["condition"], str(len(row["seeds"])), *means, gap, p, *likeness]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Above, the difference to the control by weight with its interval; below, how alike the heads ended."""
    presets = list(dict.fromkeys(row["preset"] for row in rows))
    figure, axes = pyplot.subplots(
        2, len(presets), figsize=(3.2 * len(presets) + 1, 6), layout="constrained", squeeze=False, sharex=True
    )
    places = range(len(WEIGHTS))
    for column, preset in enumerate(presets):
        above, below = axes[:, column]
        own = {row["condition"]: row for row in rows if row["preset"] == preset}
        above.axhline(0, color="grey", linewidth=1)
        for kind, colour, aside in zip(KINDS, ("tab:blue", "tab:orange"), (-0.06, 0.06), strict=True):
            found = {n: own[name] for n, weight in enumerate(WEIGHTS) if (name := f"{kind}-{weight}") in own}
            gaps = {n: Difference(**row["difference"]) for n, row in found.items() if row["difference"] is not None}
            bars = [[gap.mean - gap.low for gap in gaps.values()], [gap.high - gap.mean for gap in gaps.values()]]
            above.errorbar(
                [n + aside for n in gaps], [gap.mean for gap in gaps.values()], bars, fmt="o", color=colour, capsize=3,
                label=f"trained with {kind}",
            )  # fmt: skip
            alike = [row["alike"][kind] for row in found.values()]
            below.plot(list(found), alike, "o-", color=colour, label=f"{kind}, trained with it")
            if CONTROL in own:
                below.axhline(own[CONTROL]["alike"][kind], color=colour, linestyle=":", label=f"{kind}, control")
        above.set_title(preset)
        below.set_xticks(places, [str(weight) for weight in WEIGHTS])
        below.set_xlim(-0.4, len(WEIGHTS) - 0.6)
        below.set_ylim(bottom=0)
        below.set_xlabel("weight")
    axes[0, 0].set_ylabel("score minus control, 95 %")
    axes[1, 0].set_ylabel("how alike the heads are, 0 to 1")
    for axis in axes[:, -1]:
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("preset", "term", "seeds", "test/primary", "test/loss", "difference, 95 %", "p", "projected", "CKA")
    for row in rows:
        table.add_row(*_cells(row))
    show_table(table)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def _commits(judged: dict[Run, dict[str, Any]]) -> list[str]:
    return sorted({str(piece["machine"]["commit"]) for piece in judged.values()})
