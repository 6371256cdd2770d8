"""`python -m benchmarks`: measures the figure that FIGURE names, as a job that goes on where it was stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import digits, importing
from experiments.training.usage import nearest

FIGURES: dict[str, tuple[Callable[[Path], int], str]] = {
    "digits": (digits.measure, "ViT and a support vector machine on the same five splits: about 5 minutes"),
    "import": (importing.measure, "time of `import attnzoo` against `import torch`: about a minute"),
}
"""Figure -> (function of the folder for its pieces, what it measures)."""


def main(figure: str) -> int:
    """Measures a figure; returns the exit status."""
    if figure not in FIGURES:
        wrong = f"FIGURE={figure} is none." if figure else "Name a figure: make reproduce FIGURE=digits"
        print(f"error: {wrong}{nearest(figure, FIGURES)}", file=sys.stderr)
        for name, (_, text) in FIGURES.items():
            print(f"  {name:<10}{text}", file=sys.stderr)
        return 2
    return FIGURES[figure][0](Path("runs") / "figures" / figure)


if __name__ == "__main__":
    sys.exit(main(os.environ.get("FIGURE", "")))
