"""lucidrains/linformer on the same weights."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnzoo import Linformer, Mask, MultiheadAttention

Check = Callable[..., None]


def shells(peer: Callable[[str], Any], load: Check, share_kv: bool = False) -> tuple[MultiheadAttention, Any]:
    theirs = peer("linformer").LinformerSelfAttention(32, seq_len=40, k=6, heads=4, share_kv=share_kv)
    ours = MultiheadAttention(32, 4, functools.partial(Linformer, rank=6, max_len=40))
    load(ours.q_proj, theirs.to_q.weight, torch.zeros(32))
    load(ours.k_proj, theirs.to_k.weight)
    load(ours.v_proj, theirs.to_v.weight, torch.zeros(32))
    load(ours.out_proj, theirs.to_out.weight, theirs.to_out.bias)
    with torch.no_grad():
        ours.mechanism.key_projection.copy_(theirs.proj_k.T)
        ours.mechanism.value_projection.copy_(theirs.proj_v.T)
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("length", [40, 17])
def test_the_same_projections(peer: Callable[[str], Any], load: Check, close: Check, length: int) -> None:
    """At the length that they were built for, and with their first columns below it."""
    ours, theirs = shells(peer, load)
    x = torch.randn(2, length, 32)
    close(ours(x), theirs(x))
    context = torch.randn(2, 11, 32)
    close(ours(x, context), theirs(x, context))


def test_c4_a_mask_vanishes_there(peer: Callable[[str], Any], load: Check, close: Check) -> None:
    """C4, D3, E03: it goes into keywords that nobody reads; here padding moves nothing."""
    ours, theirs = shells(peer, load)
    x = torch.randn(1, 8, 32)
    keep = torch.tensor([[True] * 5 + [False] * 3])
    close(theirs(x, mask=keep), theirs(x))
    close(ours(x, mask=Mask(key_keep=keep))[:, :5], ours(x[:, :5]))
    close(ours(x, mask=Mask(key_keep=keep))[:, :5], theirs(x[:, :5]))
