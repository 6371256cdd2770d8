"""Linear attention with positive features: sums over the keys, whole or along the sequence, without T x S numbers.

    w_ij = sum_r phi_r(q_i) phi_r(k_j)       o_i = sum_j w_ij v_j / sum_j w_ij

Features come as their logarithms, log_q [B, H, T, R] and log_k [B, G, S, R], -inf where a key is hidden. So a maximum
can be taken out before any exponential: from the keys by feature, from the queries by row. Both cancel in the
quotient. No exponent is then above 0, no denominator below 1, and no eps is needed.

A maximum of the keys must not know the future: one that only a later key reaches would push earlier keys below what a
float can hold. So queries meet only keys that lie before all of them, which have a maximum that each of these queries
may know: the second half of every block of 2, 4, 8, ... places meets the first half, and every chunk meets the sums
of the chunks before it. streamed.py does the same on a CPU, where other things cost time.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, R features, Dv value width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnzoo.kernels.again import under_torch_func

CHUNK = 64
"""How many places pass between two running sums, a power of two; near R and Dv the sums take least time and room."""


class Sums(NamedTuple):
    """All that queries need to know of the keys so far; its size does not depend on their number.

    Attributes:
        peak: [B, G, R], the largest log-feature so far; -inf while there was no key.
        total: [B, G, R, Dv + 1], the sum of exp(log_k - peak) times v and, in the last column, times 1.
    """

    peak: Tensor
    total: Tensor


def no_sums(log_k: Tensor, v: Tensor) -> Sums:
    """The sums before the first key: log_k [B, G, any, R] and v [B, G, any, Dv] say of which sizes and kind."""
    batch, groups, _, features = log_k.shape
    peak = log_k.new_full((batch, groups, features), -torch.inf)
    return Sums(peak, log_k.new_zeros(batch, groups, features, v.shape[3] + 1))


def collect(log_k: Tensor, v: Tensor, before: Sums) -> Sums:
    """The sums after some more keys.

    Args:
        log_k: [B, G, S, R].
        v: [B, G, S, Dv].
        before: the sums of the keys before them.
    """
    return before if log_k.shape[2] == 0 else _join(before, _sum(log_k, with_one(v, log_k)))


def read(log_q: Tensor, sums: Sums) -> Tensor:
    """The output of queries that all see the same keys: [B, H, T, R] -> [B, H, T, Dv], 0 where there is no key."""
    if log_q.shape[2] == 0:
        return log_q.new_zeros(*log_q.shape[:3], sums.total.shape[3] - 1) + log_q.sum()
    out = quotient(against(log_q, sums.peak) @ sums.total)
    return out.unflatten(2, (-1, log_q.shape[2])).flatten(1, 2)


def against(log_q: Tensor, peak: Tensor) -> Tensor:
    """Features of queries where those of the keys are relative to ``peak``: [B, H, T, R] -> [B, G, H / G T, R]."""
    exponents = log_q.unflatten(1, (peak.shape[1], -1)).flatten(2, 3) + peak[:, :, None]
    return (exponents - finite(_peak(exponents, -1))).exp()


def scan(log_q: Tensor, log_k: Tensor, v: Tensor, before: Sums, *, keep: bool = False) -> Tensor:
    """Each query sees the keys up to its own place, and those that were summed before all of them.

    Args:
        log_q: [B, H, T, R].
        log_k: [B, G, T, R].
        v: [B, G, T, Dv].
        before: the sums of earlier keys.
        keep: whether the exponentials of every block size are kept for the gradients, not made once more for them.

    Returns:
        [B, H, T, Dv], 0 where there is no key.
    """
    groups, length = log_k.shape[1:3]
    if length == 0:
        return log_q.new_zeros(*log_q.shape[:3], v.shape[3]) + log_q.sum() + log_k.sum() + v.sum()
    chunk = 1
    while chunk < min(length, CHUNK):
        chunk *= 2
    chunks = len(range(0, length, chunk))  # in this form a plain number where T is a symbol of the compiler
    rest = chunks * chunk - length
    # Time stands before the heads of a group, so that any run of places, with all of its heads, is one run of rows.
    queries = pad(log_q.unflatten(1, (groups, -1)).transpose(2, 3), (0, 0, 0, 0, 0, rest))
    keys = pad(log_k, (0, 0, 0, rest), value=-torch.inf)
    values = pad(with_one(v, log_k), (0, 0, 0, rest))

    seen = torch.maximum(keys.detach().cummax(2).values, before.peak[:, :, None])
    tops = finite(_peak(queries + seen[:, :, :, None], -1))

    run = _now if keep or (not torch.compiler.is_compiling() and under_torch_func()) else _again
    total = run(_alone, queries, tops, keys, values)
    half = 1
    while half < chunk:
        late, early = ([x.unflatten(2, (-1, 2, half)) for x in pair] for pair in ((queries, tops), (keys, values)))
        more = run(_meet, *(x[:, :, :, 1] for x in late), *(x[:, :, :, 0] for x in early))
        total = total + pad(more[:, :, :, None], (0, 0, 0, 0, 0, 0, 1, 0)).flatten(2, 4)
        half *= 2
    by_chunk = (x.unflatten(2, (chunks, chunk)) for x in (queries, tops, keys, values))
    total = total + run(_past, *by_chunk, *before)
    return quotient(total[:, :, :length]).transpose(2, 3).flatten(1, 2)


def _alone(queries: Tensor, tops: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each query with the key of its own place: [B, G, T, share, R], [.., 1], [B, G, T, R], [B, G, T, Dv + 1]."""
    return (queries + keys[:, :, :, None] - tops).exp().sum(-1, keepdim=True) * values[:, :, :, None]


def _meet(queries: Tensor, tops: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """All queries with all keys: [..., T, share, R], [..., T, share, 1], [..., S, R], [..., S, Dv + 1]."""
    peak = _peak(keys, -2)
    weights = _power(queries, peak, tops) @ (keys - finite(peak)).exp().mT
    return (weights @ values).unflatten(-2, queries.shape[-3:-1])


def _past(queries: Tensor, tops: Tensor, keys: Tensor, values: Tensor, *before: Tensor) -> Tensor:
    """Each chunk with the sums of what lies before it: [B, G, chunks, chunk, share, R] and so on."""
    sums = [Sums(*before)]
    for peak, total in zip(*(x.unbind(2) for x in _sum(keys[:, :, :-1], values[:, :, :-1])), strict=True):
        sums.append(_join(sums[-1], Sums(peak, total)))
    peaks, totals = (torch.stack(each, 2) for each in zip(*sums, strict=True))
    out = _power(queries, peaks[..., None, :], tops) @ totals
    return out.unflatten(3, queries.shape[3:5]).flatten(2, 3)


def _power(queries: Tensor, peak: Tensor, tops: Tensor) -> Tensor:
    """exp(query + peak - top), [..., T share, R].

    A top is the largest sum of query and peak, over all peaks that the query meets and all features. Added in this
    order the sums are rounded alike, so no exponent is above 0 and one of them is 0, however large the numbers are.
    """
    return (queries.flatten(-3, -2) + peak - tops.flatten(-3, -2)).exp()


def _sum(keys: Tensor, values: Tensor) -> Sums:
    """[..., S, R] and [..., S, Dv + 1]."""
    peak = _peak(keys, -2)
    return Sums(peak[..., 0, :], (keys - finite(peak)).exp().mT @ values)


def _join(a: Sums, b: Sums) -> Sums:
    peak = torch.maximum(a.peak, b.peak)
    shares = [x.total * (x.peak - finite(peak)).exp()[..., None] for x in (a, b)]
    return Sums(peak, shares[0] + shares[1])


def quotient(total: Tensor) -> Tensor:
    """Numerators [..., Dv] over denominators [..., 1], 0 where there is no key, from [..., Dv + 1]."""
    numerator, denominator = total[..., :-1], total[..., -1:]
    return numerator / denominator.masked_fill(denominator == 0, 1)


def quotient_backward(upstream: Tensor, out: Tensor, below: Tensor) -> Tensor:
    """The gradient of numerators and denominators [..., Dv + 1] from that of their quotient ``out`` [..., Dv]."""
    upstream = upstream / below.masked_fill(below == 0, 1)
    return torch.cat([upstream, (upstream * out).sum(-1, keepdim=True).neg_()], -1)


def with_one(v: Tensor, like: Tensor) -> Tensor:
    """[..., Dv] -> [..., Dv + 1]: sums of the last column are those of the weights."""
    return pad(v.to(like.dtype), (0, 1), value=1.0)


def _peak(x: Tensor, dim: int) -> Tensor:
    """The maximum as a constant for the gradients: no approximation, since the result does not depend on it."""
    return x.detach().amax(dim, keepdim=True)


def finite(peak: Tensor) -> Tensor:
    """What may be subtracted: -inf stands for "no key", and -inf from -inf is NaN."""
    return peak.masked_fill(peak == -torch.inf, 0)


def _now(function: Callable[..., Any], *args: Tensor) -> Any:
    return function(*args)


def _again(function: Callable[..., Any], *args: Tensor) -> Any:
    """Calls a function, and once more for the gradients."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
