"""Blocks that are run again in the backward pass, or compiled: the same numbers; and less that is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.training.sharding import blocks
from experiments.training.speeding import Blocks
from tests.scale import scale_lab


def kept(network: torch.nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass."""
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(x)
    return sum(sizes)


@pytest.mark.parametrize("name", ["vision", "transformer"])
def test_recomputed_blocks_train_alike(name: str, tmp_path: Path) -> None:
    plain = scale_lab.run(name, tmp_path / "plain", 1)
    again = scale_lab.run(name, tmp_path / "again", 1, more=[Blocks(recompute=True, compiled=False)])
    assert again["losses"] == plain["losses"]
    assert again["validation"] == plain["validation"]
    for key, value in plain["weights"].items():
        assert torch.equal(again["weights"][key], value), key


def test_recomputed_blocks_keep_less(tmp_path: Path) -> None:
    """And are as they were when training has ended."""
    model, data = scale_lab.vision(tmp_path, 1)
    data.setup("fit")
    model.facts = dict(data.facts)  # type: ignore[attr-defined]
    model.configure_model()
    network: Any = model.network
    callback, x = Blocks(recompute=True, compiled=False), torch.rand(4, 1, 8, 8)
    before, trainer = kept(network, x), SimpleNamespace()
    callback.on_train_start(trainer, model)  # type: ignore[arg-type]
    assert kept(network, x) < before / 2
    callback.on_train_end(trainer, model)  # type: ignore[arg-type]
    assert kept(network, x) == before
    assert len(blocks(network)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_train_alike(tmp_path: Path, recompute: bool) -> None:
    plain = scale_lab.run("vision", tmp_path / "plain", 1)
    compiled = scale_lab.run("vision", tmp_path / "compiled", 1, more=[Blocks(recompute=recompute, compiled=True)])
    assert compiled["losses"] == pytest.approx(plain["losses"], abs=1e-8)
    assert compiled["validation"] == pytest.approx(plain["validation"], abs=1e-6)
