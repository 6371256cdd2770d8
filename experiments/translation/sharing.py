"""Sources that several rows of a batch read: the beams of a sentence share one projected source.

Shapes: B sentences, N rows (hypotheses), t new tokens, E width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from attnzoo import MultiheadAttention, reorder


class Sources(NamedTuple):
    """Memories of cross-attention, one row a sentence, and which of them each row of the batch reads.

    The rows of one sentence attend as several queries of one memory, so a beam copies no memory, however its rows
    are permuted, doubled or dropped.

    Attributes:
        memories: one for each attention, of B rows.
        size: B.
        sentence: int64 [N], the sentence of each row.
        place: int64 [N], where each row stands among the B x width queries; None where row n is query n.
        width: how many queries each sentence has room for.
    """

    memories: tuple[Any, ...]
    size: int
    sentence: Tensor
    place: Tensor | None = None
    width: int = 1

    @classmethod
    def of(cls, memories: tuple[Any, ...], batch: int, device: torch.device) -> Self:
        """Sources that one row each reads."""
        return cls(memories, batch, torch.arange(batch, device=device))

    def attend(self, attention: MultiheadAttention, number: int, x: Tensor) -> Tensor:
        """Cross-attention of the rows x [N, t, E] on memory ``number``: [N, t, out_dim]."""
        _, new, channels = x.shape
        if self.place is not None:
            x = x.new_zeros(self.size * self.width, new, channels).index_copy(0, self.place, x)
        queries = x.reshape(self.size, self.width * new, channels)
        y, _ = attention.step(queries, self.memories[number], on_memory=True)
        y = y.reshape(-1, new, y.shape[-1])
        return y if self.place is None else y.index_select(0, self.place)

    def reorder(self, rows: Tensor) -> Sources:
        """What row ``n`` of the result reads is what row ``rows[n]`` read.

        Memories that no row reads any more are dropped as soon as they are half of all.
        """
        memories, size, sentence = self.memories, self.size, self.sentence.index_select(0, rows)
        count = torch.bincount(sentence, minlength=size)
        read = count > 0
        if 2 * int(read.sum()) <= size:
            kept = read.nonzero()[:, 0]
            memories, size, count = tuple(reorder(memory, kept) for memory in memories), len(kept), count[kept]
            sentence = (read.cumsum(0) - 1)[sentence]
        width = int(count.max()) if size else 1
        # Sorted by sentence, at most ``width`` neighbours belong to one, so none of them fall on the same place.
        order, number = sentence.argsort(stable=True), torch.arange(len(sentence), device=sentence.device)
        rank = torch.empty_like(order)
        rank[order] = number % width
        place = sentence * width + rank
        full = len(place) == size * width and torch.equal(place, number)
        return Sources(memories, size, sentence, None if full else place, width)
