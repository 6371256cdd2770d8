"""What a dashboard needs: the offline log of each experiment is read back, with its table of predictions."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb_file

from experiments.__main__ import main
from experiments.training.samples import spread_evenly

SHORT = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--head_monitor.every=1",
    "--head_monitor.samples=32",
]
SMALL = ["--model.dim=16", "--model.num_heads=2", "--trainer.accelerator=cpu"]

PRESETS: dict[str, tuple[list[str], str, list[str]]] = {
    "vit": (
        ["--model.depth=1"],
        "attention",
        ["sample", "image", "label", "first", "first probability", "second", "second probability"],
    ),
    "translator": (
        [
            "--trainer.check_val_every_n_epoch=1",
            "--model.encoder_depth=1",
            "--model.decoder_depth=1",
            "--model.decoding.beam=1",
        ],
        "alignment",
        ["sample", "source", "reference", "translation", "alignment"],
    ),
    "forecaster": (["--model.depth=1"], "forecast", ["sample", "mse", "mae", "forecast"]),
}
"""Preset -> (options that make it small, a picture that it draws, the first columns of its table)."""


@pytest.mark.parametrize(
    "preset", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("translator", "forecaster"))]
)
def test_the_offline_log_has_what_a_dashboard_needs(preset: str, tmp_path: Path) -> None:
    options, picture, columns = PRESETS[preset]
    assert main(["fit", f"--config={preset}", f"--run.root={tmp_path}", *SHORT, *SMALL, *options]) == 0
    (folder,) = (tmp_path / preset).iterdir()
    log = wandb_file.read(folder)
    assert {run.run_group for run in log["runs"]} == {f"{preset} {log['config']['data']}"}
    assert {"task", "preset", "attention", "seed", "git/commit", "params/total", "optim/lr"} <= log["config"].keys()
    steps = [row["trainer/global_step"] for row in log["rows"]]
    assert steps == sorted(steps)
    logged = {name for row in log["rows"] for name in row}
    assert {"train/loss", "lr", "grad_norm", "val/loss", "val/primary", "test/primary", "memory/peak_mib"} <= logged
    assert {"best/score", "best/step", "test/primary"} <= log["summary"].keys()
    for name in (picture, "heads"):
        *_, last = [row for row in log["rows"] if f"{name}/path" in row]
        sent = (log["folder"] / "files" / last[f"{name}/path"]).read_bytes()
        assert sent == (folder / "figures" / f"{name}.png").read_bytes()
        assert sent[:4] == b"\x89PNG"
    _check_table(folder, log, columns)


def _check_table(folder: Path, log: dict[str, Any], columns: list[str]) -> None:
    (entry,) = [row for row in log["rows"] if "samples/path" in row]
    table = json.loads((log["folder"] / "files" / entry["samples/path"]).read_text())
    assert table["columns"][: len(columns)] == columns
    assert (entry["samples/nrows"], len(table["data"])) == (8, 8)
    (sent_files,) = [[file.path for file in sent.manifest.contents] for sent in log["artifacts"]]
    assert sum(path.endswith(".png") for path in sent_files) == 8
    numbers = [row[0] for row in table["data"]]
    assert numbers[0] == 0
    assert numbers == sorted(set(numbers))
    with (folder / "samples.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == table["columns"]
    for written, sent in zip(rows, table["data"], strict=True):
        for name, cell, other in zip(head, written, sent, strict=True):
            if name in ("image", "alignment", "forecast"):
                assert (folder / cell).read_bytes()[:4] == b"\x89PNG"
                assert other == "Image"
            else:
                assert cell == str(other)


@pytest.mark.parametrize(
    ("total", "wanted"), [(0, []), (1, [0]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3]), (40, [0, 10, 20, 30])]
)
def test_samples_are_spread_evenly(total: int, wanted: list[int]) -> None:
    assert spread_evenly(total, 4) == wanted


@pytest.fixture
def offline_runs(tmp_path: Path) -> Callable[..., list[Path]]:
    def make(*sent: bool) -> list[Path]:
        folders = []
        for number, done in enumerate(sent):
            folder = tmp_path / "vit" / f"{number:04d}-softmax" / "wandb" / f"offline-run-{number}"
            folder.mkdir(parents=True)
            (folder / f"run-{number}.wandb").touch()
            (folder.parents[1] / ".lock").touch()
            if done:
                (folder / f"run-{number}.wandb.synced").touch()
            folders.append(folder)
        return folders

    return make


def test_sync_names_what_has_not_been_sent(
    offline_runs: Callable[..., list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, sent, third = offline_runs(False, True, False)
    assert main(["sync", f"--root={tmp_path}", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert str(first) in said and str(third) in said and "2 would be sent" in said
    assert str(sent) not in said


def test_sync_without_a_login_says_how(
    offline_runs: Callable[..., list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    offline_runs(False)
    assert main(["sync", f"--root={tmp_path}"]) == 1
    assert "wandb login" in capsys.readouterr().err


def test_sync_with_nothing_to_send_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", f"--root={tmp_path}"]) == 0
    assert "nothing to send" in capsys.readouterr().out


def test_what_has_no_log_or_is_being_written_is_not_sent_yet(
    offline_runs: Callable[..., list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """W&B would mark half of a run as sent, and call the run failed."""
    empty, growing = offline_runs(False, False)
    (empty / "run-0.wandb").unlink()
    holds = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    lock = str(growing.parents[1] / ".lock")
    with subprocess.Popen([sys.executable, "-c", holds, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert main(["sync", f"--root={tmp_path}", "--dry_run"]) == 0
        said = capsys.readouterr().out
        assert f"not yet, for its run is being trained: {growing}" in said and "nothing to send" in said
        other.communicate(b"\n")
    assert main(["sync", f"--root={tmp_path}", "--dry_run"]) == 0
    assert "1 would be sent" in capsys.readouterr().out


def test_what_wandb_has_not_marked_as_sent_was_not_sent(
    offline_runs: Callable[..., list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a server refuses, `wandb sync` ends with status 0."""
    first, _ = offline_runs(False, False)
    monkeypatch.setenv("WANDB_API_KEY", "k")

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (first / "run-0.wandb.synced").touch()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr("experiments.training.syncing.subprocess.run", run)
    assert main(["sync", f"--root={tmp_path}"]) == 1
    assert "1 of 2 were not sent" in capsys.readouterr().err


def test_sync_hands_the_folders_to_wandb(
    offline_runs: Callable[..., list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, third = offline_runs(False, True, False)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    called: list[list[str]] = []

    class Done:
        returncode = 3

    def run(words: list[str], **options: Any) -> Done:
        called.append(words[1:])
        return Done()

    monkeypatch.setattr("experiments.training.syncing.subprocess.run", run)
    assert main(["sync", f"--root={tmp_path}"]) == 3
    assert called == [["-m", "wandb", "sync", str(first), str(third)]]
