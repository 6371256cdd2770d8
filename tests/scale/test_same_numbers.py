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
    """What two processes have found in float64, all experiments in one launch."""
    return several(tmp_path_factory.mktemp("two"), 2, "64-true")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What four processes have found."""
    return several(tmp_path_factory.mktemp("four"), 4, "64-true")


def several(folder: Path, world: int, precision: str) -> list[dict[str, Found]]:
    """All experiments by name; in float64 heads begin anew on the way."""
    options = {"strategy": "ddp", "precision": precision, "anew": precision == "64-true"}
    found = scale_lab.launched(folder, world, [{"name": name, **options} for name in NAMES])
    return [dict(zip(NAMES, rank, strict=True)) for rank in found]


def alone(name: str, folder: Path, processes: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Found:
    """The same in this process."""
    monkeypatch.setattr(scale_lab.Text, "parts", processes)
    return scale_lab.run(name, folder, 1, **options)


def told(event: Found) -> Found:
    """What was done, without the losses around it."""
    return {name: value for name, value in event.items() if not name.startswith("loss")}


def compare(one: Found, found: list[Found], *, weights: float, losses: float, validation: float) -> None:
    """Each process against the single one."""
    for rank in found:
        assert len(rank["losses"]) == scale_lab.STEPS
        assert rank["losses"] == pytest.approx(one["losses"], abs=losses)
        assert [told(event) for event in rank["anew"]] == [told(event) for event in one["anew"]]
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
    """R01: float64; weights, their average, losses, validation; by tokens, or with diverse heads; heads begin anew."""
    one = alone(name, tmp_path, 2, monkeypatch, anew=True)
    assert one["losses"][-1] < one["losses"][0] and len(one["anew"]) >= 2
    compare(one, [rank[name] for rank in two], weights=1e-10, losses=1e-10, validation=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_r01_four_processes_train_and_judge_like_one(
    name: str, four: list[dict[str, Found]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R01: the same, of four."""
    one = alone(name, tmp_path, 4, monkeypatch, anew=True)
    compare(one, [rank[name] for rank in four], weights=1e-10, losses=1e-10, validation=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_r01_several_processes_have_the_losses_of_one_in_float32(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R01: within 1e-5."""
    found = several(tmp_path, processes, "32-true")
    for name in NAMES:
        single = alone(name, tmp_path / "alone", processes, monkeypatch, precision="32-true")
        for rank in found:
            assert rank[name]["losses"] == pytest.approx(single["losses"], abs=1e-5)
