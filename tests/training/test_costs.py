"""What a network does for one sample, against counts by hand."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_toys import Net, Toy, ToyData

from attnzoo import Additive, Differential, Linear, Linformer, Local, MemoryCompressed, Performer, Softmax
from experiments.__main__ import main
from experiments.training import costs


def built(attention: object = Softmax, toy: type[Toy] = Toy) -> Toy:
    model = toy(attention=attention)  # type: ignore[arg-type]
    model.facts = dict(ToyData().facts)
    model.configure_model()
    return model.eval()  # type: ignore[return-value]


def batch() -> dict[str, torch.Tensor]:
    return next(iter(ToyData().val_dataloader()))


def test_flops_are_those_of_the_matrix_products() -> None:
    """Three tokens, width 4: one embedding, four projections, two products of heads, one read-out."""
    embed = 2 * 3 * 1 * 4
    projections = 4 * 2 * 3 * 4 * 4
    heads = 2 * (2 * 2 * 3 * 3 * 2)
    read_out = 2 * 3 * 4 * 1
    assert costs.flops(built(), batch()) == embed + projections + heads + read_out


def test_a_window_sees_fewer_pairs_than_all() -> None:
    """Of three tokens a window of 3 hides two pairs of nine; sums and dense scores reach all."""
    for attention, share in (
        (Softmax, 1.0),
        (Linear, 1.0),
        (Additive, 1.0),
        (functools.partial(Local, window=3), 7 / 9),
    ):
        model = built(attention)
        name = getattr(attention, "func", attention).__name__  # type: ignore[union-attr]
        assert costs.visible_pairs(model, batch(), name) == pytest.approx(share, abs=1e-4), name


class Remembering(Toy):
    """Its queries come to a memory, one by one, as those of a recurrent decoder do."""

    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        class Steps(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                tokens = self.embed(x.unsqueeze(-1))
                memory = self.attention.memory(tokens)
                heads = [self.attention.recall(token, memory) for token in tokens.split(1, dim=1)]
                return self.layers(self.attention.merge(torch.cat(heads, dim=2))).sum((1, 2))

        return Steps(self.attention)


@pytest.mark.parametrize(
    "attention",
    [
        Softmax, Additive, Linear, Performer, functools.partial(MemoryCompressed, factor=2),
        functools.partial(Linformer, rank=2, max_len=3),
    ],
)  # fmt: skip
def test_a_memory_of_mixtures_or_sums_of_keys_has_all_pairs_as_the_sequence_has(attention: Any) -> None:
    name = getattr(attention, "func", attention).__name__
    for toy in (Toy, Remembering):
        assert costs.visible_pairs(built(attention, toy), batch(), name) == 1.0


def test_other_mechanisms_than_the_one_asked_for_do_not_count() -> None:
    """A name that stands nowhere has no share: torch's Linear, which every network has, is no mechanism."""
    assert costs.visible_pairs(built(Softmax), batch(), "Linear") is None
    assert costs.visible_pairs(built(Differential), batch(), "Softmax") is None


def test_a_run_keeps_its_costs(tmp_path: Path, config: Path) -> None:
    assert main(["fit", f"--config={config}", f"--run.root={tmp_path}", "--run.wandb=false"]) == 0
    (path,) = tmp_path.glob("toy/*/results.json")
    results = json.loads(path.read_text())
    assert results["flops_per_sample"] == costs.flops(built(), batch())
    assert results["visible_pairs"] == 1.0
    rate = results["samples_per_second"]
    # Two samples a step.
    assert results["step_ms"] == pytest.approx(2000 / rate, rel=0.02)
