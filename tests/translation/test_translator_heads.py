"""Heads of Bahdanau's network: measured over its steps, begun anew, taken out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from attnzoo import Additive, Linear, Linformer, Mechanism, MemoryCompressed, Performer, Softmax
from attnzoo.heads.figures import Head
from attnzoo.heads.health import head_health
from attnzoo.heads.prune import prune_heads
from attnzoo.heads.reinit import reinit_heads
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.embedding import Words

SOURCE = torch.tensor([[4, 5, 6, 7, 2], [6, 2, 0, 0, 0], [9, 8, 4, 2, 0]])
TARGET = torch.tensor([[1, 7, 8, 9], [1, 9, 2, 0], [1, 4, 2, 0]])
REAL = TARGET != 0


def built(attention: type[Mechanism]) -> Bahdanau:
    sizes = {"dim": 8, "hidden_dim": 8, "num_heads": 2, "dropout": 0.0}
    return Bahdanau(Words(20, 20, joint=True), attention=attention, **sizes).eval()


@pytest.fixture
def network() -> Bahdanau:
    return built(Additive)


def mean_of_steps(network: Bahdanau) -> Tensor:
    """Mean output of each head over the real targets, [H, Dv], by a listener of our own."""
    heard: list[Tensor] = []
    hook = network.attention.out_proj.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    with torch.no_grad():
        network(TARGET, SOURCE)
    hook.remove()
    return torch.cat(heard, dim=1)[REAL].double().mean(0).unflatten(0, (2, 4))


def measured(network: Bahdanau) -> dict[str, Tensor]:
    health = head_health(network, [SOURCE], run=lambda _: network(TARGET, SOURCE), queries=lambda *_: REAL)
    shares = not isinstance(network.attention.mechanism, Linformer)  # its weights have either sign
    assert all((entry.effective_keys is not None) == shares for entry in health.heads)
    return health.means


@pytest.mark.parametrize("attention", [Additive, Softmax, Linear, Performer, Linformer, MemoryCompressed])
def test_the_mean_is_taken_over_all_steps_of_real_words(attention: type[Mechanism]) -> None:
    """Also where a memory keeps no keys, but mixtures or sums of them."""
    network = built(attention)
    torch.testing.assert_close(measured(network)["attention"], mean_of_steps(network), atol=1e-7, rtol=1e-5)


@torch.no_grad()
def test_a_head_begun_anew_is_one_that_was_taken_out(network: Bahdanau) -> None:
    """Both put the head to its mean in every step, which the next ones depend on; the score vector begins anew, too."""
    pruned, before = copy.deepcopy(network), copy.deepcopy(network)
    means = measured(network)
    reinit_heads(network, [Head("attention", 1)], means, step=0)
    prune_heads(pruned, [Head("attention", 1)], means)
    torch.testing.assert_close(network(TARGET, SOURCE)[0], pruned(TARGET, SOURCE)[0], atol=1e-6, rtol=1e-5)
    assert (network(TARGET, SOURCE)[0] - before(TARGET, SOURCE)[0]).abs().max() > 1e-4
    ours, theirs = network.attention.mechanism, before.attention.mechanism
    for name in ("query_weight", "key_weight", "score_weight"):
        assert torch.equal(ours.get_parameter(name)[0], theirs.get_parameter(name)[0])
        assert not torch.equal(ours.get_parameter(name)[1], theirs.get_parameter(name)[1])
