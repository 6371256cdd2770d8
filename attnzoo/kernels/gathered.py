"""Sparse attention by gathering: each group of neighbouring queries meets a list of keys of its own.

A pattern is a function of places, which seats.py tells.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width; n groups of c
cells, a cell being the seat of one query; K keys in a list. "B|1" is an axis of B or of 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.again import again, eager_on_cpu
from attnzoo.kernels.sdpa import fused
from attnzoo.kernels.seats import Cells, along, leave, seats
from attnzoo.mask import Mask

Sees = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(head, place of the query, place of the key) -> bool; any shapes that broadcast."""

Lists = Callable[[Tensor, int], Tensor]
"""(first place of each group [B|1, n], c) -> places of the keys that it meets [B|1, H|1, n, K], each at most once;
negative where there is none."""

Pick = Callable[..., Tensor]
"""``pick``, or what takes its place."""

ROOM = 128
"""Numbers that one part of the work may hold for each query of a head of a sample."""

LEAST_ROOM = 1 << 18
"""Short sequences may take so many, whatever their length."""

CACHED = 1 << 21
"""Numbers that one part of the work may hold on a CPU, of all heads and samples; half and twice of it are as fast."""


def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    *,
    block: int,
    lists: Lists,
    sees: Sees | None = None,
    growing: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """Attention over the pairs that ``sees`` lets through.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what else is hidden.
        bias: terms to be added to the scores, or None.
        block: queries whose places lie between the same two multiples of it share a list.
        lists: for each group, keys that hold at least all those that its queries see.
        sees: the pattern; None if the lists hold nothing else.
        growing: whether lists grow with S; the work is then done ``in_parts``.
        dropout: share of the weights dropped, now.

    Returns:
        [B, H, T, Dv].
    """
    cells, seat = seats(mask, q.shape[2], k.shape[2], block, q.device)
    groups, size = cells.place.shape[1:]
    terms, by_offset = (bias.values, True) if isinstance(bias, OffsetBias) else (bias, False)
    run = partial(_groups, mask=mask, by_offset=by_offset, cells=cells, lists=lists, sees=sees, dropout=dropout)
    work = lists(cells.place[:1, :1, 0], size).shape[-1] * max(size, q.shape[3], v.shape[3])
    step = at_once(work, q.shape[2])
    if not growing or step >= groups:
        return leave(run(q, k, v, terms, pick, 0, groups), seat)
    if eager_on_cpu(q):
        step = min(step, max(1, CACHED // max(1, q.shape[0] * q.shape[1] * work)))
        parts = [(begin, min(begin + step, groups)) for begin in range(0, groups, step)]
        return leave(_InParts.apply(run, parts, q, k, v, terms), seat)
    return leave(in_parts(partial(run, q, k, v, terms, pick), groups, work, q.shape[2]), seat)


def _groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Tensor | None,
    pick: Pick,
    begin: int,
    end: int,
    *,
    mask: Mask,
    by_offset: bool,
    cells: Cells,
    lists: Lists,
    sees: Sees | None,
    dropout: float,
) -> Tensor:
    """The groups from ``begin`` to ``end``; tensors that may have gradients come first."""
    part, bias = cells.part(begin, end), OffsetBias(terms) if by_offset and terms is not None else terms
    return meet(q, k, v, mask, bias, part, lists(part.place[:, :, 0], part.place.shape[2]), sees, dropout, pick)


class _InParts(torch.autograd.Function):
    """``in_parts``, with what each part gives to the gradients of q, k and v added where it belongs.

    autograd would fill a whole gradient with zeros for each part, and longer sequences have more parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensor],
        parts: list[tuple[int, int]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Tensor | None,
    ) -> Tensor:
        ctx.run, ctx.parts, ctx.random = run, parts, torch.get_rng_state()
        ctx.autocast = {"enabled": torch.is_autocast_enabled("cpu"), "dtype": torch.get_autocast_dtype("cpu")}
        ctx.save_for_backward(q, k, v, terms)
        groups, out = parts[-1][1], None
        for begin, end in parts:
            part = run(q, k, v, terms, pick, begin, end)
            out = part.new_empty(part.shape[0], groups, *part.shape[2:]) if out is None else out
            out[:, begin:end] = part
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, terms = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", **ctx.autocast):
            torch.set_rng_state(ctx.random)
            if torch.is_grad_enabled():
                out = torch.cat([ctx.run(*tensors, terms, pick, *part) for part in ctx.parts], 1)
                return None, None, *again([out], [*tensors, terms], [upstream])
            # Half precision sums in float32.
            gradients = [x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
            added = None if terms is None else torch.zeros_like(terms)
            for begin, end in ctx.parts:
                picked: list[tuple[Tensor, Tensor]] = []
                with torch.enable_grad():
                    leaf = None if terms is None else terms.detach().requires_grad_()
                    out = ctx.run(*(x.detach() for x in tensors), leaf, _picking(picked), begin, end)
                leaves = [x for _, x in picked] + ([] if leaf is None else [leaf])
                found = torch.autograd.grad(out, leaves, upstream[:, begin:end])
                for whole, (rows, _), more in zip(gradients, picked, found[:3], strict=True):
                    # Heads innermost, as torch's kernel leaves them.
                    more, rows = more.transpose(2, 3).flatten(0, 3), rows.transpose(2, 3).flatten()
                    whole.flatten(0, 2).index_add_(0, rows, more.to(whole.dtype))
                if added is not None:
                    added += found[3]
        return None, None, *(x.to(y.dtype) for x, y in zip(gradients, tensors, strict=True)), added


def _picking(picked: list[tuple[Tensor, Tensor]]) -> Pick:
    """``pick`` that makes leaves of what it picks, and keeps them with the numbers of the rows."""

    def leaf(x: Tensor, index: Tensor, heads: int | None = None) -> Tensor:
        picked.append((_rows(x, index, heads), pick(x, index, heads).requires_grad_()))
        return picked[-1][1]

    return leaf


def meet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    cells: Cells,
    key: Tensor,
    sees: Sees | None,
    dropout: float,
    pick: Pick,
) -> Tensor:
    """Each group against its list of keys [B|1, H|1, n, K]: [B, n, H, c, Dv], anything where nobody sits."""
    batch, heads = q.shape[:2]
    key = key[:, :, :, None]
    slot, visible, terms = pairs(q, k, mask, bias, cells, key, sees)
    if terms is not None:
        visible = torch.where(visible, terms, -torch.inf)
    groups = visible.shape[2]
    queries = pick(q, cells.query.clamp(min=0)[:, :, None])
    keys, values = (pick(x, slot[:, :, :, 0].transpose(1, 2), heads) for x in (k, v))
    attn_mask = visible.expand(batch, -1, -1, -1, -1).transpose(1, 2).flatten(0, 1)
    out = fused(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), attn_mask, dropout=dropout)
    return out.unflatten(0, (batch, groups))


def pairs(
    q: Tensor, k: Tensor, mask: Mask, bias: Bias | None, cells: Cells, key: Tensor, sees: Sees | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What lies between the queries in ``cells`` and the keys at places ``key`` [B|1, H|1, n, 1 or c, K].

    Returns:
        slots of the keys; bool [B|1, H|1, n, 1 or c, K], anything where nobody sits; terms of the bias [B|1, H|1, n,
        c, K], or None.
    """
    query = cells.query.clamp(min=0)[:, None, :, :, None]
    head = torch.arange(q.shape[1], device=q.device).view(1, -1, 1, 1, 1)
    slot = along(cells.order, (cells.offset[:, None, :, None, None] + key).clamp(0, k.shape[2] - 1))
    visible = (key >= 0) & (key < cells.real[:, None, :, None, None])
    if sees is not None:
        visible = visible & sees(head, cells.place[:, None, :, :, None], key)
    if mask.causal:  # by slots: at padding places are out of order
        visible = visible & (slot <= query + k.shape[2] - q.shape[2])
    if mask.pair_keep is not None:
        visible = visible & between(mask.pair_keep, query, slot)
    if bias is None:
        return slot, visible, None
    if isinstance(bias, OffsetBias):
        return slot, visible, bias.values[head, slot - query + q.shape[2] - 1].to(q.dtype)
    return slot, visible, between(bias, query, slot).to(q.dtype)


def between(x: Tensor, query: Tensor, slot: Tensor) -> Tensor:
    """x [T, S] or [B|1, H|1, T, S] at pairs of indices that broadcast to [B|1, H|1, n, c, K]."""
    x = x if x.dim() == 4 else x[None, None]
    sample, head = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return x[sample.view(-1, 1, 1, 1, 1), head.view(1, -1, 1, 1, 1), query, slot]


def pick(x: Tensor, index: Tensor, heads: int | None = None) -> Tensor:
    """Rows of x [B, G, S, width] at index [B|1, n, 1, K] -> [B, n, G, K, width].

    For ``heads`` query heads the index may be [B|1, n, H, K], which gives [B, n, H, K, width].
    """
    return embedding(_rows(x, index, heads), x.reshape(-1, x.shape[3]))


def _rows(x: Tensor, index: Tensor, heads: int | None) -> Tensor:
    batch, groups, length, _ = x.shape
    group = torch.arange(groups, device=x.device)
    if heads is not None and index.shape[2] > 1:
        group = group.repeat_interleave(heads // groups)
    row = torch.arange(batch, device=x.device)[:, None, None, None] * groups + group[:, None]
    return row * length + index


def in_parts(run: Callable[[int, int], Tensor], groups: int, work: int, queries: int) -> Tensor:
    """``run(begin, end)`` over all groups, in parts that hold no more than ``ROOM`` T numbers for a head of a sample.

    So lists that grow with S cost time, not memory. More than one part is computed anew for the gradients.

    Args:
        run: gives [B, end - begin, ...].
        groups: n.
        work: numbers that one group holds.
        queries: T.
    """
    size = at_once(work, queries)
    if size >= groups:
        return run(0, groups)
    begins = range(0, groups, size)
    parts = [checkpoint(run, begin, min(begin + size, groups), use_reentrant=False) for begin in begins]
    return torch.cat(parts, 1)


def at_once(work: int, queries: int) -> int:
    """How many groups, of ``work`` numbers each, may be taken in one part."""
    return max(1, max(ROOM * queries, LEAST_ROOM) // work)


def pattern(
    sees: Sees, heads: int, queries: int, keys: int, causal: bool, device: torch.device | None = None
) -> Tensor:
    """What ``sees`` lets through, bool [T, S] or [H, T, S]."""
    key = torch.arange(keys, device=device)
    place = torch.arange(queries, device=device)[:, None] + keys - queries
    seen = sees(torch.arange(heads, device=device)[:, None, None], place, key)
    return seen & (key <= place) if causal else seen
