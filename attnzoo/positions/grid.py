"""Terms of the scores that know how far apart query and key stand on a grid."""

from collections.abc import Sequence
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor, nn

from attnzoo.checks import at_least
from attnzoo.positions.inside import Places, ScoreTerms


class SwinBias(ScoreTerms):
    """A learned term for each head and offset of row and column (Liu et al. 2021, arXiv:2103.14030, section 3.2).

        s_ij += table[h, row_j - row_i, column_j - column_i]        (2 rows - 1) (2 columns - 1) numbers a head

    The paper has square windows; here the grid is the whole picture, of any shape. A token before the grid has no
    row and no column. All such tokens share three learned terms a head, as in BEiT (Bao et al. 2021,
    arXiv:2106.08254): from one of them to the grid, from the grid to one of them, and among themselves.

    Places are the slots of the grid, row by row: ``key_keep`` hides patches and moves none. Fewer tokens than the
    grid has are its first ones, so a picture can be made token by token. The terms are dense, [1, H, T, S].

    Args:
        num_heads: H.
        grid: (rows, columns).
        prefix_tokens: how many tokens stand before the grid.

    Raises:
        ValueError: for a grid without places; in ``forward``, for more tokens than there are places.

    Example:
        >>> SwinBias(2, grid=(3, 4), prefix_tokens=1)(queries=13, keys=13).shape
        torch.Size([1, 2, 13, 13])
    """

    reads_places: ClassVar[bool] = False

    def __init__(self, num_heads: int, grid: tuple[int, int], prefix_tokens: int = 0) -> None:
        super().__init__()
        at_least(1, "SwinBias", num_heads=num_heads)
        at_least(0, "SwinBias", prefix_tokens=prefix_tokens)
        whole_pair = isinstance(grid, Sequence) and len(grid) == 2 and all(isinstance(n, Integral) for n in grid)
        if not whole_pair or min(grid) < 1:
            raise ValueError(f"SwinBias needs grid=(rows, columns), whole numbers from 1 up; got grid={grid!r}")
        self.num_heads, self.grid, self.prefix_tokens = num_heads, tuple(grid), prefix_tokens
        on_grid = (2 * grid[0] - 1) * (2 * grid[1] - 1)
        self.table = nn.Parameter(torch.zeros(num_heads, on_grid + (3 if prefix_tokens else 0)))

    def forward(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
        """The terms for T queries and S keys, the last query at the last key: [1, H, T, S]."""
        return self.table[:, self._entries(queries, keys, device)][None]

    def terms(self, q: Tensor, keys: int, places: Places | None) -> Tensor:
        return self(q.shape[2], keys, q.device)

    def _entries(self, queries: int, keys: int, device: torch.device | None) -> Tensor:
        rows, columns = self.grid
        tokens = self.prefix_tokens + rows * columns
        if not queries <= keys <= tokens:
            raise ValueError(
                f"SwinBias is for {self.prefix_tokens} + {rows} x {columns} = {tokens} tokens and as many queries at "
                f"most; got T={queries}, S={keys}"
            )
        place = torch.arange(keys, device=device) - self.prefix_tokens
        own = place[keys - queries :, None]
        row, column = place // columns - own // columns, place % columns - own % columns
        entry = (row + rows - 1) * (2 * columns - 1) + column + columns - 1
        if not self.prefix_tokens:
            return entry
        last = self.table.shape[1]
        entry = torch.where(own < 0, last - 3, torch.where(place < 0, last - 2, entry))
        return torch.where((own < 0) & (place < 0), last - 1, entry)
