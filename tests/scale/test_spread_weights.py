"""FSDP2 on two processes: the numbers of one, translations while weights are spread, and checkpoints like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.training import saved
from experiments.training.module import Experiment
from tests.scale import scale_lab

Found = dict[str, Any]
JOB = {"name": "transformer", "strategy": "fsdp2", "precision": "32-true"}
PLACE = "transformer-fsdp2-32-true"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def spread(place: Path) -> list[Found]:
    """What two processes have found."""
    return [rank[0] for rank in scale_lab.launched(place, 2, [JOB])]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_lab.Text, "parts", 2)
        return scale_lab.run("transformer", tmp_path_factory.mktemp("one"), 1, precision="32-true")


def test_spread_weights_train_and_judge_like_whole_ones(spread: list[Found], one: Found) -> None:
    """Losses in float32, validation of the average, weights, and the average, which each process has a part of."""
    for rank in spread:
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        for name, value in one["validation"].items():
            assert rank["validation"][name] == pytest.approx(value, abs=1e-4, rel=1e-4), name
    for kind in ("weights", "average"):
        for name, value in one[kind].items():
            torch.testing.assert_close(spread[0][kind][name], value, atol=1e-4, rtol=0, msg=f"{kind} {name}")


def test_the_checkpoint_is_that_of_any_run(spread: list[Found], one: Found, place: Path) -> None:
    """Plain whole tensors, the optimiser's state by the same numbers; usable without any process group."""
    theirs, ours = spread[0]["optimizer"], one["optimizer"]
    assert [group["params"] for group in theirs["param_groups"]] == [g["params"] for g in ours["param_groups"]]
    assert theirs["state"].keys() == ours["state"].keys()
    for key, values in ours["state"].items():
        assert {name: value.shape for name, value in values.items()} == {
            name: value.shape for name, value in theirs["state"][key].items()
        }
        torch.testing.assert_close(theirs["state"][key]["exp_avg"], values["exp_avg"], atol=1e-4, rtol=0)
    content = saved.read(place / PLACE / "last.ckpt")
    assert all(type(value) is torch.Tensor for value in content["state_dict"].values())


def test_a_sharded_translator_translates(spread: list[Found], place: Path) -> None:
    """Each process other lines, with searches of other lengths; the same words as from the file, in one process."""
    model = Experiment.from_checkpoint(place / PLACE / "last.ckpt")
    said = model.predict(scale_lab.LINES)  # type: ignore[operator]
    assert [spread[0]["translations"], spread[1]["translations"]] == [said[0::2], said[1::2]]
    assert len(set(said)) > 1
