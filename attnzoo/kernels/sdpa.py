"""Dense attention: through torch's fused kernels, or in plain operations for what those cannot do.

The only caller of ``scaled_dot_product_attention``.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.mask import Mask

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale q k^T + bias, over the visible keys) v; 0 for a row without a visible key.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms to be added to the scores, or None.
        dropout: share of the weights dropped, now.
        scale: 1 / sqrt(D) if None.
        backend: "auto" or a name in ``BACKENDS``.

    Returns:
        [B, H, T, Dv].

    Raises:
        ValueError: if a back end asked for by name cannot serve these inputs, with torch's reasons.
    """
    attn_mask, is_causal = arguments(q, k, mask, bias)
    return fused(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout, scale=scale, backend=backend)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The formula of ``dense`` in plain operations, which make T x S numbers, with two terms that no kernel has.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms to be added to the scores, behind the softcap, or None.
        dropout: share of the weights dropped, now.
        scale: 1 / sqrt(D) if None.
        softcap: c of s <- c tanh(s / c), or None.
        sink: [H], the score of one more key, seen by all and worth nothing, or None.

    Returns:
        [B, H, T, Dv].
    """
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]

    def by_group(x: Tensor) -> Tensor:
        """[B, H, T, n] -> [B, G, H / G * T, n]: the query heads of one group below each other."""
        return x.reshape(batch, groups, heads // groups * queries, x.shape[3])

    scores = by_group(q * (width**-0.5 if scale is None else scale)) @ k.transpose(2, 3)
    scores = scores.reshape(batch, heads, queries, keys)
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    visible = mask.visible(queries, keys, q.device)
    if bias is not None:
        terms = bias.dense(queries) if isinstance(bias, OffsetBias) else bias
        wide = wide + terms.to(wide.dtype)
        visible = terms > -torch.inf if visible is None else visible & (terms > -torch.inf)
    if sink is not None:
        wide = torch.cat([wide, sink.to(wide.dtype)[:, None, None].expand(batch, -1, queries, 1)], dim=3)
        visible = None if visible is None else pad(visible, (0, 1), value=True)
    weights = torch.dropout(masked_softmax(wide, visible)[..., :keys], dropout, dropout > 0)
    return (by_group(weights.to(v.dtype)) @ v).reshape(batch, heads, queries, v.shape[3])


def arguments(q: Tensor, k: Tensor, mask: Mask, bias: Bias | None) -> tuple[Tensor | None, bool]:
    """``Mask`` and bias in the form that torch takes: (attn_mask, is_causal)."""
    queries, keys = q.shape[2], k.shape[2]
    # torch aligns its flag to the first key, we to the last: they agree when T equals S.
    only_causal = mask.causal and mask.key_keep is None and mask.pair_keep is None and mask.segments is None
    if only_causal and queries == keys and bias is None:
        return None, True
    visible = mask.visible(queries, keys, q.device)
    if bias is None:
        return visible, False
    terms = (bias.dense(queries) if isinstance(bias, OffsetBias) else bias).to(q.dtype)
    return (terms if visible is None else torch.where(visible, terms, -torch.inf)), False


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """torch's call with grouped heads, under the back end asked for."""
    named: dict[str, Any] = {
        "dropout_p": dropout,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if backend == "auto":
        out = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **named)
        # For ONNX an exported program is taken to other kernels, whose results do not lie in the same order.
        return out.clone(memory_format=torch.contiguous_format) if torch.compiler.is_exporting() else out
    if not torch.compiler.is_compiling():
        chosen, reasons = choice(q, k, v, attn_mask, is_causal=is_causal, dropout=dropout, backend=backend)
        if chosen is None:
            raise ValueError(f"back end {backend!r} cannot serve this call: {reasons}; use backend='auto'")
    with sdpa_kernel(BACKENDS[backend]):
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **named)


def choice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
    backend: str = "auto",
) -> tuple[str | None, str]:
    """The kernel that torch will take, and what it says against the faster ones.

    Returns:
        A name in ``BACKENDS`` ("default" on devices other than CPU and CUDA), or None if the back end asked for
        refuses; and torch's reasons.
    """
    if backend == "math":
        return "math", ""
    if q.device.type not in ("cpu", "cuda"):
        return ("default", "") if backend == "auto" else (None, f"it is not offered on {q.device.type}")
    chosen = _ask(q, k, v, attn_mask, is_causal, dropout) if backend == "auto" else None
    if chosen is not None and chosen != "math":
        return chosen, ""
    # torch gives its reasons only when nothing is left to fall back on, and then as warnings.
    fast = [value for name, value in BACKENDS.items() if name != "math" and backend in ("auto", name)]
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(fast):
        warnings.simplefilter("always")
        error = ""
        try:
            found = _ask(q, k, v, attn_mask, is_causal, dropout)
        except RuntimeError as refusal:  # how torch says that none of the kernels it may use is left
            found, error = None, str(refusal)
        if backend != "auto":
            chosen = backend if found == backend else None
    said = [str(warning.message).split(" (Triggered")[0].rstrip(" .") for warning in caught] or [error]
    return chosen, "; ".join(line for line in dict.fromkeys(said) if not line.endswith("because:"))


def is_fused(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *, is_causal: bool = False, dropout: float = 0.0
) -> bool:
    """Whether torch surely takes a kernel that makes no T x S numbers of its own."""
    if torch.compiler.is_compiling():
        # torch cannot be asked in a graph; this much is known of its kernel for a CPU.
        return q.device.type == "cpu" and dropout == 0 and q.shape[3] == v.shape[3]
    known = q.device.type in ("cpu", "cuda")
    return known and _ask(q, k, v, attn_mask, is_causal, dropout) in ("flash", "efficient", "cudnn")


def _ask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout: float) -> str | None:
    names = {value.value: name for name, value in BACKENDS.items()}
    gqa = q.shape[1] != k.shape[1]
    return names.get(torch._fused_sdp_choice(q, k, v, attn_mask, dropout, is_causal, enable_gqa=gqa))
