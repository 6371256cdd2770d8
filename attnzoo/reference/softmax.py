"""Softmax of scores over visible keys."""

import torch
from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.additive import Additive
from attnzoo.reference.rows import weighted_sum


def dot_product(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of q . k / sqrt(D) + bias over the visible keys of the mechanism's own pattern."""
    scale = getattr(mechanism, "scale", None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        return key @ query * scale

    return weighted_sum(score, q, k, v, mask, bias, mechanism.pattern(q.shape[2], k.shape[2], mask.causal))


def additive(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of w . tanh(W_q q + W_k k) + bias."""
    assert isinstance(mechanism, Additive)
    w_q, w_k = mechanism.query_weight.to(q.dtype), mechanism.key_weight.to(q.dtype)
    w = mechanism.score_weight.to(q.dtype)

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(query @ w_q[head] + key @ w_k[head]) @ w[head]

    return weighted_sum(score, q, k, v, mask, bias, None)
