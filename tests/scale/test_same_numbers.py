"""One, two and four processes with the same samples in a step come to the same numbers, in each experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scale import scale_lab

NAMES = list(scale_lab.MAKE)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What two processes have found, all experiments in one launch."""
    jobs = [{"name": name, "strategy": "ddp"} for name in NAMES]
    found = scale_lab.launched(tmp_path_factory.mktemp("two"), 2, jobs)
    return [dict(zip(NAMES, rank, strict=True)) for rank in found]


def alone(name: str, folder: Path, processes: int, monkeypatch: pytest.MonkeyPatch, **options: str) -> Found:
    """The same in this process."""
    monkeypatch.setattr(scale_lab.Text, "parts", processes)
    return scale_lab.run(name, folder, 1, **options)


def compare(one: Found, found: list[Found], *, weights: float, losses: float, validation: float) -> None:
    """Each process against the single one."""
    for rank in found:
        assert len(rank["losses"]) == scale_lab.STEPS
        assert rank["losses"] == pytest.approx(one["losses"], abs=losses)
        assert rank["validation"].keys() == one["validation"].keys()
        for name, value in one["validation"].items():
            assert rank["validation"][name] == pytest.approx(value, abs=validation, nan_ok=True), name
        for kind in ("weights", "average"):
            for name, value in one[kind].items():
                torch.testing.assert_close(rank[kind][name], value, atol=weights, rtol=0, msg=f"{kind} {name}")


@pytest.mark.parametrize("name", NAMES)
def test_r01_two_processes_train_and_judge_like_one(
    name: str, two: list[dict[str, Found]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R01: float64; weights, their average, losses and validation, with batches by tokens where there are such."""
    one = alone(name, tmp_path, 2, monkeypatch)
    assert one["losses"][-1] < one["losses"][0]
    compare(one, [rank[name] for rank in two], weights=1e-10, losses=1e-10, validation=1e-6)
