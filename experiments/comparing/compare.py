"""The command `compare`: a table of runs in the terminal, and a page that shows them side by side."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.comparing.grouping import Group, Variant, groups
from experiments.comparing.judging import difference, half_width
from experiments.comparing.reading import Run, find
from experiments.training import options
from experiments.training.tables import show_table

ALL_PAIRS = 0.9
"""From this share of the pairs on a mechanism is marked: it is no cheaper form of attention here."""

MARK = "●"

MAJORITY = "majority class (no model)"

LEGEND = (
    f"{MARK} more than {ALL_PAIRS:.0%} of the pairs of query and key have a weight. "
    "± half of the 95 % interval of the mean over seeds, by Student's t. "
    "Difference from the plain Softmax with the same other options, or else from the baseline, on the same seeds; p of "
    "a paired t test, not corrected for how many rows are looked at. FLOPs: matrix products of a forward pass, counted "
    "by torch, for one sample or token. Memory: the largest of the whole process."
)


class Cell(NamedTuple):
    """What stands in a table, and what it is sorted by."""

    text: str
    value: float | str | None


HEADS = (
    "model", "seeds", "test/primary", "difference", "p", "pairs", "parameters", "MFLOPs", "ms a step", "MiB", "epochs",
)  # fmt: skip


def compare(argv: list[str]) -> int:
    """The command; see `show`."""
    return options.call(show, argv, "python -m experiments compare")


def show(runs: str = "runs/*/*", out: str | None = None) -> int:
    """Prints a table of runs and writes a page about them.

    Args:
        runs: which run folders, as a glob pattern.
        out: the page; runs/compare.html where not given.
    """
    from experiments.comparing.page import write

    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    found = groups(find(runs, say))
    for group in found:
        show_table(table(group))
        for line in notes(group):
            console.print(line, markup=False)
    console.print(f"\n{LEGEND}", markup=False)
    path = Path(out) if out is not None else Path("runs", "compare.html")
    write(found, path, say)
    console.print(f"\npage  {path}  ({path.stat().st_size / 2**20:.1f} MiB, opens without a network)", soft_wrap=True)
    return 0


def table(group: Group) -> Table:
    """As `rows` has them."""
    made = Table(title=Text(group.title), title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column(HEADS[0])
    for head in HEADS[1:]:
        made.add_column(head, justify="right")
    for row in rows(group):
        made.add_row(*(Text(cell.text) for cell in row))
    return made


def rows(group: Group) -> list[list[Cell]]:
    """A row for each variant, and for the most frequent answer where a task scores it; the best first."""
    found = [cells(variant, group) for variant in group.variants]
    metrics = [run.results["metrics"] for variant in group.variants for run in variant.runs.values()]
    scores = [score for each in metrics if (score := each.get("test/majority")) is not None]
    if scores:
        score, none = statistics.fmean(scores), Cell("", None)
        found.append([Cell(MAJORITY, MAJORITY), none, Cell(f"{score:.4f}", score), *[none] * (len(HEADS) - 3)])
    return sorted(found, key=_score, reverse=True)


def _score(row: list[Cell]) -> float:
    value = row[HEADS.index("test/primary")].value
    return value if isinstance(value, int | float) else -math.inf


def notes(group: Group) -> list[str]:
    """What the table does not show: runs not finished or repeated, a missing baseline."""
    lines = [f"{len(runs)} {status}: {_names(runs)}" for status, runs in sorted(group.open.items())]
    older = [run for variant in group.variants for run in variant.older]
    if older:
        lines.append(f"{len(older)} left out, for a newer one has the same options and seed: {_names(older)}")
    without = [run for variant in group.variants for run in variant.runs.values() if run.score is None]
    if without:
        lines.append(f"{len(without)} without a score (no number), which no mean contains: {_names(without)}")
    if group.baseline is None and group.variants:
        lines.append("No run with Softmax to compare with.")
    return lines


def cells(variant: Variant, group: Group) -> list[Cell]:
    """A row, in the order of `HEADS`."""
    scores, count = list(variant.scores.values()), len(variant.runs)
    mean = sum(scores) / len(scores) if scores else None
    width = half_width(scores)
    pairs = variant.mean("visible_pairs")
    flops = variant.flops
    score = "" if mean is None else f"{mean:.4f}" + ("" if width is None else f" ±{width:.4f}")
    against, other = None, group.against(variant)
    if other is not None and variant is not other:
        against = difference(variant.scores, other.scores)
    gap = f"{against.mean:+.4f}" if against else ("baseline" if variant is group.baseline else "")
    p = None if against is None else against.p
    return [
        Cell(f"{variant.label} {MARK}" if pairs is not None and pairs > ALL_PAIRS else variant.label, variant.label),
        Cell(str(len(scores)) if len(scores) == count else f"{len(scores)} of {count}", len(scores)),
        Cell(score, mean),
        Cell(gap, against.mean if against else None),
        Cell("" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001", p),
        Cell("" if pairs is None else f"{pairs:.0%}", pairs),
        _number(variant.mean("parameters"), ",.0f"),
        _number(None if flops is None else flops / 1e6, ",.3g"),
        _number(variant.mean("step_ms"), ",.1f"),
        _number(variant.mean("peak_memory_mib"), ",.0f"),
        _number(variant.mean("epochs"), ".0f"),
    ]


def _names(runs: list[Run]) -> str:
    return ", ".join(run.name for run in runs[:3]) + (", ..." if len(runs) > 3 else "")


def _number(value: float | None, form: str) -> Cell:
    return Cell("" if value is None else f"{value:{form}}", value)
