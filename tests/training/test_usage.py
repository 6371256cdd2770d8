"""What is said to a user whose words do not fit: at most three lines, with the nearest right word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training_toys import fit

from experiments import make
from experiments.__main__ import COMMANDS, main
from experiments.training import usage
from experiments.training.words import value_of

WRONG: list[tuple[list[str], int, list[str]]] = [
    (["fitt"], 2, ["'fitt'", "Did you mean fit?"]),
    (["fit"], 2, ["no model", "--config"]),
    (["fit", "toy.yaml"], 2, ["toy.yaml", "--config=toy.yaml"]),
    (["fit", "--config=vitt"], 2, ["vitt", "Did you mean vit?"]),
    (["fit", "--config=nowhere/toy.yaml"], 2, ["nowhere/toy.yaml", "no such file"]),
    (["fit", "TOY", "--model.attention=Lokal"], 2, ["--model.attention=Lokal", "Did you mean Local?"]),
    (["fit", "TOY", "--model.attention=local"], 2, ["Did you mean Local?"]),
    (["fit", "TOY", "--model.atention=Local"], 2, ["--model.atention", "Did you mean attention?"]),
    (
        ["fit", "TOY", "--model.attention=Local", "--model.attention.windw=3"],
        2,
        ["--model.attention.windw", "Did you mean window?"],
    ),
    (
        ["fit", "TOY", "--model.attention=Local", "--model.attention.window=x"],
        2,
        ["--model.attention.window=x", "int"],
    ),
    (["fit", "TOY", "--data.batch_siz=7"], 2, ["--data.batch_siz", "Did you mean batch_size?"]),
    (["fit", "TOY", "--data.batch_size", "x"], 2, ["--data.batch_size=x", "int"]),
    (["fit", "TOY", "--data.batch_size=0"], 1, ["--data.batch_size is 0"]),
    (["fit", "TOY", "--model.optim.lr=fast"], 2, ["--model.optim.lr=fast", "float"]),
    (["fit", "TOY", "--model.optim.lrr=1"], 2, ["--model.optim.lrr", "Did you mean lr?"]),
    (["fit", "TOY", "--model.optim.lr=-1"], 1, ["--model.optim.lr is -1"]),
    (["fit", "TOY", "--model.optim.schedule=cosin"], 2, ["cosin", "inverse_sqrt", "Did you mean cosine?"]),
    (["fit", "TOY", "--trainer.max_epoch=3"], 2, ["--trainer.max_epoch", "--trainer.max_epochs?"]),
    (["fit", "TOY", "--trainer.max_ep=3"], 2, ["--trainer.max_ep", "--trainer.max_epochs?"]),
    (["fit", "TOY", "--traner.max_epochs=3"], 2, ["--trainer.max_epochs?"]),
    (["fit", "TOY", "--trainer.precision=17"], 2, ["--trainer.precision=17", "bf16-mixed"]),
    (["fit", "TOY", "--trainer.accelerator=gppu"], 1, ["gppu", "cpu"]),
    (["fit", "TOY", "--trainer.max_epochs=-1"], 1, ["--trainer.max_epochs", "schedule"]),
    (["fit", "TOY", "--run.name=a/b"], 1, ["--run.name", "a/b"]),
    (["fit", "TOY", "--ema.decay=2"], 1, ["--ema.decay is 2"]),
    (["fit", "TOY", "--checkpoint.every_n_steps=-2"], 1, ["--checkpoint.every_n_steps is -2"]),
    (["fit", "TOY", "--ckpt_path=none.ckpt"], 1, ["none.ckpt"]),
    (["fit", "TOY", "--ckpt_path=last"], 1, ["--ckpt_path=last"]),
    (["fit", "TOY", "--model.attention=attnzoo.Locl"], 2, ["attnzoo.Locl", "Did you mean Local?"]),
    (["fit", "TOY", "--trainer.accumulate_grad_batches=0"], 1, ["accumulate_grad_batches is 0", "at least 1"]),
    (["fit", "TOY", "--trainer.gradient_clip_val=-1"], 1, ["gradient_clip_val is -1"]),
    (["fit", "TOY", "--trainer.val_check_interval=0"], 1, ["val_check_interval is 0"]),
    (["fit", "TOY", "--trainer.limit_train_batches=0"], 1, ["No step was trained"]),
    (["fit", "TOY", "--model.optim.weight_decay=-1"], 1, ["weight_decay is -1"]),
    (["fit", "TOY", "trainer.max_epochs=3"], 2, ["Did you mean --trainer.max_epochs=3?"]),
    (["fit", "TOY", "--seed_everything=x"], 2, ["--seed_everything=x", "int"]),
    (
        ["fit", f"--config={usage.CONFIGS / 'forecaster-csv.yaml'}", "--data.split=[0.5,0.2]"],
        2,
        ["--data.split=[0.5, 0.2]: 3 values"],
    ),
    (
        ["fit", f"--config={usage.CONFIGS / 'vit.yaml'}", "--model.attention_at=Local"],
        2,
        ["""--model.attention_at='{"0": "Local"}'"""],
    ),
    (["fit", "TOY", "--model.attention=Mechanism"], 2, ["--model.attention=Mechanism", "There are: Softmax"]),
    (["fit", "TOY", "--model.attention=attnzoo.running_sums.FeatureAttention"], 2, ["FeatureAttention", "Performer"]),
    (
        ["fit", f"--config={usage.CONFIGS / 'vit-folder.yaml'}", "--data.batch_size=4", "--data.channels=4"],
        2,
        ["--data.channels=4: expected one of 1, 3."],
    ),
    (
        ["fit", f"--config={usage.CONFIGS / 'vit-folder.yaml'}", "--data.image_size=[16,16,3]"],
        2,
        ["--data.image_size=[16, 16, 3]: expected int or 2 values."],
    ),
    (["fit", "TOY", "--model=Experiment"], 2, ["--model=Experiment", "Toy"]),
    (
        ["fit", f"--config={usage.CONFIGS / 'translator.yaml'}", "--model=Translator"],
        2,
        ["--model=Translator: others are built on this class", "TransformerTranslator, "],
    ),
    (["fit", "TOY", "--model.atention.window=5"], 2, ["no option --model.atention", "Did you mean attention?"]),
    (["fit", f"--config={usage.CONFIGS / 'vit.yaml'}", "--model.numheads=3"], 2, ["Did you mean num_heads?"]),
    (["fit", "TOY", "--ema=true"], 2, ["--ema=true", "--ema.decay=0.999"]),
    (["fit", "TOY", "--guard=skip"], 2, ["--guard=skip", "--guard.policy=stop"]),
    (["fit", "TOY", "--model.optim=true"], 2, ["--model.optim=true", "--model.optim.lr=0.001"]),
    (
        ["fit", f"--config={usage.CONFIGS / 'forecaster-csv.yaml'}", "--data.table.targets=load"],
        2,
        ["a list, such as [load]"],
    ),
    (["fit", "TOY", "--trainer.max_steps", "=", "3"], 2, ["did you mean --trainer.max_steps=3?"]),
    (["fit", "TOY", "--trainer.max_steps=", "3"], 2, ["did you mean --trainer.max_steps=3?"]),
    (["fit", "TOY", "--seed_everything=true"], 2, ["--seed_everything", "int"]),
    (["fit", "TOY", "--seed_everything=-1"], 2, ["--seed_everything is -1", "0 to"]),
    (["fit", "TOY", "--data.num_workers=-1"], 1, ["--data.num_workers is -1"]),
    (["fit", "TOY", "--trainer.devices=-2"], 1, ["--trainer.devices=-2"]),
    (["fit", "TOY", "--trainer.check_val_every_n_epoch=0"], 1, ["check_val_every_n_epoch is 0"]),
    (["fit", "TOY", "--trainer.max_epochs=0"], 1, ["max_epochs is 0"]),
    (["fit", "TOY", "--trainer.max_steps=0"], 1, ["max_steps is 0"]),
    (["fit", "TOY", "--model=Toyy"], 2, ["--model=Toyy", "Did you mean Toy?"]),
    (["test", "TOY"], 1, ["--ckpt_path"]),
]


@pytest.mark.parametrize(("words", "status", "said"), WRONG, ids=lambda part: str(part)[:60])
def test_wrong_words_are_answered_in_three_lines(
    words: list[str], status: int, said: list[str], config: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What came, what was expected, the nearest right word; no traceback, and no folder is left."""
    configs = config.parent / "configs"
    configs.mkdir()
    (configs / "vit.yaml").write_text("# a preset\n")
    monkeypatch.setattr(usage, "CONFIGS", configs)
    monkeypatch.chdir(config.parent)
    argv = [f"--config={config}" if word == "TOY" else word for word in words]
    assert main([*argv, *(["--run.wandb=false"] if "TOY" in words else [])]) == status
    error = capsys.readouterr().err.strip()
    for words_said in said:
        assert words_said in error
    assert len(error.splitlines()) <= 3
    assert "Traceback" not in error
    assert not list((config.parent / "runs").rglob("config.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("attention:", "atention:", ["--model.atention", "Did you mean attention?", "toy.yaml"]),
        ("trainer:", "traner:", ["traner", "Did you mean trainer?", "toy.yaml"]),
        ("max_epochs:", "max_epoch:", ["max_epoch", "Did you mean max_epochs?", "toy.yaml"]),
        ("lr:", "lrr:", ["--model.optim.lrr", "Did you mean lr?", "toy.yaml"]),
        ("training_toys.Toy\n", "training_toyz.Toy\n", ["training_toyz.Toy"]),
        ("trainer: {", "trainer: [", ["toy.yaml"]),
    ],
)
def test_wrong_words_in_a_config_name_key_and_file(
    old: str, new: str, said: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text().replace(old, new))
    assert fit(config) == 2
    error = capsys.readouterr().err.strip()
    for words in said:
        assert words in error
    assert len(error.splitlines()) <= 3


def test_short_names_of_presets_are_found(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(usage, "CONFIGS", config.parent)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "a toy, to test the command line with" in out
    assert all(command in out for command in COMMANDS)
    assert main(["fit", "--config=toy", f"--run.root={config.parent}", "--run.wandb=false"]) == 0
    assert (config.parent / "toy" / "0001-softmax-seed0").is_dir()


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config=vit", "--data.path="],
        ["fit", "--config=vit", "--data.path", ""],
        ["fit", "--config=vit", "--ckpt_path="],
        ["classify", "--image="],
        ["heads", "--ckpt="],
        ["export", "--out", ""],
    ],
)
def test_a_place_that_is_empty_is_no_place(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As where a variable of the shell is not set; it would be the folder one stands in."""
    assert main(words) == 2
    option = next(word for word in words[1:] if not word.startswith("--config")).rstrip("=")
    assert f"{option} is empty" in capsys.readouterr().err


def test_presets_and_their_texts_stand_in_two_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert make.main("train", {}) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split(" ")[2:3] and line.startswith("  ")]
    for name, text in usage.presets().items():
        found = [line for line in lines if line.split()[0] == name]
        assert len(found) == 2
        assert all(line.endswith(f"  {text}") for line in found)


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (
            " -- ATTN=Local EXP=vti",
            2,
            "make train reads no ATTN=. Did you mean ATTENTION? It reads EXP, ATTENTION, ARGS.",
        ),
        ("k -- IMAGE=a.png EXP=vti", 2, "make train reads no IMAGE=."),
        (r" -- ARGS=--run.name=a\ ATTN=b EXP=vti PYTHON=python3", 2, "EXP=vti"),
        ("k", 2, "EXP=vti"),
    ],
)
def test_a_variable_that_a_target_does_not_read(
    flags: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make.main("train", {"EXP": "vti", "MAKEFLAGS": flags}) == status
    assert said in capsys.readouterr().err


def test_who_has_read_enough_may_go() -> None:
    """As in `make train | head -1`: no traceback, and the status that a shell gives."""
    for words in (["experiments.make", "train"], ["experiments", "help"]):
        process = subprocess.Popen(
            [sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in ("EXP", "MAKEFLAGS")},
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        with process.stderr:
            assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE


def test_a_far_word_is_no_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config=translator", "--model.pool=mean"]) == 2
    error = capsys.readouterr().err
    assert "--model.pool: there is no such option." in error and "Did you mean" not in error


def test_the_last_of_a_repeated_option_holds_everywhere() -> None:
    """As where jsonargparse reads it."""
    words = ["--run.root=A", "--run.name", "x", "--run.root", "B"]
    assert value_of(words, "--run.root") == "B"
    assert value_of(words, "--run.name") == "x"
    assert value_of(words, "--run.preset") is None
