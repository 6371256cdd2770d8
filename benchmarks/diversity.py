"""What head diversity adds to a training step, each step in turn with the same one without.

The preset `vit-cifar10-cpu` on batches of 128 random pictures, and the Transformer of `translator-multi30k` on batches
of 4,096 tokens. Processor time, so that what else runs on the cores counts little.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from attnzoo import DiversityKind
from benchmarks.machine import machine
from benchmarks.timing import Call, cpu_seconds, ratio, rounds, spread
from benchmarks.translation import DEPTH, DIM, DROPOUT, HEADS, HIDDEN, SMOOTHING, WORDS, batches
from experiments.training import specs
from experiments.training.module import Experiment
from experiments.training.optim import Optim
from experiments.training.tables import show_table
from experiments.training.usage import CONFIGS
from experiments.translation.transformer import Transformer

WEIGHT = 0.03
PRESET = "vit-cifar10-cpu"
FACTS = {"classes": list("0123456789"), "image_size": [32, 32], "channels": 3, "mean": [0.5] * 3, "std": [0.25] * 3}
BATCH = 128


def classifier(**options: Any) -> Call:
    """One optimiser step of the preset on random pictures."""
    content = yaml.safe_load((CONFIGS / f"{PRESET}.yaml").read_text(encoding="utf-8"))["model"]
    model = specs.rebuild(Experiment, content | {"init_args": content["init_args"] | options})
    model.facts = FACTS
    model.configure_model()
    batch = {"image": torch.rand(BATCH, 3, 32, 32), "label": torch.randint(10, (BATCH,))}

    def loss(_: Any) -> Tensor:
        step = model.step(batch, "train")
        return step.loss_sum / step.count + step.aux

    return _step(model, loss, cycle([None]))


def translator(made: list[tuple[Tensor, Tensor]], **options: Any) -> Call:
    """One optimiser step of the Transformer on the next batch."""
    network = Transformer(
        WORDS, dim=DIM, hidden_dim=HIDDEN, num_heads=HEADS, encoder_depth=DEPTH, decoder_depth=DEPTH,
        dropout=DROPOUT, position="rope", **options,
    )  # fmt: skip

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch
        loss, aux = network(target[:, :-1], source, labels=target[:, 1:], smoothing=SMOOTHING)
        return loss.smoothed / loss.count + aux

    return _step(network, loss, cycle(made))


def _step(network: nn.Module, loss: Callable[[Any], Tensor], batches: Iterator[Any]) -> Call:
    optimizer = Optim().optimizer(network.train())

    def once() -> None:
        optimizer.zero_grad()
        loss(next(batches)).backward()
        optimizer.step()

    return once


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures, writes `result.json` and prints the table."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=diversity", description=__doc__)
    parser.add_argument("--pairs", type=int, default=31, help="of steps, for each network and kind (31)")
    parser.add_argument("--kinds", default="projected,cka", help="some of " + ",".join(get_args(DiversityKind)))
    parser.add_argument("--only", default="", help="networks whose names begin so, such as translator; all if left out")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(get_args(DiversityKind)):
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}")
    made = batches(options.pairs + 1)
    networks: dict[str, Callable[..., Call]] = {
        PRESET: classifier,
        "translator-multi30k": lambda **more: translator(made, **more),
    }
    rows = {}
    for name, build in networks.items():
        if not name.startswith(options.only):
            continue
        calls = {"without": build()}
        calls |= {kind: build(head_diversity=WEIGHT, head_diversity_kind=kind) for kind in kinds}
        times = list(track(rounds(calls, options.pairs, cpu_seconds), name, total=options.pairs))
        plain = [row["without"] for row in times]
        for kind in kinds:
            with_it = [row[kind] for row in times]
            rows[f"{name}, {kind}"] = {
                "without": spread(plain),
                "with": spread(with_it),
                # How many times as long a step takes: the median over pairs, and where 95 % of the draws lie below.
                "times": ratio(plain, with_it)["ratio"],
                "upper95": 1 / ratio(with_it, plain)["lower95"],
            }
    folder.mkdir(parents=True, exist_ok=True)
    result = {"pairs": options.pairs, "threads": torch.get_num_threads(), "steps": rows, "machine": machine()}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table("network and kind", "step without, ms", "with, ms", "added", "95 % at most")
    for name, row in rows.items():
        middle = [f"{1000 * row[side]['median']:.0f}" for side in ("without", "with")]
        table.add_row(name, *middle, *(f"{row[key] - 1:+.1%}" for key in ("times", "upper95")))
    show_table(table)
    return 0
