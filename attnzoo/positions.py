"""Position encodings, and where each of them acts.

| name         | class              | acts on                     | any length | learned |
|--------------|--------------------|-----------------------------|------------|---------|
| sinusoidal   | Sinusoidal         | added to the embeddings     | yes        | no      |
| learned      | Learned            | added to the embeddings     | max_len    | yes     |
| rope         | Rotary             | q and k, neighbour pairs    | yes        | no      |
| rope_halves  | Rotary             | q and k, pairs half a width apart | yes  | no      |
| offset       | RelativeBias       | the scores                  | yes        | yes     |
| sincos_2d    | Sinusoidal2D       | added to the embeddings     | yes        | no      |
| learned_2d   | Learned2D          | added to the embeddings     | resized()  | yes     |
| rope_2d      | Rotary2D           | q and k, rows and columns   | yes        | no      |

A place is counted among the real tokens of a row (``Mask.positions``), so padding on either side changes
nothing. Angles are made in float32 whatever the model's precision, on the fly: nothing computed is saved.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from attnzoo.bias import OffsetBias


def sinusoids(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """sin and cos of position / base^(2i / dim), interleaved, float32 [..., dim]; odd widths end on a sin."""
    pairs = (dim + 1) // 2
    return torch.stack(_sin_cos(positions, pairs, dim, base), dim=-1).flatten(-2)[..., :dim]


def _sin_cos(positions: Tensor, pairs: int, dim: int, base: float) -> tuple[Tensor, Tensor]:
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


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): pairs of channels of q and k turn with the place.

    Args:
        head_dim: D, even.
        layout: which channels form a pair. "neighbours" is (2i, 2i+1), as in the paper and Llama's own code;
            "halves" is (i, i + D/2), as in transformers. ``halves_to_neighbours`` reorders between them.
        base: of the wave lengths.

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
        if head_dim % 2:
            raise ValueError(f"rotary positions turn pairs of channels, so head_dim must be even; got {head_dim}")
        if layout not in ("neighbours", "halves"):
            raise ValueError(f"layout must be 'neighbours' or 'halves', got {layout!r}")
        self.head_dim, self.layout, self.base = head_dim, layout, base

    def tables(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin, [..., D / 2]: made in float32, rounded once to ``dtype``."""
        sin, cos = _sin_cos(positions, self.head_dim // 2, self.head_dim, self.base)
        return cos.to(dtype), sin.to(dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turns x [B, H, T, D] at places int [T] or [B, T].

        Raises:
            ValueError: if there is not one place for each token.
        """
        check_places(positions, x, ())
        cos, sin = (_per_head(table) for table in self.tables(positions, x.dtype))
        return _turn(x, cos, sin, self.layout)


class Rotary2D(nn.Module):
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

    def __init__(self, head_dim: int, base: float = 100.0) -> None:
        super().__init__()
        if head_dim % 4:
            raise ValueError(f"2-D rotary positions need head_dim divisible by 4, got {head_dim}")
        self.head_dim = head_dim
        self.axis = Rotary(head_dim // 2, base=base)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turns x [B, H, T, D] at places (row, column) [T, 2] or [B, T, 2].

        Raises:
            ValueError: if there is not one (row, column) for each token.
        """
        check_places(positions, x, (2,))
        by_row, by_column = x.chunk(2, dim=-1)
        return torch.cat([self.axis(by_row, positions[..., 0]), self.axis(by_column, positions[..., 1])], dim=-1)


def halves_to_neighbours(head_dim: int) -> Tensor:
    """Order of channels that turns weights made for layout "halves" into ones for "neighbours".

    ``weight.unflatten(0, (H, D))[:, order].flatten(0, 1)`` on the q and k projections keeps every score.

    Example:
        >>> halves_to_neighbours(4)
        tensor([0, 2, 1, 3])
    """
    return torch.arange(head_dim).view(2, head_dim // 2).T.flatten()


class RelativeBias(nn.Module):
    """A learned term for each head and offset, clipped: s_ij += table[h, clip(p_j - p_i, -C, C)].

    The clipping of Shaw et al. 2018 (arXiv:1803.02155) with scalars instead of vectors.

    Keys further away than ``max_distance`` share a value; the same distance to the left and to the right
    does not.

    Args:
        num_heads: H.
        max_distance: C.

    Raises:
        ValueError: for a negative ``max_distance``.

    Example:
        >>> RelativeBias(num_heads=2, max_distance=3)(queries=1, keys=5).values.shape
        torch.Size([2, 5])
    """

    def __init__(self, num_heads: int, max_distance: int = 16) -> None:
        super().__init__()
        if max_distance < 0:
            raise ValueError(f"max_distance must be at least 0, got {max_distance}")
        self.num_heads, self.max_distance = num_heads, max_distance
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))

    def forward(self, queries: int, keys: int) -> OffsetBias:
        """The terms for T queries and S keys, the last query at the last key."""
        # Entry n stands for j - i = n - (T - 1), and the place of query i is i + S - T.
        offset = torch.arange(max(0, queries + keys - 1), device=self.table.device) - (keys - 1)
        return OffsetBias(self.table[:, offset.clamp(-self.max_distance, self.max_distance) + self.max_distance])


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


def check_places(positions: Tensor, x: Tensor, pair: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless ``positions`` are [T] or [B, T] (with a last axis of 2 on a grid) for x."""
    batch, length = x.shape[0], x.shape[2]
    fits = [(length, *pair), (1, length, *pair), (batch, length, *pair)]
    if tuple(positions.shape) not in fits:
        raise ValueError(f"positions must be {fits[0]} or {fits[2]} for {length} tokens, got {tuple(positions.shape)}")


def _per_head(table: Tensor) -> Tensor:
    return table if table.dim() == 2 else table[:, None]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    if layout == "halves":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
