"""Every mechanism of the catalogue trains in every preset, with no further option, or is refused by what it lacks."""

import json
import math
from pathlib import Path

import pytest
from embedded import embedded_presets

from attnzoo import CATALOGUE
from experiments.__main__ import main

NEEDS = {
    "translator": ("bidirectional", "causal", "streaming"),
    "translator-dates": ("bidirectional", "causal", "streaming"),
    "translator-bahdanau": ("cross",),
}
"""Traits that a preset's sites ask of a mechanism, beside what all have."""

FEW = ("Softmax", "Additive", "Local", "LSH", "Linear")
"""Mechanisms of the row that is quick."""

LONG = ("translator-dates", "listops")
"""Presets of which a few steps take long."""

PAIRS = [
    # All of them take minutes; one row and one column of the table go into each run of the tests.
    pytest.param(
        preset,
        name,
        marks=[]
        if (preset == "vit" and name in FEW) or (name == "Softmax" and preset not in LONG)
        else pytest.mark.slow,
    )
    for preset in embedded_presets()
    for name in CATALOGUE
]


def test_there_are_presets() -> None:
    """The tests below would pass on an empty list."""
    assert {"vit", "translator", "translator-bahdanau", "translator-dates"} <= set(embedded_presets())


@pytest.mark.parametrize(("preset", "name"), PAIRS)
def test_a_mechanism_trains_by_its_name_alone(
    preset: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"--config={preset}",
        f"--model.attention={name}",
        f"--run.root={tmp_path}",
        "--run.wandb=false",
        "--run.samples=0",
    ]
    arguments += ["--trainer.max_steps=2", "--trainer.accelerator=cpu"]
    arguments += [f"--trainer.limit_{part}_batches=1" for part in ("val", "test")]
    status = main(["fit", *arguments])
    if not all(getattr(CATALOGUE[name].traits, trait) for trait in NEEDS.get(preset, ())):
        assert status == 1
        said = capsys.readouterr().err
        assert f"{name} cannot serve at" in said
        assert "Softmax" in said
        return
    assert status == 0
    (results,) = tmp_path.glob("*/*/results.json")
    content = json.loads(results.read_text())
    assert content["mechanism"] == name
    assert content["steps"] == 2
    assert math.isfinite(content["metrics"]["test/primary"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("preset", embedded_presets())
def test_each_preset_trains_in_other_precisions_with_its_heads_watched(
    preset: str, precision: str, tmp_path: Path
) -> None:
    arguments = [f"--config={preset}", f"--trainer.precision={precision}", f"--run.root={tmp_path}"]
    arguments += ["--run.wandb=false", "--trainer.max_steps=4", "--trainer.max_epochs=-1", "--trainer.accelerator=cpu"]
    arguments += [f"--trainer.limit_{part}_batches=1" for part in ("val", "test")]
    arguments += ["--head_monitor.every=2", "--head_monitor.samples=16"]
    assert main(["fit", *arguments]) == 0
    (run,) = tmp_path.glob("*/*")
    assert all(math.isfinite(v) for v in json.loads((run / "results.json").read_text())["metrics"].values())
    assert (run / "figures" / "heads.csv").stat().st_size > 0
