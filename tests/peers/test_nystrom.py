"""lucidrains/nystrom-attention and transformers' Nystromformer on the same weights."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo import Mask, MultiheadAttention, Nystrom

Check = Callable[..., None]


def shells(peer: Callable[[str], Any], load: Check) -> tuple[MultiheadAttention, Any]:
    theirs = peer("nystrom_attention").NystromAttention(
        32, dim_head=8, heads=4, num_landmarks=6, residual_conv_kernel=5, eps=0.0
    )
    ours = MultiheadAttention(32, 4, functools.partial(Nystrom, num_landmarks=6, kernel_size=5))
    for layer, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.to_qkv.weight.chunk(3), strict=True):
        load(layer, weight, None if layer.bias is None else torch.zeros(32))
    load(ours.out_proj, theirs.to_out[0].weight, theirs.to_out[0].bias)
    with torch.no_grad():
        ours.mechanism.kernel.copy_(theirs.res_conv.weight[..., 0])
    return ours.eval(), theirs.eval()


def test_one_sample_and_one_head_at_a_time(peer: Callable[[str], Any], load: Check, close: Check) -> None:
    """Their inverse starts from a maximum over batch and heads; where that is each one's own, the numbers agree."""
    theirs = peer("nystrom_attention")
    q, k, v = torch.randn(3, 1, 1, 30, 8)
    module = Nystrom(1, 8, num_landmarks=6)
    first, middle, last = (
        (a @ b.mT * 8**-0.5).softmax(-1) for a, b in ((q, _means(k)), (_means(q), _means(k)), (_means(q), k))
    )
    close(module(q, k, v), first @ theirs.nystrom_attention.moore_penrose_iter_pinv(middle, 6) @ (last @ v))


def _means(x: Tensor) -> Tensor:
    return x.unflatten(2, (6, -1)).mean(3)


def test_j3_batch_mates_move_theirs(peer: Callable[[str], Any], load: Check, close: Check) -> None:
    """J3: a sharp sample beside it changes where the inverse of a sample starts there, and nothing here."""
    ours, theirs = shells(peer, load)
    x = torch.randn(1, 30, 32)
    both = torch.cat([x, 9 * torch.randn(1, 30, 32)])
    assert not torch.allclose(theirs(both)[:1], theirs(x), atol=1e-4)
    close(ours(both)[:1], ours(x))


def test_e2_its_filler_is_attended_where_no_mask_is_given(
    peer: Callable[[str], Any], load: Check, close: Check
) -> None:
    """E2: 29 tokens become 30 by a token of zeros in front; with a mask of ones it is hidden."""
    _, theirs = shells(peer, load)
    x = torch.randn(1, 29, 32)
    assert not torch.allclose(theirs(x), theirs(x, mask=torch.ones(1, 29, dtype=torch.bool)), atol=1e-3)


def test_transformers_nystromformer(peer: Callable[[str], Any], load: Check, close: Check) -> None:
    config = peer("transformers").NystromformerConfig(
        hidden_size=32, num_attention_heads=4, num_landmarks=6, segment_means_seq_len=30, conv_kernel_size=5
    )
    modeling = peer("transformers.models.nystromformer.modeling_nystromformer")
    theirs = modeling.NystromformerSelfAttention(config).eval().double()
    module = Nystrom(4, 8, num_landmarks=6, kernel_size=5, iterations=40).double()
    with torch.no_grad():
        module.kernel.copy_(theirs.conv.weight[..., 0])
        x = 4 * torch.randn(1, 30, 32, dtype=torch.float64)
        # Their start value, too, is a maximum over batch and heads: run the iteration until it does not matter.
        theirs.iterative_inv = functools.partial(theirs.iterative_inv, n_iter=40)
        heads = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (theirs.query, theirs.key, theirs.value))
        close(module(*heads).transpose(1, 2).flatten(2), theirs(x)[0])


def test_padding_is_exact_here(close: Check) -> None:
    """E2, J3: padded on either side equals cropped."""
    module = Nystrom(2, 8, num_landmarks=4).eval()
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    for own in (slice(0, 9), slice(3, 12)):
        keep = torch.zeros(1, 12, dtype=torch.bool)
        keep[:, own] = True
        close(module(q, k, v, Mask(key_keep=keep))[:, :, own], module(q[:, :, own], k[:, :, own], v[:, :, own]))
