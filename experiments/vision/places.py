"""Position encodings of the Vision Transformer by their names."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from attnzoo import positions
from attnzoo.positions import Learned2D, Rotary2D, ScoreTerms, Sinusoidal2D, SwinBias, Turning

PositionName = Literal[positions.PositionName, "rope_2d", "sincos_2d", "learned_2d", "swin"]
TWO_DIMENSIONAL = ("rope_2d", "sincos_2d", "learned_2d", "swin")


def added(name: PositionName, dim: int, tokens: int, grid: tuple[int, int], prefix: int) -> nn.Module | None:
    """The encoding that is added to the embeddings, if this name is one."""
    if name not in get_args(PositionName):
        raise ValueError(f"--model.position is {name!r}; it must be one of {', '.join(get_args(PositionName))}")
    if name == "sincos_2d":
        return Sinusoidal2D(dim)
    if name == "learned_2d":
        return Learned2D(dim, grid, prefix)
    return None if name in TWO_DIMENSIONAL else positions.added(name, dim, tokens)


def inside(
    name: PositionName, num_heads: int, head_dim: int, grid: tuple[int, int], prefix: int
) -> Turning | ScoreTerms | None:
    """The encoding that acts inside the attention, if this name is one."""
    if name == "rope_2d":
        return Rotary2D(head_dim)
    if name == "swin":
        return SwinBias(num_heads, grid, prefix)
    return None if name in TWO_DIMENSIONAL else positions.inside(name, num_heads, head_dim)
