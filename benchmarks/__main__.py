"""`python -m benchmarks`: measures the figure that FIGURE names, as a job that goes on where it was stopped.

ARGS is handed to the figure, as written on a shell line.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

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
    ridge,
    scaling,
    speed,
    torture,
    translation,
    vision,
    which_attention,
)
from experiments.training.usage import nearest

FIGURES: dict[str, tuple[Callable[[Path, list[str]], int], str]] = {
    "digits": (digits.measure, "ViT and a support vector machine on the same five splits: about 5 minutes"),
    "speed": (speed.measure, "time and memory of every mechanism by length, as `make bench`: about an hour"),
    "peers": (peers.measure, "speed against what others wrote, same sizes and masks: about 15 minutes"),
    "mechanisms": (mechanisms.measure, "every mechanism in `vit` on 64 pixels: about 20 minutes"),
    "vision": (vision.measure, "a training step against timm and vit-pytorch, and the wait for data: 5 minutes"),
    "cifar": (cifar.measure, "the presets for CIFAR-10 on a CPU, whole: many hours, in pieces"),
    "cifar-mechanisms": (cifar_mechanisms.measure, "every mechanism on CIFAR-10, two epochs: hours, in pieces"),
    "numbers": (number_words.measure, "both translators on number words, three seeds: about 10 minutes"),
    "translation": (translation.measure, "training against torch's Transformer, beam search with a cache: 5 minutes"),
    "multi30k": (multi30k.measure, "both translators on Multi30k: many hours, in pieces that go on"),
    "diversity": (diversity.measure, "what head diversity adds to a training step: about 5 minutes"),
    "which-attention": (
        which_attention.measure,
        "five tasks, every mechanism, three seeds: about ten hours, in pieces",
    ),
    "head-diversity": (head_diversity.measure, "does it help to keep heads different: about four hours, in pieces"),
    "head-monitor": (head_costs.measure, "what it costs to watch heads: about 3 minutes"),
    "head-events": (head_events.measure, "the loss when heads of `vit` begin anew: about 2 minutes"),
    "head-revival": (head_revival.measure, "do heads that begin anew live: about 5 minutes, in pieces"),
    "planted-heads": (heads.measure, "degenerate heads that were planted, found again: about 2 minutes"),
    "forecasting": (forecasting.measure, "a step against PatchTST, and mechanisms on 4,096 tokens: about 5 minutes"),
    "long-lookback": (long_lookback.measure, "error and time on 4,096 point tokens: about an hour, in pieces"),
    "ridge": (ridge.measure, "the closed-form ridge on ETT, fixed lookback and by validation: about 5 minutes"),
    "ett": (ett.measure, "the forecaster on ETT, four horizons, three seeds: about four hours, in pieces"),
    "logging": (logging_cost.measure, "what a step waits for `metrics.csv` and W&B: about 3 minutes"),
    "scaling": (scaling.measure, "two processes of one thread against one: about 3 minutes"),
    "torture": (torture.measure, "runs killed, cut off and starved, as `make torture`: about 20 minutes"),
    "import": (importing.measure, "time of `import attnzoo` against `import torch`: about a minute"),
}
"""Figure -> (function of the folder for its pieces and of the words of ARGS, what it measures)."""


def main(figure: str, arguments: list[str]) -> int:
    """Measures a figure; returns the exit status."""
    if figure not in FIGURES:
        wrong = f"FIGURE={figure} is none." if figure else "Name a figure: make reproduce FIGURE=digits"
        print(f"error: {wrong}{nearest(figure, FIGURES)}", file=sys.stderr)
        for name, (_, text) in FIGURES.items():
            print(f"  {name:<12}{text}", file=sys.stderr)
        return 2
    try:
        return FIGURES[figure][0](Path("runs") / "figures" / figure, arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(os.environ.get("FIGURE", ""), shlex.split(os.environ.get("ARGS", ""))))
