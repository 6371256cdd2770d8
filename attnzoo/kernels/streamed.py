"""The sums of prefix.py on a CPU: a stretch of time after the other, each small enough for the cache.

Tensors as long as the sequence are fresh memory in each call, and getting it takes longer there than the arithmetic.
So features are made for a stretch and forgotten, and made again for the gradients, which are written out here: only q,
k, v and the output are as long as the sequence. In a graph, on other devices, under torch.func and for gradients of
gradients the formulas of prefix.py take everything at once.

Where the features of all keys of a stretch are so near to 1 that no maximum is needed, which is the rule, the plain
chunks of chunks.py take the place of ``prefix.scan``: the same numbers with less work. Asking would stall a GPU.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, R features, Dv value width.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.kernels import chunks, prefix
from attnzoo.kernels.again import again, eager_on_cpu
from attnzoo.kernels.precision import full_precision
from attnzoo.kernels.prefix import CHUNK, Sums

SIZE = 1 << 19
"""How many numbers the widest tensor of a stretch may hold; half and twice of it cost about the same."""

NEAR = 30.0
"""How far from 0 a key's log-feature may lie for plain chunks. A query's are at most 0 there and end at -87, where
float32 does; what is lost below weighs exp(-87 + 30) at most, beside a weight of exp(-30) at least."""


class Maps(NamedTuple):
    """The logarithms of the features, [B, H, T, D] -> [B, H, T, R], in float32 at least.

    Attributes:
        query: of the queries.
        key: of the keys.
        constants: tensors that both read, so that one that is changed before the gradients are asked for is noticed.
            They get no gradient.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    constants: tuple[Tensor, ...] = ()


def no_sums(maps: Maps, k: Tensor, v: Tensor) -> Sums:
    """The sums before the first key."""
    return prefix.no_sums(maps.key(k[:, :, :0]), v)


def collect(maps: Maps, k: Tensor, v: Tensor, key_keep: Tensor | None, before: Sums) -> Sums:
    """The sums after some more keys.

    Args:
        maps: the features.
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        key_keep: bool [B, S], or None.
        before: the sums of the keys before them.
    """
    if not _stretched(k):
        return prefix.collect(_key_features(maps, key_keep, k), v, before)
    return Sums(*_Collect.apply(maps, k, v, key_keep, *before))


def read(maps: Maps, q: Tensor, sums: Sums) -> Tensor:
    """The output of queries that all see the same keys: [B, H, T, D] -> [B, H, T, Dv], 0 where there is no key."""
    if not _stretched(q):
        return prefix.read(maps.query(q), sums)
    out: Tensor = _Read.apply(maps, q, *sums)
    return out


def scan(maps: Maps, q: Tensor, k: Tensor, v: Tensor, key_keep: Tensor | None, before: Sums) -> tuple[Tensor, Sums]:
    """Each query sees the keys up to its own place, and those that were summed before all of them.

    Args:
        maps: the features.
        q: [B, H, T, D].
        k: [B, G, T, D].
        v: [B, G, T, Dv].
        key_keep: bool [B, T], or None.
        before: the sums of earlier keys.

    Returns:
        [B, H, T, Dv], 0 where there is no key; the sums after the last key.
    """
    if not _stretched(q):
        log_k = _key_features(maps, key_keep, k)
        return prefix.scan(maps.query(q), log_k, v, before), prefix.collect(log_k, v, before)
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, before.total))
    out, *after = _Scan.apply(maps, kept, q, k, v, key_keep, *before)
    return out, Sums(*after)


def causal(maps: Maps, q: Tensor, k: Tensor, v: Tensor, key_keep: Tensor | None) -> Tensor:
    """Query i sees keys up to i + S - T: [B, H, T, D], [B, G, S, D], [B, G, S, Dv] -> [B, H, T, Dv]."""
    first, before = k.shape[2] - q.shape[2], no_sums(maps, k, v)
    if first == 0:
        return scan(maps, q, k, v, key_keep, before)[0]
    if first < 0:
        return pad(causal(maps, q[:, :, -first:], k, v, key_keep), (0, 0, -first, 0))
    early, late = (None, None) if key_keep is None else (key_keep[:, :first], key_keep[:, first:])
    before = collect(maps, k[:, :, :first], v[:, :, :first], early, before)
    return scan(maps, q, k[:, :, first:], v[:, :, first:], late, before)[0]


def near(log_k: Tensor) -> bool:
    """Whether each feature can be taken as it is; asked before hidden keys become -inf."""
    low, high = log_k.aminmax()
    return bool((low > -NEAR) & (high < NEAR))


def _stretched(x: Tensor) -> bool:
    return x.numel() > 0 and eager_on_cpu(x)


def _key_features(maps: Maps, key_keep: Tensor | None, k: Tensor) -> Tensor:
    return _hidden(maps.key(k), key_keep)


def _hidden(log_k: Tensor, key_keep: Tensor | None) -> Tensor:
    # All features of a hidden key are 0. Those of a key of zeros, which is what comes here, would not be.
    return log_k if key_keep is None else log_k.masked_fill(~key_keep[:, None, :, None], -torch.inf)


def _stretches(x: Tensor, total: Tensor) -> Iterator[slice]:
    """The places of x [B, H, T, D], so many at once that neither features nor ``total`` are too many numbers."""
    batch, heads, length, _ = x.shape
    numbers = max(1, batch * heads * max(total.shape[2:]))
    size = max(1, SIZE // numbers // CHUNK) * CHUNK
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


def _part(part: slice, *tensors: Tensor | None) -> list[Any]:
    """A stretch of tensors [B, H, T, any], and of a ``key_keep`` [B, T]."""
    return [x if x is None else x[:, part] if x.dim() == 2 else x[:, :, part] for x in tensors]


def _with_gradients(make: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a leaf, and what is made of it."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return leaf, make(leaf)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, maps: Maps, k: Tensor, v: Tensor, key_keep: Tensor | None, peak: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums = Sums(peak, total)
        for part in _stretches(k, total):
            keys, values, keep = _part(part, k, v, key_keep)
            sums = prefix.collect(_key_features(maps, keep, keys), values, sums)
        ctx.maps = maps
        ctx.save_for_backward(k, v, key_keep, peak, total, sums.peak, *maps.constants)
        ctx.mark_non_differentiable(sums.peak)
        return sums

    @staticmethod
    def backward(ctx: Any, _: Tensor, grown: Tensor) -> tuple[Tensor | None, ...]:
        k, v, key_keep, peak, total, last, *_ = ctx.saved_tensors
        with full_precision(k):  # gradients may be asked for under autocast
            if torch.is_grad_enabled():
                sums = prefix.collect(_key_features(ctx.maps, key_keep, k), v, Sums(peak, total))
                dk, dv, dtotal = again([sums.total], [k, v, total], [grown])
                return None, dk, dv, None, None, dtotal
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            last = prefix.finite(last)
            for part in _stretches(k, total):
                keys, values, keep = _part(part, k, v, key_keep)
                leaf, log_k = _with_gradients(partial(_key_features, ctx.maps, keep), keys)
                phi = (log_k.detach() - last[:, :, None]).exp_()
                dv[:, :, part] = phi @ grown[..., :-1]
                dphi = prefix.with_one(values, phi) @ grown.mT
                dk[:, :, part] = torch.autograd.grad(log_k, leaf, dphi.mul_(phi))[0]
            return None, dk, dv, None, None, grown * (peak - last).exp()[..., None]


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Maps, q: Tensor, peak: Tensor, total: Tensor) -> Tensor:
        out = total.new_empty(*q.shape[:3], total.shape[3] - 1)
        for part in _stretches(q, total):
            out[:, :, part] = prefix.read(maps.query(q[:, :, part]), Sums(peak, total))
        ctx.maps = maps
        ctx.save_for_backward(q, peak, total, out, *maps.constants)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, peak, total, out, *_ = ctx.saved_tensors
        with full_precision(q):
            if torch.is_grad_enabled():
                repeated = prefix.read(ctx.maps.query(q), Sums(peak, total))
                dq, dtotal = again([repeated], [q, total], [upstream])
                return None, dq, None, dtotal
            dq, dtotal = torch.empty_like(q), torch.zeros_like(total)
            for part in _stretches(q, total):
                leaf, log_q = _with_gradients(ctx.maps.query, q[:, :, part])
                phi = prefix.against(log_q.detach(), peak)
                up, rows = (x[:, :, part].unflatten(1, (phi.shape[1], -1)).flatten(2, 3) for x in (upstream, out))
                dsum = prefix.quotient_backward(up, rows, phi @ total[..., -1:])
                dtotal += phi.mT @ dsum
                dphi = (dsum @ total.mT).mul_(phi)
                dq[:, :, part] = torch.autograd.grad(log_q, leaf, dphi.view_as(log_q))[0]
            return None, dq, None, dtotal


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        maps: Maps,
        kept: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_keep: Tensor | None,
        peak: Tensor,
        total: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = total.new_empty(*q.shape[:3], total.shape[3] - 1)
        starts: list[Tensor] = []
        after, plain = Sums(peak, total), []
        for part in _stretches(q, total):
            queries, keys, values, keep = _part(part, q, k, v, key_keep)
            before, log_q, log_k = after, maps.query(queries), maps.key(keys)
            plain.append(near(log_k) and near(prefix.finite(before.peak)))
            way = chunks.forward if plain[-1] else _careful
            out[:, :, part], after = way(log_q, _hidden(log_k, keep), values, before)
            if kept:  # without gradients nobody will ask for them
                starts += before
        ctx.maps, ctx.plain = maps, plain
        ctx.save_for_backward(q, k, v, key_keep, out, *starts, *maps.constants)
        ctx.mark_non_differentiable(after.peak)
        return out, *after

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor, grown: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_keep, out, *saved = ctx.saved_tensors
        starts = [Sums(*saved[2 * number : 2 * number + 2]) for number in range(len(ctx.plain))]
        with full_precision(q):
            if torch.is_grad_enabled():
                log_q, log_k = ctx.maps.query(q), _key_features(ctx.maps, key_keep, k)
                repeated, after = _careful(log_q, log_k, v, starts[0])
                found = again([repeated, after.total], [q, k, v, starts[0].total], [upstream, grown])
                return None, None, *found[:3], None, None, found[3]
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            each = zip(_stretches(q, starts[0].total), ctx.plain, starts, strict=True)
            for part, plain, before in reversed(list(each)):
                queries, keys, values, keep = _part(part, q, k, v, key_keep)
                leaf_q, log_q = _with_gradients(ctx.maps.query, queries)
                leaf_k, log_k = _with_gradients(partial(_key_features, ctx.maps, keep), keys)
                back = chunks.backward if plain else _careful_backward
                dlog_q, dlog_k, dv, grown = back(
                    log_q.detach(), log_k.detach(), values, before, out[:, :, part], upstream[:, :, part], grown
                )
                dq, dk = torch.autograd.grad((log_q, log_k), (leaf_q, leaf_k), (dlog_q, dlog_k))
                for whole, x in zip(gradients, (dq, dk, dv), strict=True):
                    whole[:, :, part] = x
        return None, None, *gradients, None, None, grown


def _careful(log_q: Tensor, log_k: Tensor, v: Tensor, before: Sums, *, keep: bool = False) -> tuple[Tensor, Sums]:
    """As ``chunks.forward``, whatever the features are, and with gradients."""
    return prefix.scan(log_q, log_k, v, before, keep=keep), prefix.collect(log_k, v, before)


def _careful_backward(
    log_q: Tensor, log_k: Tensor, v: Tensor, before: Sums, out: Tensor, upstream: Tensor, grown: Tensor
) -> Sequence[Tensor]:
    """As ``chunks.backward``."""
    with torch.enable_grad():
        leaves = log_q, log_k, v, total = tuple(x.detach().requires_grad_() for x in (log_q, log_k, v, before.total))
        repeated, after = _careful(log_q, log_k, v, Sums(before.peak, total), keep=True)
    return torch.autograd.grad((repeated, after.total), leaves, (upstream, grown))
