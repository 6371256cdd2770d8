"""What it costs to watch heads: a check of all figures by the steps that lie between two checks, in processor time.

The network of the preset `vit`, a ViT of CIFAR's size (64 patches, width 128, 6 blocks) and the Transformer of
`translator-multi30k`, on random pictures and words; 512 samples a check, a check every 500 steps, as by default.
Drawing is not in it: it is held to a hundredth of the time of a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from attnzoo.heads.health import head_health
from benchmarks.machine import machine
from benchmarks.timing import Call, cpu_seconds, rounds, spread
from benchmarks.translation import DEPTH, DIM, DROPOUT, HEADS, HIDDEN, SMOOTHING, WORDS, batches
from experiments.training.head_monitor import Monitoring
from experiments.training.optim import Optim
from experiments.training.tables import show_table
from experiments.translation.transformer import Transformer
from experiments.vision.network import PictureFacts, VisionTransformer

Loss = Callable[[Any], tuple[Tensor, Tensor | int]]
PICTURES = PictureFacts(32, 32, 3, 10, mean=[0.5] * 3, std=[0.25] * 3)
DIGITS = PictureFacts(8, 8, 1, 10, mean=[0.3], std=[0.37])


def vit(pictures: PictureFacts, batch: int, **options: Any) -> tuple[nn.Module, Loss, list[Any]]:
    """A ViT, its loss, and batches of 512 pictures in all."""
    network = VisionTransformer(pictures, **options)
    size = (batch, pictures.channels, pictures.height, pictures.width)
    made = [(torch.rand(size), torch.randint(10, (batch,))) for _ in range(512 // batch)]

    def loss(part: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(network(part[0])[0], part[1], reduction="sum"), batch

    return network, loss, made


def translator() -> tuple[nn.Module, Loss, list[Any]]:
    """The Transformer, its loss, and batches of at least 512 sentences in all."""
    network = Transformer(
        WORDS, dim=DIM, hidden_dim=HIDDEN, num_heads=HEADS, encoder_depth=DEPTH, decoder_depth=DEPTH,
        dropout=DROPOUT, position="rope",
    )  # fmt: skip
    found = batches(16)
    while sum(len(source) for source, _ in found[1:]) >= 512:
        found = found[1:]

    def loss(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        source, target = batch
        result, _ = network(target[:, :-1], source, labels=target[:, 1:], smoothing=SMOOTHING)
        return result.smoothed, result.count

    return network, loss, found


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures, writes `result.json` and prints the table."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=head-monitor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of a check and a step, for each network (7)")
    options = parser.parse_args(arguments)
    every = Monitoring().every
    networks: dict[str, Callable[[], tuple[nn.Module, Loss, list[Any]]]] = {
        "vit (digits)": lambda: vit(DIGITS, 64, depth=3, patch_size=2, pool="mean"),
        "ViT of CIFAR's size": lambda: vit(PICTURES, 128, dim=128, depth=6, patch_size=4, pool="mean", dropout=0.1),
        "translator-multi30k": translator,
    }
    rows = {}
    for name, build in networks.items():
        network, loss, made = build()
        calls = {"step": _step(network, loss, made), "check": lambda: head_health(network, made, loss=loss)}  # noqa: B023
        times = list(rounds(calls, options.rounds, cpu_seconds))
        found = {call: spread([row[call] for row in times]) for call in calls}
        rows[name] = {**found, "share": found["check"]["median"] / (every * found["step"]["median"])}
    folder.mkdir(parents=True, exist_ok=True)
    result = {"rounds": options.rounds, "threads": torch.get_num_threads(), "networks": rows, "machine": machine()}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = Table("network", "step, ms", "check, ms", f"of {every} steps")
    for name, row in rows.items():
        table.add_row(name, *(f"{1000 * row[call]['median']:.0f}" for call in ("step", "check")), f"{row['share']:.2%}")
    show_table(table)
    return 0


def _step(network: nn.Module, loss: Loss, made: list[Any]) -> Call:
    optimizer, parts = Optim().optimizer(network.train()), cycle(made)

    def once() -> None:
        optimizer.zero_grad()
        total, count = loss(next(parts))
        (total / count).backward()
        optimizer.step()

    return once
