"""Sparse attention by gathering: each group of neighbouring queries meets a list of keys of its own.

A pattern is a function of places. The place of a token counts the real tokens before it in its own sequence, so
padding, wherever it stands, moves nothing, and sequences packed into one row (``mask.segments``) each begin at place 0.
Queries that stand at padding have the places behind the last real token. Without a mask query i is at place i + S - T.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width; n groups of c
cells, a cell being the seat of one query; K keys in a list. "B|1" is an axis of B or of 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.packing import front
from attnzoo.kernels.sdpa import fused
from attnzoo.mask import Mask

Sees = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(head, place of the query, place of the key) -> bool; any shapes that broadcast."""

Lists = Callable[[Tensor, int], Tensor]
"""(first place of each group [B|1, n], c) -> places of the keys that it meets [B|1, H|1, n, K], each at most once;
negative where there is none."""

ROOM = 128
"""Numbers that one part of the work may hold for each query of a head of a sample."""

LEAST_ROOM = 1 << 18
"""Short sequences may take so many, whatever their length."""


class Cells(NamedTuple):
    """Queries seated by place, and the keys of their sequences.

    Attributes:
        order: [B|1, S], the slot of each key, sequence by sequence and real ones first.
        offset: [B|1, n], where in ``order`` the sequence of a group begins.
        real: [B|1, n], how many real keys that sequence has.
        place: [B|1, n, c].
        query: [B|1, n, c], the index of the query that sits here; -1 for nobody.
    """

    order: Tensor
    offset: Tensor
    real: Tensor
    place: Tensor
    query: Tensor

    def part(self, begin: int, end: int) -> "Cells":
        """The groups from ``begin`` to ``end``."""
        return Cells(self.order, *(x[:, begin:end] for x in self[1:]))


class Row(NamedTuple):
    """Queries and keys of rows that are one sequence each.

    Attributes:
        order: [B|1, S], the slot of each key, real ones first.
        real: [B|1, 1], the number of real keys.
        asked: [B|1, T], the index of each query, real ones first.
        first: [B|1, 1], the place of the first of them; the others follow one by one.
    """

    order: Tensor
    real: Tensor
    asked: Tensor
    first: Tensor

    def seat(self, place: Tensor) -> Cells:
        """The queries at the given places [B|1, n, c]."""
        rank, last = place - self.first[..., None], self.asked.shape[1] - 1
        query = along(self.asked, rank.clamp(0, last)).masked_fill((rank < 0) | (rank > last), -1)
        offset = torch.zeros_like(query[:, :, 0])
        return Cells(self.order, offset, self.real.expand_as(offset), place.expand_as(query), query)

    @property
    def places(self) -> Tensor:
        """[B|1, T], where each query stands."""
        return self.asked.argsort(1) + self.first


def row(mask: Mask, queries: int, keys: int, device: torch.device) -> Row:
    """Finds the places, by ``mask.key_keep``."""
    asked, order = (torch.arange(n, device=device)[None] for n in (queries, keys))
    count = torch.full((1, 1), keys, device=device)
    if mask.key_keep is None:
        return Row(order, count, asked, count - queries)
    # Queries before the first slot (T > S) are no padding.
    real = pad(mask.key_keep, (max(queries - keys, 0), 0), value=True)[:, -queries:]
    count = mask.key_keep.sum(1, keepdim=True)
    return Row(front(mask.key_keep), count, front(real), count - real.sum(1, keepdim=True))


def seats(mask: Mask, queries: int, keys: int, block: int, device: torch.device) -> tuple[Cells, Tensor]:
    """Seats queries in groups none of which crosses a multiple of ``block``; one by one where segments are packed.

    Returns:
        the cells; [B|1, T], which of the n * c cells each query sits in.
    """
    if mask.segments is not None:
        cells = segmented(mask.segments, mask.key_keep)
        return cells, cells.order.argsort(1)
    if queries >= block:
        size = block
    else:  # a whole sequence lies in the first block, some last queries anywhere
        size = queries if queries == keys else max(c for c in range(1, queries + 1) if block % c == 0)
    own = row(mask, queries, keys, device)
    if mask.key_keep is None or queries >= keys:
        groups = (keys - 1) // size - (keys - queries) // size + 1
    else:  # how far the first place stands from a multiple of c differs from row to row
        groups = (queries + size - 2) // size + 1
    base = own.first // size
    place = ((base + torch.arange(groups, device=device)) * size)[..., None] + torch.arange(size, device=device)
    return own.seat(place), own.places - base * size


def segmented(segments: Tensor, key_keep: Tensor | None) -> Cells:
    """Each query a group of its own, in the order of the keys."""
    order = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    if key_keep is not None:
        order = front(key_keep)
    order = order.gather(1, segments.gather(1, order).argsort(dim=1, stable=True))
    own = segments.gather(1, order)
    begins = torch.cat([torch.ones_like(own[:, :1], dtype=torch.bool), own[:, 1:] != own[:, :-1]], 1)
    index = torch.arange(own.shape[1], device=own.device).expand_as(own)
    offset = torch.where(begins, index, 0).cummax(1).values
    real = torch.ones_like(index) if key_keep is None else key_keep.long().gather(1, order)
    count = torch.zeros_like(index).scatter_add(1, offset, real).gather(1, offset)
    return Cells(order, offset, count, (index - offset)[..., None], order[..., None])


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
    size = cells.place.shape[2]

    def run(begin: int, end: int) -> Tensor:
        part = cells.part(begin, end)
        return meet(q, k, v, mask, bias, part, lists(part.place[:, :, 0], size), sees, dropout)

    groups = cells.place.shape[1]
    if not growing:
        return leave(run(0, groups), seat)
    longest = lists(cells.place[:1, :1, 0], size).shape[-1]
    return leave(in_parts(run, groups, longest * max(size, q.shape[3], v.shape[3]), q.shape[2]), seat)


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
    batch, groups, length, width = x.shape
    group = torch.arange(groups, device=x.device)
    if heads is not None and index.shape[2] > 1:
        group = group.repeat_interleave(heads // groups)
    row = torch.arange(batch, device=x.device)[:, None, None, None] * groups + group[:, None]
    return embedding(row * length + index, x.reshape(batch * groups * length, width))


def along(table: Tensor, index: Tensor) -> Tensor:
    """table [B|1, length] at index [B|1, ...]."""
    return table.gather(1, index.flatten(1)).view(index.shape)


def leave(seated: Tensor, seat: Tensor) -> Tensor:
    """[B, n, H, c, Dv] -> [B, H, T, Dv]: each query takes what stands in its seat."""
    batch, groups, heads, size, width = seated.shape
    row = torch.arange(batch, device=seat.device)[:, None] * groups + seat // size
    head = torch.arange(heads, device=seat.device)[:, None]
    index = (row[:, None] * heads + head) * size + (seat % size)[:, None]
    return embedding(index, seated.reshape(-1, width))


def in_parts(run: Callable[[int, int], Tensor], groups: int, work: int, queries: int) -> Tensor:
    """``run(begin, end)`` over all groups, in parts that hold no more than ``ROOM`` T numbers for a head of a sample.

    So lists that grow with S cost time, not memory. More than one part is computed anew for the gradients.

    Args:
        run: gives [B, end - begin, ...].
        groups: n.
        work: numbers that one group holds.
        queries: T.
    """
    size = max(1, max(ROOM * queries, LEAST_ROOM) // work)
    if size >= groups:
        return run(0, groups)
    begins = range(0, groups, size)
    parts = [checkpoint(run, begin, min(begin + size, groups), use_reentrant=False) for begin in begins]
    return torch.cat(parts, 1)


def pattern(
    sees: Sees, heads: int, queries: int, keys: int, causal: bool, device: torch.device | None = None
) -> Tensor:
    """What ``sees`` lets through, bool [T, S] or [H, T, S]."""
    key = torch.arange(keys, device=device)
    place = torch.arange(queries, device=device)[:, None] + keys - queries
    seen = sees(torch.arange(heads, device=device)[:, None, None], place, key)
    return seen & (key <= place) if causal else seen
