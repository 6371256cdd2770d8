"""Run folders, the CSV log and W&B."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from training_toys import Toy, ToyData, trainer

from experiments.__main__ import main
from experiments.training.finding import newest_finished
from experiments.training.loggers import CsvRows
from experiments.training.pictures import save_pictures
from experiments.training.runs import RunFolder, RunOptions, newest_last, newest_unfinished
from experiments.training.throughput import Throughput
from experiments.training.wandb_rows import WandbRows, logged_in


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_r13_folders_are_numbered_and_never_shared(tmp_path: Path) -> None:
    """R13: also when eight runs start at once."""
    options = RunOptions(root=str(tmp_path), preset="vit")
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(RunFolder.create(options, "local").path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in made) == [f"{n:04d}-local" for n in range(1, 9)]
    made[3].rename(tmp_path / "vit" / "0042-other")
    assert RunFolder.create(options, "local").path.name == "0043-local"
    assert not [path for path in (tmp_path / "vit").iterdir() if path.name.startswith(".")]


def test_r13_a_run_that_begins_at_the_same_moment_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R13: the other one, with other words, is complete between our looking and our claim."""
    mkdir = Path.mkdir

    def slow(self: Path, *args: Any, **options: Any) -> None:
        if self.name == ".0001":
            mkdir(self.parent / "0001-softmax")
        mkdir(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", slow)
    made = RunFolder.create(RunOptions(root=str(tmp_path), preset="vit"), "local")
    assert made.path.name == "0002-local"


def test_newest_last_passes_over_runs_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run under"):
        newest_last(str(tmp_path), "vit")
    for number, preset in enumerate(("vit", "vit", "other", "vit"), start=1):
        folder = tmp_path / preset / f"{number}-a" / "checkpoints"
        folder.mkdir(parents=True)
        if number != 4:
            (folder / "last.ckpt").touch()
            os.utime(folder / "last.ckpt", (number, number))
    assert newest_last(str(tmp_path), "vit").parts[-3] == "2-a"
    assert newest_last(str(tmp_path), None).parts[-3] == "3-a"


def test_csv_of_a_run_that_is_taken_up_again_loses_no_row_to_a_second_kill(tmp_path: Path) -> None:
    """R12: the row of the checkpoint's step stays in the file, and may still grow."""
    path = tmp_path / "metrics.csv"
    log = CsvRows(path)
    for step in (1, 2, 3, 4):
        log.log_metrics({"epoch": 0, "a": float(step)}, step=step)
    log.save()
    again = CsvRows(path, steps_done=3)
    assert [row["step"] for row in rows(path)] == ["1", "2", "3"]
    again.log_metrics({"b": 7.0}, step=3)
    again.log_metrics({"epoch": 0, "a": 5.0}, step=4)
    again.finalize("success")
    assert [(row["step"], row["a"], row["b"]) for row in rows(path)][2:] == [("3", "3.0", "7.0"), ("4", "5.0", "")]


def test_csv_keeps_one_rising_row_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    log = CsvRows(path)
    log.log_metrics({"epoch": 0, "a": 1.0}, step=1)
    log.log_metrics({"epoch": 0, "a": 2.0}, step=2)
    log.log_metrics({"epoch": 0, "b": 3.0}, step=2)
    log.save()
    log.log_metrics({"c": 4.0}, step=2)
    log.log_metrics({"epoch": 1, "a": 5.0}, step=3)
    log.finalize("success")
    assert [list(row.values()) for row in rows(path)] == [
        ["1", "0", "1.0", "", ""],
        ["2", "0", "2.0", "3.0", "4.0"],
        ["3", "1", "5.0", "", ""],
    ]


def test_csv_takes_the_last_figure_of_a_step(tmp_path: Path) -> None:
    log = CsvRows(tmp_path / "metrics.csv")
    for value in (1.23456, 1):
        log.log_metrics({"epoch": 0, "a": value}, step=2)
        log.save()
    assert [list(row.values()) for row in rows(tmp_path / "metrics.csv")] == [["2", "0", "1"]]


def test_csv_cuts_off_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    log = CsvRows(path)
    for step in range(1, 6):
        log.log_metrics({"epoch": 0, "a": step}, step=step)
    log.save()
    with path.open("a") as file:
        file.write("6,0")
    again = CsvRows(path, steps_done=3)
    again.log_metrics({"b": 7}, step=3)
    again.log_metrics({"epoch": 0, "a": 40}, step=4)
    again.save()
    assert [(row["step"], row["a"], row["b"]) for row in rows(path)] == [
        ("1", "1", ""), ("2", "2", ""), ("3", "3", "7"), ("4", "40", ""),
    ]  # fmt: skip


class FakeRun:
    """What wandb.init gives."""

    offline = True

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.defined: dict[str, dict[str, Any]] = {}
        self.dir = "files"
        self.summary: dict[str, Any] = {}
        self.id = options["id"]
        self.artifacts: list[tuple[Any, list[str]]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def define_metric(self, name: str, **options: Any) -> None:
        self.defined[name] = options

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code: int) -> None:
        self.options["exit_code"] = exit_code


def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    import wandb

    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    return runs


def opened(folder: Path) -> WandbRows:
    return WandbRows(folder, name="n", group="g", tags=["t"], config=lambda: {"task": "toy"})


def test_wandb_run_is_opened_with_the_first_row_and_kept_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12, 52: one id, one axis, best values in the summary."""
    runs = fake_wandb(monkeypatch)
    log = opened(tmp_path)
    assert not runs
    log.log_metrics({"train/loss": 1.0}, step=7)
    log.log_metrics({"val/primary": 1.0}, step=7)
    log.finish(exit_code=0)
    (run,) = runs
    assert [row["trainer/global_step"] for row in run.rows] == [7, 7]
    assert run.options["mode"] == "offline"
    assert run.options["config"] == {"task": "toy"}
    assert run.defined["val/primary"]["summary"] == "max,last"
    assert run.defined["*"]["step_metric"] == "trainer/global_step"
    again = opened(tmp_path)
    again.log_metrics({"train/loss": 1.0}, step=8)
    assert runs[1].options["id"] == run.options["id"]


@pytest.mark.parametrize("place", ["init", "log"])
def test_wandb_never_costs_a_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it throws becomes one line, and the run ends well."""
    import wandb

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the server is on fire")

    runs = fake_wandb(monkeypatch)
    log = opened(tmp_path)
    if place == "init":
        monkeypatch.setattr(wandb, "init", fail)
    else:
        monkeypatch.setattr(FakeRun, "log", fail)
    with caplog.at_level(logging.WARNING, "experiments"):
        made = trainer(tmp_path, logger=[log])
        made.fit(Toy(), datamodule=ToyData())
        log.finish(exit_code=0)
    assert [run.options["exit_code"] for run in runs] == ([0] if place == "log" else [])
    assert made.global_step == 20
    warned = [record for record in caplog.records if record.name == "experiments"]
    assert [record.getMessage() for record in warned] == ["W&B is off for the rest of this run: the server is on fire"]


@pytest.mark.parametrize("key", ["", "k" * 40])
def test_what_cannot_be_sent_is_logged_offline(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a key nothing is asked for, which in a terminal W&B would do; with one, the server may be away."""
    import wandb

    def init(**options: Any) -> FakeRun:
        tried.append(options["mode"])
        if options["mode"] == "online":
            raise wandb.errors.CommError("context deadline exceeded\nwhile retrying")
        return FakeRun(**options)

    tried: list[str] = []
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: tried.append("teardown"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "online")
    log = opened(tmp_path)
    log.log_metrics({"train/loss": 1.0}, step=1)
    assert tried == [*(["online"] if key else []), "teardown", "offline"]
    assert log.offline_folder == Path()
    log.finish(exit_code=0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert ("context deadline exceeded while retrying" if key else "-m wandb login") in said
    assert said.endswith("it logs offline, and make sync sends it.")


def test_wandb_is_online_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert logged_in()
    (tmp_path / "netrc").write_text("machine example.org\n  login user\n  password secret\n")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert logged_in()


def test_fit_logs_to_wandb_offline(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real library: one offline folder inside the run folder, and the command that sends it."""
    assert main(["fit", f"--config={config}", f"--run.root={config.parent / 'runs'}"]) == 0
    (folder,) = (config.parent / "runs" / "toy").iterdir()
    (offline,) = (folder / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert f"wandb sync {offline.parent}/offline-run-*" in capsys.readouterr().out


def test_config_twin_is_flat_and_short(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_wandb(monkeypatch)
    words = [f"--run.root={config.parent / 'runs'}", "--model.attention=Local", "--model.attention.window=3"]
    assert main(["fit", f"--config={config}", *words]) == 0
    (run,) = runs
    twin = run.options["config"]
    wanted = {"task": "toy", "preset": "toy", "attention": "Local", "attention/window": 3, "seed": 0}
    assert wanted.items() <= twin.items()
    assert twin["optim/lr"] == 0.01
    assert twin["data/batch_size"] == 2
    assert twin["params/total"] > 0
    assert all(name.count("/") < 2 and name.count(".") < 3 for name in twin)
    assert (run.options["group"], run.options["tags"]) == ("toy ToyData", ["toy", "Local"])
    assert run.options["exit_code"] == 0


def test_a_run_that_never_starts_opens_no_wandb_run(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = fake_wandb(monkeypatch)
    root = f"--run.root={config.parent / 'runs'}"
    assert main(["fit", f"--config={config}", root, "--trainer.max_epochs=-1"]) == 1
    assert not runs


@pytest.mark.parametrize("offline", [False, True])
def test_the_best_checkpoint_is_an_artifact_of_a_run_that_is_online(
    config: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    runs = fake_wandb(monkeypatch)
    monkeypatch.setattr(FakeRun, "offline", offline)
    monkeypatch.setenv("WANDB_DATA_DIR", str(config.parent))
    root = config.parent / "runs"
    assert main(["fit", f"--config={config}", f"--run.root={root}"]) == 0
    (run,) = runs
    assert len(run.artifacts) == (0 if offline else 1)
    (best,) = root.glob("toy/*/checkpoints/best.ckpt")
    for artifact, aliases in run.artifacts:
        assert (artifact.name, artifact.type, aliases) == (f"checkpoint-{run.id}", "model", ["best"])
        results = json.loads((best.parents[1] / "results.json").read_text())
        assert artifact.metadata == {"val/primary": results["best_val_primary"]}
        (file,) = artifact.manifest.entries.values()
        digest = base64.b64encode(hashlib.md5(best.read_bytes()).digest()).decode()
        assert (file.path, file.size, file.digest) == ("best.ckpt", best.stat().st_size, digest)


def test_throughput_counts_samples_without_the_first_batch(tmp_path: Path) -> None:
    watch = Throughput()
    made = trainer(tmp_path, [watch], logger=[CsvRows(tmp_path / "metrics.csv")], val_check_interval=0.5)
    made.fit(Toy(), datamodule=ToyData())
    assert watch.count == 2 * 18
    assert watch.per_second == pytest.approx(watch.count / watch.seconds, rel=0.01)
    found = [row for row in rows(tmp_path / "metrics.csv") if row["throughput/samples"]]
    assert [row["step"] for row in found] == ["10", "20"]
    assert float(found[0]["throughput/step_ms"]) > 0


def test_pictures_are_files(tmp_path: Path) -> None:
    class Figure:
        def savefig(self, file: io.BytesIO, **options: Any) -> None:
            file.write(b"png")

    class Drawn(Toy):
        def attention_pictures(self, batch: Any) -> dict[str, Any]:
            assert not torch.is_grad_enabled()
            return {"first/heads": Figure(), f"of {len(batch['x'])}": Figure()}

    files = save_pictures(Drawn(), ToyData(), tmp_path / "figures")
    assert {path.name for path in files.values()} == {"first-heads.png", "of 2.png"}
    assert all(path.read_bytes() == b"png" for path in files.values())
    assert save_pictures(Toy(), ToyData(), tmp_path / "none") == {}
    assert not (tmp_path / "none").exists()


def test_results_are_written_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_results() == {}
    content = {"task": "toy", "status": "finished"}
    folder.write_results(content)
    assert json.loads((tmp_path / "results.json").read_text()) == folder.read_results() == content


@pytest.mark.parametrize(
    "text", ["", '{"task": "toy", "sta', '["finished"]', "{}", '{"task": 1, "status": 2}', "\0\xff"]
)
def test_a_results_file_that_no_run_has_written_costs_a_line_and_no_command(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a command that looks for a finished run, nor one that looks for an unfinished run."""
    for number, written in enumerate((text, '{"task": "toy", "status": "finished"}'), start=1):
        folder = tmp_path / "toy" / f"{number}-a"
        (folder / "checkpoints").mkdir(parents=True)
        for name in ("best", "last"):
            (folder / "checkpoints" / f"{name}.ckpt").touch()
        (folder / "results.json").write_bytes(written.encode("latin-1"))
    assert newest_finished(["toy"], str(tmp_path)).parts[-3] == "2-a"
    assert newest_unfinished(str(tmp_path), "toy", None) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(str(tmp_path / "toy" / "1-a" / "results.json") in line for line in said)
