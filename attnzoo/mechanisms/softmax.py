"""Scaled dot-product attention.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.1.

    s_ij = q_i . k_j / sqrt(D) + bias_ij        over the visible keys j in V(i)
    a_ij = exp(s_ij) / sum_{l in V(i)} exp(s_il)
    o_i  = sum_j a_ij v_j

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]

Left out: nothing. Dropout acts on a_ij, after the softmax, in training only.
"""

import math
from typing import Literal, get_args

from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.kernels import sdpa
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism
from attnzoo.traits import Traits

Backend = Literal["auto", "flash", "efficient", "cudnn", "math"]


class Softmax(Mechanism):
    """Dense softmax attention through torch's fused kernels.

    Args:
        num_heads: H.
        head_dim: D.
        backend: "auto" lets torch choose; a name asks for that kernel and raises where it cannot serve.
        scale: what the dot products are multiplied with; 1 / sqrt(D) if None. 1.0 gives Luong's form.
        dropout: share of the attention weights dropped in training. torch has no fused kernel with
            dropout on a CPU, so there it takes the one that makes T x S numbers.

    Raises:
        ValueError: for an unknown back end, or a scale that is not finite.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(2, 4, 5, 8)
        >>> Softmax(4, 8)(q, k, v, Mask(causal=True)).shape
        torch.Size([2, 4, 5, 8])
    """

    traits = Traits(complexity="T S D")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        backend: Backend = "auto",
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if backend not in get_args(Backend):
            raise ValueError(f"Softmax: backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"Softmax: scale must be a finite number, got {scale}")
        self.backend = backend
        self.scale = scale

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return sdpa.dense(q, keys, v, mask, bias, dropout=dropout, scale=self.scale, backend=self.backend)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Names the kernel that torch will run for these inputs, and why not a faster one."""
        attn_mask, is_causal = sdpa.arguments(q, k, as_mask(mask), bias)
        dropout = self.dropout if self.training else 0.0
        chosen, reasons = sdpa.choice(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout, backend=self.backend)
        if chosen is None:
            return f"none: back end {self.backend!r} refuses ({reasons})"
        asked = "chosen by torch" if self.backend == "auto" else "asked for"
        return f"SDPA {chosen} kernel on {q.device.type}, {asked}" + (f" ({reasons})" if reasons else "")
