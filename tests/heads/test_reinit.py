"""Heads begun anew and heads taken out: what the function becomes, and which numbers change."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo import (
    CATALOGUE,
    Additive,
    EncoderBlock,
    Mask,
    MultiheadAttention,
    MultiheadLatentAttention,
    Softmax,
)
from attnzoo.heads.health import Head, head_health
from attnzoo.heads.prune import prune_heads
from attnzoo.heads.reinit import Average, check_reinit, reinit_heads, switch_off_heads
from attnzoo.positions import Alibi, RelativeBias, Rotary

SITE = {"max_len": 20, "grid": (4, 5), "prefix_tokens": 0, "layer": 1}


def with_means(attn: nn.Module, x: Tensor, heads: list[int], means: Tensor) -> Tensor:
    """What an attention gives with the outputs of these heads put to their means, by its public halves."""
    found = attn.attend(x).clone()
    for head in heads:
        found[:, head] = means[head]
    return attn.merge(found)


def mean_outputs(attn: nn.Module, x: Tensor) -> Tensor:
    return attn.attend(x).double().mean((0, 2))


def shell(mechanism: Any = Softmax, **options: Any) -> MultiheadAttention:
    attn = MultiheadAttention(24, 4, mechanism, **{**SITE, **options}).eval()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and the mechanism's own are not 0 then
    return attn


@pytest.mark.parametrize("name", CATALOGUE)
@torch.no_grad()
def test_a_pruned_attention_computes_what_it_did_with_the_means(name: str) -> None:
    """J4: for every mechanism, one head in the middle and one at the end."""
    attn, x = shell(CATALOGUE[name]), torch.randn(3, 20, 24)
    means = mean_outputs(attn, x)
    expected = with_means(attn, x, [1, 3], means)
    prune_heads(attn, [Head("attention", 1), Head("attention", 3)], head_health(attn, [x]).means)
    assert attn.attend(x).shape[1] == 2
    assert not attn.training
    torch.testing.assert_close(attn(x), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ({"num_kv_heads": 2}, [0, 2]),
        ({"num_kv_heads": 2}, [0, 1]),
        ({"num_kv_heads": 2}, [0]),
        ({"num_kv_heads": 1}, [3]),
        ({"gate": "head"}, [1]),
        ({"gate": "elementwise"}, [1]),
        ({"qk_norm": "rms", "head_norm": True}, [2]),
        ({"value_dim": 5, "bias": False}, [0, 3]),
        ({"position": RelativeBias(4)}, [1]),
        ({"position": Rotary(6)}, [1]),
        ({"mechanism": functools.partial(Softmax, sink=True)}, [1]),
    ],
    ids=str,
)
@torch.no_grad()
def test_pruning_in_every_kind_of_shell(options: dict[str, Any], heads: list[int]) -> None:
    attn, x = shell(**options), torch.randn(3, 20, 24)
    expected = with_means(attn, x, heads, mean_outputs(attn, x))
    prune_heads(attn, [Head("attention", head) for head in heads], head_health(attn, [x]).means)
    torch.testing.assert_close(attn(x), expected, atol=1e-5, rtol=1e-4)
    grown = attn.num_kv_heads > options.get("num_kv_heads", 4)
    assert grown == (options.get("num_kv_heads") == 2 and heads == [0])  # the only one with unequal groups


@torch.no_grad()
def test_pruning_latent_attention_and_its_steps() -> None:
    attn, x = MultiheadLatentAttention(24, 4, causal=True).eval(), torch.randn(2, 7, 24)
    expected = with_means(attn, x, [2], mean_outputs(attn, x))
    prune_heads(attn, [Head("attention", 2)], head_health(attn, [x]).means)
    torch.testing.assert_close(attn(x), expected, atol=1e-5, rtol=1e-4)
    stepped, _ = attn.step(x, attn.init_state(2, max_len=7))
    torch.testing.assert_close(stepped, expected, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_pruned_is_refused() -> None:
    attn, x = shell(position=Alibi(4)), torch.randn(2, 20, 24)
    means = head_health(attn, [x]).means
    with pytest.raises(ValueError, match="Alibi"):
        prune_heads(attn, [Head("attention", 1)], means)
    with pytest.raises(ValueError, match="all 4 heads would go"):
        prune_heads(shell(), [Head("attention", head) for head in range(4)], means)
    with pytest.raises(ValueError, match=r"there is no attention 'encoder'; there are attention"):
        prune_heads(shell(), [Head("encoder", 1)], means)
    with pytest.raises(ValueError, match="heads 0 to 3"):
        prune_heads(shell(), [Head("attention", 4)], means)


@pytest.mark.parametrize("name", CATALOGUE)
@torch.no_grad()
def test_a_head_begun_anew_gives_its_mean(name: str) -> None:
    attn, x = shell(CATALOGUE[name]), torch.randn(3, 20, 24)
    before = copy.deepcopy(attn)
    expected = with_means(attn, x, [1], mean_outputs(attn, x))
    reinit_heads(attn, [Head("attention", 1)], head_health(attn, [x]).means, step=3)
    torch.testing.assert_close(attn(x), expected, atol=2e-5, rtol=1e-4)
    # The other heads are as they were, and this one is not.
    kept = [0, 2, 3]
    torch.testing.assert_close(attn.attend(x)[:, kept], before.attend(x)[:, kept], atol=1e-6, rtol=1e-5)
    assert (attn.attend(x)[:, 1] - before.attend(x)[:, 1]).abs().max() > 0.1


@torch.no_grad()
def test_new_weights_are_as_a_new_module_has_them() -> None:
    """Xavier bounds of the whole projection, biases 0, and spread over all of them."""
    attn, x = shell(Additive), torch.randn(2, 20, 24)
    attn.q_proj.weight.fill_(7)
    means = head_health(attn, [x]).means
    reinit_heads(attn, [Head("attention", 2)], means, step=0)
    bound = (6 / (24 + 24)) ** 0.5
    drawn = attn.q_proj.weight[12:18]
    assert 0.8 * bound < drawn.abs().max() <= bound
    assert attn.q_proj.bias[12:18].abs().max() == 0
    assert attn.mechanism.score_weight[2].abs().max() <= (6 / (6 + 1)) ** 0.5
    assert (attn.q_proj.weight[:12] == 7).all() and (attn.q_proj.weight[18:] == 7).all()


@torch.no_grad()
def test_a_new_head_depends_on_seed_step_and_head_alone() -> None:
    x = torch.randn(2, 20, 24)
    start = shell()
    means = head_health(start, [x]).means

    def anew(step: int, head: int = 1, seed: int = 0) -> Tensor:
        attn = copy.deepcopy(start)
        torch.rand(step + head)  # the generator of the run stands somewhere else each time
        state = torch.get_rng_state()
        reinit_heads(attn, [Head("attention", head)], means, step=step, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return attn.q_proj.weight[6 * head : 6 * head + 6]

    assert torch.equal(anew(5), anew(5))
    others = [anew(6), anew(5, head=2), anew(5, seed=1)]
    assert not any(torch.equal(anew(5), other) for other in others)


@torch.no_grad()
def test_grouped_keys_begin_anew_with_their_whole_group() -> None:
    x, start = torch.randn(2, 20, 24), shell(num_kv_heads=2)
    means = head_health(start, [x]).means
    one, both = copy.deepcopy(start), copy.deepcopy(start)
    reinit_heads(one, [Head("attention", 1)], means, step=0)
    assert torch.equal(one.k_proj.weight, start.k_proj.weight) and torch.equal(one.v_proj.weight, start.v_proj.weight)
    assert not torch.equal(one.q_proj.weight, start.q_proj.weight)
    reinit_heads(both, [Head("attention", 0), Head("attention", 1)], means, step=0)
    assert not torch.equal(both.k_proj.weight[:6], start.k_proj.weight[:6])
    assert torch.equal(both.k_proj.weight[6:], start.k_proj.weight[6:])
    assert torch.equal(both.v_proj.weight[6:], start.v_proj.weight[6:])
    expected = with_means(start, x, [0, 1], means["attention"])
    torch.testing.assert_close(both(x), expected, atol=1e-5, rtol=1e-4)


class Own(Softmax):
    """A mechanism of one's own with numbers for each head; keeps the option ``width`` if asked to."""

    def __init__(self, num_heads: int, head_dim: int, width: int, keep: bool, **options: Any) -> None:
        super().__init__(num_heads, head_dim, **options)
        self.keep = keep
        if keep:
            self.width = width
        self.table = nn.Parameter(torch.randn(num_heads, width))


class Forgetful(Softmax):
    """Its option has a default, and what was given is not kept."""

    def __init__(self, num_heads: int, head_dim: int, width: int = 1) -> None:
        super().__init__(num_heads, head_dim)
        self.table = nn.Parameter(torch.randn(num_heads, width))


class Mixing(Softmax):
    """Heads that are mixed: no number belongs to one of them."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.mixed = nn.Parameter(torch.eye(num_heads))


@pytest.mark.parametrize(
    ("mechanism", "said"),
    [
        (functools.partial(Own, width=3, keep=False), "Own does not keep its option width.*set self.width"),
        (functools.partial(Forgetful, width=3), r"Forgetful: table is \(4, 3\), .* twice the heads \(8, 1\)"),
        (
            functools.partial(Own, width=3, keep=True, sink=True),
            r"Own: sink_scores is \(4,\), .* twice the heads not there",
        ),
        (Mixing, r"Mixing: mixed is \(4, 4\), .* twice the heads \(8, 8\)"),
    ],
)
def test_a_mechanism_that_cannot_be_told_apart_by_heads_is_refused(mechanism: Any, said: str) -> None:
    attn, x = shell(mechanism), torch.randn(2, 20, 24)
    means, before = head_health(attn, [x]).means, copy.deepcopy(attn.state_dict())
    with pytest.raises(ValueError, match=said):
        reinit_heads(attn, [Head("attention", 1)], means, step=1)
    with pytest.raises(ValueError, match=said):
        prune_heads(attn, [Head("attention", 1)], means)
    assert all(torch.equal(value, before[name]) for name, value in attn.state_dict().items())


@torch.no_grad()
def test_a_mechanism_that_keeps_its_options_is_pruned() -> None:
    attn, x = shell(functools.partial(Own, width=3, keep=True)), torch.randn(2, 20, 24)
    table = attn.mechanism.table
    prune_heads(attn, [Head("attention", 1)], head_health(attn, [x]).means)
    assert torch.equal(attn.mechanism.table, table[[0, 2, 3]])


def test_moments_of_adam() -> None:
    attn, x = shell().train(), torch.randn(3, 20, 24)
    optimizer = torch.optim.AdamW(attn.parameters(), lr=1e-3, amsgrad=True)
    for _ in range(3):
        attn(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {id(p): {key: value.clone() for key, value in state.items()} for p, state in optimizer.state.items()}
    parameters = {name: id(p) for name, p in attn.named_parameters()}
    reinit_heads(attn, [Head("attention", 1)], head_health(attn, [x]).means, step=3, optimizer=optimizer)
    assert parameters == {name: id(p) for name, p in attn.named_parameters()}
    for name, axis in (("q_proj.weight", 0), ("v_proj.bias", 0), ("out_proj.weight", 1)):
        parameter = attn.get_parameter(name)
        old, new = before[id(parameter)], optimizer.state[parameter]
        here, others = slice(6, 12), [*range(6), *range(12, 24)]
        at = (slice(None),) * axis
        assert new["exp_avg"][(*at, here)].abs().max() == 0
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            first, third, fourth = (old[key][(*at, slice(n, n + 6))] for n in (0, 12, 18))
            torch.testing.assert_close(new[key][(*at, here)], (first + third + fourth) / 3, atol=0, rtol=1e-5)
            assert first.max() > 0
            assert torch.equal(new[key][(*at, others)], old[key][(*at, others)])
        assert torch.equal(new["exp_avg"][(*at, others)], old["exp_avg"][(*at, others)])
        assert new["step"] == old["step"] == 3


def test_the_first_step_trains_the_output_slice_the_second_all() -> None:
    attn, x = shell(), torch.randn(3, 20, 24)
    reinit_heads(attn, [Head("attention", 1)], head_health(attn, [x]).means, step=0)
    optimizer = torch.optim.SGD(attn.parameters(), lr=0.1)
    sizes = []
    for _ in range(2):
        attn(x).square().mean().backward()
        sizes.append([attn.out_proj.weight.grad[:, 6:12].norm(), attn.q_proj.weight.grad[6:12].norm()])
        optimizer.step()
        optimizer.zero_grad()
    assert sizes[0][0] > 0 and sizes[0][1] == 0
    assert sizes[1][1] > 0


@torch.no_grad()
def test_averaged_weights_are_changed_likewise() -> None:
    attn, average, x = shell(), shell(), torch.randn(2, 20, 24)
    expected = with_means(average, x, [1], mean_outputs(average, x))
    copied = Average(dict(average.named_parameters()), head_health(average, [x]).means)
    reinit_heads(attn, [Head("attention", 1)], head_health(attn, [x]).means, step=0, averages=[copied])
    torch.testing.assert_close(average(x), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(average.q_proj.weight[6:12], attn.q_proj.weight[6:12])


def test_what_cannot_begin_anew_is_refused_and_left_alone() -> None:
    latent, x = MultiheadLatentAttention(24, 4), torch.randn(2, 7, 24)
    means = head_health(latent, [x]).means
    with pytest.raises(ValueError, match="MultiheadLatentAttention has no bias in its output projection"):
        reinit_heads(latent, [Head("attention", 0)], means, step=0)
    attn = shell()
    optimizer = torch.optim.Adagrad(attn.parameters())
    before = copy.deepcopy(attn.state_dict())
    with pytest.raises(ValueError, match="Adagrad keeps 'sum'"):
        reinit_heads(attn, [Head("attention", 0)], means, step=0, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in attn.state_dict().items())


class Pair(nn.Module):
    """Two attentions, one behind the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def tied_output() -> nn.Module:
    pair = Pair(shell(), shell())
    pair.second.out_proj.weight = pair.first.out_proj.weight
    return pair


def one_table() -> nn.Module:
    position = RelativeBias(4)
    return Pair(shell(position=position), shell(position=position))


def computed() -> nn.Module:
    pair = Pair(shell(), shell())
    nn.utils.parametrizations.weight_norm(pair.first.q_proj)
    return pair


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (tied_output, "first: out_proj.weight is held in another place"),
        (one_table, "first: position.table is held in another place"),
        (computed, "first: q_proj.weight is computed from other tensors"),
    ],
)
def test_weights_that_are_not_of_one_attention_alone_are_left_alone(made: Any, said: str) -> None:
    """The other attention lost a head, or no longer ran; a computed weight came back at the next call."""
    model, x = made().eval(), torch.randn(2, 20, 24)
    means = head_health(model, [x]).means
    before = copy.deepcopy(model.state_dict())
    heads = [Head("first", 1)]
    acts = (
        lambda: reinit_heads(model, heads, means, step=0),
        lambda: switch_off_heads(model, heads, means),
        lambda: prune_heads(model, heads, means),
        lambda: check_reinit(model),
    )
    for act in acts:
        with pytest.raises(ValueError, match=said):
            act()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_whole_attention_in_two_places_begins_anew() -> None:
    attn, x = shell(), torch.randn(2, 20, 24)
    model = Pair(attn, attn).eval()
    check_reinit(model)
    reinit_heads(model, [Head("first", 1)], head_health(model, [x]).means, step=0)
    assert not attn.out_proj.weight[:, 6:12].any()
    prune_heads(model, [Head("first", 0)], head_health(model, [x]).means)
    assert model(x).shape == x.shape


def test_a_frozen_head_does_not_begin_anew() -> None:
    """It would be lost: nothing trains what it is begun with. To switch it off or take it out needs no training."""
    attn, x = shell(), torch.randn(2, 20, 24)
    attn.out_proj.weight.requires_grad_(False)
    means = head_health(attn, [x]).means
    before = attn.out_proj.weight.clone()
    for act in (lambda: reinit_heads(attn, [Head("attention", 1)], means, step=0), lambda: check_reinit(attn)):
        with pytest.raises(ValueError, match=r"out_proj.weight would not be trained \(requires_grad=False\)"):
            act()
    assert torch.equal(attn.out_proj.weight, before)
    switch_off_heads(attn, [Head("attention", 1)], means)
    prune_heads(attn, [Head("attention", 1)], means)


def test_means_of_other_heads_are_refused() -> None:
    attn, x = shell(), torch.randn(2, 20, 24)
    means = head_health(attn, [x]).means
    prune_heads(attn, [Head("attention", 3)], means)
    for stale, said in ((means, r"3 heads of 6, the means are \(4, 6\)"), ({}, "of other attentions")):
        with pytest.raises(ValueError, match=said):
            prune_heads(attn, [Head("attention", 1)], stale)
        with pytest.raises(ValueError, match=said):
            reinit_heads(attn, [Head("attention", 1)], stale, step=0)


@torch.no_grad()
def test_padding_is_no_part_of_the_mean() -> None:
    block, x = EncoderBlock(24, 4).eval(), torch.randn(2, 9, 24)
    mask = Mask.from_lengths(torch.tensor([9, 4]))
    health = head_health(block, [x], run=lambda batch: block(batch, mask=mask))
    heads = block.attention.attend(block.attention_norm(x), mask=mask)
    expected = torch.cat([heads[0], heads[1, :, :4]], dim=1).double().mean(1)
    torch.testing.assert_close(health.means["attention"], expected, atol=1e-7, rtol=1e-5)
