"""Bad days: runs that are taken up again, steps that cannot be right, schedulers, memory and folders that refuse."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor
from training_toys import Rows, Toy, ToyData, fit, folders

from experiments.__main__ import main
from experiments.training import saved
from experiments.training.runs import newest_unfinished
from experiments.training.signals import requeue
from experiments.training.starting import explained


def stop_in_step(config: Path, step: int, number: int = signal.SIGTERM, *words: str) -> Path:
    callback = ["--trainer.callbacks+=training_toys.SignalAt", f"--trainer.callbacks.step={step}"]
    assert fit(config, *callback, f"--trainer.callbacks.number={int(number)}", *words) == 128 + number
    folder = folders(config)[-1]
    # The run is to be taken up without the callback that stopped it.
    content = yaml.safe_load((folder / "config.yaml").read_text())
    content["trainer"]["callbacks"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_resume_auto_goes_on_with_what_is_unfinished_or_begins(config: Path) -> None:
    """The same words begin a run, go on with it, and begin the next one when it has finished."""
    words = ["--resume=auto", "--model.attention=Local", "--model.attention.window=3"]
    folder = stop_in_step(config, 7, signal.SIGTERM, *words)
    assert fit(config, *words) == 0
    assert folders(config) == [folder]
    assert [int(row["step"]) for row in rows(folder)] == list(range(1, 21))
    assert fit(config, *words) == 0
    assert len(folders(config)) == 2
    assert yaml.safe_load((folders(config)[1] / "config.yaml").read_text())["resume"] is None


def test_resume_auto_takes_the_run_of_its_name_and_none_that_is_being_trained(config: Path) -> None:
    """So two jobs of a preset do not take each other's."""
    first = stop_in_step(config, 7, signal.SIGTERM, "--run.name=job1")
    second = stop_in_step(config, 7, signal.SIGTERM, "--run.name=job2")
    root = str(config.parent / "runs")
    assert newest_unfinished(root, "toy", None) == second / "checkpoints" / "last.ckpt"
    assert newest_unfinished(root, "toy", "job1") == first / "checkpoints" / "last.ckpt"
    holds = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(second / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert newest_unfinished(root, "toy", None) == first / "checkpoints" / "last.ckpt"
        assert fit(config, f"--ckpt_path={second / 'checkpoints' / 'last.ckpt'}") == 1
        other.communicate("\n")
    assert newest_unfinished(root, "toy", None) == second / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("word", ["--resume=auto", "--ckpt_path=last"])
def test_a_run_that_has_lost_its_options_is_not_taken_up_without_them(
    config: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "runs" / "toy" / "0001-a"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    assert fit(config, "--run.root=elsewhere", f"--run.root={config.parent / 'runs'}", word) == 2
    assert "has lost its config.yaml" in capsys.readouterr().err
    assert folders(config) == [folder]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume=last"], "can be auto"),
        (["--resume=auto", "--ckpt_path=last"], "leave --ckpt_path out"),
    ],
)
def test_resume_says_what_it_can_be(
    config: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(config, *words) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A `scontrol` that notes what it is asked; gives what it has noted."""
    notes, program = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return lambda: notes.read_text().splitlines() if notes.exists() else []


def test_the_warning_of_slurm_saves_and_requeues(
    config: Path, scheduler: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """35: SIGUSR1 saves after the step, ends with 138 and puts the job back; the restarted command goes on."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder = stop_in_step(config, 7, signal.SIGUSR1, "--resume=auto")
    assert scheduler() == ["requeue 17"]
    assert saved.read(folder / "checkpoints" / "last.ckpt")["global_step"] == 7
    assert json.loads((folder / "results.json").read_text())["status"] == "stopped"
    assert fit(config, "--resume=auto") == 0
    assert folders(config) == [folder]


def test_only_the_warning_requeues(scheduler: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With SIGTERM jobs are cancelled; outside of SLURM there is no queue. An array names the task."""
    requeue(signal.SIGUSR1)
    monkeypatch.setenv("SLURM_JOB_ID", "19")
    requeue(signal.SIGTERM)
    assert scheduler() == []
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "18")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    requeue(signal.SIGUSR1)
    assert scheduler() == ["requeue 18_3"]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample 4 of the training data is no number."""
    before = Rows.__getitem__

    def read(self: Rows, index: int) -> dict[str, Tensor]:
        row = before(self, index)
        # Validation has five rows, and none of them is spoilt.
        return row | {"x": row["x"] * float("nan")} if index == 4 and len(self) == 20 else row

    monkeypatch.setattr(Rows, "__getitem__", read)


@pytest.mark.usefixtures("spoilt")
def test_a_sample_that_is_no_number_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends before the update, so the weights are as they were."""
    assert fit(config) == 1
    error = capsys.readouterr().err
    assert re.search(r"The loss is nan in step \d+.* highest at samples 4 \(nan\), \d+ \(\d", error)
    assert "--guard.policy=skip" in error


@pytest.mark.usefixtures("spoilt")
@pytest.mark.parametrize("policy", ["skip", "roll_back"])
def test_a_step_that_is_no_number_can_be_left_out(
    config: Path, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once in each of two epochs; in the second roll_back goes back to the checkpoint behind the first."""
    assert fit(config, f"--guard.policy={policy}") == 0
    (folder,) = folders(config)
    faults = [int(row["step"]) for row in rows(folder) if row["train/faults"]]
    assert [step > 10 for step in faults] == [False, True]
    assert [row["train/faults"] for row in rows(folder) if row["train/faults"]] == ["1", "2"]
    content = saved.read(folder / "checkpoints" / "last.ckpt")
    assert all(value.isfinite().all() for value in content["raw_state_dict"].values())
    said = capsys.readouterr().out
    assert said.count("It is left out") == 2
    assert ("again those after step 10" in said) == (policy == "roll_back")
    assert ("no last.ckpt yet" in said) == (policy == "roll_back")


@pytest.mark.usefixtures("spoilt")
def test_a_skipped_step_moves_nothing_and_going_back_is_exact(config: Path) -> None:
    """Weights, averages and the optimiser's state around the faulty step."""
    seen: dict[int, tuple[Tensor, float]] = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
            moment = next(iter(trainer.optimizers[0].state.values()))["exp_avg"]
            seen[trainer.global_step] = (module.network.embed.weight.detach().clone(), float(moment.abs().sum()))

    from experiments.training.cli import ExperimentCLI

    words = [f"--config={config}", f"--run.root={config.parent / 'runs'}", "--run.wandb=false"]
    cli = ExperimentCLI([*words, "--guard.policy=roll_back"], resume=True)
    cli.trainer.callbacks.insert(0, Watch())
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    first, second = (int(row["step"]) for row in rows(folders(config)[0]) if row["train/faults"])
    assert torch.equal(seen[first][0], seen[first - 1][0]) and seen[first][1] == seen[first - 1][1]
    assert torch.equal(seen[second][0], seen[10][0]) and seen[second][1] == seen[10][1]
    assert not torch.equal(seen[second - 1][0], seen[10][0])


def test_too_many_faults_end_the_run_all_the_same(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Rows, "__getitem__", lambda self, i: {"x": torch.full((3,), torch.inf), "y": torch.ones(()),
                                                              "id": torch.tensor(i)})  # fmt: skip
    assert fit(config, "--guard.policy=skip", "--guard.limit=3") == 1
    assert "in step 4" in capsys.readouterr().err


def test_a_loss_that_explodes_counts_where_that_is_asked(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sample a thousand times as large as the others, among the last ten: the usual loss is known by then."""
    before = Toy.step

    def step(self: Toy, batch: Any, stage: Any) -> Any:
        made = before(self, batch, stage)
        late = stage == "train" and self.trainer.global_step == 15
        return made._replace(loss_sum=made.loss_sum * 1000) if late else made

    monkeypatch.setattr(Toy, "step", step)
    assert fit(config) == 0
    assert fit(config, "--guard.spike=50") == 1
    assert re.search(r"in step 16, and [\d.]+ is usual", capsys.readouterr().err)


def test_memory_that_runs_out_names_what_to_lower(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: Toy, batch: Any, stage: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(Toy, "step", step)
    assert fit(config) == 1
    error = capsys.readouterr().err
    assert "Memory ran out" in error
    assert "--data.batch_size (it is 2)" in error
    assert "--activation_checkpointing=true" in error


def test_errors_are_explained_only_where_they_are_known() -> None:
    one, two = (cast(pl.Trainer, SimpleNamespace(world_size=n, global_rank=0, global_step=3)) for n in (1, 2))
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:43")
    assert "another one has ended" in str(explained(lost, two, ToyData(), None))
    assert explained(lost, one, ToyData(), None) is None
    assert explained(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), two, ToyData(), None) is None
    assert "Memory ran out in step 4" in str(explained(MemoryError(), one, ToyData(), None))


def test_a_root_that_cannot_be_written_is_said_before_training(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for root, who may write where permissions forbid it."""
    (config.parent / "file").touch()
    assert main(["fit", f"--config={config}", f"--run.root={config.parent / 'file'}"]) == 1
    error = capsys.readouterr().err
    assert "Nothing can be written to" in error
    assert "--run.root" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.strategy=fsdp"], "--trainer.strategy=fsdp2"),
        (["--trainer.num_nodes=2"], "torchrun or srun"),
        (["--guard.spike=0.5"], "--guard.spike is 0.5"),
        (["--activation_checkpointing=true"], "has no blocks"),
    ],
)
def test_what_cannot_be_is_said(config: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(config, *words) != 0
    assert said in capsys.readouterr().err
