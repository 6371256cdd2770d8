"""FlexAttention: torch compiles one kernel for a pattern that is given as a function of places.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.gathered import Sees
from attnzoo.kernels.seats import along, seats
from attnzoo.mask import Mask

Backend = Literal["blocks", "flex"]
Mod = Callable[..., Tensor]

BLOCK = 128
"""Queries and keys in a block of FlexAttention."""


def check_backend(owner: str, backend: str, dropout: float) -> None:
    """Raises ``ValueError``, in the name of ``owner``, for an unknown back end, and for "flex" with dropout."""
    if backend not in get_args(Backend):
        raise ValueError(f"{owner}: backend must be one of {get_args(Backend)}, got {backend!r}")
    if backend == "flex" and dropout:
        raise ValueError(f"{owner}: backend='flex' has no dropout, got {dropout}; take backend='blocks' or dropout=0")


def flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, *, sees: Sees, owner: str, dropout: float = 0.0
) -> Tensor:
    """Attention over the pairs that ``sees`` lets through, see ``kernels.gathered``; no gathering, no copies.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what else is hidden.
        bias: terms to be added to the scores, or None.
        sees: the pattern.
        owner: the mechanism, for messages.
        dropout: share of the weights dropped, now.

    Returns:
        [B, H, T, Dv].

    Raises:
        ValueError: for dropout, and for gradients on the CPU, neither of which FlexAttention has.
    """
    check_backend(owner, "flex", dropout)
    values = bias.values if isinstance(bias, OffsetBias) else bias
    tracked = any(x is not None and x.requires_grad for x in (q, k, v, values))
    if q.device.type in ("cpu", "mps") and tracked and torch.is_grad_enabled():
        raise ValueError(
            f"{owner}: backend='flex' has no gradients on {q.device.type}: FlexAttention goes backward on CUDA only; "
            f"take backend='blocks', or torch.no_grad()"
        )
    mask_mod = _mask_mod(mask, sees, q.shape[2], k.shape[2], q.device)
    block_mask = _block_mask(mask_mod, q, k)
    score_mod = None if bias is None else _score_mod(bias, q.shape[2])
    return _kernel()(q, k, v, score_mod, block_mask, enable_gqa=q.shape[1] != k.shape[1])


def _mask_mod(mask: Mask, sees: Sees, queries: int, keys: int, device: torch.device) -> Mod:
    cells, seat = seats(mask, queries, keys, 1, device)
    place = along(cells.place[:, :, 0], seat)
    packed = cells.order.argsort(1)
    key = packed if mask.segments is None else packed - along(cells.offset, packed)
    pair_keep = None if mask.pair_keep is None else _four(mask.pair_keep)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = sees(h, place[_of(place, b), i], key[_of(key, b), j])
        if mask.causal:
            seen = seen & (j <= i + keys - queries)
        if mask.key_keep is not None:
            seen = seen & mask.key_keep[b, j]
        if pair_keep is not None:
            seen = seen & pair_keep[_of(pair_keep, b), _of(pair_keep, h, 1), i, j]
        if mask.segments is not None:
            seen = seen & (mask.segments[b, i] == mask.segments[b, j])
        return seen

    return visible


def _score_mod(bias: Bias, queries: int) -> Mod:
    if isinstance(bias, OffsetBias):
        values = bias.values
        return lambda score, b, h, i, j: score + values[h, j - i + queries - 1]
    terms = _four(bias)
    return lambda score, b, h, i, j: score + terms[_of(terms, b), _of(terms, h, 1), i, j]


def _block_mask(visible: Mod, q: Tensor, k: Tensor) -> Any:
    """Which blocks hold a visible pair, found for ``BLOCK`` queries at a time, so never with T x S elements."""
    from torch.nn.attention.flex_attention import BlockMask

    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    b, h, i, j = (torch.arange(n, device=q.device) for n in (batch, heads, queries, keys))
    bands = []
    for band in i[:, None].split(BLOCK):
        seen = visible(b[:, None, None, None], h[:, None, None], band[None, None], j)
        seen = pad(seen, (0, -keys % BLOCK)).unflatten(-1, (-1, BLOCK))
        bands.append(seen.any(-1).any(-2))
    blocks = torch.stack(bands, 2)
    return BlockMask.from_kv_blocks(
        blocks.sum(-1, dtype=torch.int32),
        (~blocks).byte().argsort(dim=-1, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )


def _four(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[None, None]


def _of(x: Tensor, index: Tensor, axis: int = 0) -> Tensor:
    """The index into an axis that may have one element for all."""
    return index if x.shape[axis] > 1 else index * 0  # a tensor as well: torch 2.9 cannot mix the two here


def _kernel() -> Mod:
    from torch.nn.attention.flex_attention import flex_attention  # late: it takes long to import

    return cast(Mod, flex_attention) if torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Mod:
    from torch.nn.attention.flex_attention import flex_attention

    return cast(Mod, torch.compile(flex_attention))
