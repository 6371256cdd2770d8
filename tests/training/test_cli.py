"""The command line: what a user types, what comes out, and what is said when it does not fit."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_toys import fit, folders

from experiments.__main__ import main
from experiments.training import saved
from experiments.training.checkpoints import WholeFiles
from experiments.training.specs import describe

HERE = Path(__file__).parent


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def stop_in_step(config: Path, step: int) -> Path:
    status = fit(config, "--trainer.callbacks+=training_toys.SignalAt", f"--trainer.callbacks.step={step}")
    assert status == 128 + signal.SIGTERM
    (folder,) = folders(config)
    # The run is to be taken up without the callback that stopped it.
    content = yaml.safe_load((folder / "config.yaml").read_text())
    content["trainer"]["callbacks"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder


def test_fit_leaves_a_complete_folder_and_says_what_comes_next(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(config, "--model.attention=Local", "--model.attention.window=3") == 0
    (folder,) = folders(config)
    assert folder.name == "0001-local-seed0"
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    results = json.loads((folder / "results.json").read_text())
    assert (results["status"], results["mechanism"], results["seed"]) == ("finished", "Local", 0)
    assert results["metrics"].keys() == {"test/mae", "test/loss", "test/primary"}
    assert results["parameters"] > 0
    assert results["peak_memory_mib"] > 10
    assert results["samples_per_second"] > 0
    out = capsys.readouterr().out
    assert "1 x attention: Local(" in out
    assert f"python -m experiments test --ckpt_path={folder / 'checkpoints' / 'best.ckpt'}" in out
    assert out.index("parameters") < out.index("epoch 1/2") < out.index("test/mae")
    assert not (Path.cwd() / "lightning_logs").exists()


def test_metrics_have_one_row_a_step_and_the_agreed_names(config: Path) -> None:
    """52, 58: one axis; validation rows carry the training step."""
    fit(config)
    found = rows(folders(config)[0])
    assert [int(row["step"]) for row in found] == list(range(1, 21))
    assert all(row["train/loss"] and row["lr"] and row["grad_norm"] for row in found)
    assert [row["step"] for row in found if row["val/primary"]] == ["10", "20"]
    assert found[-1]["test/primary"]
    assert {"val/loss", "throughput/samples"} <= found[0].keys()


def test_an_epoch_shorter_than_the_interval_is_logged(config: Path) -> None:
    """58: 10 batches, a row each 50 steps."""
    fit(config, "--trainer.log_every_n_steps=50")
    assert [row["step"] for row in rows(folders(config)[0]) if row["train/loss"]] == ["10", "20"]


def test_r13_the_same_command_twice(config: Path) -> None:
    """R13, 26: the next number, nothing overwritten; then the first is resumed. All end well."""
    assert fit(config) == 0
    before = {p: p.read_bytes() for p in folders(config)[0].rglob("*") if p.is_file()}
    assert fit(config) == 0
    assert [p.name[:4] for p in folders(config)] == ["0001", "0002"]
    assert {p: p.read_bytes() for p in before} == before
    last = folders(config)[0] / "checkpoints" / "last.ckpt"
    assert main(["fit", f"--ckpt_path={last}", "--trainer.max_epochs=3"]) == 0
    assert len(folders(config)) == 2
    assert int(rows(folders(config)[0])[-1]["step"]) == 30


def test_saved_config_runs_again_as_it_is(config: Path) -> None:
    """46: and is byte-equal when it is written again."""
    fit(config, "--model.optim.lr=0.02")
    first = folders(config)[0] / "config.yaml"
    assert main(["fit", f"--config={first}"]) == 0
    assert (folders(config)[1] / "config.yaml").read_bytes() == first.read_bytes()
    assert yaml.safe_load(first.read_text())["model"]["init_args"]["optim"]["lr"] == 0.02


def test_r12_a_resumed_run_is_one_rising_file(config: Path) -> None:
    """R12, R10: stopped at step 7, resumed; the same rows as a run in one piece."""
    whole = config.with_name("whole") / "toy.yaml"
    whole.parent.mkdir()
    whole.write_text(config.read_text())
    assert fit(whole) == 0
    folder = stop_in_step(config, 7)
    assert json.loads((folder / "results.json").read_text())["status"] == "stopped"
    # A process that was killed later than it saved leaves rows that come again.
    with (folder / "metrics.csv").open("a") as file:
        file.write("8,0,9.9,9.9,9.9,9.9\n9,0,9.9")
    assert main(["fit", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"]) == 0
    found, wanted = rows(folder), rows(folders(whole)[0])
    assert [int(row["step"]) for row in found] == list(range(1, 21))
    for one, other in zip(found, wanted, strict=True):
        measured = [name for name in one if not name.startswith(("throughput", "memory"))]
        assert {name: one[name] for name in measured} == {name: other[name] for name in measured}
    results = [json.loads((f / "results.json").read_text()) for f in (folder, folders(whole)[0])]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["best_step"] == results[1]["best_step"]


def test_ckpt_path_last_is_the_newest_run(config: Path) -> None:
    folder = stop_in_step(config, 12)
    assert fit(config, "--ckpt_path=last") == 0
    assert folders(config) == [folder]
    assert int(rows(folder)[-1]["step"]) == 20
    assert yaml.safe_load((folder / "config.yaml").read_text())["ckpt_path"] is None


def test_the_best_checkpoint_is_tested_not_the_last(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation and test are the same samples here, and the score falls with each epoch."""
    from training_toys import Toy

    monkeypatch.setattr(Toy, "primary", lambda self, values: -float(self.trainer.global_step))
    assert fit(config) == 0
    found = rows(folders(config)[0])
    results = json.loads((folders(config)[0] / "results.json").read_text())
    assert results["best_step"] == 10
    assert results["metrics"]["test/mae"] == pytest.approx(float(found[9]["val/mae"]))
    assert results["metrics"]["test/mae"] != pytest.approx(float(found[19]["val/mae"]))


def test_options_against_a_checkpoint_are_refused_or_honoured(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """34: with the difference; with --run.override_ckpt the rate asked for is used."""
    folder = stop_in_step(config, 12)
    last = folder / "checkpoints" / "last.ckpt"
    assert main(["fit", f"--ckpt_path={last}", "--model.optim.lr=0.5"]) == 1
    error = capsys.readouterr().err
    assert "--model.optim.lr was 0.01 there and is 0.5 here" in error
    assert "--run.override_ckpt" in error
    assert main(["fit", f"--ckpt_path={last}", "--model.optim.lr=0.5", "--run.override_ckpt=true"]) == 0
    found = rows(folder)
    assert float(found[12]["lr"]) == pytest.approx(50 * float(found[11]["lr"]), rel=0.2)
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["optim"]["lr"] == 0.5


@pytest.mark.parametrize(
    ("option", "said"),
    [("--trainer.accumulate_grad_batches=2", "was 1 and is 2 now"), ("--ema.decay=0.5", "--ema was")],
)
def test_what_changes_a_step_is_refused_too_and_a_longer_run_is_not(
    config: Path, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    """34: options of the trainer and averaging stand in no checkpoint, but in the folder of the run."""
    folder = stop_in_step(config, 12)
    last = folder / "checkpoints" / "last.ckpt"
    assert main(["fit", f"--ckpt_path={last}", option]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "--run.override_ckpt" in error
    assert main(["fit", f"--ckpt_path={last}", "--trainer.max_epochs=3"]) == 0


def test_workers_may_differ_from_those_of_the_checkpoint(config: Path) -> None:
    folder = stop_in_step(config, 12)
    assert main(["fit", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}", "--data.num_workers=1"]) == 0


def test_test_needs_the_file_alone(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(config)
    folder = folders(config)[0]
    wanted = json.loads((folder / "results.json").read_text())["metrics"]["test/mae"]
    alone = config.parent / "moved.ckpt"
    (folder / "checkpoints" / "best.ckpt").rename(alone)
    capsys.readouterr()
    assert main(["test", f"--ckpt_path={alone}"]) == 0
    assert f"{wanted:.4f}" in capsys.readouterr().out
    assert len(folders(config)) == 1


def test_an_overlay_changes_one_key_and_keeps_the_rest(config: Path) -> None:
    """43, 47: a second config over the first."""
    over = config.with_name("over.yaml")
    over.write_text(
        "checkpoint: {every_n_steps: 3}\nmodel: {init_args: {optim: {warmup_steps: 9}}}\nema: {decay: 0.5}\n"
    )
    assert fit(config, f"--config={over}") == 0
    content = yaml.safe_load((folders(config)[0] / "config.yaml").read_text())
    assert content["checkpoint"] == {"every_n_steps": 3}
    optim = content["model"]["init_args"]["optim"]
    assert (optim["warmup_steps"], optim["lr"]) == (9, 0.01)
    assert saved.read(folders(config)[0] / "checkpoints" / "best.ckpt")["experiment"]["init_args"]["optim"] == optim


def test_seed_chooses_the_order_of_samples(config: Path) -> None:
    fit(config, "--seed_everything=3")
    folder = folders(config)[0]
    assert folder.name == "0001-softmax-seed3"
    assert saved.read(folder / "checkpoints" / "last.ckpt")["experiment"]["seed"] == 3


def test_help_is_worth_reading(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--help"], "--model.attention=Local"),
        ([f"--config={config}", "--model.help"], "--model.width"),
        ([f"--config={config}", "--data.help"], "--data.batch_size"),
        ([f"--config={config}", "--model.attention.help=Local"], "window"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["fit", *words])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert said in out and "usage: python -m experiments" in out and "None" not in out


def test_every_public_option_is_typed() -> None:
    """44: an untyped argument would be taken unchecked."""
    from training_toys import Toy, ToyData

    import experiments.training.checkpoints as checkpoints
    import experiments.training.ema as ema
    import experiments.training.optim as optim
    import experiments.training.runs as runs

    for cls in (checkpoints.BestAndLast, ema.Ema, optim.Optim, runs.RunOptions):
        code = cls.__init__.__code__
        assert set(cls.__init__.__annotations__) == {*code.co_varnames[1 : code.co_argcount], "return"}
    assert describe(Toy())["init_args"].keys() == {"attention", "optim", "width"}
    assert describe(ToyData())["init_args"]["noise"] == 0.1


def test_a_loss_that_is_no_number_ends_the_run_with_a_hint(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run says so in its results, with step, rate and what to do."""
    assert fit(config, "--model.optim.lr=1e30") == 1
    error = capsys.readouterr().err
    assert "The loss is" in error
    assert "--model.optim.lr" in error
    assert json.loads((folders(config)[0] / "results.json").read_text())["status"] == "failed"


def test_ctrl_c_saves_and_ends_with_its_status(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGINT as SIGTERM: the step is finished, saved, and the run goes on from it."""
    words = ["--trainer.callbacks+=training_toys.SignalAt", "--trainer.callbacks.step=3"]
    assert fit(config, *words, f"--trainer.callbacks.number={int(signal.SIGINT)}") == 128 + signal.SIGINT
    assert "go on with" in capsys.readouterr().err
    assert saved.read(folders(config)[0] / "checkpoints" / "last.ckpt")["global_step"] == 3


@pytest.mark.slow
def test_a_signal_to_the_process_saves_and_ends_with_its_status(config: Path) -> None:
    """37 on one process: a real one; exit status 143, and the run goes on from its last.ckpt."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    words = ["fit", f"--config={config}", f"--run.root={config.parent / 'runs'}", "--run.wandb=false"]
    command = [sys.executable, "-m", "experiments", *words, "--trainer.max_epochs=10000"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=config.parent
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch 3/"):
                break
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "go on with" in error
    assert "Traceback" not in error
    (folder,) = folders(config)
    step = saved.read(folder / "checkpoints" / "last.ckpt")["global_step"]
    assert step >= 30
    assert int(rows(folder)[-1]["step"]) == step


def test_last_alone_goes_on_with_the_newest_run_and_its_options(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was started with more options than the preset has, with the preset named or not."""
    monkeypatch.chdir(config.parent)
    started = [f"--config={config}", "--run.wandb=false", "--model.attention=Local", "--model.attention.window=3"]
    for words in ([f"--config={config}"], []):
        assert main(["fit", *started, "--trainer.max_steps=12"]) == 0
        folder = max((config.parent / "runs" / "toy").iterdir())
        assert main(["fit", *words, "--ckpt_path=last", "--trainer.max_steps=15"]) == 0
        assert [int(row["step"]) for row in rows(folder)] == list(range(1, 16))
        assert "Local" in (folder / "config.yaml").read_text()


@pytest.fixture
def interrupts_are_heard() -> Iterator[None]:
    """A shell starts what it puts into the background with SIGINT ignored, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_are_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_closing_test_ends_with_its_status(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """A scheduler must not take it for a success."""
    from training_toys import Toy

    before = Toy.test_step

    def interrupted(self: Toy, *args: Any) -> None:
        os.kill(os.getpid(), number)
        before(self, *args)

    monkeypatch.setattr(Toy, "test_step", interrupted)
    assert fit(config) == 128 + number
    assert f"stopped by {number.name}" in capsys.readouterr().err
    (folder,) = folders(config)
    assert json.loads((folder / "results.json").read_text())["status"] == "stopped"
    assert (folder / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.usefixtures("interrupts_are_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_error_that_a_signal_to_all_has_caused_is_no_failure(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """As where it ends the compiler of --compile, which is in the same group of processes."""
    from training_toys import Toy

    def compiled(self: Toy, *args: Any) -> None:
        os.kill(os.getpid(), number)
        raise RuntimeError("the compiler was interrupted\n" * 200)

    monkeypatch.setattr(Toy, "training_step", compiled)
    assert fit(config) == 128 + number
    error = capsys.readouterr().err
    assert error.strip() == f"stopped by {number.name}; the checkpoints that were written stand"


def test_a_finished_run_keeps_its_cost_when_it_is_tested_again(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(config.parent)
    assert fit(config) == 0
    (folder,) = folders(config)
    before = json.loads((folder / "results.json").read_text())
    capsys.readouterr()
    assert main(["fit", f"--config={config}", f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"]) == 0
    assert f"Nothing was left to train in {folder} after step 20" in capsys.readouterr().out
    after = json.loads((folder / "results.json").read_text())
    for key in ("seconds", "samples_per_second", "steps", "metrics"):
        assert after[key] == before[key]
    assert after["peak_memory_mib"] >= before["peak_memory_mib"]


def test_a_score_that_is_no_number_does_not_stay_the_best(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every comparison with NaN is false, so a first one would never be beaten."""
    from training_toys import Toy

    monkeypatch.setattr(Toy, "primary", lambda self, values: 1.0 if self.trainer.current_epoch else float("nan"))
    assert fit(config) == 0
    results = json.loads((folders(config)[0] / "results.json").read_text())
    assert results["best_step"] == 20
    assert results["best_val_primary"] == 1.0


def test_r12_figures_are_on_the_disk_before_the_checkpoint_of_their_step(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed right after a save and taken up again does not measure them a second time."""
    before = WholeFiles.save_checkpoint
    seen: list[tuple[int, str]] = []

    def save(self: WholeFiles, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        seen.append((checkpoint["global_step"], rows(folders(config)[0])[-1]["step"]))
        before(self, checkpoint, path, storage_options)

    monkeypatch.setattr(WholeFiles, "save_checkpoint", save)
    assert fit(config) == 0
    assert {step for step, _ in seen} == {10, 20}
    assert all(str(step) == on_disk for step, on_disk in seen)


def test_a_warm_up_that_is_too_long_names_the_option_that_cuts_the_run(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(config, "--trainer.max_steps=3", "--trainer.max_epochs=9") == 0
    out = capsys.readouterr().out
    assert "or raise --trainer.max_steps." in out and "or raise --trainer.max_epochs" not in out


@pytest.mark.slow
def test_a_checkpoint_of_another_model_than_the_preset_is_refused_by_both_names(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(config, "--trainer.max_steps=2") == 0
    path = folders(config)[0] / "checkpoints" / "last.ckpt"
    for words in (["test"], ["fit", f"--run.root={config.parent}"], ["test", "--run.override_ckpt=true"]):
        capsys.readouterr()
        assert main([*words, "--config=vit", f"--ckpt_path={path}"]) == 1
        error = capsys.readouterr().err
        assert "is a toy checkpoint (Toy), and --config=vit is of a vision model (ImageClassifier)" in error
        assert "Leave --config out" in error
