"""Terms that are added to the scores: dense, or by the offset of key and query alone.

Letters: H query heads, T queries, S keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.mask import check_pair_shape


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
        row, column = (torch.arange(n, device=self.values.device) for n in (queries, keys))
        return self.values[:, column - row[:, None] + queries - 1][None]

    def plus(self, other: "Bias | None", queries: int) -> "Bias":
        """The sum with another bias, by offset where both are."""
        if other is None:
            return self
        if isinstance(other, OffsetBias):
            return OffsetBias(self.values + other.values)
        return self.dense(queries) + other


Bias = Tensor | OffsetBias


def check_bias(bias: Bias, heads: int, batch: int, queries: int, keys: int) -> None:
    """Raises ``ValueError`` unless the bias is floating point and fits H, B, T, S."""
    values = bias.values if isinstance(bias, OffsetBias) else bias
    if not isinstance(values, Tensor):
        raise ValueError(f"bias must be a tensor or an OffsetBias, got {type(values).__name__}")
    if not values.is_floating_point():
        raise ValueError(f"bias must be floating point, got {values.dtype}; what hides a key is a mask, boolean")
    if isinstance(bias, OffsetBias):
        expected = (heads, max(0, queries + keys - 1))
        if tuple(values.shape) != expected:
            raise ValueError(f"OffsetBias must be [H, T + S - 1] = {expected}, got {tuple(values.shape)}")
    else:
        check_pair_shape("bias", bias, batch, heads, queries, keys)
