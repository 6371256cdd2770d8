"""performer-pytorch and linear-attention-transformer, which turn keys into features."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnzoo import Linear, Mask, Performer

Check = Callable[..., None]


@pytest.fixture
def performer(peer: Callable[[str], Any]) -> Any:
    return peer("performer_pytorch.performer_pytorch")


def fast_attention(performer: Any, module: Performer, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = performer.FastAttention(8, nb_features=module.num_features, **options)
    theirs.projection_matrix.copy_(module.projection)
    return theirs


def test_performer_on_the_same_features(performer: Any, close: Check) -> None:
    """It adds an eps of 1e-4 to each feature, which moves its outputs; without it the numbers agree."""
    module = Performer(2, 8, num_features=64)
    q, k, v = torch.randn(3, 2, 2, 40, 8)
    assert not torch.allclose(module(q, k, v), fast_attention(performer, module)(q, k, v), atol=1e-3)
    features = [
        performer.softmax_kernel(x, projection_matrix=module.projection, is_query=queries, eps=0.0)
        for x, queries in ((q, True), (k, False))
    ]
    close(module(q, k, v), performer.linear_attention(*features, v))
    causal = performer.causal_linear_attention_noncuda(*features, v, chunk_size=16, eps=0.0)
    close(module(q, k, v, Mask(causal=True)), causal)


def test_j3_its_stabiliser_looks_at_later_keys(performer: Any, close: Check) -> None:
    """J3, E1: causal, and yet a large last key moves the outputs before it, through the eps. Not here."""
    module = Performer(1, 8, num_features=32)
    theirs = fast_attention(performer, module)
    q, k, v = torch.randn(3, 1, 1, 20, 8)
    later = k.clone()
    later[:, :, -1] *= 12
    moved = []
    for keys in (k, later):
        features = [
            performer.softmax_kernel(x, projection_matrix=theirs.projection_matrix, is_query=queries)
            for x, queries in ((q, True), (keys, False))
        ]
        moved.append(performer.causal_linear_attention_noncuda(*features, v))
    assert (moved[0] - moved[1])[:, :, :-1].abs().max() > 1e-2
    mask = Mask(causal=True)
    close(module(q, k, v, mask)[:, :, :-1], module(q, later, v, mask)[:, :, :-1])


def test_i1_hidden_keys_stay_in_its_normaliser(peer: Callable[[str], Any], close: Check) -> None:
    """I1: performer-pytorch's module masks the values alone; padded equals cropped here."""
    performer = peer("performer_pytorch")
    attention = performer.SelfAttention(32, heads=4, dim_head=8, nb_features=24).eval()
    x = torch.randn(1, 9, 32)
    keep = torch.tensor([[True] * 6 + [False] * 3])
    assert not torch.allclose(attention(x, mask=keep)[:, :6], attention(x[:, :6]), atol=1e-3)
    for module in (Performer(2, 8), Linear(2, 8)):
        q, k, v = torch.randn(3, 1, 2, 9, 8)
        padded = module(q, k, v, Mask(key_keep=keep))[:, :, :6]
        close(padded, module(q[:, :, :6], k[:, :, :6], v[:, :, :6]))


def test_linear_attention_transformer_causal(peer: Callable[[str], Any], close: Check) -> None:
    """Its causal form: exp features of the keys, and a softmax over the width of each query, whose sum cancels.

    It sees whole blocks that lie before a query's own ("blindspot"); at a block of one, everything up to itself.
    """
    theirs = peer("linear_attention_transformer.linear_attention_transformer")
    q, k, v = torch.randn(3, 2, 2, 24, 8)
    right = theirs.causal_linear_attn(q, k, v, bucket_size=1)
    # exp(q) is softmax(q) times a number of its own for each query, which the division takes out.
    close(Linear(2, 8, feature_map="exp")(q, k, v, Mask(causal=True)), right)


def test_d2_its_denominator_is_held_at_a_thousandth(peer: Callable[[str], Any], close: Check) -> None:
    """D2: small keys fall below its clamp and the output shrinks with them; here weights still sum to 1."""
    theirs = peer("linear_attention_transformer.linear_attention_transformer")
    q, v = torch.randn(1, 1, 6, 8), torch.ones(1, 1, 6, 8)
    k = torch.full((1, 1, 6, 8), -14.0)
    assert theirs.causal_linear_attn(q, k, v, bucket_size=1).max() < 0.1
    close(Linear(1, 8, feature_map="exp")(q, k, v, Mask(causal=True)), v)
