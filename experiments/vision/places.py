"""Position encodings of the Vision Transformer by their names."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from attnzoo.positions import (
    Alibi,
    Learned,
    Learned2D,
    RelativeBias,
    Rotary,
    Rotary2D,
    ScoreTerms,
    Shaw,
    Sinusoidal,
    Sinusoidal2D,
    SwinBias,
    T5Bias,
    Turning,
)

PositionName = Literal[
    "none",
    "sinusoidal",
    "learned",
    "rope",
    "rope_halves",
    "alibi",
    "t5",
    "offset",
    "shaw",
    "rope_2d",
    "sincos_2d",
    "learned_2d",
    "swin",
]


def added(name: PositionName, dim: int, tokens: int, grid: tuple[int, int], prefix: int) -> nn.Module | None:
    """The encoding that is added to the embeddings, if this name is one."""
    if name not in get_args(PositionName):
        raise ValueError(f"--model.position is {name!r}; it must be one of {', '.join(get_args(PositionName))}")
    if name == "sinusoidal":
        return Sinusoidal(dim)
    if name == "learned":
        return Learned(dim, tokens)
    if name == "sincos_2d":
        return Sinusoidal2D(dim)
    if name == "learned_2d":
        return Learned2D(dim, grid, prefix)
    return None


def inside(
    name: PositionName, num_heads: int, head_dim: int, grid: tuple[int, int], prefix: int
) -> Turning | ScoreTerms | None:
    """The encoding that acts inside the attention, if this name is one."""
    if name in ("rope", "rope_halves"):
        return Rotary(head_dim, layout="neighbours" if name == "rope" else "halves")
    if name == "rope_2d":
        return Rotary2D(head_dim)
    if name == "alibi":
        return Alibi(num_heads)
    if name == "t5":
        return T5Bias(num_heads, bidirectional=True)
    if name == "shaw":
        return Shaw(head_dim)
    if name == "swin":
        return SwinBias(num_heads, grid, prefix)
    return RelativeBias(num_heads) if name == "offset" else None
