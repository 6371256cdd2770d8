"""The files in configs/sweeps: W&B takes them as they are, and so does the sweep without a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from experiments.comparing import files
from experiments.training.usage import CONFIGS, UsageError, presets, python

SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))
GRIDS = [path for path in SWEEPS if yaml.safe_load(path.read_text())["method"] == "grid"]


def write(folder: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "method": "grid",
        "command": [".venv/bin/python", "-m", "experiments", "fit", "--config=vit", "${args}"],
        "parameters": {
            "seed_everything": {"values": [0, 1]},
            "model.dim": {"values": [8, 16]},
            "model.depth": {"value": 1},
        },
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
    return path


def test_there_are_sweeps_of_mechanisms_of_diversity_and_by_bayes() -> None:
    """The tests below would pass on an empty folder."""
    names = {path.stem for path in SWEEPS}
    of_attention = {f"{name}-attention" for name in ("vit", "forecaster", "translator", "translator-bahdanau")}
    assert names >= {*of_attention, "vit-head_diversity", "vit-lr"}
    assert {yaml.safe_load(path.read_text())["method"] for path in SWEEPS} == {"grid", "bayes"}


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_the_words_are_those_that_the_agent_of_wandb_makes(path: Path) -> None:
    """W&B's own code turns each choice into options; ours must be the same."""
    file = files.read(path)
    for choice in file.combinations():
        theirs = create_sweep_command_args({"args": {name: {"value": value} for name, value in choice.items()}})
        assert theirs["args"] == [f"--{name}={value}" for name, value in choice.items()]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_server_gets_all_that_it_needs(path: Path) -> None:
    """A metric that every run logs, a command that starts the preset of the name, and how it is called."""
    content = yaml.safe_load(path.read_text())
    assert content["metric"] == {"name": "val/primary", "goal": "maximize"}
    command = create_sweep_command(list(content["command"]))
    assert command[1:4] == ["-m", "experiments", "fit"]
    assert command[-1] == "${args}"
    # W&B's own ${interpreter} is the first `python` of the PATH, which knows nothing of the project.
    assert f"\nBIN := {Path(command[0]).parent}\n" in (CONFIGS.parent / "Makefile").read_text()
    heading = re.sub(r"\s*\n# ", " ", path.read_text().partition("program:")[0])
    assert f"{command[0]} -m wandb sweep {path.relative_to(CONFIGS.parent)}" in heading
    assert f"{command[0]} -m wandb agent ID" in heading
    (config,) = [word.removeprefix("--config=") for word in content["command"] if word.startswith("--config=")]
    assert config in presets()
    assert path.stem.startswith(f"{config}-")
    first = path.read_text().partition("\n")[0]
    assert "make sweep EXP=" in first or "wandb sweep" in first
    # More than half of a line of help would be lost in a terminal.
    assert len(first) <= 120


def test_every_choice_comes_once_and_the_first_seed_first(tmp_path: Path) -> None:
    file = files.read(write(tmp_path))
    assert file.words == ["--config=vit"]
    assert file.varied() == ["model.dim"]
    chosen = [(c["seed_everything"], c["model.dim"], c["model.depth"]) for c in file.combinations()]
    assert chosen == [(0, 8, 1), (0, 16, 1), (1, 8, 1), (1, 16, 1)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "bayes"}, f"method: bayes, which the W&B server steers: {python()} -m wandb sweep"),
        ({"method": "random"}, "method: random"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate"),
        ({"run_cap": 5}, "run_cap, which the W&B server does"),
        (
            {"parameters": {"model.optim.lr": {"min": 0.1, "max": 1.0}}},
            "model.optim.lr has no `value` or `values`, but min, max",
        ),
        ({"parameters": {"model": {"parameters": {"dim": {"value": 8}}}}}, "write one name with dots"),
        ({"parameters": {"model.dim": {"values": []}}}, "model.dim has no `value` or `values`"),
        ({"parameters": [1]}, "is no sweep"),
        ({"command": ["python", "train.py", "${args}"]}, "command must be a list that starts fit"),
        ({"command": ["${interpreter}", "-m", "experiments", "fit", "${args}", "--x=1"]}, "command must be a list"),
    ],
)
def test_what_only_a_server_can_do_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        files.read(write(tmp_path, **changes))
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_the_file_by_bayes_is_refused_and_says_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"wandb sweep .*vit-lr\.yaml, then \S*python -m wandb agent"):
        files.read(files.find("vit", "lr"))


def test_a_sweep_that_is_not_there_is_answered_by_those_that_are() -> None:
    with pytest.raises(UsageError, match="no sweep of vit over atention. Did you mean vit-attention"):
        files.find("vit", "atention")
