"""Heads watched and begun anew while a model trains, and the command that shows them."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from training_toys import Net, Toy, ToyData, trainer

from attnzoo import MultiheadLatentAttention
from attnzoo.heads.degenerate import Flagged, Limits
from attnzoo.heads.figures import Head, Health
from experiments.training import saved
from experiments.training.checkpoints import Stopped
from experiments.training.ema import Ema, EmaWeights
from experiments.training.head_monitor import HeadMonitor, Monitoring
from experiments.training.head_reinit import HeadReinit, Reinit
from experiments.training.loggers import CsvRows, read_rows
from experiments.training.optim import Optim

HERE = Path(__file__).parent
EVERYTHING = Limits(dead=1e9, useless=1e9, checks=1)
"""By these every head is degenerate, in each check."""


class Seen(pl.Callback):
    """Notes, after every optimiser step, the output slices of both heads and the validation loss."""

    def __init__(self) -> None:
        self.slices: dict[int, list[float]] = {}
        self.average: dict[int, list[float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        def norms(weight: Tensor) -> list[float]:
            return [float(weight[:, :2].norm()), float(weight[:, 2:].norm())]

        self.slices[trainer.global_step] = norms(module.network.attention.out_proj.weight.detach())
        ema = next((found for found in trainer.callbacks if isinstance(found, EmaWeights)), None)
        if ema is not None:
            self.average[trainer.global_step] = norms(ema.average["network.attention.out_proj.weight"])


def begin_anew(limits: Limits | None = EVERYTHING, **options: Any) -> HeadReinit:
    callback = HeadReinit(Reinit(**{"every": 2, "cooldown": 0, "until": 1.0, **options}))
    if limits is not None:
        callback.watch.limits = limits
    return callback


def run(
    folder: Path, *callbacks: pl.Callback, model: Toy | None = None, resume: Path | None = None, **options: Any
) -> tuple[Toy, pl.Trainer]:
    pl.seed_everything(0, verbose=False)
    made = trainer(folder, list(callbacks), **options)
    model = Toy() if model is None else model
    made.fit(model, datamodule=ToyData(), ckpt_path=resume)
    return model, made


def test_a_head_begins_anew_in_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """20 steps, 4 of warm-up: the first check is at step 6; a loss is written before and after."""
    seen, callback = Seen(), begin_anew(every=3, cooldown=100)
    with caplog.at_level(logging.INFO, "experiments"):
        run(tmp_path, callback, seen, logger=[CsvRows(tmp_path / "metrics.csv")])
    first, second = callback.events
    assert (first["step"], second["step"]) == (6, 9)  # one a time; the other head has no cool-down
    assert {first["head"], second["head"]} == {0, 1}
    assert "dead" in first["causes"] and first["site"] == "attention" and not first["off"]
    assert seen.slices[6][first["head"]] == 0 < seen.slices[5][first["head"]]
    assert seen.slices[7][first["head"]] > 0  # and is trained from then on
    rows = {int(row["step"]): row for row in read_rows(tmp_path / "metrics.csv")}
    assert [rows[step]["heads/begun_anew"] for step in (6, 9, 12)] == ["1.0", "2.0", "2.0"]
    assert rows[5]["heads/begun_anew"] == ""
    change = (first["loss_after"] - first["loss_before"]) / first["loss_before"]
    assert float(rows[6]["heads/loss_change"]) == pytest.approx(change)
    assert "Step 6: head" in caplog.text and "it begins anew" in caplog.text


def test_the_change_of_the_loss_is_that_of_the_ablation(tmp_path: Path) -> None:
    """What was measured is what happens."""
    callback = begin_anew(every=6, cooldown=100)
    measured: dict[int, float] = {}
    allowed = callback._allowed

    def listening(flagged: Any, health: Health) -> list[Flagged]:
        measured.update({entry.head.number: entry.ablation for entry in health.heads})
        return allowed(flagged, health)

    callback._allowed = listening  # type: ignore[method-assign]
    run(tmp_path, callback, max_steps=6)
    (event,) = callback.events
    rise = event["loss_after"] - event["loss_before"]
    assert rise == pytest.approx(measured[event["head"]], rel=1e-3, abs=1e-6)
    assert measured[event["head"]] == min(measured.values())


def test_nothing_is_done_before_the_warm_up_ends_or_late(tmp_path: Path) -> None:
    callback = begin_anew(until=0.7)
    run(tmp_path, callback)
    assert [event["step"] for event in callback.events] == [6, 8, 10, 12, 14]


def test_after_two_attempts_a_head_is_switched_off_for_good(tmp_path: Path) -> None:
    seen, callback = Seen(), begin_anew()
    run(tmp_path, callback, EmaWeights(Ema(0.5)), seen, max_epochs=3)
    by_head = {head: [event for event in callback.events if event["head"] == head] for head in (0, 1)}
    for head, events in by_head.items():
        assert [event["off"] for event in events] == [False, False, True]
        last = events[-1]["step"]
        assert all(seen.slices[step][head] == seen.average[step][head] == 0 for step in range(last, 31))
    assert len(callback.events) == 6


def test_a_head_that_began_anew_is_left_alone_for_a_while(tmp_path: Path) -> None:
    callback = begin_anew(cooldown=5, attempts=9)
    run(tmp_path, callback)
    for head in (0, 1):
        steps = [event["step"] for event in callback.events if event["head"] == head]
        assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(steps))
        assert len(steps) >= 2


def test_a_dry_run_says_what_it_would_do_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = begin_anew(dry_run=True)
    plain, _ = run(tmp_path / "plain")
    with caplog.at_level(logging.INFO, "experiments"):
        dry, _ = run(tmp_path / "dry", callback)
    assert callback.events and "would begin anew (dry run)" in caplog.text
    assert dry.losses == plain.losses
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in dry.state_dict().items())


def test_healthy_heads_are_left_alone(tmp_path: Path) -> None:
    callback = begin_anew(Limits(dead=0, uniform=0, sink=2, duplicate=2, useless=1e9, checks=1))
    run(tmp_path, callback)
    assert callback.events == []


def test_checks_fall_on_optimiser_steps(tmp_path: Path) -> None:
    """20 samples by 2, accumulated by 3: 4 steps an epoch."""
    callback = begin_anew(every=3, cooldown=100)
    run(tmp_path, callback, accumulate_grad_batches=3, max_epochs=3)
    assert [event["step"] for event in callback.events] == [6, 9]


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    """Events, counters, judgements so far, averaged weights."""
    limits = Limits(dead=1e9, useless=1e9, checks=2)

    def callbacks() -> tuple[HeadReinit, EmaWeights]:
        return begin_anew(limits, cooldown=3), EmaWeights(Ema(0.9))

    whole = callbacks()
    run(tmp_path / "whole", *whole, max_epochs=3)
    with contextlib.suppress(Stopped):
        run(tmp_path / "parts", *callbacks(), Interrupt(), max_epochs=3)
    parts = callbacks()
    run(tmp_path / "parts", *parts, resume=tmp_path / "parts" / "last.ckpt", max_epochs=3)
    assert parts[0].events == whole[0].events
    assert [event["off"] for event in whole[0].events].count(True) >= 1
    assert parts[0].state_dict() == whole[0].state_dict()
    one, two = (saved.read(tmp_path / name / "last.ckpt") for name in ("whole", "parts"))
    for kind in ("state_dict", "raw_state_dict"):
        assert all(torch.equal(value, two[kind][name]) for name, value in one[kind].items())


class Interrupt(pl.Callback):
    """Stops the run in optimiser step 9, as a signal does."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGTERM)


class Pair(Net):
    """Two attentions."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.second = Net(attention).attention

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.unsqueeze(-1))
        tokens = tokens + self.attention(tokens)
        return self.layers(tokens + self.second(tokens)).sum((1, 2))


class PairToy(Toy):
    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        return Pair(self.attention)


def test_one_head_an_attention_and_a_share_of_all_at_once(tmp_path: Path) -> None:
    half, quarter = begin_anew(every=6, share=0.5), begin_anew(every=6)
    run(tmp_path / "half", half, model=PairToy(), max_steps=6)
    run(tmp_path / "quarter", quarter, model=PairToy(), max_steps=6)
    assert sorted(event["site"] for event in half.events) == ["attention", "second"]
    assert len(quarter.events) == 1


def test_heads_that_cost_too_much_together_do_not_go_together(tmp_path: Path) -> None:
    callback = begin_anew(every=6, share=0.5)
    asked = []

    class Costly:
        def ablation(self, heads: Any, health: Health) -> list[float]:
            asked.append(heads)
            return [0.5]

    callback._probes = Costly()  # type: ignore[assignment]
    callback.watch.limits = Limits(useless=0.1)
    first, second = (Flagged(Head(site, 0), ("dead",)) for site in ("a", "b"))
    assert callback._safe([first, second], Health([], {}, loss=1.0)) == [first]
    assert asked == [[[first.head, second.head]]]


def test_what_cannot_begin_anew_is_refused_before_training(tmp_path: Path) -> None:
    class Latent(Toy):
        def build_network(self, facts: dict[str, Any]) -> nn.Module:
            network = Net(self.attention)
            network.attention = MultiheadLatentAttention(4, 2)  # type: ignore[assignment]
            return network

    with pytest.raises(ValueError, match="MultiheadLatentAttention has no bias"):
        run(tmp_path, begin_anew(), model=Latent())
    with pytest.raises(ValueError, match=r"--head_reinit.until=1.0 is a share of the run"):
        run(tmp_path, begin_anew(), max_epochs=-1, model=Toy(optim=Optim(schedule="constant")))


@pytest.mark.parametrize(
    ("made", "option", "value"),
    [
        (Reinit, "every", 0),
        (Reinit, "share", 1.5),
        (Reinit, "until", 0),
        (Reinit, "attempts", -1),
        (Monitoring, "every", 0),
    ],
)
def test_options_out_of_range(made: Any, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        made(**{option: value})


def test_watching_changes_nothing_and_writes_rows_a_table_and_a_picture(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain")
    monitor = HeadMonitor(Monitoring(every=5, samples=4), tmp_path / "figures")
    watched, _ = run(tmp_path / "watched", monitor, logger=[CsvRows(tmp_path / "metrics.csv")])
    assert watched.losses == plain.losses
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in watched.state_dict().items())
    rows = {int(row["step"]): row for row in read_rows(tmp_path / "metrics.csv")}
    assert [step for step, row in rows.items() if row.get("heads/norm_min")] == [5, 10, 15, 20]
    assert 0 < float(rows[5]["heads/norm_min"]) <= 1 and rows[5]["heads/dead"] == "0.0"
    with (tmp_path / "figures" / "heads.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["step"], row["head"]) for row in table] == [(str(s), h) for s in (5, 10, 15, 20) for h in "01"]
    assert 1 <= float(table[0]["effective_keys"]) <= 3
    assert (tmp_path / "figures" / "heads.png").stat().st_size > 5000


def test_a_resumed_run_writes_each_row_of_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadMonitor, "_draw", lambda *args: None)
    figures = tmp_path / "figures"
    options = Monitoring(every=4, samples=4)
    run(tmp_path / "run", HeadMonitor(options, figures), max_steps=9)
    (tmp_path / "run" / "last.ckpt").rename(tmp_path / "at-9.ckpt")
    for _ in range(2):  # the first was killed after its end, say
        run(tmp_path / "run", HeadMonitor(options, figures), resume=tmp_path / "at-9.ckpt")
    with (figures / "heads.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == [4, 4, 8, 8, 12, 12, 16, 16, 20, 20]


PROGRAM = """
import json, sys
from pathlib import Path
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Subset
from training_toys import Rows, Toy, ToyData, trainer
from attnzoo.heads.degenerate import Limits
from experiments.training.ema import Ema, EmaWeights
from experiments.training.head_reinit import HeadReinit, Reinit
from experiments.training.sampling import ResumableBatches, ResumableLoader

torch.set_num_threads(1)
folder = Path(sys.argv[1])

class Data(ToyData):
    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        batches = ResumableBatches(20, 2, seed=0, rank=rank, world_size=world)
        return ResumableLoader(Rows(20, 0.0), batch_sampler=batches)

    def val_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(Subset(Rows(7, 0.0), range(rank, 7, world)), batch_size=2)

pl.seed_everything(0, verbose=False)
model, anew = Toy(), HeadReinit(Reinit(every=2, cooldown=0, until=1.0))
anew.watch.limits = Limits(dead=1e9, useless=1e9, checks=1)
made = trainer(folder, [anew, EmaWeights(Ema(0.5))], max_epochs=3, strategy="ddp", devices=2)

seen = []
class Look(pl.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        state = trainer.optimizers[0].state_dict()["state"]
        moments = [value.double().sum().item() for entry in state.values() for value in entry.values()]
        exact = [value.flatten().tolist() for entry in state.values() for value in entry.values()]
        seen.append([[p.flatten().tolist() for p in module.parameters()], exact, moments])

made.callbacks.insert(1, Look())
made.fit(model, datamodule=Data())
(folder / f"result-{made.global_rank}.json").write_text(json.dumps({"seen": seen, "events": anew.events}))
"""


@pytest.mark.slow
def test_two_processes_stay_equal_bit_for_bit_after_every_event(tmp_path: Path) -> None:
    """Each judges by a part of the samples of its own; parameters and Adam's state are compared after every step."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2))
    assert len(one["events"]) >= 4 and one["events"] == two["events"]
    assert len(one["seen"]) == 15 and one["seen"] == two["seen"]
