"""FSDP2 on two processes: the numbers of one, translations while weights are spread, and checkpoints like any other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.training import saved
from experiments.training.module import Experiment
from tests.scale import scale_lab

Found = dict[str, Any]
NAMES = [name for name in scale_lab.MAKE if name != "bahdanau"]  # recurrent layers are refused by name
HALF = ["batch norms", "transformer"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def spread(place: Path) -> dict[str, list[Found]]:
    """What two processes have found, all experiments in one launch."""
    jobs = [{"name": name, "strategy": "fsdp2", "precision": "32-true"} for name in NAMES]
    jobs += [{"name": name, "strategy": "fsdp2", "precision": "bf16-mixed"} for name in HALF]
    ranks = scale_lab.launched(place, 2, jobs)
    keys = [*NAMES, *(f"{name}, half" for name in HALF)]
    return {key: [rank[number] for rank in ranks] for number, key in enumerate(keys)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """The same in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_lab.Text, "parts", 2)
        folder = tmp_path_factory.mktemp("one")
        return {name: scale_lab.run(name, folder, 1, precision="32-true") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_spread_weights_train_and_judge_like_whole_ones(
    name: str, spread: dict[str, list[Found]], alone: dict[str, Found]
) -> None:
    """Losses in float32, validation of the average, weights, and the average, which each process has a part of."""
    found, one = spread[name], alone[name]
    for rank in found:
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        for figure, value in one["validation"].items():
            assert rank["validation"][figure] == pytest.approx(value, abs=1e-4, rel=1e-4), figure
    for kind in ("weights", "average"):
        for part, value in one[kind].items():
            torch.testing.assert_close(found[0][kind][part], value, atol=1e-4, rtol=0, msg=f"{kind} {part}")


@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoint_is_that_of_any_run(
    name: str, spread: dict[str, list[Found]], alone: dict[str, Found], place: Path
) -> None:
    """Plain whole tensors, the optimiser's state by the same numbers; usable without any process group."""
    theirs, ours = spread[name][0]["optimizer"], alone[name]["optimizer"]
    assert [group["params"] for group in theirs["param_groups"]] == [g["params"] for g in ours["param_groups"]]
    assert theirs["state"].keys() == ours["state"].keys()
    for key, values in ours["state"].items():
        assert {part: value.shape for part, value in values.items()} == {
            part: value.shape for part, value in theirs["state"][key].items()
        }
        torch.testing.assert_close(theirs["state"][key]["exp_avg"], values["exp_avg"], atol=1e-4, rtol=0)
    content = saved.read(place / f"{name}-fsdp2-32-true" / "last.ckpt")
    assert all(type(value) is torch.Tensor for value in content["state_dict"].values())


@pytest.mark.parametrize("name", HALF)
def test_in_half_precision_all_processes_learn_the_same(name: str, spread: dict[str, list[Found]]) -> None:
    one, two = (rank["losses"] for rank in spread[f"{name}, half"])
    assert one == two and all(math.isfinite(loss) for loss in one)
    assert sum(one[-5:]) < 0.95 * sum(one[:5])


def test_a_sharded_translator_translates(spread: dict[str, list[Found]], place: Path) -> None:
    """Each process other lines, with searches of other lengths; the same words as from the file, in one process."""
    model = Experiment.from_checkpoint(place / "transformer-fsdp2-32-true" / "last.ckpt")
    said = model.predict(scale_lab.LINES)  # type: ignore[operator]
    assert [rank["translations"] for rank in spread["transformer"]] == [said[0::2], said[1::2]]
    assert len(set(said)) > 1
