"""Trains each experiment for twenty steps in one process of a few, and keeps what came out.

Started by `launched` as a script in each of the processes; called in the test's own process for a single one. With the
same seed and the same samples in each step all must come to the same numbers.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from attnzoo.heads.degenerate import Limits
from experiments.forecasting.data import SeriesData
from experiments.forecasting.module import Forecaster
from experiments.forecasting.table import TableOptions
from experiments.training import saved, sharding
from experiments.training.checkpoints import BestAndLast, WholeFiles
from experiments.training.ema import Ema, EmaWeights
from experiments.training.head_reinit import HeadReinit, Reinit
from experiments.training.module import Experiment
from experiments.training.optim import Optim
from experiments.training.sampling import ResumableLoader
from experiments.training.writing import write_whole
from experiments.translation.batching import TokenBatches
from experiments.translation.data import TranslationData
from experiments.translation.module import BahdanauTranslator, TransformerTranslator
from experiments.translation.search import Decoding
from experiments.vision.data import ImageData
from experiments.vision.module import ImageClassifier

STEPS = 20
GLOBAL = 24
"""Samples of a step over all processes."""
DIVERSITY = {"head_diversity": 0.1, "head_diversity_kind": "li_output"}
"""A kind that draws no tokens. Shares of equal size have equal counts of tokens, so the means agree."""
ANEW = Reinit(every=4, samples=10**6, cooldown=4, share=0.5)
"""All of the validation part: so heads are judged by the same samples, whatever each process has of them."""
EVERYTHING = Limits(dead=1e9, useless=1e9, checks=1)
"""By these every head is degenerate; which begins anew is told by what it costs."""
OPTIM = Optim(lr=3e-3, warmup_steps=5, schedule="constant")
LINES = ["one two", "six", "seven nine", "three four four", "two zero zero", "nine", "eight", "one one one one"]


class Joined(TokenBatches):
    """For one process: each of its batches is what `parts` processes together have in the same step."""

    def __init__(self, *lengths: Any, parts: int, seed: int) -> None:
        self.parts = [TokenBatches(*lengths, seed=seed, rank=rank, world_size=parts) for rank in range(parts)]
        super().__init__(*lengths, seed=seed)

    def plan(self, epoch: int) -> list[list[int]]:
        return [list(itertools.chain(*batches)) for batches in zip(*(p.plan(epoch) for p in self.parts), strict=True)]

    def __len__(self) -> int:
        return len(self.parts[0])


class Text(TranslationData):
    """Words of small numbers, and the same in figures; 40 tokens in a batch of each of `parts` processes."""

    parts = 1

    def train_dataloader(self) -> ResumableLoader:
        loader = super().train_dataloader()
        if self.trainer.world_size == 1:
            batches, parts = loader.batch_sampler, type(self).parts
            assert isinstance(batches, TokenBatches)
            joined = Joined(batches.source_lengths, batches.target_lengths, self.batch_tokens, parts=parts, seed=0)
            return ResumableLoader(loader.dataset.dataset, batch_sampler=joined, collate_fn=loader.collate_fn)
        return loader


def vision(folder: Path, world: int) -> tuple[Experiment, pl.LightningDataModule]:
    model = ImageClassifier(dim=16, depth=2, num_heads=2, stem="patch", label_smoothing=0.1, optim=OPTIM, **DIVERSITY)
    return model, ImageData(batch_size=GLOBAL // world, cache=None)


def forecaster(folder: Path, world: int) -> tuple[Experiment, pl.LightningDataModule]:
    model = Forecaster(dim=8, depth=1, num_heads=2, patch_size=8, optim=OPTIM, **DIVERSITY)
    table = TableOptions(missing="fill")
    return model, SeriesData(lookback=32, horizon=6, batch_size=GLOBAL // world, table=table)


def text(folder: Path) -> TranslationData:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for part, numbers in (("train", range(100, 400)), ("val", range(7, 700, 34)), ("test", range(8, 70, 34))):
        for ending, sign in (("en", words), ("de", list("0123456789"))):
            lines = [" ".join(sign[int(figure)] for figure in str(number * 7)) for number in numbers]
            # Written at once and alike by all processes.
            write_whole(folder / "text" / f"{part}.{ending}", "\n".join(lines).encode() + b"\n")
    return Text(path=str(folder / "text"), tokens="words", batch_tokens=40, cache=None)


def transformer(folder: Path, world: int) -> tuple[Experiment, pl.LightningDataModule]:
    sizes = {"dim": 16, "encoder_depth": 1, "decoder_depth": 2, "num_heads": 2}
    return TransformerTranslator(**sizes, dropout=0.0, decoding=Decoding(beam=2), optim=OPTIM), text(folder)


def bahdanau(folder: Path, world: int) -> tuple[Experiment, pl.LightningDataModule]:
    sizes = {"dim": 8, "hidden_dim": 8}
    return BahdanauTranslator(**sizes, dropout=0.0, decoding=Decoding(beam=2), optim=OPTIM), text(folder)


MAKE: dict[str, Callable[[Path, int], tuple[Experiment, pl.LightningDataModule]]] = {
    "vision": vision, "forecaster": forecaster, "transformer": transformer, "bahdanau": bahdanau,
}  # fmt: skip


def stem(folder: Path, world: int) -> tuple[Experiment, pl.LightningDataModule]:
    """Batch norms, which see the batch of their own process: not the numbers of one."""
    return ImageClassifier(dim=16, depth=1, num_heads=2, stem="conv", optim=OPTIM), ImageData(batch_size=8, cache=None)


OTHERS = {"batch norms": stem}


class Losses(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.values.append(pl_module.accumulated.means(trainer)["train/loss"])


def run(
    name: str,
    folder: Path,
    world: int,
    strategy: str = "auto",
    precision: str = "64-true",
    more: Any = (),
    anew: bool = False,
) -> dict[str, Any]:
    """Train, validate the average of the weights, and give all numbers; with `anew`, heads begin anew on the way."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    model, data = (MAKE | OTHERS)[name](folder, world)
    keeper, losses = BestAndLast(), Losses()
    reinit = HeadReinit(ANEW)
    reinit.watch.limits = EVERYTHING
    keeper.folder = folder / f"{name}-{strategy}-{precision}"
    options: dict[str, Any] = {"devices": world, "strategy": strategy} if world > 1 else {}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, limit_val_batches=0, gradient_clip_val=1.0,
        precision=precision, plugins=[WholeFiles()],
        callbacks=[losses, keeper, EmaWeights(Ema(0.9)), *([reinit] if anew else []), *more],
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    content = saved.read(keeper.folder / "last.ckpt")
    judge = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, precision=precision, default_root_dir=folder, enable_checkpointing=False,
        **options,
    )  # fmt: skip
    judge.validate(model, datamodule=data, verbose=False)
    found = {
        "losses": losses.values,
        "validation": {name: float(value) for name, value in judge.callback_metrics.items()},
        "average": content["state_dict"],
        "weights": content["raw_state_dict"],
        "optimizer": content["optimizer_states"][0],
        "anew": reinit.events,
    }
    if strategy == sharding.NAME and isinstance(model, TransformerTranslator):
        # Different lines in each process, so their searches take different numbers of steps.
        found["translations"] = model.predict(LINES[judge.global_rank :: world])
    return found


def launched(folder: Path, world: int, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each of `world` processes has found for each of the jobs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).resolve()
    base = os.environ | {
        "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "lab",
    }  # fmt: skip
    words = [sys.executable, str(here), str(folder), str(world), json.dumps(jobs)]
    started = [
        subprocess.Popen(words, env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    for process in started:
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said.decode()[-3000:]
    return [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(world)]


if __name__ == "__main__":
    place, processes, wanted = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    Text.parts = processes
    everything = [run(folder=place, world=processes, **job) for job in wanted]
    torch.save(everything, place / f"found-{os.environ['RANK']}.pt")
