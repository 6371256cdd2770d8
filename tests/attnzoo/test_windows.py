"""Windows: Local against counting by hand, at every length, and against dense attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import Local, Mask, OffsetBias, Softmax, attention_map

Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_c1_windows_by_brute_force(causal: bool) -> None:
    """C1: every T <= 40 and W <= 12 lets through what counting on one's fingers lets through."""
    for window in range(1, 13):
        if not causal and window % 2 == 0:
            continue
        attn = Local(1, 1, window=window)
        left, right = (window - 1, 0) if causal else (window // 2, window // 2)
        for length in range(1, 41):
            offset = torch.arange(length) - torch.arange(length)[:, None]
            expected = (offset >= -left) & (offset <= right)
            pattern = attn.pattern(length, length, causal)
            assert pattern is not None
            assert torch.equal(pattern, expected)
            # Equal scores: the output is the mean of the keys in the window, so each of them counts.
            zero, v = torch.zeros(1, 1, length, 1), torch.randn(1, 1, length, 1, dtype=torch.float32)
            share = expected.float() / expected.sum(-1, keepdim=True)
            close(attn(zero, zero, v, Mask(causal=causal)), share @ v)


@pytest.mark.parametrize("window", [1, 2, 5, (3, 0), (0, 2), (4, 1), 12])
def test_c1_windows_on_rectangles(brute: Brute, window: int | tuple[int, int], random_qkv: Draw) -> None:
    """C1, E02: T below and above S, with masks and with every form of bias."""
    attn = Local(2, 4, window=window)
    causal_only = isinstance(window, int) and window % 2 == 0
    for queries, keys in [(1, 9), (3, 40), (39, 40), (40, 39), (40, 3), (9, 1)]:
        q, k, v = random_qkv(queries, keys, groups=1)
        for causal in {True, causal_only}:
            mask = Mask(causal=causal, key_keep=torch.rand(2, keys) < 0.7)
            full = mask._replace(pair_keep=torch.rand(2, 1, queries, keys) < 0.7)
            for m in (Mask(causal=causal), mask, full):
                for bias in (
                    None,
                    torch.randn(1, 2, queries, keys),
                    OffsetBias(torch.randn(2, queries + keys - 1)),
                ):
                    close(attn(q, k, v, m, bias), brute(attn, q, k, v, m, bias))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_e01_lengths_below_the_window(length: int, random_qkv: Draw) -> None:
    """E01: window 8; up to 8 tokens it is full causal attention, at 9 the last query loses key 0."""
    q, k, v = random_qkv(length, length)
    out = Local(2, 4, window=8)(q, k, v, Mask(causal=True))
    full = Softmax(2, 4)(q, k, v, Mask(causal=True))
    if length <= 8:
        close(out, full)
    else:
        close(out[:, :, :8], full[:, :, :8])
        weights = attention_map(Local(2, 4, window=8), q.detach(), k.detach(), Mask(causal=True))
        assert (weights[:, :, 8, 0] == 0).all()
        assert (weights[:, :, 8, 1:] > 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(63, 63), (64, 64), (65, 65), (130, 130), (130, 70), (70, 130)])
@pytest.mark.parametrize("window", [64, (20, 43), (63, 0)])
def test_e02_lengths_that_are_no_multiple_of_the_block(
    brute: Brute,
    queries: int,
    keys: int,
    window: int | tuple[int, int],
    random_qkv: Draw,
) -> None:
    """E02: blocks of 64; equal to dense attention under the same visible pattern."""
    attn = Local(1, 4, window=window)
    q, k, v = random_qkv(queries, keys, heads=1, groups=1)
    for mask in (Mask(causal=True), Mask(causal=True, key_keep=torch.rand(2, keys) < 0.9)):
        close(attn(q, k, v, mask), brute(attn, q, k, v, mask))
        pattern = attn.pattern(queries, keys, True)
        assert pattern is not None
        dense = Softmax(1, 4)(q, k, v, mask._replace(pair_keep=pattern))
        close(attn(q, k, v, mask), dense)


def test_windows_that_make_no_sense_are_refused(random_qkv: Draw) -> None:
    """Below one, negative, three numbers, or even without causal: by name, at construction where known."""
    for window in (0, -3, (-1, 2), (1, 2, 3), 3.0, True, "5"):
        wrong: Any = window
        with pytest.raises(ValueError, match="Local: window"):
            Local(2, 4, window=wrong)
    with pytest.raises(ValueError, match=r"window=8 is even.*7, 9"):
        Local(2, 4, window=8, causal=False)
    with pytest.raises(ValueError, match=r"window=8 is even.*7, 9"):
        Local(2, 4, window=8)(*random_qkv(9, 9))
