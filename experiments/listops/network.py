"""An encoder over any mechanism that reads the answer off the last symbol, the bracket that closes the expression.

The operator that this bracket belongs to is the first symbol, up to 511 places away, and must come there.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, the encoder, with norms before the branches. Shapes:
B expressions, T symbols, E width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor, nn

from attnzoo import DiversityKind, EncoderBlock, HeadDiversity, Mask, Mechanism
from attnzoo.positions import PositionName, added, inside


class ListOpsEncoder(nn.Module):
    """Embedding, blocks, a linear head on the last symbol.

    Args:
        symbols: how many there are, padding included, which is number 0.
        classes: how many answers.
        max_length: the longest expression.
        attention: factory of the mechanism in every block.
        position: name of the position encoding, see ``attnzoo.positions``.
        dim: E.
        depth: how many blocks.
        num_heads: heads, a divisor of E.
        head_diversity: weight of the term that keeps the heads different; 0 for none.
        head_diversity_kind: see ``attnzoo.HeadDiversity``.
        hidden_dim: width of the feed-forward; 2 E if None.
        dropout: of the branches of a block.

    Raises:
        ValueError: for sizes below 1, a dropout outside [0, 1), or an unknown position.
    """

    def __init__(
        self,
        symbols: int,
        classes: int,
        max_length: int,
        *,
        attention: Callable[[int, int], Mechanism],
        position: PositionName,
        dim: int,
        depth: int,
        num_heads: int,
        head_diversity: float,
        head_diversity_kind: DiversityKind,
        hidden_dim: int | None,
        dropout: float,
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("depth", depth), ("num_heads", num_heads), ("hidden_dim", hidden_dim)):
            if size is not None and size < 1:
                raise ValueError(f"--model.{name} is {size}; it must be at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"--model.dropout is {dropout}; it must lie in [0, 1)")
        if position not in get_args(PositionName):
            raise ValueError(f"--model.position is {position!r}; it must be one of {', '.join(get_args(PositionName))}")
        self.embed = nn.Embedding(symbols, dim)
        # As small as learned positions begin, which would not be heard beside the default of 1.
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        self.position = added(position, dim, max_length)
        diversity = HeadDiversity(head_diversity, head_diversity_kind) if head_diversity else None
        # Rows for mechanisms that go along axes, as near to a square as divides the length.
        row = next(size for size in range(math.isqrt(max_length), 0, -1) if max_length % size == 0)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                dim, num_heads, attention, hidden_dim=2 * dim if hidden_dim is None else hidden_dim, dropout=dropout,
                causal=False, position=inside(position, num_heads, dim // num_heads),
                max_len=max_length, grid=(row, max_length // row), prefix_tokens=0, layer=layer,
                head_diversity=diversity,
            )
            for layer in range(depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of symbols [B, T], 0 at padding on the right -> logits [B, classes] and aux."""
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(tokens.new_ones(tokens.shape[1]).cumsum(0) - 1)
        aux = x.new_zeros(())
        real = tokens > 0
        for block in self.blocks:
            x, more = block(x, mask=Mask(key_keep=real))
            aux = aux + more
        last = (real.sum(1) - 1).clamp(min=0)
        rows = torch.arange(x.shape[0], device=x.device)  # len() would fix the number of rows in an export
        return self.head(self.norm(x[rows, last])), aux
