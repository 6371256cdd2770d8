"""torch's own: scaled_dot_product_attention and nn.MultiheadAttention."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnzoo import Mask, MultiheadAttention, Softmax

Check = Callable[..., None]


def draw(queries: int, keys: int, groups: int = 4) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(2, heads, length, 8, requires_grad=True)
        for heads, length in ((4, queries), (groups, keys), (groups, keys))
    )


def both(ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...], close: Check) -> None:
    upstream = torch.randn_like(ours)
    close(ours, theirs)
    gradients = (torch.autograd.grad(out, leaves, upstream) for out in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        close(a, b)


@pytest.mark.parametrize(("queries", "keys", "groups"), [(9, 9, 4), (5, 12, 4), (9, 9, 2), (1, 6, 1)])
def test_sdpa_with_a_boolean_mask(queries: int, keys: int, groups: int, close: Check) -> None:
    q, k, v = draw(queries, keys, groups)
    pairs = torch.rand(2, 4, queries, keys) < 0.7
    pairs[..., 0] = True
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=groups != 4)
    both(Softmax(4, 8)(q, k, v, Mask(pair_keep=pairs)), theirs, (q, k, v), close)


def test_sdpa_with_additive_terms(close: Check) -> None:
    q, k, v = draw(7, 7)
    bias = torch.randn(2, 4, 7, 7, requires_grad=True)
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    both(Softmax(4, 8)(q, k, v, bias=bias), theirs, (q, k, v, bias), close)


def test_sdpa_causal_agrees_where_lengths_do(close: Check) -> None:
    q, k, v = draw(9, 9)
    both(
        Softmax(4, 8)(q, k, v, Mask(causal=True)),
        scaled_dot_product_attention(q, k, v, is_causal=True),
        (q, k, v),
        close,
    )


def test_b3_sdpa_aligns_its_flag_to_the_first_key(close: Check) -> None:
    """B3, M05: with one query and eight keys torch shows it the first; the last query belongs to the last key."""
    q, k, v = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 8, 8), torch.arange(8.0).view(1, 1, 8, 1).expand(1, 4, 8, 8)
    close(scaled_dot_product_attention(q, k, v, is_causal=True), torch.zeros(1, 4, 1, 8))
    close(Softmax(4, 8)(q, k, v, Mask(causal=True)), torch.full((1, 4, 1, 8), 3.5))


def test_a4_a_hidden_nan_reaches_torchs_output() -> None:
    """A4: 0 times NaN is NaN; here the same key, hidden by ``key_keep``, moves nothing."""
    q, k, v = (x.detach() for x in draw(4, 4))
    keep = torch.tensor([True, True, True, False]).expand(2, -1)
    v[:, :, 3] = torch.nan
    assert scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None]).isnan().any()
    assert Softmax(4, 8)(q, k, v, Mask(key_keep=keep)).isfinite().all()


def shells(load: Check) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
            bias.normal_()
    ours = MultiheadAttention(32, 4)
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    load(ours.q_proj, weights[0], biases[0])
    load(ours.k_proj, weights[1])  # a bias of the keys moves no softmax
    load(ours.v_proj, weights[2], biases[2])
    load(ours.out_proj, theirs.out_proj.weight, theirs.out_proj.bias)
    return ours.eval(), theirs.eval()


def test_multihead_attention_on_the_same_weights(load: Check, close: Check) -> None:
    ours, theirs = shells(load)
    x, context = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    close(ours(x), theirs(x, x, x, need_weights=False)[0])
    right = theirs(x, context, context, key_padding_mask=padded, need_weights=False)[0]
    close(ours(x, context, mask=Mask.from_key_padding_mask(padded)), right)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    close(ours(x, mask=Mask(causal=True)), theirs(x, x, x, attn_mask=future, need_weights=False)[0])


def test_a1_torch_gives_nan_for_a_sample_of_padding_where_weights_are_asked_for(load: Check, close: Check) -> None:
    """A1, A2: NaN or not by the path that is taken; here 0, which the output projection makes its bias."""
    ours, theirs = shells(load)
    x = torch.randn(2, 4, 32)
    padded = torch.tensor([[False] * 4, [True] * 4])
    assert theirs(x, x, x, key_padding_mask=padded, need_weights=True)[0][1].isnan().all()
    out = ours(x, mask=Mask.from_key_padding_mask(padded))
    close(out[1], ours.out_proj.bias.expand(4, -1))
    close(out[0], theirs(x[:1], x[:1], x[:1], need_weights=False)[0][0])
