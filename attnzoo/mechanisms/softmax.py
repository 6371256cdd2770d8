"""Scaled dot-product attention, with an optional softcap and an optional learned sink.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.1; softcap: Gemma Team 2024,
"Gemma 2", arXiv:2408.00118; sink: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card",
arXiv:2508.10925.

    s_ij = q_i . k_j / sqrt(D)                    with a softcap: s_ij <- c tanh(s_ij / c)
    e_ij = exp(s_ij + bias_ij)                    over the visible keys j in V(i)
    a_ij = e_ij / sum_{l in V(i)} e_il            with a sink:    e_ij / (exp(b_h) + sum_l e_il)
    o_i  = sum_j a_ij v_j

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]   b [H]

Dropout acts on a_ij, after the softmax, in training only. The bias is added behind the softcap, so that a bias of
-inf still hides its key. Left out: nothing.

Use it when you want attention as everyone means it: the measure for all others here, and up to some thousand tokens
mostly the fastest of them. A softcap or a sink are there for the models that were trained with one.

Not when sequences are long: time grows with T S, and memory does with dropout on a CPU, a bias, pairs, a softcap or
a sink. Flash is the same in linear memory, without the sink.
"""

import dataclasses
import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias
from attnzoo.kernels import sdpa
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism, number, yes_or_no
from attnzoo.traits import Traits

Backend = Literal["auto", "flash", "efficient", "cudnn", "math", "plain"]


class Softmax(Mechanism):
    """Dense softmax attention through torch's fused kernels.

    Args:
        num_heads: H.
        head_dim: D.
        backend: "auto" lets torch choose; a name asks for that kernel and raises where it cannot serve. "plain" is
            no kernel but plain operations on T x S numbers: on a CPU, in bfloat16 and for some dozens of tokens,
            they train several times faster than the fused kernel.
        scale: what the dot products are multiplied with; 1 / sqrt(D) if None. 1.0 gives Luong's form.
        softcap: c of s <- c tanh(s / c), which holds the scores within -c .. c before mask and bias. No fused
            kernel can do it, so it is done in plain operations on T x S numbers.
        sink: a learned score b_h for each head that takes a share of every softmax and gives nothing for it: the
            weights of a row then sum to less than 1, which ``traits`` of the object says. It starts at 0. Plain
            operations too.
        dropout: share of the attention weights dropped in training. torch has no fused kernel with
            dropout on a CPU, so there it takes the one that makes T x S numbers.

    Raises:
        ValueError: for an unknown back end, a scale that is not finite, a softcap that is not finite and above 0, or
            a fused back end asked for by name beside a softcap or a sink.

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
        softcap: float | None = None,
        sink: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if backend not in get_args(Backend):
            raise ValueError(f"Softmax: backend must be one of {', '.join(get_args(Backend))}; got {backend!r}")
        number("Softmax", scale=scale, softcap=softcap)
        yes_or_no("Softmax", sink=sink)
        if scale is not None and not math.isfinite(scale):
            raise ValueError(f"Softmax: scale must be a finite number, got {scale}")
        if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
            raise ValueError(f"Softmax: softcap must be a finite number above 0, got {softcap}")
        if (softcap is not None or sink) and backend not in ("auto", "math", "plain"):
            raise ValueError(
                f"Softmax: backend={backend!r} has neither softcap nor sink; take backend='auto' or leave them out"
            )
        self.backend = backend
        self.scale = scale
        self.softcap = softcap
        self.sink = sink
        self.sink_scores = nn.Parameter(torch.empty(num_heads)) if sink else None
        if sink:
            # A fact of this object alone: the class, which the catalogue shows, has no sink.
            self.traits = dataclasses.replace(self.traits, normalised=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sinks of score 0."""
        if self.sink_scores is not None:
            nn.init.zeros_(self.sink_scores)

    @property
    def _is_plain(self) -> bool:
        return self.backend == "plain" or self.softcap is not None or self.sink

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if not self._is_plain:
            return sdpa.dense(q, keys, v, mask, bias, dropout=dropout, scale=self.scale, backend=self.backend)
        sink = self.sink_scores
        return sdpa.explicit(q, keys, v, mask, bias, dropout=dropout, scale=self.scale, softcap=self.softcap, sink=sink)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Names the kernel that torch will run for these inputs, and why not a faster one."""
        if self._is_plain:
            why = "asked for" if self.backend == "plain" else "no fused kernel has a softcap or a sink"
            return f"plain torch operations on T x S numbers ({why})"
        attn_mask, is_causal = sdpa.arguments(q, k, as_mask(mask), bias)
        dropout = self.dropout if self.training else 0.0
        chosen, reasons = sdpa.choice(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout, backend=self.backend)
        if chosen is None:
            return f"none: back end {self.backend!r} refuses ({reasons})"
        asked = "chosen by torch" if self.backend == "auto" else "asked for"
        return f"SDPA {chosen} kernel on {q.device.type}, {asked}" + (f" ({reasons})" if reasons else "")
