"""What "right" means: the slow, obvious formula of every mechanism, row by row in float64.

Nothing here is shared with the code it judges. A mechanism that is a softmax over the pairs of its own
``pattern`` needs no entry; any other has its formula in ``FORMULAS``.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.additive import Additive
from attnzoo.mechanisms.softmax import Softmax

Formula = Callable[[Mechanism, Tensor, Tensor, Tensor, Mask, Bias | None], Tensor]


def reference(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None
) -> Tensor:
    """The output that ``mechanism`` should give, without dropout, in float64.

    Args:
        mechanism: only its options and parameters are read.
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms to be added to the scores.

    Returns:
        [B, H, T, Dv] float64, differentiable.

    Raises:
        ValueError: if there is no formula for the class.
    """
    mask = as_mask(mask)
    formula = formula_of(mechanism)
    if formula is None:
        raise ValueError(
            f"{type(mechanism).__name__} has no formula in attnzoo.reference and is not exact; "
            f"pass one: check_attention(mechanism, formula=...)"
        )
    return formula(mechanism, q.double(), k.double(), v.double(), mask, bias)


def formula_of(mechanism: Mechanism) -> Formula | None:
    """The formula of a mechanism's class, or of the nearest parent that has one."""
    for cls in type(mechanism).__mro__:
        if cls in FORMULAS:
            return FORMULAS[cls]
    return dot_product if mechanism.traits.exact else None


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


FORMULAS: dict[type[Mechanism], Formula] = {Softmax: dot_product, Additive: additive}


def weighted_sum(
    score: Callable[[int, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    pattern: Tensor | None,
) -> Tensor:
    """For each query: the softmax of ``score(head, query [D], keys [n, D])`` over its n visible keys, times v."""
    batch, heads, queries, _ = q.shape
    keys, share = k.shape[2], heads // k.shape[1]
    seen = visible_pairs(mask, batch, heads, queries, keys, q.device)
    if pattern is not None:
        seen = seen & pattern.to(seen.device)
    terms = torch.zeros(batch, heads, queries, keys, dtype=q.dtype, device=q.device)
    if isinstance(bias, OffsetBias):
        for i in range(queries):
            terms[:, :, i] += bias.values.to(q.dtype)[:, queries - 1 - i : queries - 1 - i + keys]
    elif bias is not None:
        terms = terms + bias.to(q.dtype)
    rows = []
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                sees = seen[b, h, i].nonzero()[:, 0]
                if len(sees) == 0:
                    rows.append(v.new_zeros(v.shape[-1]))
                    continue
                scores = score(h, q[b, h, i], k[b, h // share, sees]) + terms[b, h, i, sees]
                rows.append(scores.softmax(0) @ v[b, h // share, sees])
    return torch.stack(rows).view(batch, heads, queries, v.shape[-1])


def visible_pairs(
    mask: Mask, batch: int, heads: int, queries: int, keys: int, device: torch.device | None = None
) -> Tensor:
    """Bool [B, H, T, S] by the definition of each part of ``Mask``."""
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool, device=device)
    for i in range(queries):
        if mask.causal:
            seen[:, :, i, max(0, i + keys - queries + 1) :] = False
        if mask.segments is not None:
            for b in range(batch):
                seen[b, :, i] &= mask.segments[b] == mask.segments[b, i]
    if mask.key_keep is not None:
        seen &= mask.key_keep[:, None, None, :]
    if mask.pair_keep is not None:
        seen &= mask.pair_keep
    return seen
