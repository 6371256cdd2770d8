"""`python -m benchmarks`: measures the figure that FIGURE names, as a job that goes on where it was stopped.

ARGS is handed to the figure, as written on a shell line.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import (
    cifar,
    cifar_mechanisms,
    digits,
    diversity,
    ett,
    forecasting,
    head_costs,
    head_diversity,
    head_events,
    head_revival,
    heads,
    importing,
    logging_cost,
    long_lookback,
    mechanisms,
    multi30k,
    number_words,
    peers,
    records,
    ridge,
    scaling,
    speed,
    torture,
    translation,
    vision,
    which_attention,
)
from experiments.training.usage import nearest


class Figure(NamedTuple):
    """A figure that can be measured.

    Attributes:
        measure: function of the folder for its pieces and of the words of ARGS; returns the exit status.
        about: what it measures, and how long that takes.
        recorded: patterns of the files in that folder which are kept in git, see `records`; of long jobs alone.
    """

    measure: Callable[[Path, list[str]], int]
    about: str
    recorded: tuple[str, ...] = ()


FIGURES: dict[str, Figure] = {
    "digits": Figure(digits.measure, "ViT and a support vector machine on the same five splits: about 5 minutes"),
    "speed": Figure(speed.measure, "time and memory of every mechanism by length, as `make bench`: about an hour"),
    "peers": Figure(peers.measure, "speed against what others wrote, same sizes and masks: about 15 minutes"),
    "mechanisms": Figure(mechanisms.measure, "every mechanism in `vit` on 64 pixels: about 20 minutes"),
    "vision": Figure(vision.measure, "a training step against timm and vit-pytorch, and the wait for data: 5 minutes"),
    "cifar": Figure(cifar.measure, "the presets for CIFAR-10 on a CPU, whole: many hours, in pieces", ("*.json",)),
    "cifar-mechanisms": Figure(
        cifar_mechanisms.measure, "every mechanism on CIFAR-10, two epochs: hours, in pieces", ("*.json",)
    ),
    "numbers": Figure(number_words.measure, "both translators on number words, three seeds: about 10 minutes"),
    "translation": Figure(
        translation.measure, "training against torch's Transformer, beam search with a cache: 5 minutes"
    ),
    "multi30k": Figure(
        multi30k.measure, "both translators on Multi30k: many hours, in pieces that go on", ("*/tested.json",)
    ),
    "diversity": Figure(diversity.measure, "what head diversity adds to a training step: about 5 minutes"),
    "which-attention": Figure(
        which_attention.measure,
        "five tasks, every mechanism, three seeds: about ten hours, in pieces",
        (
            "steps/*/*/results.json",
            "steps/sweeps/*/plan.json",
            "equal-time/*/*/*/results.json",
            "timed/*.json",
        ),
    ),
    "head-diversity": Figure(
        head_diversity.measure, "does it help to keep heads different: about four hours, in pieces", ("*/judged.json",)
    ),
    "head-monitor": Figure(head_costs.measure, "what it costs to watch heads: about 3 minutes"),
    "head-events": Figure(head_events.measure, "the loss when heads of `vit` begin anew: about 2 minutes"),
    "head-revival": Figure(head_revival.measure, "do heads that begin anew live: about 5 minutes, in pieces"),
    "planted-heads": Figure(heads.measure, "degenerate heads that were planted, found again: about 2 minutes"),
    "forecasting": Figure(
        forecasting.measure, "a step against PatchTST, and mechanisms on 4,096 tokens: about 5 minutes"
    ),
    "long-lookback": Figure(
        long_lookback.measure, "error and time on 4,096 point tokens: about an hour, in pieces", ("*.json",)
    ),
    "ridge": Figure(ridge.measure, "the closed-form ridge on ETT, fixed lookback and by validation: about 5 minutes"),
    "ett": Figure(
        ett.measure,
        "the forecaster on ETT, four horizons, three seeds: about four hours, in pieces",
        ("*/tested.json",),
    ),
    "logging": Figure(logging_cost.measure, "what a step waits for `metrics.csv` and W&B: about 3 minutes"),
    "scaling": Figure(scaling.measure, "two processes of one thread against one: about 3 minutes"),
    "torture": Figure(torture.measure, "runs killed, cut off and starved, as `make torture`: about 20 minutes"),
    "import": Figure(importing.measure, "time of `import attnzoo` against `import torch`: about a minute"),
}


def main(figure: str, arguments: list[str]) -> int:
    """Measures a figure; returns the exit status."""
    if figure not in FIGURES:
        wrong = f"FIGURE={figure} is none." if figure else "Name a figure: make reproduce FIGURE=digits"
        print(f"error: {wrong}{nearest(figure, FIGURES)}", file=sys.stderr)
        for name, known in FIGURES.items():
            print(f"  {name:<12}{known.about}", file=sys.stderr)
        return 2
    asked = FIGURES[figure]
    folder, record = Path("runs") / "figures" / figure, Path("benchmarks") / "records" / f"{figure}.jsonl"
    try:
        if count := records.restore(record, folder):
            print(f"taken over from {record}: {count} files; without that file all is measured anew")
        try:
            return asked.measure(folder, arguments)
        finally:
            records.keep(record, folder, asked.recorded)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(os.environ.get("FIGURE", ""), shlex.split(os.environ.get("ARGS", ""))))
