"""Items laid out by the group that they fall into, so that what depends on the input becomes equal chunks."""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias


class Layout(NamedTuple):
    """Where items lie, and what lies where.

    Attributes:
        slot: int64 [..., N], the slot of each item.
        item: int64 [..., chunks x size], the item in each slot; N in a slot that is left empty.
    """

    slot: Tensor
    item: Tensor


def lay_out(group: Tensor, groups: int, size: int) -> Layout:
    """Sorts items by group, and by place within a group; each group begins a chunk of its own.

    Args:
        group: int64 [..., N], values below ``groups``.
        groups: how many there are.
        size: slots in a chunk. How many chunks there are depends on N, ``groups`` and ``size`` alone.

    Example:
        >>> lay_out(torch.tensor([1, 0, 1, 1]), groups=2, size=2).item
        tensor([1, 4, 0, 2, 3, 4, 4, 4])
    """
    items = group.shape[-1]
    place = torch.arange(items, device=group.device).expand_as(group)
    # No two values are equal, so the order is the same from every sort.
    order = (group * items + place).argsort(dim=-1)
    ids = group.gather(-1, order)
    count = group.new_zeros(*group.shape[:-1], groups).scatter_add(-1, group, torch.ones_like(group))
    chunks = (count + size - 1) // size
    shift = (chunks.cumsum(-1) - chunks) * size - (count.cumsum(-1) - count)
    slot = torch.zeros_like(group).scatter(-1, order, shift.gather(-1, ids) + place)
    # A chunk in use holds an item, and no more than one chunk of a group is partly filled.
    most = min(items, items // size + groups)
    empty = group.new_full((*group.shape[:-1], most * size), items)
    return Layout(slot, empty.scatter(-1, slot, place))


def terms_at(bias: Bias, rows: Tensor, columns: Tensor, queries: int, keys: int) -> Tensor:
    """The terms of a bias at some pairs alone; any term where a row or column does not exist.

    Args:
        bias: [T, S], [B or 1, H or 1, T, S] or by offset.
        rows: int64 [B, H, ...], queries.
        columns: int64 [B, H, ...], keys; broadcast with ``rows``.
        queries: T.
        keys: S.
    """
    batch, heads = rows.shape[:2]
    ones = (1,) * (rows.dim() - 2)
    head = torch.arange(heads, device=rows.device).view(1, heads, *ones)
    if isinstance(bias, OffsetBias):
        return bias.values[head, (columns - rows + queries - 1).clamp(0, queries + keys - 2)]
    dense = bias if bias.dim() == 4 else bias[None, None]
    sample = torch.arange(batch, device=rows.device).view(batch, 1, *ones)
    # A bias of one sample or one head serves all of them.
    sample, head = sample.clamp(max=dense.shape[0] - 1), head.clamp(max=dense.shape[1] - 1)
    return dense[sample, head, rows.clamp(0, queries - 1), columns.clamp(0, keys - 1)]
