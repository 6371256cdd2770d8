"""`make sweep`: what fits, at which size, what is repeated and what is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnzoo import CATALOGUE
from experiments.__main__ import main
from experiments.comparing import files, plan
from experiments.comparing.sweep import Outcome, outcome, time_left
from experiments.training import console, costs
from experiments.training.usage import CONFIGS

SMALL = ["--model.dim=16", "--model.depth=1", "--run.wandb=false", "--run.samples=0"]
LOCAL = '{"class_path": "Local", "init_args": {"window": %d}}'
SLOWER = ("forecaster", "listops", "translator", "translator-bahdanau")
LEFT_OUT = {"translator": ["Strided"], "forecaster": ["Axial"]}
"""No size of theirs sees half of the pairs there; the files say why."""

ALL_PAIRS = {
    "Softmax", "Flash", "Additive", "Differential",  # by their definition
    "MemoryCompressed", "Linformer", "Nystrom", "Linear", "Performer",  # weights of mixtures and sums of keys
}  # fmt: skip


def sweep_file(folder: Path, **parameters: list[Any]) -> files.SweepFile:
    path = folder / "sweeps" / "vit-attention.yaml"
    path.parent.mkdir(exist_ok=True)
    content = {
        "method": "grid",
        "command": ["python", "-m", "experiments", "fit", "--config=vit", "${args}"],
        "parameters": {name.replace("__", "."): {"values": values} for name, values in parameters.items()},
    }
    path.write_text(yaml.safe_dump(content))
    return files.read(path)


@pytest.mark.parametrize("preset", ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)])
def test_each_sweep_of_mechanisms_names_all_that_fit_at_half_of_the_pairs(preset: str) -> None:
    file = files.read(CONFIGS / "sweeps" / f"{preset}-attention.yaml")
    made = plan.plan(file, [], None, None)
    named = {trial.label for trial in made.trials}
    assert named | made.left_out.keys() == CATALOGUE.keys()
    assert [name for name, why in made.left_out.items() if why.startswith("not in")] == (LEFT_OUT.get(preset, []))
    builder = plan._Builder()
    for trial in made.trials:
        if trial.label not in ALL_PAIRS:
            model, data = builder.model(trial.words)
            share = costs.visible_pairs(model, next(iter(data.val_dataloader())), trial.label)
            assert share is not None
            assert 0 < share <= 0.5, (trial.label, share)


def test_what_the_network_refuses_is_left_out_with_its_reason(tmp_path: Path) -> None:
    """A window that cannot be centred, and a class that the file does not name."""
    made = plan.plan(sweep_file(tmp_path, model__attention=["Softmax", LOCAL % 4, LOCAL % 5]), SMALL, 2, None)
    # Two sizes of one mechanism need two labels; one of them is refused here.
    assert [(trial.label, trial.seed) for trial in made.trials] == [
        (label, seed) for seed in (0, 1) for label in ("Softmax", "Local window=5")
    ]
    assert "window" in made.left_out["Local window=4"]
    assert made.left_out["Linear"] == "not in vit-attention.yaml"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--model.attention=Local"], "varies --model.attention; leave --model.attention out"),
        (["--model.attention", "Local"], "varies --model.attention; leave --model.attention out"),
        (["--model.attention.window=5"], "varies --model.attention; leave --model.attention.window out"),
        (["--model.optim={}"], "varies --model.optim.lr; leave --model.optim out"),
        (["--model.optim.lr", "0.1"], "varies --model.optim.lr; leave --model.optim.lr out"),
        (["--seed_everything=5"], "by --seeds=NUMBER (make: SEEDS); leave --seed_everything out"),
        (["--seed_everything", "5"], "by --seeds=NUMBER (make: SEEDS); leave --seed_everything out"),
    ],
)
def test_an_option_of_every_run_cannot_be_one_that_varies(tmp_path: Path, extra: list[str], said: str) -> None:
    """It would win over each choice: trials by the names of two mechanisms would both train the third."""
    file = sweep_file(tmp_path, model__attention=["Softmax", "Linear"], model__optim__lr=[0.1, 0.2])
    with pytest.raises(ValueError) as caught:
        plan.plan(file, [*SMALL, *extra], 2, None)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: {attention: Local}", "leave --model.attention out of {}"),
        ("model: {init_args: {attention: {class_path: Local, init_args: {window: 5}}}}", "varies --model.attention;"),
        ("model: {init_args: {optim: {lr: 0.1}}}", "varies --model.optim.lr; leave --model.optim.lr out of {}"),
        ("seed_everything: 5", "by --seeds=NUMBER (make: SEEDS); leave --seed_everything out of {}"),
    ],
)
def test_a_config_of_every_run_cannot_set_what_varies(tmp_path: Path, content: str, said: str) -> None:
    file = sweep_file(tmp_path, model__attention=["Softmax", "Linear"], model__optim__lr=[0.1, 0.2])
    config = tmp_path / "mine.yaml"
    config.write_text(content)
    with pytest.raises(ValueError) as caught:
        plan.plan(file, [*SMALL, "-c", str(config)], 2, None)
    assert said.format(config) in str(caught.value)


def test_an_option_beside_those_that_vary_goes_to_every_run(tmp_path: Path) -> None:
    """A name that only begins alike, a parameter of one value, and the seed of a file that names none."""
    file = sweep_file(tmp_path, model__head_diversity=[0.0, 0.1], model__depth=[2])
    made = plan.plan(file, [*SMALL, "--model.head_diversity_kind=projected", "--seed_everything=5"], None, None)
    labels = ["head_diversity=0.0", "head_diversity=0.1"]
    assert [(trial.label, trial.seed) for trial in made.trials] == [(label, 5) for label in labels]
    assert all("--model.depth=1" in trial.words and "--seed_everything=5" in trial.words for trial in made.trials)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ({"ema": ['{"decay": 0.5}', "null"]}, ['ema={"decay": 0.5}', "ema=null"]),
        ({"model__attention_at": ['{"0": "Linear"}', "{}"]}, ['attention_at={"0": "Linear"}', "attention_at={}"]),
        (
            {"model__attention": ["{class_path: Linear}", {"class_path": "Local", "init_args": {"window": 5}}]},
            ["Linear", "Local"],
        ),
    ],
)
def test_values_may_be_mappings_in_any_yaml(tmp_path: Path, values: dict[str, Any], labels: list[str]) -> None:
    made = plan.plan(sweep_file(tmp_path, **values), SMALL, None, None)
    assert [trial.label for trial in made.trials] == labels


@pytest.mark.parametrize("where", ["file", "words", "config"])
def test_runs_are_looked_for_where_their_options_put_them(tmp_path: Path, where: str) -> None:
    file = sweep_file(tmp_path, model__optim__lr=[0.1, 0.2])
    config = tmp_path / "mine.yaml"
    config.write_text(f"run: {{root: {tmp_path}, preset: mine}}")
    words = [f"--run.root={tmp_path}", "--run.preset=mine"]
    extra = {"file": [], "words": words, "config": ["-c", str(config)]}[where]
    if where == "file":
        file = file._replace(words=[*file.words, *words])
    assert plan.plan(file, [*SMALL, *extra], None, None).runs == tmp_path / "mine"


def test_names_follow_from_all_options(tmp_path: Path) -> None:
    file = sweep_file(tmp_path, model__optim__lr=[0.1, 0.2])
    names = [trial.name for trial in plan.plan(file, SMALL, 2, None).trials]
    assert len(set(names)) == 4
    assert names == [trial.name for trial in plan.plan(file, SMALL, 2, None).trials]
    assert not set(names) & {trial.name for trial in plan.plan(file, [*SMALL, "--model.pool=class"], 2, None).trials}


def test_names_follow_from_what_configs_say_and_not_from_their_comments(tmp_path: Path) -> None:
    """A sweep that is begun goes on after a comment changed; other values are other runs."""
    file = sweep_file(tmp_path, model__optim__lr=[0.1, 0.2])
    config = tmp_path / "mine.yaml"
    found = []
    for content in ("ema: {decay: 0.5}", "# half\nema:\n  decay: 0.5", "ema: {decay: 0.6}"):
        config.write_text(content)
        found.append([trial.name for trial in plan.plan(file, [*SMALL, f"-c={config}"], 1, None).trials])
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])


@pytest.mark.parametrize("kind", ["params", pytest.param("flops", marks=pytest.mark.slow)])
def test_sizes_are_matched_within_two_percent(tmp_path: Path, kind: plan.Match) -> None:
    file = sweep_file(tmp_path, model__attention=["Softmax", "Additive", "LSH"])
    made = plan.plan(file, SMALL, 1, kind)
    builder = plan._Builder()

    def cost(words: list[str]) -> float:
        model, data = builder.model(words)
        if kind == "params":
            assert model.network is not None
            return console.parameter_count(model.network)
        return costs.flops(model, next(iter(data.val_dataloader())))

    target = cost(["--config=vit", *SMALL])
    for trial in made.trials:
        assert abs(cost(trial.words) / target - 1) <= 0.02, trial
        other = cost([word for word in trial.words if "hidden_dim" not in word])
        assert ("hidden_dim" in trial.words[-1]) == (abs(other / target - 1) > 0.02), trial
    assert any("hidden_dim" in trial.words[-1] for trial in made.trials)


def test_what_cannot_be_matched_is_left_out(tmp_path: Path) -> None:
    """With a feed-forward of 1 there is nothing to take from where a mechanism has more."""
    file = sweep_file(tmp_path, model__attention=["Softmax", "MemoryCompressed"])
    made = plan.plan(file, [*SMALL, "--model.hidden_dim=1", "--model.num_heads=1"], 1, "params")
    assert [trial.label for trial in made.trials] == ["Softmax"]
    assert "cannot be matched: the preset has" in made.left_out["MemoryCompressed"]


def test_time_left_goes_by_the_same_trial_or_the_mean() -> None:
    done = {"a-seed0-1": Outcome(30.0, 0.5), "b-seed0-2": Outcome(90.0, 0.5), "c-seed0-3": Outcome(0.0, None, "broke")}
    assert time_left(["a-seed1-4"], done, 10.0) == "about 20 s left"
    assert time_left(["a-seed1-4", "b-seed1-5", "d-seed0-6"], done, 31.0) == "about 2 min left"  # 0 + 90 + 60
    assert time_left(["a-seed0-1"], {}, 5.0) == ""


def test_a_trial_whose_results_are_damaged_is_open_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs, notes = tmp_path / "vit", tmp_path / "notes"
    finished = '{"task": "vision", "status": "finished", "seconds": %s, "metrics": %s}'
    for content in (
        "", "[]", '{"metrics": {}}', "[" * 100_000, finished % (1, "null"), finished % (1, '{"test/primary": "x"}'),
        finished % ("null", "{}"), finished % ('"x"', "{}"),
    ):  # fmt: skip
        folder = runs / "0001-local-seed0-abc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(content)
        assert outcome(runs, notes, "local-seed0-abc") is None
        (said,) = [record.getMessage() for record in caplog.records]
        assert str(folder / "results.json") in said
        caplog.clear()
    (folder / "results.json").write_text(finished % (3, '{"test/primary": null}'))
    assert outcome(runs, notes, "local-seed0-abc") == Outcome(3, None)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff"])
def test_a_failure_without_a_word_is_a_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "local-seed0-abc.failed").write_bytes(content)
    found = outcome(tmp_path / "vit", tmp_path, "local-seed0-abc")
    assert found is not None
    assert found.failure


def test_a_sweep_runs_all_repeats_nothing_and_ends_no_earlier_for_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rate is so high that its run fails: a row with its message, and the next one runs all the same."""
    monkeypatch.setattr(files, "CONFIGS", tmp_path)
    sweep_file(tmp_path, model__optim__lr=[1e30, 0.002])
    words = ["sweep", "--config=vit", "--over=attention", f"--run.root={tmp_path}", *SMALL]
    words += ["--trainer.max_steps=3", "--trainer.gradient_clip_val=null", "--model.optim.warmup_steps=0"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "The loss is" in said
    assert "1 of 1" in said
    (failed,) = (tmp_path / "sweeps" / "vit-attention").glob("*.failed")
    assert failed.name.startswith("lr-1e-30-seed0-")
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("vit/*/results.json")}
    finished = [path for path in runs if json.loads(path.read_text())["status"] == "finished"]
    assert len(finished) == 1
    assert main(words) == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("vit/*/results.json")} == runs
    assert "delete" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path, number: int) -> None:
    """In the middle of the second run: the first is not repeated, the second ends at the step it was meant to."""
    command = [sys.executable, "-m", "experiments", "sweep", "--config=vit", "--over=head_diversity", "--seeds=1"]
    command += [f"--run.root={tmp_path}", *SMALL, "--trainer.max_epochs=12", "--checkpoint.every_n_steps=5"]
    sweep = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and len(list(tmp_path.glob("vit/0002-*/checkpoints/last.ckpt"))) == 0:
        time.sleep(0.05)
    os.kill(sweep.pid, number)
    status = sweep.wait(60)
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    first = next(tmp_path.glob("vit/0001-*/results.json"))
    before = first.stat().st_mtime_ns
    # The run of a sweep that was killed sees that, and stops as at a signal.
    while time.monotonic() < deadline and not list(tmp_path.glob("vit/0002-*/results.json")):
        time.sleep(0.05)
    stopped = json.loads(next(tmp_path.glob("vit/0002-*/results.json")).read_text())
    assert stopped["status"] == "stopped"
    assert subprocess.run(command, check=False).returncode == 0
    assert first.stat().st_mtime_ns == before
    results = sorted(tmp_path.glob("vit/*/results.json"))
    assert len(results) == 4
    steps = {json.loads(path.read_text())["steps"] for path in results}
    assert steps == {12 * 21}
    assert stopped["steps"] < 12 * 21
