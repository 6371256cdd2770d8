"""Heads a few at a time, on a CPU: what one part needs stays in the cache, and is used again for the next.

All heads at once make tensors of tens of MiB, which are fresh memory in every call there: getting it takes longer than
what is computed in it. Nothing of this holds on other devices, and a graph would hold every part.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.again import eager_on_cpu
from attnzoo.mask import Mask

NUMBERS = 1 << 18
"""How many numbers of q or k a part may hold: 1 MiB of float32. What is made of them is several times as much."""

Call = Callable[[Tensor, Tensor, Tensor, Mask, Bias | None, slice], Tensor]


def by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """The outputs of ``call`` for some heads after the others, or for all at once where they are small.

    Args:
        call: takes q, k, v, mask and bias of some heads, and which of the H heads they are.
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms to be added to the scores, or None.

    Returns:
        [B, H, T, Dv].
    """
    heads, groups = q.shape[1], k.shape[1]
    share, some = heads // groups, groups
    if eager_on_cpu(q):
        some = max(1, NUMBERS * groups // max(1, q.numel(), k.numel()))
    if some >= groups:
        return call(q, k, v, mask, bias, slice(0, heads))
    size = some * share
    parts = [slice(begin, min(begin + size, heads)) for begin in range(0, heads, size)]
    # Pieces of one split give their gradients back in one go; each slice would fill a whole tensor with zeros first.
    tensors = q.split(size, 1), k.split(some, 1), v.split(some, 1)
    each = zip(*tensors, _masks(mask, parts), _biases(bias, size, parts), parts, strict=True)
    return torch.cat([call(*piece) for piece in each], 1)


def _masks(mask: Mask, parts: list[slice]) -> list[Mask]:
    pairs = mask.pair_keep
    if pairs is None or pairs.dim() == 2 or pairs.shape[1] == 1:
        return [mask] * len(parts)
    return [mask._replace(pair_keep=pairs[:, part]) for part in parts]


def _biases(bias: Bias | None, size: int, parts: list[slice]) -> list[Bias | None]:
    if isinstance(bias, OffsetBias):
        return [OffsetBias(values) for values in bias.values.split(size)]
    if bias is None or bias.dim() == 2 or bias.shape[1] == 1:
        return [bias] * len(parts)
    return list(bias.split(size, 1))
