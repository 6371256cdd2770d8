"""Flash attention: exact softmax attention in linear memory.

Dao, Fu, Ermon, Rudra, Re 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
arXiv:2205.14135; Dao 2023, "FlashAttention-2", arXiv:2307.08691; Rabe and Staats 2021, "Self-attention Does Not
Need O(n^2) Memory", arXiv:2112.05682.

    s_ij = q_i . k_j / sqrt(D)                    with a softcap: s_ij <- c tanh(s_ij / c)
    a_ij = exp(s_ij + bias_ij) / sum_{l in V(i)} exp(s_il + bias_il)      over the visible keys j in V(i)
    o_i  = sum_j a_ij v_j

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]

The formula of Softmax, and a promise: no tensor of T x S elements, forward or backward, on any device, under
dropout, padding, packed segments and biases that are learned. Where torch's fused kernels keep it by themselves they
run. Elsewhere queries are taken in chunks, as by Rabe and Staats, and each chunk is made again for its gradients.

We deviate in the chunks: they tile the queries alone and hold chunk x S numbers, where the paper also tiles the
keys with a running maximum. Left out: the sink of Softmax, and block-sparse FlashAttention, which BlockSparse is.

Use it when sequences are long and dropout, padding under causal, segments or a relative bias would make Softmax hold
T x S numbers. Causal chunks skip the keys ahead of them, so they are often faster than Softmax, too.

Not when the sequence is short, where there is no memory to save, or the dense bias or pair mask that you pass is
itself T x S. The time is still T S D: Local or Linear make that linear as well.
"""

import math

from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.kernels import sdpa
from attnzoo.kernels.tiled import CHUNK, obstacle, tiled
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism
from attnzoo.traits import Traits


class Flash(Mechanism):
    """Dense softmax attention that never makes a tensor of T x S elements.

    Args:
        num_heads: H.
        head_dim: D.
        scale: what the dot products are multiplied with; 1 / sqrt(D) if None.
        softcap: c of s <- c tanh(s / c), which holds the scores within -c .. c before mask and bias.
        dropout: share of the attention weights dropped in training.

    Raises:
        ValueError: for a scale that is not finite, or a softcap that is not finite and above 0.

    Example:
        >>> import torch
        >>> q = k = v = torch.randn(1, 2, 300, 8)
        >>> Flash(2, 8).explain(q, k, v)
        'SDPA flash kernel on cpu, all queries at once'
        >>> Flash(2, 8, softcap=50.0).explain(q, k, v)
        'chunks of 128 queries, each made again for its gradients (no fused kernel has a softcap)'
    """

    traits = Traits(linear_memory=True, complexity="T S D")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"Flash: scale must be a finite number, got {scale}")
        if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
            raise ValueError(f"Flash: softcap must be a finite number above 0, got {softcap}")
        self.scale = scale
        self.softcap = softcap

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return tiled(q, keys, v, mask, bias, dropout=dropout, scale=self.scale, softcap=self.softcap)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says whether a fused kernel takes all queries at once, or else in how many chunks they go, and why."""
        mask = as_mask(mask)
        reason = obstacle(q, k, mask, bias, self.softcap)
        if reason is None:
            attn_mask, is_causal = sdpa.arguments(q, k, mask, bias)
            dropout = self.dropout if self.training else 0.0
            chosen, reason = sdpa.choice(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout)
            if sdpa.is_fused(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout):
                return f"SDPA {chosen} kernel on {q.device.type}, all queries at once"
        if q.shape[2] <= CHUNK:
            return f"one chunk of {q.shape[2]} queries ({reason})"
        return f"chunks of {CHUNK} queries, each made again for its gradients ({reason})"
