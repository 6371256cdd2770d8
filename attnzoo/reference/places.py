"""Softmax over a pattern of places: BlockSparse, Strided and GlobalLocal."""

import torch
from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.reference.rows import weighted_sum


def by_place(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of q . k / sqrt(D) + bias over the pairs that the mechanism's ``pattern`` lets through by place.

    The place of a token counts the real tokens before it in its own sequence: the row, or its segment. Queries
    that stand at padding follow the last real token, in their order; keys there are hidden anyway.
    """
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    shift = keys - queries
    early = max(-shift, 0)
    seen = torch.zeros(batch, q.shape[1], queries, keys, dtype=torch.bool)
    for b in range(batch):
        segments = [0] * keys if mask.segments is None else mask.segments[b].tolist()
        for segment in sorted(set(segments)):
            own = [s for s in range(keys) if segments[s] == segment]
            real = [s for s in own if mask.key_keep is None or mask.key_keep[b, s]]
            asking = [s for s in own if s not in real and s >= shift]
            places = {slot: place for place, slot in enumerate(real + asking)}
            places |= {slot: slot for slot in range(shift, 0)}
            pattern = mechanism.pattern(len(own) + early, len(own), mask.causal)
            assert pattern is not None
            for slot, place in places.items():
                if slot >= shift:
                    seen[b, :, slot - shift][:, real] = pattern[..., place + early, : len(real)]

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        return key @ query * q.shape[-1] ** -0.5

    return weighted_sum(score, q, k, v, mask, bias, seen)
