"""Small tables, and a forecaster that was trained on one of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from quick_forecaster import QUICK

from experiments.__main__ import main

CASES = Path(__file__).parent.parent / "cases" / "forecasting"

"""A preset made small; a table and --run.root are to be added."""


@pytest.fixture(scope="session")
def cases() -> Path:
    """The small files of the acceptance cases."""
    return CASES


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="experiments")
    return caplog


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forecaster of load from load and temp, 24 hours in and 6 out, trained for two epochs."""
    root = tmp_path_factory.mktemp("runs")
    table = [f"--data.path={CASES / 'base_hourly.csv'}", "--data.table.targets=[load]", "--trainer.max_epochs=2"]
    assert main(["fit", "--config=forecaster-csv", f"--run.root={root}", *table, *QUICK]) == 0
    (found,) = root.glob("*/*/checkpoints/best.ckpt")
    return found
