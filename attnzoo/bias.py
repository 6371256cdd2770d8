"""Terms that are added to the scores: dense, or by the offset of key and query alone.

Letters: H query heads, T queries, S keys.
"""

from typing import NamedTuple

from torch import Tensor


class OffsetBias(NamedTuple):
    """Terms to be added to the scores that depend on the offset of key and query alone.

    Attributes:
        values: [H, T + S - 1]; query ``i`` and key ``j`` take ``values[h, j - i + T - 1]``. Window, block
            and tiled kernels read it as it is, without ever making T x S numbers.

    Example:
        >>> import torch
        >>> OffsetBias(torch.arange(4.0)[None]).dense(queries=2)[0, 0]
        tensor([[1., 2., 3.],
                [0., 1., 2.]])
    """

    values: Tensor

    def dense(self, queries: int) -> Tensor:
        """The same terms as [1, H, T, S]."""
        keys = self.values.shape[-1] - queries + 1
        return self.values.unfold(-1, keys, 1).flip(-2)[None]

    def plus(self, other: "Bias | None", queries: int) -> "Bias":
        """The sum with another bias, by offset where both are."""
        if other is None:
            return self
        if isinstance(other, OffsetBias):
            return OffsetBias(self.values + other.values)
        return self.dense(queries) + other


Bias = Tensor | OffsetBias
