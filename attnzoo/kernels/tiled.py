"""Dense attention without a T x S tensor, forward or backward, whatever is masked, added or dropped.

Rabe and Staats 2021, arXiv:2112.05682: queries in chunks, each made again for its gradients, so that chunk x S
numbers are all there ever is. Dao et al. 2022, arXiv:2205.14135, tile the keys too; torch's fused kernels do so
inside, and take all queries at once where no mask of T x S is needed.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.sdpa import arguments, dense, explicit, fused, is_fused
from attnzoo.mask import Mask

CHUNK = 128
"""How many queries are taken at once. On a CPU 128 and 256 are equally fast, 32 and 512 slower."""


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What ``dense``, or with a softcap ``explicit``, gives, in memory O(T + S).

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms to be added to the scores, or None. The gradient of an ``OffsetBias`` is linear in memory too.
        dropout: share of the weights dropped, now.
        scale: 1 / sqrt(D) if None.
        softcap: c of c tanh(s / c), or None.

    Returns:
        [B, H, T, Dv].
    """
    if obstacle(q, k, mask, bias, softcap) is None:
        attn_mask, is_causal = arguments(q, k, mask, bias)
        if is_fused(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout):
            return fused(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout, scale=scale)
    queries, keys = q.shape[2], k.shape[2]
    options: dict[str, Any] = {"causal": mask.causal, "dropout": dropout, "scale": scale, "softcap": softcap}
    # An exported program has no fixed length, so there is no number of chunks to be written down.
    if torch.compiler.is_exporting() or queries <= CHUNK:
        return _rows(*_chunk(q, k, v, mask, bias, 0, queries), **options)
    first = max(0, queries - keys) if mask.causal else 0
    # Masks and biases would add up to T x S if each chunk kept its own for the gradients: they are made again.
    parts = []
    for start in range(first, queries, CHUNK):
        chunk = _chunk(q, k, v, mask, bias, start, min(start + CHUNK, queries))
        parts.append(checkpoint(_rows, *chunk, use_reentrant=False, **options))
    return pad(torch.cat(parts, dim=2), (0, 0, first, 0))


def _chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, start: int, stop: int) -> tuple[Any, ...]:
    """What queries start .. stop need: the first arguments of ``_rows``."""
    queries, keys = q.shape[2], k.shape[2]
    # The keys end with the last one that any of these queries may see, so that causal means the same for them.
    end = stop + keys - queries if mask.causal else keys
    if isinstance(bias, OffsetBias):
        bias = OffsetBias(bias.values[:, queries - stop : queries - start + end - 1])
    elif bias is not None:
        bias = bias[..., start:stop, :end]
    return (
        q[:, :, start:stop],
        k[:, :, :end],
        v[:, :, :end],
        None if mask.key_keep is None else mask.key_keep[:, :end],
        None if mask.pair_keep is None else mask.pair_keep[..., start:stop, :end],
        None if mask.segments is None else (mask.segments[:, start:stop], mask.segments[:, :end]),
        bias,
    )


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_keep: Tensor | None,
    pair_keep: Tensor | None,
    segments: tuple[Tensor, Tensor] | None,
    bias: Bias | None,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    if segments is not None:
        same = segments[0][:, None, :, None] == segments[1][:, None, None, :]
        pair_keep = same if pair_keep is None else pair_keep & same
    mask = Mask(causal, key_keep, pair_keep)
    if softcap is not None:
        return explicit(q, k, v, mask, bias, dropout=dropout, scale=scale, softcap=softcap)
    return dense(q, k, v, mask, bias, dropout=dropout, scale=scale)


def obstacle(q: Tensor, k: Tensor, mask: Mask, bias: Bias | None, softcap: float | None) -> str | None:
    """Why no fused kernel can take all queries at once in linear memory; None where nothing speaks against it."""
    if softcap is not None:
        return "no fused kernel has a softcap"
    if bias is not None:
        return "a bias is T x S numbers to a fused kernel"
    if mask.pair_keep is not None or mask.segments is not None:
        return "pairs or segments are a mask of T x S to a fused kernel"
    if mask.causal and q.shape[2] > 1 and (mask.key_keep is not None or q.shape[2] != k.shape[2]):
        return "causal is a mask of T x S to a fused kernel unless T equals S and nothing is padded"
    return None
