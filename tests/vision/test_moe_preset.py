"""The option ``experts`` of the classifier, and the preset vit-moe."""

import csv
import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
from quick_vit import SMALL

import experiments
from attnzoo import FeedForward
from attnzoo.moe import MixtureOfExperts
from experiments.__main__ import main
from experiments.training.optim import split_parameters
from experiments.vision.network import Experts, PictureFacts, VisionTransformer

DIGITS = PictureFacts(8, 8, 1, 10, mean=[0.3], std=[0.4])


def network(experts: Experts | None) -> VisionTransformer:
    return VisionTransformer(DIGITS, experts=experts, dim=16, depth=2, num_heads=2)


def test_the_options_are_those_of_the_module() -> None:
    """By name and default; where to put it is the network's to say."""
    parameters = inspect.signature(MixtureOfExperts).parameters
    theirs = {name: p.default for name, p in parameters.items() if name not in ("dim", "hidden_dim", "dropout")}
    assert dataclasses.asdict(Experts()) == theirs


def test_every_block_has_its_experts_and_asks_for_their_balance() -> None:
    """The aux of the network is the sum over its blocks, each counted once."""
    assert all(isinstance(block.feed_forward, FeedForward) for block in network(None).blocks)
    model = network(Experts(num_experts=3, top_k=1, capacity_factor=3.0, balance_weight=1.0, z_weight=0.0))
    for block in model.blocks:
        assert block.feed_forward.up_weight.shape == (3, 16, 32)
        torch.nn.init.zeros_(block.feed_forward.router.weight)
    logits, aux = model(torch.rand(4, 1, 8, 8))
    assert aux.item() == pytest.approx(2.0)
    (logits.sum() + aux).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_m10_a_picture_gives_the_same_alone_and_among_others() -> None:
    """M10: nothing is dropped in evaluation, whatever the capacity."""
    model = network(Experts(capacity_factor=0.1)).eval()
    pictures = torch.rand(6, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(pictures)[0][5:], model(pictures[5:])[0], atol=1e-5, rtol=0)


def test_weights_of_experts_decay_and_their_biases_do_not() -> None:
    """Although both have as many dimensions as experts add."""
    model = network(Experts())
    decayed, spared = ({id(p) for p in part} for part in split_parameters(model))
    moe = model.blocks[0].feed_forward
    assert {id(moe.up_weight), id(moe.down_weight), id(moe.router.weight)} <= decayed
    assert {id(moe.up_bias), id(moe.down_bias)} <= spared


def test_the_preset_trains_and_its_checkpoint_is_made_of_plain_values(tmp_path: Path) -> None:
    """Options on the command line go over those of the preset; the loss that is logged has the balance beside it."""
    words = ["--config=vit-moe", f"--run.root={tmp_path}", "--trainer.max_steps=2", "--model.experts.num_experts=3"]
    assert main(["fit", *words, *SMALL]) == 0
    (checkpoint,) = tmp_path.glob("vit-moe/*/checkpoints/last.ckpt")
    entry = torch.load(checkpoint, weights_only=True)["experiment"]
    assert json.loads(json.dumps(entry)) == entry
    assert entry["init_args"]["experts"] == {**dataclasses.asdict(Experts()), "num_experts": 3}
    model = experiments.load(checkpoint)
    assert model.network.blocks[1].feed_forward.num_experts == 3
    pixels = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model.predict(pixels)[:1], model.predict(pixels[:1]), atol=1e-5, rtol=0)
    with (checkpoint.parent.parent / "metrics.csv").open(newline="") as file:
        aux = [float(row["train/aux"]) for row in csv.DictReader(file) if row["train/aux"]]
    assert len(aux) == 2
    assert all(0.02 < value < 0.1 for value in aux)  # two blocks, each 0.01 of balance and z about ln(3) ** 2 / 1000


def test_more_choices_than_experts_are_refused_in_few_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is trained."""
    words = [
        "--config=vit-moe",
        f"--run.root={tmp_path}",
        "--model.experts.top_k=5",
        "--run.wandb=false",
        "--run.samples=0",
    ]
    assert main(["fit", *words]) == 1
    assert "top_k must lie in 1..4, the number of experts; got 5" in capsys.readouterr().err
