"""Entropy of softmax weights, exact, a stretch of queries after the other.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width.
"""

import torch
from torch import Tensor

from attnzoo.bias import OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanisms.flash import Flash
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.record import Call

SIZE = 1 << 20
"""How many scores are made at once."""


def entropy(call: Call) -> Tensor | None:
    """-sum_j a_ij log a_ij in nats, [B, H, T], 0 for a row without keys; None for all but ``Softmax`` and ``Flash``."""
    mechanism = call.mechanism
    if not isinstance(mechanism, (Softmax, Flash)):
        return None
    batch, heads, queries, width = call.q.shape
    keys = call.k.shape[2]
    scale = width**-0.5 if mechanism.scale is None else mechanism.scale
    k = call.k.repeat_interleave(heads // call.k.shape[1], dim=1).transpose(2, 3)
    stretch = max(1, SIZE // max(1, batch * heads * keys))
    parts = []
    for start in range(0, queries, stretch):
        stop = min(start + stretch, queries)
        scores = call.q[:, :, start:stop] * scale @ k
        if mechanism.softcap is not None:
            scores = mechanism.softcap * torch.tanh(scores / mechanism.softcap)
        scores = _with_bias(scores, call, start, stop)
        visible = _visible(call.mask, start, stop, queries, keys, call.q.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        logs = (scores - scores.logsumexp(-1, keepdim=True)).nan_to_num(nan=-torch.inf)
        parts.append(-(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1))
    return torch.cat(parts, dim=2)


def _with_bias(scores: Tensor, call: Call, start: int, stop: int) -> Tensor:
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.bias is None:
        return scores
    if isinstance(call.bias, OffsetBias):
        return scores + OffsetBias(call.bias.values[:, queries - stop : queries - start + keys - 1]).dense(stop - start)
    return scores + call.bias[..., start:stop, :]


def _visible(mask: Mask, start: int, stop: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys queries start .. stop see."""
    visible = mask._replace(
        causal=False, pair_keep=None if mask.pair_keep is None else mask.pair_keep[..., start:stop, :], segments=None
    ).visible(stop - start, keys, device)
    parts = [] if visible is None else [visible]
    if mask.causal:
        last = torch.arange(start, stop, device=device) + keys - queries
        parts.append(torch.arange(keys, device=device) <= last[:, None])
    if mask.segments is not None:
        parts.append(mask.segments[:, None, start:stop, None] == mask.segments[:, None, None, :])
    whole = None
    for part in parts:
        whole = part if whole is None else whole & part
    return whole
