"""Running sums in plain chunks, for features so near to 1 that no maximum has to be taken out, and their gradients.

What a query gets from before its chunk comes from sums, what it gets from within it from a matrix of c x c weights.

Letters: B batch, H query heads, G key/value heads, T places, R features, Dv value width; c places in a chunk; n chunks
of all samples and groups, each with the queries of its ``share`` heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.kernels.prefix import CHUNK, Sums, finite, quotient, quotient_backward, with_one


def forward(log_q: Tensor, log_k: Tensor, v: Tensor, before: Sums) -> tuple[Tensor, Sums]:
    """Each query sees the keys up to its own place, and those that were summed before all of them.

    Args:
        log_q: [B, H, T, R].
        log_k: [B, G, T, R], -inf at a hidden key.
        v: [B, G, T, Dv].
        before: the sums of earlier keys.

    Returns:
        [B, H, T, Dv], 0 where there is no key; the sums after the last key. Neither has gradients.
    """
    parts = _chunks(log_q, log_k, v, before)
    found = quotient(torch.baddbmm(parts.queries @ parts.sums, parts.weights, parts.values))
    return _by_head(found, log_q.shape, log_k.shape[1]), parts.after


def backward(
    log_q: Tensor, log_k: Tensor, v: Tensor, before: Sums, out: Tensor, upstream: Tensor, grown: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the first three arguments and of ``before.total``.

    Args:
        log_q: [B, H, T, R].
        log_k: [B, G, T, R].
        v: [B, G, T, Dv].
        before: the sums of earlier keys.
        out: what ``forward`` gave, [B, H, T, Dv].
        upstream: the gradient of that.
        grown: the gradient of the total of the sums after the last key, [B, G, R, Dv + 1].
    """
    queries, keys, values, sums, weights, after = _chunks(log_q, log_k, v, before)
    groups, size = log_k.shape[1], keys.shape[1]
    below = weights.sum(-1, keepdim=True).add_(queries @ sums[..., -1:])
    dsum = quotient_backward(_by_chunk(upstream, size, groups), _by_chunk(out, size, groups), below)
    # What each chunk gave to the sums behind it comes back from the last chunk to the first.
    more = (queries.mT @ dsum).unflatten(0, (*log_k.shape[:2], -1))
    grown, later = grown * _level(after.peak), torch.empty_like(more)
    for number in reversed(range(more.shape[2])):
        later[:, :, number] = grown
        grown = grown + more[:, :, number]
    later = later.flatten(0, 2)
    dweights = _past(dsum @ values.mT)
    dlog_q = torch.baddbmm(dsum @ sums.mT, dweights, keys).mul_(queries)
    dlog_k = torch.baddbmm(values @ later.mT, dweights.mT, queries).mul_(keys)
    dv = torch.baddbmm(keys @ later[..., :-1], weights.mT, dsum[..., :-1])
    dlog_q, dlog_k, dv = (_by_head(x, like.shape, groups) for x, like in ((dlog_q, log_q), (dlog_k, log_k), (dv, v)))
    return dlog_q, dlog_k, dv, grown * before.peak.exp()[..., None]


class _Parts(NamedTuple):
    """All chunks side by side.

    Attributes:
        queries: [n, share c, R], the features, the largest of each query 1.
        keys: [n, c, R], the features.
        values: [n, c, Dv + 1].
        sums: [n, R, Dv + 1], over the keys before the chunk.
        weights: [n, share c, c], of the keys in the chunk.
        after: the sums behind the last key.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    sums: Tensor
    weights: Tensor
    after: Sums


def _chunks(log_q: Tensor, log_k: Tensor, v: Tensor, before: Sums) -> _Parts:
    groups, length = log_k.shape[1:3]
    size = min(CHUNK, length)
    queries = _by_chunk((log_q - log_q.amax(-1, keepdim=True)).exp_(), size, groups)
    keys, values = (_by_chunk(x, size, groups) for x in (log_k.exp(), with_one(v, log_k)))
    more = (keys.mT @ values).unflatten(0, (*log_k.shape[:2], -1))
    sums, total = torch.empty_like(more), before.total * before.peak.exp()[..., None]
    for number in range(more.shape[2]):  # a cumulative sum, seventy times as fast as torch's along this axis
        sums[:, :, number] = total
        total = total + more[:, :, number]
    peak = torch.maximum(before.peak, log_k.amax(2))
    after = Sums(peak, total * _level(peak))
    return _Parts(queries, keys, values, sums.flatten(0, 2), _past(queries @ keys.mT), after)


def _level(peak: Tensor) -> Tensor:
    return (-finite(peak)).exp()[..., None]


def _past(pairs: Tensor) -> Tensor:
    """[n, share c, c], 0 where a key comes after the query."""
    pairs.unflatten(1, (-1, pairs.shape[2])).tril_()
    return pairs


def _by_chunk(x: Tensor, size: int, groups: int) -> Tensor:
    """[B, H, T, width] -> [n, share c, width]."""
    rest = -x.shape[2] % size
    x = pad(x, (0, 0, 0, rest)) if rest else x
    return x.unflatten(2, (-1, size)).unflatten(1, (groups, -1)).transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _by_head(x: Tensor, shape: torch.Size, groups: int) -> Tensor:
    """[n, share c, width] -> [B, H, T, width], of which ``shape`` tells B, H and T."""
    batch, heads, length, _ = shape
    by_head = x.unflatten(1, (heads // groups, -1)).unflatten(0, (batch, groups, -1)).transpose(2, 3)
    return by_head.flatten(3, 4).flatten(1, 2)[:, :, :length]
