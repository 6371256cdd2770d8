"""Banded attention: each block of queries meets only the keys that its band can reach.

Time and memory are O(T (left + right)), also with masks and biases; T x S elements are never made.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.heads import by_heads
from attnzoo.kernels.sdpa import fused
from attnzoo.mask import Mask


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    *,
    left: int,
    right: int,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in which query i sees keys p - left .. p + right, with p = i + S - T.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what else is hidden.
        bias: terms to be added to the scores, or None.
        left: how many keys before its own place a query sees.
        right: how many keys after its own place a query sees.
        dropout: share of the weights dropped, now.

    Returns:
        [B, H, T, Dv].
    """
    some = partial(_banded, left=left, right=right, dropout=dropout)
    return by_heads(some, q, k, v, mask, bias)


def _banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    part: slice,
    *,
    left: int,
    right: int,
    dropout: float,
) -> Tensor:
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    # A place lies in S-T .. S-1, so no window can show more than this, however wide it was set.
    left, right = min(left, keys - 1), 0 if mask.causal else min(right, queries - 1)
    reach = left + right
    # A query pays for block + reach keys, and each block of queries pays for itself: half the band was fastest.
    block = min(queries, max(32, -(-reach // 64) * 32))
    blocks = -(-queries // block)
    span = block + reach
    first = keys - queries - left
    device = q.device

    def windows(x: Tensor) -> Tensor:
        """[..., S, width] -> [..., blocks, span, width], zeros outside of 0..S-1."""
        reaching = pad(x, (0, 0, -first, first + blocks * block + reach - keys))
        return reaching.unfold(-2, span, block).transpose(-1, -2)

    def by_block(x: Tensor) -> Tensor:
        """[batch, heads, blocks, ...] -> [batch * blocks, heads, ...]."""
        return x.transpose(1, 2).flatten(0, 1)

    rows = pad(q, (0, 0, 0, blocks * block - queries)).unflatten(2, (blocks, block))
    row, column = torch.arange(block, device=device)[:, None], torch.arange(span, device=device)
    in_band = (column >= row) & (column <= row + reach)
    place = first + torch.arange(blocks, device=device)[:, None] * block + column
    exists = (place >= 0) & (place < keys)
    visible = (in_band & exists[:, None])[None, None]

    def pairs(x: Tensor) -> Tensor:
        """[T, S] or [B or 1, H or 1, T, S] -> [B or 1, H or 1, blocks, block, span]."""
        x = x if x.dim() == 4 else x[None, None]
        number = torch.arange(blocks, device=device)[:, None, None]
        return x[:, :, (number * block + row).clamp(max=queries - 1), place.clamp(0, keys - 1)[:, None]]

    if mask.key_keep is not None:
        kept = windows(mask.key_keep[..., None])[..., 0]
        visible = visible & kept[:, None, :, None]
    if mask.pair_keep is not None:
        visible = visible & pairs(mask.pair_keep)
    if mask.segments is not None:
        # Filler keys hold segment 0 here, which may be a real one; `exists` hides them.
        own = pad(mask.segments, (0, blocks * block - queries)).unflatten(1, (blocks, block))
        visible = visible & (own[..., None] == windows(mask.segments[..., None])[..., 0][:, :, None])[:, None]
    terms: Tensor | None = None
    if isinstance(bias, OffsetBias):
        offset = (first + column - row + queries - 1).clamp(0, queries + keys - 2)
        terms = bias.values[:, offset][None, :, None]
    elif bias is not None:
        terms = pairs(bias)
    if terms is not None:
        terms = torch.where(visible, terms.to(q.dtype), -torch.inf)
    both = visible if terms is None else terms
    attn_mask = by_block(both.expand(batch, -1, blocks, -1, -1))

    out = fused(by_block(rows), by_block(windows(k)), by_block(windows(v)), attn_mask, dropout=dropout)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :queries]
