"""How well a checkpoint does on each test example, how alike its heads are, and whether two models differ.

One score an example, larger is better: 1 or 0 for a picture or a translation that is right or not, minus the squared
error of a forecast. Models are compared on the same examples, so what makes an example hard counts for neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

import experiments
from attnzoo import DiversityKind, HeadDiversity
from experiments.forecasting.module import Forecaster
from experiments.training import saved, specs
from experiments.training.module import Experiment
from experiments.translation.translator import Translator
from experiments.vision.module import ImageClassifier
from experiments.vision.pictures import scale_pixels

DRAWS = 10_000
"""Of the bootstrap."""


class Judged(NamedTuple):
    """What a model made of its test part.

    Attributes:
        scores: one for each example, in the order of the data.
        lines: the translations, of a translator.
        references: what they should be.
        block: how many neighbours depend on each other, as windows of a series do that overlap.
    """

    scores: list[float]
    lines: list[str] | None = None
    references: list[str] | None = None
    block: int = 1


class Difference(NamedTuple):
    """Of two models, the second minus the first: the mean, its 95 % interval, and a two-sided p value."""

    mean: float
    low: float
    high: float
    p: float


def data_of(checkpoint: Path) -> pl.LightningDataModule:
    """The data that a checkpoint was trained on, with its vocabulary or scale."""
    entry = saved.origin(saved.read(checkpoint))
    data: Any = specs.rebuild(pl.LightningDataModule, entry["data"])
    for name in ("use", "adopt"):
        if hasattr(data, name):
            getattr(data, name)(entry["facts"])
    data.setup("test")
    return data


@torch.no_grad()
def judge(model: Experiment, data: pl.LightningDataModule) -> Judged:
    """Every test example by itself."""
    scores: list[float] = []
    lines: list[str] = []
    references: list[str] = []
    for batch in data.test_dataloader():
        if isinstance(model, ImageClassifier):
            assert model.network is not None
            logits, _ = model.network(scale_pixels(batch["image"]))
            scores += (logits.argmax(-1) == batch["label"]).float().tolist()
        elif isinstance(model, Translator):
            found = [row[0].text for row in model.search(batch["source"])]
            lines, references = [*lines, *found], [*references, *batch["target_text"]]
            scores += [float(line == right) for line, right in zip(found, batch["target_text"], strict=True)]
        else:
            assert isinstance(model, Forecaster) and model.network is not None
            forecast, *_ = model.network(batch["past"], batch["calendar"])
            error = torch.where(batch["known"], (forecast - batch["future"]).square(), 0.0)
            scores += (-error.sum((1, 2)) / batch["known"].sum((1, 2)).clamp(min=1)).tolist()
    block = model.facts["horizon"] if isinstance(model, Forecaster) and model.facts is not None else 1
    return Judged(scores, lines or None, references or None, block)


@torch.no_grad()
def alike(model: Experiment, data: pl.LightningDataModule, kind: DiversityKind, batches: int = 4) -> float:
    """How alike the heads are in evaluation, by ``attnzoo.HeadDiversity``, on the first batches of the test part.

    Raises:
        ValueError: the model was built without head diversity.
    """
    terms = [module for module in model.modules() if isinstance(module, HeadDiversity)]
    if not terms:
        raise ValueError("The model has no HeadDiversity; train it with --model.head_diversity above 0.")
    heard: list[float] = []
    torch.manual_seed(0)
    model.eval()
    hooks = [term.register_forward_hook(lambda term, given, out: heard.append(float(out))) for term in terms]
    for term in terms:
        term.train()
        term.kind = kind
        term.move(1.0)
    for _, batch in zip(range(batches), data.test_dataloader(), strict=False):
        model.step(batch, "val")
    for hook in hooks:
        hook.remove()
    model.eval()
    return sum(heard) / len(heard)


def measure(checkpoint: Path) -> dict[str, Any]:
    """Scores and likeness of one checkpoint, as plain values."""
    model, data = experiments.load(checkpoint), data_of(checkpoint)
    kinds: tuple[DiversityKind, ...] = ("projected", "cka")
    return judge(model, data)._asdict() | {"alike": {kind: alike(model, data, kind) for kind in kinds}}


def difference(control: list[list[float]], treated: list[list[float]], block: int = 1) -> Difference:
    """Paired bootstrap over the examples (Koehn 2004; blocks: Kunsch 1989): both models are judged on each draw.

    Args:
        control: scores of one model, seed by seed.
        treated: those of the other, of the same seeds on the same examples; seeds are averaged before drawing.
        block: so many neighbours are drawn together.

    Example:
        >>> difference([[0.0, 0.0, 1.0]] * 2, [[1.0, 1.0, 1.0]] * 2).mean
        0.6666666666666666
    """
    gaps = (np.array(treated) - np.array(control)).mean(0)
    starts = np.random.default_rng(0).integers(len(gaps), size=(DRAWS, -(-len(gaps) // block)))
    drawn = (starts[..., None] + np.arange(block)).reshape(DRAWS, -1)[:, : len(gaps)]
    means = gaps[drawn % len(gaps)].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    p = min(1.0, 2 * min((means <= 0).mean(), (means >= 0).mean()))
    return Difference(float(gaps.mean()), float(low), float(high), float(p))


def bleu_difference(control: list[str], treated: list[str], references: list[str]) -> tuple[float, float, float]:
    """BLEU of both, and the p value of sacreBLEU's paired bootstrap over sentences."""
    systems = [("control", control), ("treated", treated)]
    test = PairedTest(systems, {"BLEU": BLEU(references=[references])}, None, test_type="bs", n_samples=1000)
    _, found = test()
    first, second = found["BLEU"]
    return float(first.score), float(second.score), float(second.p_value)
