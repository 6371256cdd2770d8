"""What the projection shell does to each head by itself, before and behind the mechanism.

Letters: B batch, H heads, T queries, D head width, Dv value width, E width of the input.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from attnzoo.mechanism import Mechanism

QKNormForm = Literal["rms", "layer", "l2"]
GateForm = Literal["elementwise", "head"]

L2_SCALE = 10.0
"""What cosines are multiplied with under "l2", in place of 1 / sqrt(D); the value of x-transformers."""


class QKNorm(nn.Module):
    """Normalises queries or keys of each head, so that scores cannot grow without bound.

    Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv:2010.04245; Dehghani et al. 2023, "Scaling
    Vision Transformers to 22 Billion Parameters", arXiv:2302.05442.

        rms     x / sqrt(mean(x^2) + eps) * gain
        layer   (x - mean(x)) / sqrt(var(x) + eps) * gain
        l2      x / |x| * length                no learned gain; a vector of 0 stays 0

    It acts before a rotary position, and on each of ``qk_parts`` by itself. The gain, one for all heads and parts,
    starts at 1. Left out: the scale of the first paper is learned, ours is fixed.

    Args:
        width: of a part, D / qk_parts.
        form: "rms", "layer" or "l2".
        length: of the vectors under "l2".

    Raises:
        ValueError: for another form.

    Example:
        >>> QKNorm(4, "l2")(torch.full((1, 1, 1, 4), 3.0)).flatten()
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    EPS = 1e-6

    def __init__(self, width: int, form: QKNormForm, length: float = 1.0) -> None:
        super().__init__()
        if form not in get_args(QKNormForm):
            raise ValueError(f"qk_norm must be one of {', '.join(get_args(QKNormForm))} or None, got {form!r}")
        self.width, self.form, self.length = width, form, length
        self.weight = None if form == "l2" else nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """A gain of 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> the same, of the same kind; half precision is summed in float32."""
        parts = _wide(x).unflatten(-1, (-1, self.width))
        if self.weight is None:
            square = parts.square().sum(-1, keepdim=True)
            # The gradient of |x| at 0 does not exist; there the vector stays as it is.
            out = parts * torch.where(square > 0, square, 1).rsqrt() * self.length
        elif self.form == "rms":
            out = rms_norm(parts, (self.width,), self.weight.to(parts.dtype), self.EPS)
        else:
            out = layer_norm(parts, (self.width,), self.weight.to(parts.dtype), None, self.EPS)
        return out.flatten(-2).to(x.dtype)


def query_key_norms(form: QKNormForm | None, mechanism: Mechanism) -> tuple[QKNorm | None, QKNorm | None]:
    """The norms of queries and of keys before ``mechanism``; none of the keys where they are the queries.

    Under "l2" the queries are made as long as it takes for the mechanism's 1 / sqrt(D) to leave ``L2_SCALE``.

    Raises:
        ValueError: for an unknown form, for parts that do not divide D, and for "l2" on top of another scale.
    """
    if form is None:
        return None, None
    name, parts = type(mechanism).__name__, mechanism.qk_parts
    if mechanism.head_dim % parts:
        raise ValueError(f"{name} has {parts} parts, which do not divide head_dim={mechanism.head_dim}")
    if form == "l2" and getattr(mechanism, "scale", None) is not None:
        raise ValueError(
            f"qk_norm='l2' fixes the scale at {L2_SCALE}, {name} has one of its own; leave one of them out"
        )
    width = mechanism.head_dim // parts
    queries = QKNorm(width, form, L2_SCALE * width**0.5)
    return queries, None if mechanism.traits.shared_qk else QKNorm(width, form)


class Gate(nn.Module):
    """Lets each query decide how much of each head comes out: out_h * sigmoid(W_g x).

    Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv:2505.06708. x is the input at the query, so
    the output stays linear in v.

    Args:
        dim: E.
        num_heads: H.
        value_dim: Dv.
        form: "elementwise" gates each number of a head, "head" the head as a whole.

    Raises:
        ValueError: for another form.

    Example:
        >>> Gate(16, 2, 8, "head")(torch.randn(1, 5, 16)).shape
        torch.Size([1, 2, 5, 1])
    """

    def __init__(self, dim: int, num_heads: int, value_dim: int, form: GateForm) -> None:
        super().__init__()
        if form not in get_args(GateForm):
            raise ValueError(f"gate must be one of {', '.join(get_args(GateForm))} or None, got {form!r}")
        self.num_heads, self.form = num_heads, form
        self.proj = nn.Linear(dim, num_heads * (value_dim if form == "elementwise" else 1), bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform: gates around a half."""
        nn.init.xavier_uniform_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, H, T, Dv or 1], between 0 and 1."""
        return self.proj(x).sigmoid().unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class HeadNorm(nn.Module):
    """RMSNorm over each head by itself, with a learned weight, times a fixed gain.

    As differential attention has it (Ye et al. 2024, arXiv:2410.05258), with the gain 1 - l0. A row that saw no key
    is 0 before and after.

    Args:
        value_dim: Dv.
        gain: the fixed factor.

    Example:
        >>> HeadNorm(4, gain=0.5)(torch.full((1, 1, 1, 4), 3.0)).flatten()
        tensor([0.5000, 0.5000, 0.5000, 0.5000], grad_fn=<ViewBackward0>)
    """

    EPS = 1e-5

    def __init__(self, value_dim: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.weight = nn.Parameter(torch.ones(value_dim))

    def reset_parameters(self) -> None:
        """A weight of 1."""
        nn.init.ones_(self.weight)

    def forward(self, heads: Tensor) -> Tensor:
        """[B, H, T, Dv] -> the same, of the same kind; half precision is summed in float32."""
        wide = _wide(heads)
        return (rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.EPS) * self.gain).to(heads.dtype)


def norm_of_heads(asked: bool | None, mechanism: Mechanism, value_dim: int) -> HeadNorm | None:
    """The norm behind ``mechanism``, with the gain that it asks for; whether there is one is its say if None."""
    gain = mechanism.norm_gain
    if not (gain is not None if asked is None else asked):
        return None
    return HeadNorm(value_dim, 1.0 if gain is None else gain)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, H D] -> [B, H, T, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
