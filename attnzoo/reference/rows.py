"""Row loops that the slow formulas share."""

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism

Formula = Callable[[Mechanism, Tensor, Tensor, Tensor, Mask, Bias | None], Tensor]
"""(mechanism, q, k, v, mask, bias) -> output; computes in the precision of q."""


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
