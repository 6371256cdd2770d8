"""Rotary positions: pairs of channels of q and k turn with the place, so a score depends on offsets alone."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnzoo.checks import at_least, number
from attnzoo.positions.absolute import sin_cos
from attnzoo.positions.inside import Turning, check_places


class Rotary(Turning):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs of channels of q and k turn with the place.

    Args:
        head_dim: D, even.
        layout: which channels form a pair. "neighbours" is (2i, 2i+1), as in the paper and Llama's own code;
            "halves" is (i, i + D/2), as in transformers. ``halves_to_neighbours`` reorders between them.
        base: of the wave lengths.

    A mechanism whose q and k fall into ``qk_parts`` takes the same ``Rotary(head_dim)``: the shell turns each
    part as a head of its own.

    Raises:
        ValueError: for an odd ``head_dim`` or an unknown layout.

    Example:
        >>> x = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4)
        >>> Rotary(4)(x, torch.tensor([1])).flatten()
        tensor([0.5403, 0.8415, 0.0000, 0.0000])
    """

    def __init__(
        self, head_dim: int, layout: Literal["neighbours", "halves"] = "neighbours", base: float = 10000.0
    ) -> None:
        super().__init__()
        at_least(1, "Rotary", head_dim=head_dim)
        number("Rotary", base=base)
        if head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of channels, so head_dim must be even; got {head_dim}")
        if layout not in ("neighbours", "halves"):
            raise ValueError(f"layout must be 'neighbours' or 'halves', got {layout!r}")
        self.head_dim, self.layout, self.base = head_dim, layout, base

    def tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, [..., width / 2] with D for the width if None: made in float32, rounded once to ``dtype``."""
        width = self.head_dim if width is None else width
        sin, cos = sin_cos(positions, width // 2, width, self.base)
        return cos.to(dtype), sin.to(dtype)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        check_places(positions, x, ())
        cos, sin = (_per_head(table) for table in self.tables(positions, x.dtype, x.shape[-1]))
        if self.layout == "halves":
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


class Rotary2D(Turning):
    """Rotary positions on a grid: the first half of the channels turns by the row, the second by the column.

    The axial form of rotary positions for pictures (Heo et al. 2024, arXiv:2403.13298).

    Args:
        head_dim: D, a multiple of 4.
        base: of the wave lengths; small, since grids are short.

    Raises:
        ValueError: if ``head_dim`` is no multiple of 4.

    Example:
        >>> places = torch.cartesian_prod(torch.arange(2), torch.arange(3))     # a grid of 2 x 3
        >>> Rotary2D(8)(torch.randn(1, 2, 6, 8), places).shape
        torch.Size([1, 2, 6, 8])
    """

    multiple: ClassVar[int] = 4

    def __init__(self, head_dim: int, base: float = 100.0) -> None:
        super().__init__()
        at_least(1, "Rotary2D", head_dim=head_dim)
        if head_dim % 4:
            raise ValueError(f"2-D rotary positions need head_dim divisible by 4, got {head_dim}")
        self.head_dim = head_dim
        self.axis = Rotary(head_dim // 2, base=base)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        check_places(positions, x, (2,))
        by_row, by_column = x.chunk(2, dim=-1)
        turned = self.axis.turn(by_row, positions[..., 0]), self.axis.turn(by_column, positions[..., 1])
        return torch.cat(turned, dim=-1)


def halves_to_neighbours(head_dim: int) -> Tensor:
    """Order of channels that turns weights made for layout "halves" into ones for "neighbours".

    ``weight.unflatten(0, (H, D))[:, order].flatten(0, 1)`` on the q and k projections keeps every score.

    Example:
        >>> halves_to_neighbours(4)
        tensor([0, 2, 1, 3])
    """
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


def _per_head(table: Tensor) -> Tensor:
    return table if table.dim() == 2 else table[:, None]
