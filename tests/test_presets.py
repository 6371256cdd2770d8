"""Every mechanism of the catalogue trains in every preset, with no further option."""

import json
import math
from pathlib import Path

import pytest

from attnzoo import CATALOGUE
from experiments.__main__ import main
from experiments.training.usage import presets

FIRST = next(iter(presets()))
PAIRS = [
    # All of them take minutes; one row and one column of the table go into each run of the tests.
    pytest.param(preset, name, marks=[] if preset == FIRST or name == "Softmax" else pytest.mark.slow)
    for preset in presets()
    for name in CATALOGUE
]


@pytest.mark.parametrize(("preset", "name"), PAIRS)
def test_a_mechanism_trains_by_its_name_alone(preset: str, name: str, tmp_path: Path) -> None:
    arguments = [f"--config={preset}", f"--model.attention={name}", f"--run.root={tmp_path}", "--run.wandb=false"]
    assert main(["fit", *arguments, "--trainer.max_steps=2", "--trainer.accelerator=cpu"]) == 0
    (results,) = tmp_path.glob("*/*/results.json")
    content = json.loads(results.read_text())
    assert content["mechanism"] == name
    assert content["steps"] == 2
    assert math.isfinite(content["metrics"]["test/primary"])
