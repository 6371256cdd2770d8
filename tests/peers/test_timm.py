"""timm's attention on the same weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attnzoo import Differential, Mask, MultiheadAttention

Check = Callable[..., None]


@pytest.mark.parametrize("fused", [True, False])
def test_attention(peer: Callable[[str], Any], load: Check, close: Check, fused: bool) -> None:
    theirs = peer("timm.layers").Attention(32, num_heads=4, qkv_bias=True)
    theirs.fused_attn = fused
    with torch.no_grad():
        theirs.qkv.bias.normal_()
    ours = MultiheadAttention(32, 4)
    weights, biases = theirs.qkv.weight.chunk(3), theirs.qkv.bias.chunk(3)
    for layer, weight, bias in zip((ours.q_proj, ours.k_proj, ours.v_proj), weights, biases, strict=True):
        load(layer, weight, bias if layer.bias is not None else None)
    load(ours.out_proj, theirs.proj.weight, theirs.proj.bias)
    x = torch.randn(2, 9, 32)
    pairs = torch.rand(2, 1, 9, 9) < 0.7
    pairs[..., 0] = True
    close(ours(x), theirs(x))
    close(ours(x, mask=Mask(pair_keep=pairs)), theirs(x, attn_mask=pairs))
    close(ours(x, mask=Mask(causal=True)), theirs(x, is_causal=True))


def test_g1_the_unfused_path_drops_a_mask_beside_the_causal_flag(
    peer: Callable[[str], Any], load: Check, close: Check
) -> None:
    """G1: what timm gives with both is what it gives with ``is_causal`` alone; here both act."""
    theirs = peer("timm.layers").Attention(8, num_heads=1)
    theirs.fused_attn = False
    x, pairs = torch.randn(1, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    pairs[:, 0] = False
    pairs[0, 0] = True
    close(theirs(x, attn_mask=pairs, is_causal=True), theirs(x, is_causal=True))
    ours = MultiheadAttention(8, 1)
    for layer, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.qkv.weight.chunk(3), strict=True):
        load(layer, weight)
    load(ours.out_proj, theirs.proj.weight, theirs.proj.bias)
    right = theirs(x, attn_mask=pairs & torch.ones(5, 5, dtype=torch.bool).tril())
    close(ours(x, mask=Mask(causal=True, pair_keep=pairs)), right)


def test_a1_an_empty_row_is_nan_or_0_by_the_path(peer: Callable[[str], Any], close: Check) -> None:
    """A1: unfused NaN, fused 0; here 0 whatever runs."""
    theirs = peer("timm.layers").Attention(8, num_heads=1)
    x, pairs = torch.randn(1, 3, 8), torch.ones(3, 3, dtype=torch.bool)
    pairs[1] = False
    theirs.fused_attn = False
    assert theirs(x, attn_mask=pairs)[:, 1].isnan().all()
    ours = MultiheadAttention(8, 1)
    nn.init.normal_(ours.out_proj.bias)
    close(ours(x, mask=Mask(pair_keep=pairs))[0, 1], ours.out_proj.bias)


@pytest.mark.parametrize("depth", [0, 3])
def test_differential_attention(peer: Callable[[str], Any], load: Check, close: Check, depth: int) -> None:
    """Two maps, lambda, and the norm of each head with its gain of 1 - lambda's start."""
    theirs = peer("timm.layers").DiffAttention(32, num_heads=2, depth=depth)
    ours = MultiheadAttention(32, 2, Differential, bias=False, layer=depth)
    for layer, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.qkv.weight.chunk(3), strict=True):
        load(layer, weight)
    ours.out_proj.bias = nn.Parameter(torch.zeros(32))
    load(ours.out_proj, theirs.proj.weight, theirs.proj.bias)
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(ours.mechanism, name).copy_(getattr(theirs, name))
    x = torch.randn(2, 9, 32)
    close(ours(x), theirs(x))
    close(ours(x, mask=Mask(causal=True)), theirs(x, is_causal=True))
