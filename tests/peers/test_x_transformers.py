"""x-transformers' attention on the same weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attnzoo import Mask, MultiheadAttention

Check = Callable[..., None]


def shells(peer: Callable[[str], Any], load: Check, **options: Any) -> tuple[MultiheadAttention, nn.Module]:
    theirs = peer("x_transformers.x_transformers").Attention(dim=32, dim_head=8, heads=4, **options)
    ours = MultiheadAttention(32, 4, bias=False, num_kv_heads=options.get("kv_heads"))
    load(ours.q_proj, theirs.to_q.weight)
    load(ours.k_proj, theirs.to_k.weight)
    load(ours.v_proj, theirs.to_v.weight)
    load(ours.out_proj, theirs.to_out.weight)
    return ours.eval(), theirs.eval()


def outcome(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(peer: Callable[[str], Any], load: Check, close: Check, flash: bool, causal: bool) -> None:
    ours, theirs = shells(peer, load, flash=flash, causal=causal)
    x = torch.randn(2, 9, 32)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, 6:] = False
    close(ours(x, mask=Mask(causal=causal)), outcome(theirs(x)))
    got = ours(x, mask=Mask(causal=causal, key_keep=keep))
    right = outcome(theirs(x, mask=keep))
    close(got[keep], right[keep])


def test_k3_grouped_heads_lie_in_blocks_here_and_in_tiles_there(
    peer: Callable[[str], Any], load: Check, close: Check
) -> None:
    """M11, K3: query head h uses key head h mod G there; put in order, both give the same."""
    ours, theirs = shells(peer, load, kv_heads=2)
    x = torch.randn(2, 7, 32)
    assert not torch.allclose(ours(x), outcome(theirs(x)), atol=1e-3)
    order = torch.tensor([0, 2, 1, 3])
    load(ours.q_proj, theirs.to_q.weight.unflatten(0, (4, 8))[order].flatten(0, 1))
    load(ours.out_proj, theirs.to_out.weight.unflatten(1, (4, 8))[:, order].flatten(1))
    close(ours(x), outcome(theirs(x)))
