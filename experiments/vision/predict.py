"""Using a trained classifier on a picture."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.training.exporting import beside
from experiments.training.finding import newest_finished
from experiments.training.options import call
from experiments.training.writing import PICTURES, check_writable, write_figure
from experiments.vision.classifier import PictureClassifier
from experiments.vision.drawing import attention_figures
from experiments.vision.network import VisionTransformer
from experiments.vision.pictures import scale_pixels


def classify(argv: list[str]) -> int:
    """Names what is in a picture. Arguments: see ``_classify``."""
    return call(_classify, argv, "python -m experiments classify")


def _classify(image: str, ckpt: str | None = None, top: int = 5, invert: bool = False, out: str | None = None) -> int:
    """Name what is in a picture, and draw what the model attended to.

    Args:
        image: file of the picture, in any format; resized to what the model was trained on.
        ckpt: checkpoint; the best one of the newest finished vision run if null.
        top: how many classes to print.
        invert: swap dark and light first, for dark ink on white paper where training had light on dark.
        out: file of the attention picture (.png, .pdf, .svg, .jpg); in the run's classified/ if null.
    """
    if out is not None and Path(out).suffix.lower() not in PICTURES:
        raise ValueError(f"--out={out}: the attention picture is written as one of {', '.join(PICTURES)}")
    if top < 1:
        raise ValueError(f"--top is {top}; it must be at least 1.")
    path = Path(ckpt) if ckpt else newest_finished(["vision"])
    model = PictureClassifier.from_checkpoint(path)
    assert model.facts is not None
    pixels = model.read(image)
    pixels = 255 - pixels if invert else pixels
    target = Path(out) if out else beside(path, "classified") / f"{Path(image).stem}-attention.png"
    check_writable(target, "--out")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    note = _brightness(scale_pixels(pixels).mean().item(), model.facts["mean"], invert)
    if note:
        console.print(note)
    probabilities = model.predict(pixels)
    shown = os.fsencode(image).decode(errors="replace")  # a name of a file need not be UTF-8, what is printed must
    console.print(f"{shown}, by {path}")
    table = Table("class", "probability", box=None)
    best = probabilities.topk(min(top, len(probabilities)))
    for share, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        table.add_row(Text(model.facts["classes"][number]), f"{share:.4f}")
    console.print(table)
    if not isinstance(model.network, VisionTransformer):
        console.print("attention: no picture, which only a network of this project gives")
        return 0
    title = f"{Path(shown).name}: {model.answer(pixels)}"
    figures = attention_figures(model.network, scale_pixels(pixels)[None], title)
    for figure in figures.values():
        write_figure(target, figure, "--out", dpi=120)
        console.print(f"attention: {target}")
    return 0


def _brightness(light: float, means: list[float], inverted: bool) -> str:
    """A note where dark and light seem to be swapped, compared with training."""
    usual = sum(means) / len(means)
    if abs(1 - light - usual) + 0.2 >= abs(light - usual):
        return ""
    what = f"the picture is {'lighter' if light > usual else 'darker'} (mean {light:.2f}) than those of training"
    cure = "leave --invert out" if inverted else "--invert=true (make: INVERT=true) swaps dark and light"
    return f"note: {what} ({usual:.2f}), so do not trust what follows; {cure}"
