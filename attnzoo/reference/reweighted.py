"""Softmax weights that are changed afterwards: a second map subtracted, a span that fades out."""

import math

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.adaptive_span import AdaptiveSpan
from attnzoo.mechanisms.differential import Differential
from attnzoo.reference.rows import visible_pairs, weighted_sum


def differential(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of q1 . k1 / sqrt(D/2) + bias, minus lambda times that of the other halves."""
    assert isinstance(mechanism, Differential)
    half = q.shape[-1] // 2

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        return key @ query / math.sqrt(half)

    lq1, lk1, lq2, lk2 = (
        x.to(q.dtype) for x in (mechanism.lambda_q1, mechanism.lambda_k1, mechanism.lambda_q2, mechanism.lambda_k2)
    )
    start = 0.8 - 0.6 * math.exp(-0.3 * mechanism.layer)
    lam = torch.exp(lq1 @ lk1) - torch.exp(lq2 @ lk2) + start
    first = weighted_sum(score, q[..., :half], k[..., :half], v, mask, bias, None)
    second = weighted_sum(score, q[..., half:], k[..., half:], v, mask, bias, None)
    return first - lam * second


def adaptive_span(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """m exp(s) / sum m exp(s) over the visible keys whose m is above 0."""
    assert isinstance(mechanism, AdaptiveSpan)
    batch, heads, queries, width = q.shape
    keys, share = k.shape[2], heads // k.shape[1]
    seen = visible_pairs(mask, batch, heads, queries, keys, q.device)
    rows: dict[tuple[int, int, int], Tensor] = {}
    for h in range(heads):
        by_distance = [_span_weight(mechanism, h, x, q.dtype) for x in range(queries + keys)]
        for i in range(queries):
            m = torch.stack([by_distance[abs(i + keys - queries - j)] for j in range(keys)])
            for b in range(batch):
                sees = (seen[b, h, i] & (m > 0)).nonzero()[:, 0]
                scores = k[b, h // share] @ q[b, h, i] / math.sqrt(width) + _terms(bias, b, h, i, queries, keys, q)
                weights = m[sees] * torch.exp(scores[sees])
                total = weights.sum() if len(sees) else 1.0
                rows[b, h, i] = weights / total @ v[b, h // share, sees]
    places = [(b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)]
    return torch.stack([rows[place] for place in places]).view(batch, heads, queries, v.shape[-1])


def _span_weight(mechanism: AdaptiveSpan, head: int, distance: int, dtype: torch.dtype) -> Tensor:
    fading = (mechanism.ratio[head].to(dtype) * mechanism.max_span - distance) / mechanism.ramp + 1
    if distance >= mechanism.max_span or fading <= 0:
        return torch.zeros_like(fading)
    return fading if fading < 1 else torch.ones_like(fading)


def _terms(bias: Bias | None, b: int, h: int, i: int, queries: int, keys: int, like: Tensor) -> Tensor:
    """What the bias adds to the scores of one query, [S]."""
    if bias is None:
        return like.new_zeros(keys)
    if isinstance(bias, OffsetBias):
        return torch.stack([bias.values[h, j - i + queries - 1] for j in range(keys)]).to(like.dtype)
    four = bias if bias.dim() == 4 else bias[None, None]
    return four[b if four.shape[0] > 1 else 0, h if four.shape[1] > 1 else 0, i].to(like.dtype)
