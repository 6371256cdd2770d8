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
    with pytest.raises(ValueError, match=r"num_kv_heads=0"):
        MultiheadAttention(8, 4, num_kv_heads=0)


def test_a_position_made_for_other_heads_is_refused() -> None:
    """The width and the number of the heads are known when the shell is built."""
    for position in (Rotary(8), Rotary2D(8), RelativeBias(4)):
        with pytest.raises(ValueError, match=r"(4.*8|8.*4|2.*4|4.*2)"):
            MultiheadAttention(8, 2, position=position)
