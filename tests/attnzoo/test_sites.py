"""What a site tells its mechanism, and what is refused when an attention is put together."""

import functools
from typing import Any

import pytest
import torch

from attnzoo import Local, Mask, MultiheadAttention, Softmax
from attnzoo.positions import RelativeBias, Rotary, Rotary2D


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


class _Tells(Softmax):
    """Keeps the facts of the site that it was told."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        dropout: float = 0.0,
        causal: bool | None = None,
        max_len: int | None = None,
        grid: tuple[int, ...] | None = None,
        prefix_tokens: int | None = None,
        layer: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        self.told = (causal, max_len, grid, prefix_tokens, layer, num_kv_heads)


def test_facts_of_the_site_reach_a_mechanism_that_names_them() -> None:
    """A fact is filled in where nobody set it; what is set and agrees stays; a contradiction raises."""
    facts: dict[str, Any] = {"max_len": 64, "grid": (2, 3), "prefix_tokens": 1, "layer": 5}
    attn = MultiheadAttention(8, 2, _Tells, causal=True, num_kv_heads=1, **facts)
    assert isinstance(attn.mechanism, _Tells)
    assert attn.mechanism.told == (True, 64, (2, 3), 1, 5, 1)
    agreeing = MultiheadAttention(8, 2, functools.partial(_Tells, max_len=64), **facts)
    assert isinstance(agreeing.mechanism, _Tells)
    assert agreeing.mechanism.told[1:3] == (64, (2, 3))
    with pytest.raises(ValueError, match=r"_Tells.*max_len=32.*max_len=64"):
        MultiheadAttention(8, 2, functools.partial(_Tells, max_len=32), **facts)
    alone = MultiheadAttention(8, 2, _Tells)
    assert isinstance(alone.mechanism, _Tells)
    assert alone.mechanism.told[1:5] == (None, None, None, None)
    MultiheadAttention(8, 2, Softmax, causal=True, **facts)


def test_a_causal_site_with_an_even_window() -> None:
    """E01 in the shell: the site tells Local that it is causal, so an even window has a meaning."""
    attn = MultiheadAttention(8, 2, functools.partial(Local, window=8), causal=True)
    dense = MultiheadAttention(8, 2, causal=True)
    dense.load_state_dict(attn.state_dict())
    x = torch.randn(1, 8, 8)
    close(attn(x), dense(x))
    with pytest.raises(ValueError, match=r"window=8 is even"):
        MultiheadAttention(8, 2, functools.partial(Local, window=8), causal=False)


class _Plain(Softmax):
    """Softmax that denies much, to see who asks."""

    traits = Softmax.traits.__class__(causal=False, cross=False, grouped=False, bias=False, streaming=False)
    reasons = {"causal": "it looks both ways; Softmax can"}


def test_what_a_mechanism_denies_is_refused_when_the_shell_is_built() -> None:
    """At construction where it can be known then, at the call otherwise; the reason is told."""
    with pytest.raises(ValueError, match=r"_Plain does not take causal=True: it looks both ways; Softmax"):
        MultiheadAttention(8, 2, _Plain, causal=True)
    with pytest.raises(ValueError, match=r"_Plain does not take num_kv_heads=1"):
        MultiheadAttention(8, 2, _Plain, num_kv_heads=1)
    with pytest.raises(ValueError, match=r"_Plain does not take a relative bias"):
        MultiheadAttention(8, 2, _Plain, position=RelativeBias(2))
    attn = MultiheadAttention(8, 2, _Plain)
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match=r"_Plain does not take a context"):
        attn(x, x)
    with pytest.raises(ValueError, match=r"_Plain does not take mask\.causal=True: it looks both ways"):
        attn(x, mask=Mask(causal=True))
    with pytest.raises(ValueError, match=r"_Plain does not take bias"):
        attn(x, bias=torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"_Plain does not take 1 key/value heads for 2 query heads"):
        attn.mechanism(torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4))
    with pytest.raises(ValueError, match=r"_Plain does not take step"):
        attn.init_state(1, 3)


def test_sizes_that_do_not_fit() -> None:
    """The message names the numbers that came."""
    with pytest.raises(ValueError, match=r"num_heads=4.*num_kv_heads=3"):
        MultiheadAttention(8, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"dim=10.*num_heads=4.*head_dim"):
        MultiheadAttention(10, 4)
    with pytest.raises(ValueError, match=r"num_heads"):
        MultiheadAttention(8, 0)
    with pytest.raises(ValueError, match=r"num_kv_heads must be at least 1, got 0"):
        MultiheadAttention(8, 4, num_kv_heads=0)


def test_a_position_made_for_other_heads_is_refused() -> None:
    """The width and the number of the heads are known when the shell is built."""
    for position in (Rotary(8), Rotary2D(8), RelativeBias(4)):
        with pytest.raises(ValueError, match=r"(4.*8|8.*4|2.*4|4.*2)"):
            MultiheadAttention(8, 2, position=position)


def test_a_site_that_is_not_causal_does_not_decode() -> None:
    """Steps are causal by nature."""
    attn = MultiheadAttention(8, 2, causal=False).eval()
    with pytest.raises(ValueError, match="causal=False"):
        attn.init_state(1, 4)


def test_a_state_and_a_memory_are_not_taken_for_each_other() -> None:
    attn = MultiheadAttention(8, 2).eval()
    x = torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="no memory"):
        attn.step(x, attn.init_state(1, 4), on_memory=True)
    with pytest.raises(ValueError, match="a memory"):
        attn.step(x, attn.memory(x))
    mechanism = attn.mechanism
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="needs k and v"):
        mechanism.step(q, None, None, mechanism.init_state(1, 4))
    with pytest.raises(ValueError, match="queries alone"):
        mechanism.step(q, q, q, mechanism.memory(q, q))


@pytest.mark.parametrize("bias", [torch.ones(5, 5, dtype=torch.bool), torch.zeros(4, 5, 5), torch.zeros(1, 5)])
def test_m04_a_bias_beside_a_relative_one_is_checked_before_they_are_added(bias: torch.Tensor) -> None:
    attn = MultiheadAttention(16, 4, position=RelativeBias(4))
    with pytest.raises(ValueError, match="bias"):
        attn(torch.randn(2, 5, 16), bias=bias)


def test_a_relative_bias_or_segments_between_two_sequences_are_refused() -> None:
    x = torch.randn(1, 5, 16)
    with pytest.raises(ValueError, match="RelativeBias has no meaning between two sequences"):
        MultiheadAttention(16, 4, position=RelativeBias(4))(x, x)
    with pytest.raises(ValueError, match="segments"):
        MultiheadAttention(16, 4)(x, x, mask=Mask(segments=torch.zeros(1, 5, dtype=torch.long)))
    with pytest.raises(ValueError, match="without a context"):
        MultiheadAttention(16, 4, position=Rotary(4))(x, context_positions=torch.arange(5))


def test_what_is_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match="position must be"):
        MultiheadAttention(16, 4, position="rope")  # type: ignore[arg-type]


def test_an_input_of_another_width_is_named() -> None:
    with pytest.raises(ValueError, match=r"x must be \[B, length, 16\], got \(2, 5, 8\)"):
        MultiheadAttention(16, 4)(torch.randn(2, 5, 8))


def test_a_factory_that_builds_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="was asked for num_heads=4, head_dim=4 and gave 2, 8"):
        MultiheadAttention(16, 4, lambda heads, width: Softmax(2, 8))


def test_an_empty_batch_of_tokens_has_gradients_of_zero() -> None:
    q, k = torch.randn(1, 2, 3, 4, requires_grad=True), torch.zeros(1, 2, 0, 4, requires_grad=True)
    Softmax(2, 4)(q, k, k).sum().backward()
    assert q.grad is not None
    assert q.grad.count_nonzero() == 0


def test_compiled_decoding_is_one_graph_for_every_length() -> None:
    attn = MultiheadAttention(16, 4).eval()
    torch._dynamo.reset()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(lambda x, state: attn.step(x, state), backend=count, fullgraph=True)
    x, state = torch.randn(1, 12, 16), attn.init_state(1, 12)
    with torch.no_grad():
        whole = attn(x, mask=Mask(causal=True))
        for place in range(12):
            y, state = step(x[:, place : place + 1], state)
            torch.testing.assert_close(y[:, 0], whole[:, place], atol=1e-5, rtol=0)
    assert len(graphs) <= 3
