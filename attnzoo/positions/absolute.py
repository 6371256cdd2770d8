"""Encodings that are added to the embeddings: sinusoids and learned tables, along a line or on a grid."""

import torch
from torch import Tensor, nn

from attnzoo.checks import at_least, check_grid


def sinusoids(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """sin and cos of position / base^(2i / dim), interleaved, float32 [..., dim]; odd widths end on a sin."""
    return torch.stack(sin_cos(positions, (dim + 1) // 2, dim, base), dim=-1).flatten(-2)[..., :dim]


def sin_cos(positions: Tensor, pairs: int, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """sin and cos of position / base^(2i / dim) for i below ``pairs``: float32 [..., pairs] each."""
    power = torch.arange(pairs, device=positions.device, dtype=torch.float32) * (-2.0 / dim)
    angle = positions[..., None].float() * base**power
    return angle.sin(), angle.cos()


class Sinusoidal(nn.Module):
    """Fixed sinusoids (Vaswani et al. 2017, arXiv:1706.03762, section 3.5), interleaved as in the paper.

    Args:
        dim: width; odd ones end on a sin.
        base: of the wave lengths.

    Example:
        >>> Sinusoidal(4)(torch.tensor([1]))
        tensor([[0.8415, 0.5403, 0.0100, 0.9999]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        at_least(1, "Sinusoidal", dim=dim)
        self.dim, self.base = dim, base

    def forward(self, positions: Tensor) -> Tensor:
        """int [T] or [B, T] -> float32 [..., dim]."""
        return sinusoids(positions, self.dim, self.base)


class Learned(nn.Module):
    """A learned row for each of ``max_len`` places.

    Args:
        dim: width.
        max_len: how many places.

    Raises:
        ValueError: in ``forward``, for a place outside the table, naming both numbers.

    Example:
        >>> Learned(8, max_len=16)(torch.arange(5)).shape
        torch.Size([5, 8])
    """

    def __init__(self, dim: int, max_len: int) -> None:
        super().__init__()
        at_least(1, "Learned", dim=dim, max_len=max_len)
        self.table = nn.Parameter(torch.empty(max_len, dim))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """int [T] or [B, T] -> [..., dim]."""
        # On an accelerator the places are not read back, which would stall it: their number is checked.
        on_cpu = positions.device.type == "cpu" and not torch.compiler.is_compiling()
        needed = int(positions.max()) + 1 if on_cpu and positions.numel() else positions.shape[-1]
        if on_cpu and positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"places must be at least 0, got {int(positions.min())}")
        if needed > len(self.table):
            raise ValueError(f"{needed} places are needed, the learned position table has {len(self.table)} (max_len)")
        return self.table[positions]


class Sinusoidal2D(nn.Module):
    """Fixed sinusoids on a grid: the first half of the channels from the row, the second from the column.

    As in the plain ViT-S/16 of Beyer et al. 2022 (arXiv:2205.01580).

    Args:
        dim: width, a multiple of 4.
        base: of the wave lengths.

    Raises:
        ValueError: if ``dim`` is no multiple of 4.

    Example:
        >>> Sinusoidal2D(8)(torch.tensor([[0, 0], [0, 1]])).shape
        torch.Size([2, 8])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        at_least(1, "Sinusoidal2D", dim=dim)
        if dim % 4:
            raise ValueError(f"2-D sinusoids need a width divisible by 4, got {dim}")
        self.dim, self.base = dim, base

    def forward(self, positions: Tensor) -> Tensor:
        """(row, column) [..., T, 2] -> float32 [..., T, dim]."""
        return torch.cat([sinusoids(positions[..., axis], self.dim // 2, self.base) for axis in (0, 1)], dim=-1)


class Learned2D(nn.Module):
    """A learned row for each place of a grid, and for each prefix token (class token) before it.

    As in the Vision Transformer, resized the way it is fine-tuned (Dosovitskiy et al. 2020, arXiv:2010.11929,
    section 3.2).

    Args:
        dim: width.
        grid: (rows, columns).
        prefix_tokens: how many tokens stand before the grid.

    Example:
        >>> Learned2D(8, grid=(4, 6), prefix_tokens=1).resized((8, 12)).table.shape
        torch.Size([97, 8])
    """

    def __init__(self, dim: int, grid: tuple[int, int], prefix_tokens: int = 0) -> None:
        super().__init__()
        at_least(1, "Learned2D", dim=dim)
        at_least(0, "Learned2D", prefix_tokens=prefix_tokens)
        check_grid("Learned2D", grid, axes=2)
        self.grid, self.prefix_tokens = tuple(grid), prefix_tokens
        self.table = nn.Parameter(torch.empty(prefix_tokens + grid[0] * grid[1], dim))
        nn.init.normal_(self.table, std=0.02)

    def forward(self) -> Tensor:
        """[prefix + rows * columns, dim], row by row."""
        return self.table

    def resized(self, grid: tuple[int, int]) -> "Learned2D":
        """The same table for another grid, by bicubic interpolation; prefix rows stay as they are."""
        new = Learned2D(self.table.shape[1], grid, self.prefix_tokens).to(self.table)
        prefix, places = self.table[: self.prefix_tokens], self.table[self.prefix_tokens :]
        picture = places.unflatten(0, self.grid).permute(2, 0, 1)[None]
        picture = nn.functional.interpolate(picture, size=grid, mode="bicubic", align_corners=False)
        with torch.no_grad():
            new.table.copy_(torch.cat([prefix, picture[0].permute(1, 2, 0).flatten(0, 1)]))
        return new
