"""Dense attention through torch's fused kernels: the only caller of ``scaled_dot_product_attention``.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnzoo.bias import Bias, OffsetBias
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


def arguments(q: Tensor, k: Tensor, mask: Mask, bias: Bias | None) -> tuple[Tensor | None, bool]:
    """``Mask`` and bias in the form that torch takes: (attn_mask, is_causal)."""
    queries, keys = q.shape[2], k.shape[2]
    # torch aligns its flag to the first key, we to the last: they agree when T equals S.
    only_causal = mask.causal and mask.key_keep is None and mask.pair_keep is None and mask.segments is None
    if only_causal and queries == keys and bias is None:
        return None, queries > 1
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
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **named)
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
    names = {value.value: name for name, value in BACKENDS.items()}
    gqa = q.shape[1] != k.shape[1]

    def ask() -> int:
        return torch._fused_sdp_choice(q, k, v, attn_mask, dropout, is_causal, enable_gqa=gqa)

    if backend == "math":
        return "math", ""
    if q.device.type not in ("cpu", "cuda"):
        return ("default", "") if backend == "auto" else (None, f"it is not offered on {q.device.type}")
    chosen = names.get(ask()) if backend == "auto" else None
    if chosen is not None and chosen != "math":
        return chosen, ""
    # torch gives its reasons only when nothing is left to fall back on, and then as warnings.
    fast = [value for name, value in BACKENDS.items() if name != "math" and backend in ("auto", name)]
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(fast):
        warnings.simplefilter("always")
        error = ""
        try:
            found = names.get(ask())
        except RuntimeError as refusal:  # how torch says that none of the kernels it may use is left
            found, error = None, str(refusal)
        if backend != "auto":
            chosen = backend if found == backend else None
    said = [str(warning.message).split(" (Triggered")[0].rstrip(" .") for warning in caught] or [error]
    return chosen, "; ".join(line for line in dict.fromkeys(said) if not line.endswith("because:"))
