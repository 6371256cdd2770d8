"""lucidrains/axial-attention, with the same weights on each axis, for our axes share theirs."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnzoo import Axial, Mask, MultiheadAttention

Check = Callable[..., None]


def test_the_sum_over_axes(peer: Callable[[str], Any], load: Check, close: Check) -> None:
    """A sum there, a mean here."""
    theirs = peer("axial_attention").AxialAttention(dim=32, num_dimensions=2, heads=4, dim_index=-1)
    first, second = (axis.fn for axis in theirs.axial_attentions)
    second.load_state_dict(first.state_dict())
    ours = MultiheadAttention(32, 4, functools.partial(Axial, combine="sum"), grid=(5, 7))
    keys, values = first.to_kv.weight.chunk(2)
    load(ours.q_proj, first.to_q.weight, torch.zeros(32))
    load(ours.k_proj, keys)
    load(ours.v_proj, values, torch.zeros(32))
    load(ours.out_proj, first.to_out.weight, first.to_out.bias)
    x = torch.randn(2, 35, 32)
    close(2 * ours(x), theirs(x.unflatten(1, (5, 7))).flatten(1, 2))


def test_e2_it_has_no_masks(peer: Callable[[str], Any], close: Check) -> None:
    """E2: padding can be told here, on either side, and equals the shorter input."""
    assert "mask" not in peer("axial_attention").AxialAttention.forward.__code__.co_varnames
    module = Axial(2, 8, grid=(4, 4))
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    keep = torch.ones(1, 16, dtype=torch.bool)
    keep[:, :5] = False
    padded = module(q, k, v, Mask(key_keep=keep))[:, :, 5:]
    close(padded, module(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:]))
