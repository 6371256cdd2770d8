"""Local (sliding window) attention.

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509;
Beltagy et al. 2020, "Longformer", arXiv:2004.05150, section 3.1.

    V(i) = { j : p - left <= j <= p + right },  p = i + S - T
    o_i  = softmax over V(i) of (q_i . k_j / sqrt(D) + bias_ij)  times v_j

A window of W keys includes the query's own place: causal it is p-W+1 .. p, otherwise W is odd and
it reaches (W-1)/2 to either side. Libraries count differently; convert when you import settings.

A state for decoding holds the last W - 1 keys and no more. Left out: dilation, and the global tokens of Longformer
(see GlobalLocal).

Use it when what matters stands near, as in text, sound, time series or pixels in raster order, and sequences are
several windows long: time, memory and the state for decoding no longer grow with the square of the length.

Not when one token must reach any other in one layer: L layers see L (W - 1) back at most. Not below some windows of
length either, where Softmax does the same work without the blocks.
"""

from typing import Any

from torch import Tensor, arange, int64, zeros

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.blocks import banded
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism, yes_or_no
from attnzoo.state import State, WindowState
from attnzoo.traits import Traits


class Local(Mechanism):
    """Each query sees the keys near its own place: time and memory O(T W).

    Args:
        num_heads: H.
        head_dim: D.
        window: W, the number of keys including the query's own place; or (left, right), how many keys
            before and after it.
        dropout: share of the attention weights dropped in training.
        causal: a fact of the site, filled in by the shell; lets an even W be refused at construction.

    Raises:
        ValueError: for a window below 1 or a negative reach; for an even W where attention is not causal.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 100, 8)
        >>> Local(2, 8, window=9)(q, k, v).shape
        torch.Size([1, 2, 100, 8])
    """

    traits = Traits(cross=False, linear_memory=True, complexity="T W D")
    reasons = {"cross": "a window needs keys that stand at the places of the queries; Softmax or Additive can cross"}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int | tuple[int, int] = 9,
        dropout: float = 0.0,
        causal: bool | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if isinstance(window, bool) or not isinstance(window, (int, tuple, list)):
            raise ValueError(f"Local: window must be a whole number or (left, right); got {window!r}")
        if isinstance(window, int):
            if window < 1:
                raise ValueError(f"Local: window counts the query's own place, so it is at least 1; got {window}")
        elif len(window) != 2 or any(
            isinstance(reach, bool) or not isinstance(reach, int) or reach < 0 for reach in window
        ):
            raise ValueError(f"Local: window must be a number or (left, right), both >= 0; got {window}")
        yes_or_no("Local", causal=causal)
        self.window = window
        if causal is False:
            self.reach(causal=False)

    def reach(self, causal: bool) -> tuple[int, int]:
        """How many keys before and after its own place a query sees."""
        if not isinstance(self.window, int):
            left, right = self.window
            return left, 0 if causal else right
        if causal:
            return self.window - 1, 0
        if self.window % 2 == 0:
            raise ValueError(
                f"Local: window={self.window} is even, which has no middle without causal; "
                f"take {self.window - 1}, {self.window + 1} or (left, right)"
            )
        return self.window // 2, self.window // 2

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        left, right = self.reach(mask.causal)
        dropout = self.dropout if self.training else 0.0
        return banded(q, keys, v, mask, bias, left=left, right=right, dropout=dropout)

    def start(self, keys: Tensor, v: Tensor, max_len: int) -> State:
        return WindowState(keys, v, None, zeros(v.shape[0], dtype=int64, device=v.device), used=0, max_len=max_len)

    def advance(
        self, q: Tensor, keys: Tensor, v: Tensor, state: Any, mask: Mask, bias: Bias | None
    ) -> tuple[Tensor, State]:
        state = state.append(keys, v, mask.key_keep)
        # What covers all keys so far is cut to those that are left; the last of them belong to the queries.
        gone = state.used - state.k.shape[2]
        pair_keep = None if mask.pair_keep is None else mask.pair_keep[..., gone:]
        if isinstance(bias, OffsetBias):
            bias = OffsetBias(bias.values[:, gone:])
        elif bias is not None:
            bias = bias[..., gone:]
        out = self._attend(q, state.k, state.v, Mask(causal=True, key_keep=state.keep, pair_keep=pair_keep), bias)
        return out, state.last(self.reach(causal=True)[0])

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor:
        left, right = self.reach(causal)
        offset = arange(keys) - (arange(queries)[:, None] + keys - queries)
        return (offset >= -left) & (offset <= right)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how far the window reaches here."""
        left, right = self.reach(as_mask(mask).causal)
        return f"banded blocks over SDPA: {left} keys before and {right} after each query"
