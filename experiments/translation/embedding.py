"""Word embeddings of source and target, and the output layer that may be the same numbers.

Press, Wolf 2016, "Using the Output Embedding to Improve Language Models", arXiv:1608.05859; Vaswani et al. 2017,
arXiv:1706.03762, section 3.4.

Shapes: B batch, T tokens, E width, V words of the target.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from experiments.translation.output_loss import Loss, output_loss
from experiments.translation.tokens import PAD


class Words(NamedTuple):
    """How many words the vocabularies have, and whether they are one for both languages."""

    source_size: int
    target_size: int
    joint: bool


class WordEmbedding(nn.Module):
    """Rows for the words of both sides, and the logits of target words.

    Rows start as N(0, 1/E) and are multiplied with sqrt(E) on their way in, so that the same numbers give words of
    size 1 to the network and logits of size 1 to the softmax.

    Args:
        words: sizes of the vocabularies.
        dim: E.
        tied: the output layer is the target's embedding, and with a joint vocabulary the source's too: one storage.
            False keeps all of them apart.

    Raises:
        ValueError: for a joint vocabulary of two sizes.

    Example:
        >>> embedding = WordEmbedding(Words(10, 10, joint=True), 4)
        >>> [tuple(p.shape) for p in embedding.parameters()]
        [(10, 4)]
    """

    def __init__(self, words: Words, dim: int, *, tied: bool = True) -> None:
        super().__init__()
        if words.joint and words.source_size != words.target_size:
            raise ValueError(
                f"A joint vocabulary has one size; got {words.source_size} source and {words.target_size} target words"
            )
        self.scale = dim**0.5
        self.target_table = nn.Embedding(words.target_size, dim)
        # What is shared is registered once, so it cannot come apart when weights are loaded.
        shared = words.joint and tied
        self.source_table = None if shared else nn.Embedding(words.source_size, dim)
        self.output_table = None if tied else nn.Embedding(words.target_size, dim)
        for table in (self.target_table, self.source_table, self.output_table):
            if table is not None:
                nn.init.normal_(table.weight, std=dim**-0.5)

    def source(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, E]."""
        table = self.target_table if self.source_table is None else self.source_table
        return table(tokens) * self.scale

    def target(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, E]."""
        return self.target_table(tokens) * self.scale

    @property
    def output_weight(self) -> Tensor:
        """What makes logits of states: [V, E]."""
        return (self.target_table if self.output_table is None else self.output_table).weight

    def logits(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., V]."""
        return F.linear(x, self.output_weight)

    def loss(self, x: Tensor, labels: Tensor, smoothing: float) -> Loss:
        """Cross entropy of the logits of x [N, E] with the words that should come, int64 [N]."""
        return output_loss(x, self.output_weight, labels, smoothing=smoothing)


def real(tokens: Tensor) -> Tensor:
    """Bool [B, S]: True where there is a word or an end symbol, False at padding."""
    return tokens != PAD
