"""Who sits where: queries in groups of neighbours by place, and the keys of their sequences.

The place of a token counts the real tokens before it in its own sequence, so padding, wherever it stands, moves
nothing, and sequences packed into one row (``mask.segments``) each begin at place 0. Queries that stand at padding have
the places behind the last real token. Without a mask query i is at place i + S - T.

Letters: B batch, H query heads, T queries, S keys, Dv value width; n groups of c cells, a cell being the seat of one
query. "B|1" is an axis of B or of 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from attnzoo.kernels.packing import front
from attnzoo.mask import Mask


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
    return own.seat(place), own.places() - base * size


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
