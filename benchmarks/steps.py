"""How long training steps of finished runs take, measured in turn in one process.

What runs measured of themselves, at other hours beside other work, differs by more than the mechanisms do.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.progress import track

from benchmarks.examples import data_of
from benchmarks.machine import machine
from benchmarks.timing import Call, cpu_seconds, rounds, seconds
from experiments.training import saved
from experiments.training.module import Experiment

ROUNDS = 15


def step_times(checkpoints: Mapping[str, Path], file: Path) -> dict[str, float]:
    """Median milliseconds of a step by name, on the first batch of its data; kept in a file for the same names."""
    kept = json.loads(file.read_text(encoding="utf-8"))["ms"] if file.is_file() else {}
    if kept.keys() != checkpoints.keys():
        if gone := [name for name, path in checkpoints.items() if not path.is_file()]:
            raise ValueError(
                f"The steps of {', '.join(gone)} cannot be timed beside the others: their checkpoints lie on another "
                f"machine. Take their lines out of the record of this figure in benchmarks/records to train them here."
            )
        calls = {name: training_call(path) for name, path in checkpoints.items()}
        # Of one thread the processor time is the time that a step takes on an idle machine, whoever else is at work.
        single = torch.get_num_threads() == 1 and not torch.cuda.is_available()
        measured = rounds(calls, ROUNDS, cpu_seconds if single else seconds)
        clocked = list(track(measured, f"{file.stem}, steps in turn", total=ROUNDS))
        kept = {name: 1000 * statistics.median(row[name] for row in clocked) for name in calls}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"ms": kept, "machine": machine()}, indent=1) + "\n", encoding="utf-8")
    return dict(kept)


def training_call(checkpoint: Path) -> Call:
    """One optimiser step of the model in a checkpoint, on the first batch of its data."""
    model = saved.rebuild_model(Experiment, saved.read(checkpoint)).train()
    assert model.network is not None
    data = data_of(checkpoint)
    data.setup("fit")
    batch = model.receive(next(iter(data.train_dataloader())), data)
    optimizer = model.optim.optimizer(model.network)

    def once() -> None:
        optimizer.zero_grad()
        step = model.step(batch, "train")
        (step.loss_sum / step.count + step.aux).backward()
        optimizer.step()

    return once
