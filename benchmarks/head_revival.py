"""Do heads that begin anew live, and does the model lose by it? A small ViT on the digits, with heads that are dead.

In each of three seeds one head of each block is dead from the start (values and output slice 0: no gradient leads out
of there) and one more looks at the class token alone. The same run is made with `head_reinit` and without. Told are the
heads that were begun anew, how many of them show no cause at the end, at least 2,000 steps later, the change of the
loss at the events, and the scores of both runs on the test part, which nothing is chosen by.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from attnzoo import MultiheadAttention
from attnzoo.heads.degenerate import causes
from attnzoo.heads.figures import Head
from benchmarks.machine import machine
from experiments.training import console
from experiments.training.checkpoints import BestAndLast, WholeFiles
from experiments.training.head_reinit import HeadReinit, Reinit
from experiments.training.optim import Optim
from experiments.training.probing import ProbeSet
from experiments.vision.data import ImageData
from experiments.vision.module import ImageClassifier
from experiments.vision.network import VisionTransformer

SEEDS = 3
STEPS, EVERY = 3200, 100
DEAD, SINK = 0, 1
"""Which head of a block is planted; the sink in the first block alone, whose class token is always the same."""


class Plant(pl.Callback):
    """Makes heads degenerate before the first step."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Dead ones in every block, a sink in the first."""
        network = pl_module.network
        assert isinstance(network, VisionTransformer)
        with torch.no_grad():
            for block in network.blocks:
                _rows(block.attention.v_proj.weight, block.attention, DEAD).zero_()
                _rows(block.attention.out_proj.weight.T, block.attention, DEAD).zero_()
            first = network.blocks[0]
            token = network.class_token[0, 0] + network.position.table[0]  # type: ignore[index]
            seen = first.attention_norm(token)
            attention: MultiheadAttention = first.attention
            for linear in (attention.q_proj, attention.k_proj):
                _rows(linear.weight, attention, SINK).zero_()
            place = SINK * attention.head_dim
            attention.k_proj.weight[place] = 30 * seen / seen.norm()  # type: ignore[union-attr]
            attention.q_proj.bias[place] = attention.head_dim**0.5


def _rows(weight: torch.Tensor, attention: MultiheadAttention, head: int) -> torch.Tensor:
    return weight[head * attention.head_dim : (head + 1) * attention.head_dim]


def train(seed: int, anew: bool) -> dict[str, Any]:
    """One run."""
    pl.seed_everything(seed, verbose=False)
    data, keeper = ImageData(batch_size=32), BestAndLast()
    data.order_seed = seed
    model = ImageClassifier(dim=32, depth=2, num_heads=4, pool="class", optim=Optim(lr=2e-3, warmup_steps=100))
    reinit = HeadReinit(Reinit(every=EVERY), seed)
    with tempfile.TemporaryDirectory() as folder:
        keeper.folder = Path(folder)
        trainer = pl.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, num_sanity_val_steps=0, gradient_clip_val=1.0, check_val_every_n_epoch=10,
            log_every_n_steps=0, plugins=[WholeFiles()], callbacks=[Plant(), *([reinit] if anew else []), keeper],
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        health = ProbeSet(model, data).health(ablate=True)
        trainer.test(model, datamodule=data, verbose=False)
    scores = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    heads = [
        {
            "site": event["site"], "head": event["head"], "causes": event["causes"], "step": event["step"],
            "change": (event["loss_after"] - event["loss_before"]) / event["loss_before"],
            "causes_at_the_end": list(causes(health[Head(event["site"], event["head"])])),
        }
        for event in reinit.events
    ]  # fmt: skip
    shown = {f"{entry.head.site} {entry.head.number}": list(causes(entry)) for entry in health.heads if causes(entry)}
    return {"seed": seed, "anew": anew, "scores": scores, "events": heads, "causes_at_the_end": shown}


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures run by run, going on where it was stopped, and writes `result.json`."""
    argparse.ArgumentParser(prog="make reproduce FIGURE=head-revival").parse_args(arguments)  # takes none
    console.quieten()
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in range(SEEDS):
        for anew in (True, False):
            piece = folder / f"seed{seed}-{'anew' if anew else 'plain'}.json"
            if not piece.is_file():
                piece.write_text(json.dumps(train(seed, anew)) + "\n", encoding="utf-8")
            runs.append(json.loads(piece.read_text(encoding="utf-8")))
            print(f"{piece.stem}: {runs[-1]}")
    events = [event for run in runs for event in run["events"]]
    losses = {anew: [run["scores"]["test/loss"] for run in runs if run["anew"] == anew] for anew in (True, False)}
    result = {
        "begun_anew": len(events),
        "healthy_at_the_end": sum(not event["causes_at_the_end"] for event in events),
        "largest_change_of_loss": max(abs(event["change"]) for event in events),
        "test_loss_anew": losses[True],
        "test_loss_plain": losses[False],
        "test_accuracy_anew": [run["scores"]["test/accuracy"] for run in runs if run["anew"]],
        "test_accuracy_plain": [run["scores"]["test/accuracy"] for run in runs if not run["anew"]],
        "mean_difference_of_test_loss": statistics.fmean(losses[True]) - statistics.fmean(losses[False]),
        "machine": machine(),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0
