"""Differential attention: the difference of two softmax maps, which cancels what both of them attend to.

Ye et al. 2024, "Differential Transformer", arXiv:2410.05258, section 2.1.

    q = [q1 ; q2],  k = [k1 ; k2], halves of D/2
    A1 = softmax(q1 k1^T / sqrt(D/2) + bias),  A2 = softmax(q2 k2^T / sqrt(D/2) + bias)    over the visible keys
    o  = (A1 - lambda A2) v
    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + l0,   l0 = 0.8 - 0.6 exp(-0.3 layer),  layer from 0

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]
    lq1, lk1, lq2, lk2 [D/2], learned, one set for all heads

Weights may be negative; a row sums to 1 - lambda. A rotary position turns each half by itself. The paper's RMSNorm of
each head, times 1 - l0, follows in the shell, by norm_gain: behind it the output is no longer linear in v.

Deviations: none in the formula; the paper counts layers from 1 and writes exp(-0.3 (l - 1)), the same numbers. It
takes half as many heads as a Transformer of the same width, so that a half of a head is as wide as a head there: with
the shell, give half of num_heads.

Use it when attention should be sparse without being told where: long inputs in which few tokens matter, and the many
others should cancel instead of adding up. Masks, biases, positions and decoding are those of Softmax.

Not when time is short: with equal H and D it costs up to twice Softmax. Nor when maps are read as shares, for weights
below 0 have no meaning as such; nor with narrow heads: at D = 16 a half scores with 8 numbers.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.sdpa import dense
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, whole
from attnzoo.traits import Traits


class Differential(Mechanism):
    """Two softmax maps of half the width each, the second one times lambda subtracted from the first.

    Args:
        num_heads: H.
        head_dim: D, even.
        dropout: share of the weights of either map dropped in training.
        layer: a fact of the site: depth from 0, which sets where lambda starts; 0 if None.

    Attributes:
        lambda_init: l0.

    Raises:
        ValueError: for an odd ``head_dim`` or a negative ``layer``.

    Example:
        >>> attention = Differential(2, 8)
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> attention(q, k, v, Mask(causal=True)).shape
        torch.Size([1, 2, 5, 8])
        >>> round(attention.lambda_init, 4), round(attention.norm_gain, 4)
        (0.2, 0.8)
    """

    traits = Traits(normalised=False, exact=False, complexity="T S D")
    reasons = {"normalised": "a row of the difference sums to 1 - lambda and may be negative; Softmax has shares"}
    qk_parts = 2

    def __init__(self, num_heads: int, head_dim: int, *, dropout: float = 0.0, layer: int | None = None) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if head_dim % 2:
            raise ValueError(f"Differential: head_dim must be even, for q and k fall into two halves; got {head_dim}")
        whole("Differential", layer=layer)
        if layer is not None and layer < 0:
            raise ValueError(f"Differential: layer counts from 0, got {layer}")
        self.layer = layer or 0
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        self.norm_gain = 1 - self.lambda_init
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(head_dim // 2)) for _ in range(4)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.1), so that lambda starts near ``lambda_init``."""
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=0.1)

    def lam(self) -> Tensor:
        """The lambda of now, a scalar in at least float32."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = (self.lambda_q1.to(wide) * self.lambda_k1.to(wide)).sum().exp()
        second = (self.lambda_q2.to(wide) * self.lambda_k2.to(wide)).sum().exp()
        return first - second + self.lambda_init

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        half = self.head_dim // 2
        # Fused kernels want q and k as wide as v; zeros there add nothing to a score.
        filler = max(0, v.shape[3] - half)

        def stacked(x: Tensor) -> Tensor:
            """Both halves as heads: [B, H, T, D] -> [B, 2 H, T, D/2 and zeros], the first halves first."""
            return pad(torch.cat(x.split(half, dim=-1), dim=1), (0, filler))

        mask = mask._replace(pair_keep=None if mask.pair_keep is None else _twice(mask.pair_keep))
        if isinstance(bias, OffsetBias):
            bias = OffsetBias(bias.values.repeat(2, 1))
        elif bias is not None:
            bias = _twice(bias)
        dropout = self.dropout if self.training else 0.0
        both = torch.cat([v, v], dim=1)
        out = dense(stacked(q), stacked(keys), both, mask, bias, dropout=dropout, scale=half**-0.5)
        first, second = out.chunk(2, dim=1)
        return first - self.lam().to(out.dtype) * second

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how the two maps are made."""
        return f"SDPA, one call for both maps: {2 * self.num_heads} heads of width {self.head_dim // 2}"


def _twice(x: Tensor) -> Tensor:
    """A term for each head, for the heads of both maps; one for all heads stays as it is."""
    return x.repeat(1, 2, 1, 1) if x.dim() == 4 and x.shape[1] > 1 else x
