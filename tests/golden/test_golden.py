"""The first losses of each preset at a fixed seed: a change of code that is no change of behaviour leaves them alone.

`make golden` measures them anew; the difference is then to be read and explained.
"""

import csv
import json
from pathlib import Path

import pytest
from embedded import embedded_presets

from experiments.__main__ import main

HERE = Path(__file__).parent
STEPS = 5
TOLERANCE = 2e-3
"""Relative; processors sum in another order, and five steps let that grow."""


def first_losses(preset: str, root: Path) -> list[float]:
    arguments = [
        f"--config={preset}",
        f"--trainer.max_steps={STEPS}",
        f"--run.root={root}",
        "--run.wandb=false",
        "--run.samples=0",
    ]
    arguments += [f"--trainer.limit_{part}_batches=1" for part in ("val", "test")]
    assert main(["fit", *arguments, "--trainer.accelerator=cpu"]) == 0
    (metrics,) = root.glob("*/*/metrics.csv")
    with metrics.open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]


SLOW = {"translator-dates", "listops"}
"""Dates take ten times as long to write as the steps take, and expressions are long."""


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in embedded_presets()]
)
def test_the_first_losses_are_those_on_record(preset: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    losses = first_losses(preset, tmp_path)
    assert len(losses) == STEPS
    record = HERE / f"{preset}.json"
    if pytestconfig.getoption("--rewrite-golden"):
        record.write_text(json.dumps({"losses": losses}, indent=2) + "\n")
    assert losses == pytest.approx(json.loads(record.read_text())["losses"], rel=TOLERANCE)
