"""Softmax of scores over visible keys."""

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.additive import Additive
from attnzoo.reference.rows import visible_pairs, weighted_sum


def dot_product(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of q . k / sqrt(D) + bias over the visible keys of the mechanism's own pattern.

    With a softcap c the first term is c tanh(q . k / (c sqrt(D))). A sink is one key more, of value 0, that every
    query sees with a score of its own.
    """
    scale = getattr(mechanism, "scale", None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softcap = getattr(mechanism, "softcap", None)

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        plain = key @ query * scale
        return plain if softcap is None else softcap * torch.tanh(plain / softcap)

    pattern = mechanism.pattern(q.shape[2], k.shape[2], mask.causal)
    sink = getattr(mechanism, "sink_scores", None)
    if sink is None:
        return weighted_sum(score, q, k, v, mask, bias, pattern)
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    seen = torch.ones(batch, heads, queries, keys + 1, dtype=torch.bool)
    seen[..., :keys] = visible_pairs(mask, batch, heads, queries, keys)
    terms = torch.zeros(batch, heads, queries, keys + 1, dtype=q.dtype)
    terms[..., keys] = sink.to(q.dtype)[:, None]
    if isinstance(bias, OffsetBias):
        for i in range(queries):
            terms[:, :, i, :keys] += bias.values.to(q.dtype)[:, queries - 1 - i : queries - 1 - i + keys]
    elif bias is not None:
        terms[..., :keys] += bias.to(q.dtype)
    k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], dim=2) for x in (k, v))
    return weighted_sum(score, q, k, v, Mask(pair_keep=seen), terms, None)


def additive(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of w . tanh(W_q q + W_k k) + bias."""
    assert isinstance(mechanism, Additive)
    w_q, w_k = mechanism.query_weight.to(q.dtype), mechanism.key_weight.to(q.dtype)
    w = mechanism.score_weight.to(q.dtype)

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(query @ w_q[head] + key @ w_k[head]) @ w[head]

    return weighted_sum(score, q, k, v, mask, bias, None)
