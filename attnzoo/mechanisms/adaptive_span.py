"""Adaptive attention span: each head learns how far back it looks.

Sukhbaatar et al. 2019, "Adaptive Attention Span in Transformers", arXiv:1905.07799, section 2.2.

    x    = p - j,  p = i + S - T;   |p - j| where attention is not causal
    m(x) = clamp((z W - x) / R + 1, 0, 1) for x < W, else 0
    a_ij = m(x) exp(s_ij) / sum_l m(x) exp(s_il),   s_ij = q_i . k_j / sqrt(D) + bias_ij
    o_i  = sum_j a_ij v_j

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]
    z [H] learned, in [0, 1]   W = max_span, R = ramp, both in keys

The span of a head is z W keys, after which its weights fade out over R more, never beyond W: with z = 1 it is a plain
window of W keys. Span costs: the training adds penalty() = span_cost W mean(z) to the loss, and after_step() brings z
back into [0, 1].

Computed as a softmax whose scores have log m(x) added, by offset, in a band. The band is cut at W, a fixed number:
keys between max(z) W + R and W are hidden, at the price of their arithmetic; the authors cut there, in steps of 64,
which would make sizes depend on a parameter and break the compiled graph. Decoding keeps all keys for the same reason.

Deviations: distances count from the query's own place, which is always in the span (the paper's window ends before
it); both directions for attention that is not causal are ours; z starts at 1/8, not 0, and the defaults are for short
sequences (the authors on enwik8: W 8192, R 32, span_cost 5e-7). Left out: spans that depend on the input.

Use it when most heads need little context and a few need much, and nobody knows which: character models, long audio.
What z has become says how far each head looks.

Not when every head needs the whole sequence, or training is too short for z to move: then Local with a window, or
Softmax, is the same for less.
"""

import torch
from torch import Tensor, arange, nn

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.blocks import banded
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least, number
from attnzoo.traits import Traits


class AdaptiveSpan(Mechanism):
    """Each head sees the keys near its own place, as far as its learned span: time and memory O(T W).

    Args:
        num_heads: H.
        head_dim: D.
        max_span: W, the most keys that a head sees to one side, its own place included.
        ramp: R, over how many keys the weights fade out at the end of a span.
        init_ratio: the share of ``max_span`` that each head starts with.
        span_cost: what a key of the mean span adds to the loss, see ``penalty``.
        dropout: share of the attention weights dropped in training.

    Attributes:
        ratio: z [H], a parameter.

    Raises:
        ValueError: for a ``max_span`` below 1, a ``ramp`` below 2 (it would have no slope to learn on), an
            ``init_ratio`` outside [0, 1], a negative ``span_cost``.

    Example:
        >>> attention = AdaptiveSpan(2, 8, max_span=8, ramp=4, init_ratio=0.5)
        >>> q = k = v = torch.randn(1, 2, 50, 8)
        >>> attention(q, k, v, Mask(causal=True)).shape
        torch.Size([1, 2, 50, 8])
        >>> attention.soft_mask(arange(8))[0].tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    traits = Traits(cross=False, exact=False, linear_memory=True, complexity="T W D")
    reasons = {"cross": "a span needs keys that stand at the places of the queries; Softmax or Additive can cross"}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        max_span: int = 16,
        ramp: int = 8,
        init_ratio: float = 0.125,
        span_cost: float = 1e-4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "AdaptiveSpan", max_span=max_span, ramp=ramp)
        if ramp < 2:
            raise ValueError(f"AdaptiveSpan: ramp must be at least 2, else a span has no slope to learn on; got {ramp}")
        number("AdaptiveSpan", init_ratio=init_ratio, span_cost=span_cost)
        if not 0 <= init_ratio <= 1:
            raise ValueError(f"AdaptiveSpan: init_ratio must lie in [0, 1], got {init_ratio}")
        if not span_cost >= 0:
            raise ValueError(f"AdaptiveSpan: span_cost must be at least 0, got {span_cost}")
        self.max_span = max_span
        self.ramp = ramp
        self.init_ratio = init_ratio
        self.span_cost = span_cost
        self.ratio = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every head starts with the same span."""
        nn.init.constant_(self.ratio, self.init_ratio)

    def soft_mask(self, distance: Tensor) -> Tensor:
        """m(x) of each head, [n] -> [H, n], in at least float32; a gradient reaches z where it is in (0, 1)."""
        ratio = self.ratio.to(torch.promote_types(self.ratio.dtype, torch.float32))
        fading = (ratio[:, None] * self.max_span - distance) / self.ramp + 1
        # Where it is 1 it is constant, at z W = x too, where z = 0 may only grow: no gradient, unlike some clamps.
        inside = torch.where(fading < 1, fading, 1.0)
        return torch.where((fading > 0) & (distance < self.max_span), inside, 0.0)

    def penalty(self) -> Tensor:
        """What the spans cost: a scalar that the training adds to the loss once a step."""
        return self.span_cost * self.max_span * self.ratio.mean()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        self.ratio.clamp_(0, 1)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        queries, length = q.shape[2], keys.shape[2]
        offset = arange(queries + length - 1, device=q.device) - (length - 1)
        weight = self.soft_mask(offset.abs())
        # The logarithm of a hidden weight is never taken: its gradient would be 0 times infinity.
        hidden = weight == 0
        log_weight = torch.where(hidden, 1.0, weight).log().masked_fill(hidden, -torch.inf)
        terms = OffsetBias(log_weight).plus(bias, queries)
        dropout = self.dropout if self.training else 0.0
        reach = self.max_span - 1
        return banded(q, keys, v, mask, terms, left=reach, right=reach, dropout=dropout)

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor:
        place = arange(queries, device=self.ratio.device)[:, None] + keys - queries
        distance = place - arange(keys, device=self.ratio.device)
        reached = self.soft_mask(distance.abs().flatten()).unflatten(1, (queries, keys)) > 0
        return reached & (distance >= 0) if causal else reached

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how far the band and the spans reach now."""
        spans = ", ".join(f"{ratio * self.max_span:.1f}" for ratio in self.ratio.tolist())
        return f"banded blocks over SDPA: up to {self.max_span} keys a side, spans of the heads {spans}"
