"""A run that was stopped and taken up again is, bit for bit, the run that was not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from training_toys import SignalAt, Toy, ToyData, trainer

from experiments.training import saved
from experiments.training.checkpoints import BestAndLast, Stopped
from experiments.training.ema import Ema, EmaWeights


class CopyBest(pl.Callback):
    """Keeps the first best.ckpt, for it is overwritten."""

    def __init__(self, folder: Path, to: Path) -> None:
        self.folder, self.to = folder, to

    def on_train_batch_end(self, *args: Any) -> None:
        if (self.folder / "best.ckpt").exists() and not (self.to / "best.ckpt").exists():
            self.to.mkdir()
            shutil.copy(self.folder / "best.ckpt", self.to / "best.ckpt")


class Validated(pl.Callback):
    """Notes the score of every validation."""

    def __init__(self) -> None:
        self.scores: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.scores.append((trainer.global_step, float(trainer.callback_metrics["val/primary"])))


def run(
    folder: Path,
    *,
    callbacks: tuple[pl.Callback, ...] = (),
    resume: Path | None = None,
    ema: bool = True,
    workers: int = 0,
    seed: int = 0,
    **options: Any,
) -> tuple[Toy, BestAndLast]:
    # Whatever state the generators have when a run is taken up must not matter.
    pl.seed_everything(seed, verbose=False)
    keeper = BestAndLast()
    averaging = (EmaWeights(Ema(0.9)),) if ema else ()
    made = trainer(folder, [keeper, *callbacks, *averaging], **options)
    model = Toy()
    with contextlib.suppress(Stopped):
        made.fit(model, datamodule=ToyData(num_workers=workers), ckpt_path=resume)
    return model, keeper


def assert_same_end(whole: Path, parts: Path) -> None:
    one, two = saved.read(whole / "last.ckpt"), saved.read(parts / "last.ckpt")
    for kind in {"state_dict", "raw_state_dict"} & one.keys():
        for name, value in one[kind].items():
            assert torch.equal(value, two[kind][name]), (kind, name)
    for key in ("global_step", "epoch", "callbacks", "lr_schedulers"):
        assert one[key] == two[key], key
    for index, state in one["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, two["optimizer_states"][0]["state"][index][name])


CASES: list[tuple[int, dict[str, Any]]] = [
    (3, {}),
    (3, {"ema": False}),
    (13, {}),
    (10, {"max_epochs": 3}),
    (2, {"accumulate_grad_batches": 3}),
    (5, {"accumulate_grad_batches": 3}),
    (5, {"val_check_interval": 0.5}),
    (7, {"val_check_interval": 0.5}),
    (3, {"limit_train_batches": 7}),
    (3, {"workers": 2}),
]


@pytest.mark.parametrize(("step", "options"), CASES)
def test_r10_stop_by_a_signal_and_resume(tmp_path: Path, step: int, options: dict[str, Any]) -> None:
    """R10, 28, 29, 40, 41: same samples, dropout, EMA, schedule, best score and steps, wherever it was stopped."""
    scores = [Validated() for _ in range(3)]
    whole, keeper = run(tmp_path / "whole", callbacks=(scores[0],), **options)
    first, _ = run(tmp_path / "parts", callbacks=(SignalAt(step), scores[1]), **options)
    last = tmp_path / "parts" / "last.ckpt"
    second, resumed = run(tmp_path / "parts", callbacks=(scores[2],), resume=last, seed=5, **options)
    assert 0 < len(first.seen) < len(whole.seen)
    assert first.seen + second.seen == whole.seen
    assert first.losses + second.losses == whole.losses
    assert scores[1].scores + scores[2].scores == scores[0].scores
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    assert (keeper.best_score, keeper.best_step) == (resumed.best_score, resumed.best_step)


class SignalInBatch(pl.Callback):
    """Sends SIGTERM to this process in batch `batch` of the first epoch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("batch", [3, 4])
def test_r10_a_validation_among_accumulated_batches_is_no_place_to_stop(tmp_path: Path, batch: int) -> None:
    """R10: validation follows batch 5, and an optimiser step takes 3: gradients of two batches would be lost."""
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 5}
    whole, _ = run(tmp_path / "whole", **options)
    first, _ = run(tmp_path / "parts", callbacks=(SignalInBatch(batch),), **options)
    second, _ = run(tmp_path / "parts", resume=tmp_path / "parts" / "last.ckpt", seed=5, **options)
    assert len(first.seen) == 6
    assert first.seen + second.seen == whole.seen
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_r10_every_sample_of_an_interrupted_epoch_is_seen_once(tmp_path: Path) -> None:
    """R10: 10 batches an epoch, stopped after 3."""
    first, _ = run(tmp_path, callbacks=(SignalAt(3),), max_epochs=1)
    second, _ = run(tmp_path, resume=tmp_path / "last.ckpt", max_epochs=1)
    assert len(first.seen) == 3
    assert sorted(i for batch in first.seen + second.seen for i in batch) == list(range(20))


@pytest.mark.parametrize(("steps", "options"), [(3, {}), (13, {}), (5, {"val_check_interval": 0.5})])
def test_a_step_limit_inside_an_epoch_is_no_end_of_the_epoch(
    tmp_path: Path, steps: int, options: dict[str, Any]
) -> None:
    """Also where it falls on a step that a validation follows."""
    scores = [Validated() for _ in range(3)]
    whole, _ = run(tmp_path / "whole", ema=False, callbacks=(scores[0],), **options)
    first, _ = run(tmp_path / "parts", max_steps=steps, ema=False, callbacks=(scores[1],), **options)
    last = tmp_path / "parts" / "last.ckpt"
    second, _ = run(tmp_path / "parts", resume=last, ema=False, callbacks=(scores[2],), **options)
    assert len(first.seen) == steps
    assert first.seen + second.seen == whole.seen
    # The scores differ: a cosine that ends earlier falls faster.
    validated = [[step for step, _ in seen.scores] for seen in scores]
    assert validated[1] + validated[2] == validated[0]


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 0.5}])
def test_best_checkpoint_is_a_place_to_go_on_from(tmp_path: Path, options: dict[str, Any]) -> None:
    copy = CopyBest(tmp_path / "whole", tmp_path / "parts")
    whole, _ = run(tmp_path / "whole", callbacks=(copy,), max_epochs=3, **options)
    second, _ = run(tmp_path / "parts", resume=tmp_path / "parts" / "best.ckpt", max_epochs=3, **options)
    assert 0 < len(second.seen) < len(whole.seen)
    assert whole.seen[-len(second.seen) :] == second.seen
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_saves_inside_an_epoch_fall_on_optimiser_steps(tmp_path: Path) -> None:
    saves: list[tuple[int, int]] = []

    class Spy(BestAndLast):
        def _save(self, trainer: pl.Trainer, name: str) -> None:
            super()._save(trainer, name)
            if name == "last.ckpt":
                saves.append((trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.current.ready))

    made = trainer(tmp_path, [Spy(every_n_steps=1)], max_epochs=1, accumulate_grad_batches=4)
    made.fit(Toy(), datamodule=ToyData())
    assert saves == [(1, 4), (2, 8), (3, 10)]


def test_a_run_from_a_foreign_checkpoint_leaves_its_folder_alone(tmp_path: Path) -> None:
    """32: files of the old run are as they were."""
    run(tmp_path / "old", max_epochs=1)
    before = {path: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    run(tmp_path / "new", resume=tmp_path / "old" / "last.ckpt")
    assert {path: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_a_checkpoint_inside_an_epoch_of_another_length_is_refused(tmp_path: Path) -> None:
    run(tmp_path, callbacks=(SignalAt(3),), ema=False)
    made = trainer(tmp_path)
    with pytest.raises(ValueError, match=r"10 batches.*5"):
        made.fit(Toy(), datamodule=ToyData(batch_size=4), ckpt_path=tmp_path / "last.ckpt")


def test_a_loader_that_cannot_be_taken_up_is_refused(tmp_path: Path) -> None:
    class Plain(ToyData):
        def train_dataloader(self) -> Any:
            return self.val_dataloader()

    with pytest.raises(ValueError, match="ResumableLoader"):
        trainer(tmp_path).fit(Toy(), datamodule=Plain())
