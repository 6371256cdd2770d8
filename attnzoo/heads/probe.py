"""Reading the matrix A that a mechanism applies to the values through the code that runs, without ever making it.

A mechanism that is linear in v gives A x for any columns x, in place of the values, and x^T A by one pass backward.

    columns R of signs [S, m]               sum_j A_ij^2 is the mean of (A R)_i^2 / m over R (Hutchinson 1990)
    backward from A R                       A^T A R, which tells sum_ij A_ij^2 far better (``trace.py``)
    ones, and 1 up to key t                 sum_j A_ij, and the share of the keys up to t
    backward from every query               sum_i A_ij, all that falls on key j

The mean row of a sequence comes from the pass backward, without noise; the signs are left with how rows differ from it.
What a head would do if all scores were equal is asked of the same code, with queries and keys of zero: B below.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, C columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.bias import OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanisms.linformer import Linformer
from attnzoo.record import Call

SIGNED = (Linformer,)
"""Mechanisms whose rows of A sum to anything, 0 too, so that there are no shares."""


class Even(NamedTuple):
    """What a head does if all scores are equal, as shares that sum to 1 in each row.

    Attributes:
        square: sum_j B_ij^2, [B or 1, H or 1, T]; one over the number of visible keys, where these weigh the same.
        seen: B times the columns asked for, [B, H or 1, T, C].
    """

    square: Tensor
    seen: Tensor


def readable(call: Call) -> Call:
    """The call in float32 at least, for what is read of it; a mechanism of its own low precision stays as it is."""
    own = next(call.mechanism.parameters(), None)
    if own is not None and own.dtype in (torch.float16, torch.bfloat16):
        return call
    return call._replace(q=_wide(call.q), k=_wide(call.k), v=_wide(call.v))


def signs(keys: int, columns: int, rows: int, generator: torch.Generator) -> Tensor:
    """R [rows, S, m], entries of +1 and -1; for at most 2 m keys S unit columns times the root of S, which are exact.

    The columns are those of a Hadamard matrix with the sign of each key at random, which is less noisy than signs of
    their own: R R^T is the unit matrix up to what the missing columns leave.
    """
    if keys <= 2 * columns:
        return (torch.eye(keys) * keys**0.5).expand(rows, -1, -1)
    size = 1 << (keys - 1).bit_length()
    chosen = torch.rand(rows, size, generator=generator).argsort(-1)[:, :columns]
    own = torch.randint(0, 2, (rows, keys, 1), generator=generator) * 2.0 - 1
    place = torch.arange(keys)[None, :, None] & chosen[:, None]
    for shift in (32, 16, 8, 4, 2, 1):  # the parity of the bits
        place = place ^ (place >> shift)
    return own * (1.0 - 2.0 * (place & 1))


def through(call: Call, columns: Tensor) -> Tensor:
    """A times ``columns`` [B or 1, S, C]: [B, H, T, C], in blocks of head_dim columns as values would come."""
    groups, keys, width = call.v.shape[1], call.k.shape[2], call.mechanism.head_dim
    parts = []
    for part in columns.to(call.v).split(width, dim=2):
        v = call.v.new_zeros(call.q.shape[0], groups, keys, width)
        v[..., : part.shape[2]] = part[:, None]
        parts.append(_attend(call, _hidden(v, call.mask))[..., : part.shape[2]])
    return torch.cat(parts, dim=-1)


def received(call: Call, columns: Tensor) -> Tensor:
    """What falls on each key from queries weighted by ``columns`` [B, H, T, C], sum_i columns_i A_ij: [B, H, S, C]."""
    (batch, groups, keys, _), heads = call.v.shape, call.q.shape[1]
    share = heads // groups
    width = max(call.mechanism.head_dim, share)
    # The heads of one group read the same values, so each gives its gradient to columns of its own.
    room = width // share
    parts = []
    for part in columns.split(room, dim=3):
        with torch.enable_grad():
            v = call.v.new_zeros(batch, groups, keys, width).requires_grad_()
            out = _attend(call, _hidden(v, call.mask))
            cotangent = torch.zeros_like(out)
            for head in range(heads):
                begin = head % share * room
                cotangent[:, head, :, begin : begin + part.shape[3]] = part[:, head].to(out)
            (found,) = torch.autograd.grad(out, v, cotangent)
        by_head = found[..., : share * room].unflatten(3, (share, room)).transpose(2, 3).flatten(1, 2)
        parts.append(by_head[..., : part.shape[3]])
    return torch.cat(parts, dim=-1)


def even(call: Call, columns: Tensor) -> Even:
    """What the head would do with equal scores.

    Args:
        call: in full precision.
        columns: [B, S, C], what ``seen`` is wanted for.
    """
    blank = call._replace(q=torch.zeros_like(call.q), k=torch.zeros_like(call.k), bias=_hiding(call))
    counted = _counts(blank)
    if counted is not None:
        return Even(1 / counted.clamp(min=1), _running_means(blank, columns, counted))
    total = shares_of(blank)
    seen = through(blank, columns) / total
    by_row = any(part is not None for part in (blank.mask.key_keep, blank.mask.segments, blank.mask.pair_keep))
    if not by_row and blank.bias is None:
        blank = blank._replace(q=blank.q[:1], k=blank.k[:1], v=blank.v[:1])
        total = total[:1]
    square = torch.zeros_like(total[..., 0])
    for part in torch.eye(columns.shape[1], device=columns.device).split(call.mechanism.head_dim, dim=1):
        square += (through(blank, part[None]) / total).square().sum(-1)
    return Even(square, seen)


def shares_of(call: Call) -> Tensor:
    """What each row of A is divided by to become shares: its sum, [B, H, T, 1]; 1 where it has none."""
    if isinstance(call.mechanism, SIGNED):
        return torch.ones_like(call.q[..., :1])
    total = through(call, call.v.new_ones(1, call.k.shape[2], 1))
    return torch.where(total.abs() < TINY, 1, total)


def _running_means(call: Call, columns: Tensor, counted: Tensor) -> Tensor:
    """The mean of the columns over the keys that each query sees, [B, 1, T, C]."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    keep = call.mask.key_keep
    columns = columns if keep is None else columns * keep[..., None]
    if not call.mask.causal:
        return columns.sum(1)[:, None, None] / counted.clamp(min=1)[..., None]
    last = torch.arange(queries, device=columns.device) + keys - queries
    sums = torch.where((last >= 0)[:, None], columns.cumsum(1)[:, last.clamp(min=0)], 0)
    return sums[:, None] / counted.clamp(min=1)[..., None]


TINY = 1e-6
"""Rows that sum to less have no shares."""


def _counts(call: Call) -> Tensor | None:
    """How many keys each query sees, [B, H or 1, T], where the mask alone decides; None where it does not."""
    mechanism, mask, bias = call.mechanism, call.mask, call.bias
    queries, keys = call.q.shape[2], call.k.shape[2]
    if not mechanism.traits.exact or bias is not None or mask.segments is not None or mask.pair_keep is not None:
        return None
    if mechanism.pattern(1, 1, mask.causal) is not None:
        return None
    kept = torch.ones(1, keys, device=call.q.device) if mask.key_keep is None else mask.key_keep.float()
    if not mask.causal:
        return kept.sum(1)[:, None, None].expand(-1, 1, queries)
    last = torch.arange(queries, device=kept.device) + keys - queries
    return torch.where(last >= 0, kept.cumsum(1)[:, last.clamp(min=0)], 0)[:, None]


def _hiding(call: Call) -> Tensor | OffsetBias | None:
    """Of a bias, what hides keys; the rest makes scores unequal."""
    if call.bias is None:
        return None
    offsets = isinstance(call.bias, OffsetBias)
    values = call.bias.values if isinstance(call.bias, OffsetBias) else call.bias
    hidden = values == -torch.inf
    if not bool(hidden.any()):
        return None
    terms = torch.zeros_like(values).masked_fill(hidden, -torch.inf)
    return OffsetBias(terms) if offsets else terms


def _attend(call: Call, v: Tensor) -> Tensor:
    # By the class, past the listener of record(): a probe is no call of the model.
    return type(call.mechanism)._attend(call.mechanism, call.q, call.k, v, call.mask, call.bias)


def _hidden(v: Tensor, mask: Mask) -> Tensor:
    return v if mask.key_keep is None else v.masked_fill(~mask.key_keep[:, None, :, None], 0)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
