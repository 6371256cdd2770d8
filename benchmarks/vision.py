"""A training step of the Vision Transformer against timm's and vit-pytorch's, and how long a step waits for data.

Networks of one size: pictures of 32x32 in 64 patches and a class token, width 192, 6 blocks of 3 heads, feed-forward
384, batches of 64. Forward, cross entropy, backward and torch's AdamW, float32, in turn in one process. A ratio of 2
says that ours takes half the time. The wait is what passes from the end of one step to the beginning of the next, in
the preset `vit-cifar10-cpu` on random pictures: order, batch, augmentation, and what the trainer does in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from PIL import Image
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.timing import CLOCKS, Call, ratio, rounds, spread
from experiments.training import specs
from experiments.training.module import Experiment
from experiments.training.tables import show_table
from experiments.training.usage import CONFIGS
from experiments.vision import ImageData
from experiments.vision.network import PictureFacts, VisionTransformer

SIZE, PATCH, DIM, DEPTH, HEADS, HIDDEN, CLASSES = 32, 4, 192, 6, 3, 384, 10
BATCH = 64
PRESET = "vit-cifar10-cpu"


def networks() -> dict[str, nn.Module]:
    """Three of the same size; only biases of queries, keys and values differ."""
    # Both take seconds to import, which other figures need not pay.
    from timm.models.vision_transformer import VisionTransformer as TimmTransformer
    from vit_pytorch import ViT

    facts = PictureFacts(SIZE, SIZE, 3, CLASSES, [0.5] * 3, [0.25] * 3)
    ours = VisionTransformer(
        facts, dim=DIM, depth=DEPTH, num_heads=HEADS, hidden_dim=HIDDEN, patch_size=PATCH, stem="patch", pool="class"
    )
    timm = TimmTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=HIDDEN / DIM,
        num_classes=CLASSES,
    )  # fmt: skip
    vit_pytorch = ViT(
        image_size=SIZE, patch_size=PATCH, num_classes=CLASSES, dim=DIM, depth=DEPTH, heads=HEADS,
        dim_head=DIM // HEADS, mlp_dim=HIDDEN,
    )  # fmt: skip
    return {"ours": ours, "timm": timm, "vit-pytorch": vit_pytorch}


def training_call(network: nn.Module, compiled: bool, device: str) -> Call:
    """One optimiser step on the same random batch."""
    network.to(device).train()
    run: Callable[[Tensor], Any] = torch.compile(network) if compiled else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    pictures, labels = torch.rand(BATCH, 3, SIZE, SIZE, device=device), torch.arange(BATCH, device=device) % CLASSES

    def once() -> None:
        optimizer.zero_grad()
        out = run(pictures)
        logits = out[0] if isinstance(out, tuple) else out
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()

    return once


class Waiting(pl.Callback):
    """Time between steps, and within them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.marks: list[tuple[float, float]] = []
        self._begun = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """The batch is there."""
        self._begun = self.now()

    def on_train_batch_end(self, *_: Any) -> None:
        """The step is done."""
        self.marks.append((self._begun, self.now()))

    def share(self) -> float:
        """Median share of the time from step to step that is spent before a step begins; the first is left out."""
        pairs = list(zip(self.marks[1:], self.marks[2:], strict=False))
        return statistics.median((start - before) / (end - before) for (_, before), (start, end) in pairs)


def waiting(steps: int, now: Callable[[], float]) -> float:
    """The share in the preset, on as many random pictures as it takes."""
    content = yaml.safe_load((CONFIGS / f"{PRESET}.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        generator = torch.Generator().manual_seed(0)
        for name in range(CLASSES):
            place = Path(folder, "train", str(name))
            place.mkdir(parents=True)
            pixels = torch.randint(256, (64, SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
            for number, picture in enumerate(pixels):
                Image.fromarray(picture.numpy()).save(place / f"{number}.png")
        options = content["data"]["init_args"] | {"path": folder, "cache": None}
        data = specs.rebuild(ImageData, {"class_path": content["data"]["class_path"], "init_args": options})
        model = specs.rebuild(Experiment, content["model"])
        watch = Waiting(now)
        trainer = pl.Trainer(
            max_steps=steps, max_epochs=-1, precision=content["trainer"]["precision"], callbacks=[watch], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            default_root_dir=folder, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(model, data)
    return watch.share()


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures, writes `result.json` and prints the tables."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=vision", description=__doc__)
    parser.add_argument("--pairs", type=int, default=31, help="of steps (31)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu where others share the cores (wall)")
    parser.add_argument("--modes", default="eager,compiled", help="eager, compiled or both")
    parser.add_argument("--steps", type=int, default=40, help="of the preset, for the wait (40)")
    options = parser.parse_args(arguments)
    modes = options.modes.split(",")
    if unknown := set(modes) - {"eager", "compiled"}:
        parser.error(f"--modes: there is no {', '.join(sorted(unknown))}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: dict[str, dict[str, Any]] = {}
    for mode in modes:
        torch.manual_seed(0)
        calls = {name: training_call(net, mode == "compiled", device) for name, net in networks().items()}
        clocked = rounds(calls, options.pairs, CLOCKS[options.clock])
        times = list(track(clocked, f"steps, {mode}", total=options.pairs))
        for name in ("timm", "vit-pytorch"):
            ours, theirs = ([row[side] for row in times] for side in ("ours", name))
            rows[f"{name}, {mode}"] = {**ratio(ours, theirs), "ours": spread(ours), "theirs": spread(theirs)}
    wait = waiting(options.steps, time.process_time if options.clock == "cpu" else time.perf_counter)
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "steps": rows, "waiting_for_data": wait, "preset": PRESET, "pairs": options.pairs, "clock": options.clock,
        "threads": torch.get_num_threads(), "device": device, "machine": machine(),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = Table("ours / theirs", "ours, ms", "theirs, ms", "times faster", "95 % at least")
    for name, row in rows.items():
        middle = [f"{1000 * row[side]['median']:.1f}" for side in ("ours", "theirs")]
        table.add_row(name, *middle, f"{row['ratio']:.3f}", f"{row['lower95']:.3f}")
    show_table(table)
    print(f"{PRESET}: {wait:.1%} of the time from step to step passes before a step begins")
    return 0
