"""Block-sparse attention.

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, section 5.5;
Zaheer et al. 2020, "Big Bird", arXiv:2007.14062, section 2 and appendix D, for random blocks.

    V(i) = { j : layout[p div b, j div b] },  b = block_size, and j <= p where causal
    o_i  = softmax over V(i) of (q_i . k_j / sqrt(D) + bias_ij)  times v_j

    p, j: places, counted among the real tokens of the sequence that a token belongs to
    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv];   L = local_blocks, R = random_blocks

Layouts, for a row r of blocks and a column c:
    "fixed"   r div L = c div L, or c mod L >= L - global_blocks: runs of L blocks, the last of each seen by all
    "random"  |r - c| <= (L - 1) / 2 (causal: 0 <= r - c < L), or c < global_blocks, or c is one of R random blocks
    [N][N] or [H][N][N] of 0 and 1: any other, for up to N b tokens; a row without a block gives 0

Deviations: where Big Bird draws random blocks from the whole row, they are drawn from before the window here, one from
each of R equal parts, so that a longer input never changes an earlier row and no block comes twice. Its global *rows*
are GlobalLocal's. Left out: a fixed layout whose heads have different global blocks.

Use it when you know which blocks matter, or want Child's or Big Bird's pattern as published: with b = 32 and more it
costs what the visible blocks cost, and any layout can be written down.

Not when sequences are short, or blocks much smaller than D: gathering keys then takes longer than multiplying them.
"fixed" sees one column of blocks more for each L blocks of length: its time is quadratic, if a fraction of Softmax's.
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, arange

from attnzoo.bias import Bias
from attnzoo.kernels.flex import Backend, check_backend, flex
from attnzoo.kernels.gathered import gathered, pattern
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least, whole
from attnzoo.traits import Traits

Named = Literal["fixed", "random"]

DRAWS = 1024
"""Rows of blocks that have random numbers of their own; row 1024 takes those of row 0 again, for another range."""


class BlockSparse(Mechanism):
    """Queries and keys in blocks; a layout says which block of queries sees which block of keys.

    Args:
        num_heads: H.
        head_dim: D.
        block_size: b, tokens in a block.
        layout: "fixed", "random", or nested lists of 0 and 1, [N][N] or [H][N][N].
        local_blocks: L, odd for "random"; 3 if None. Named layouts only.
        global_blocks: blocks seen from everywhere, see above; 1 if None. Named layouts only.
        random_blocks: R; 1 if None. Only for "random".
        seed: random blocks follow from it, from ``layer``, the head and the row.
        backend: "blocks" gathers keys for the ordinary kernels; "flex" is torch's FlexAttention (kernels/flex.py).
        dropout: share of the attention weights dropped in training.
        max_len: a fact of the site; lets a layout that is too short be refused at construction.
        layer: a fact of the site; gives each layer random blocks of its own.

    Raises:
        ValueError: for options that make no sense, or that the layout does not read; for more keys than a written
            layout covers.

    Example:
        >>> q = k = v = torch.randn(1, 2, 100, 8)
        >>> BlockSparse(2, 8, block_size=16)(q, k, v).shape
        torch.Size([1, 2, 100, 8])
        >>> BlockSparse(2, 8, block_size=2, layout=[[1, 0], [1, 1]]).pattern(4, 4, causal=True).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    traits = Traits(cross=False, linear_memory=True, complexity="(visible pairs) D")
    reasons = {"cross": "a layout needs keys that stand at the places of the queries; Softmax or Additive can cross"}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        block_size: int = 8,
        layout: Named | list[list[int]] | list[list[list[int]]] = "fixed",
        local_blocks: int | None = None,
        global_blocks: int | None = None,
        random_blocks: int | None = None,
        seed: int = 0,
        backend: Backend = "blocks",
        dropout: float = 0.0,
        max_len: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "BlockSparse", block_size=block_size, max_len=max_len)
        at_least(0, "BlockSparse", layer=layer)
        whole("BlockSparse", seed=seed)
        check_backend("BlockSparse", backend, dropout)
        if isinstance(layout, str) and layout not in get_args(Named):
            raise ValueError(f"BlockSparse: layout must be nested lists or one of {get_args(Named)}, got {layout!r}")
        named, random = isinstance(layout, str), layout == "random"
        counts = []
        for name, value, read, least, default in (
            ("local_blocks", local_blocks, named, 1, 3),
            ("global_blocks", global_blocks, named, 0, 1),
            ("random_blocks", random_blocks, random, 0, 1),
        ):
            if value is not None and not read:
                raise ValueError(f"BlockSparse: {name}={value} is not read by this layout; leave it None")
            at_least(least, "BlockSparse", **{name: value})
            counts.append(0 if not read else default if value is None else value)
        self.block_size = block_size
        self.layout = layout
        self.local_blocks, self.global_blocks, self.random_blocks = counts
        self.seed = seed
        self.backend = backend
        self.layer = layer
        if random and self.local_blocks % 2 == 0:
            raise ValueError(f"BlockSparse: local_blocks must be odd for layout='random', got {local_blocks}")
        if layout == "fixed" and self.global_blocks > self.local_blocks:
            raise ValueError(
                f"BlockSparse: global_blocks={self.global_blocks} are more than the local_blocks={self.local_blocks} "
                f"that they are the last of"
            )
        self.table: Tensor
        if random:
            self.register_buffer("table", torch.empty(num_heads, DRAWS, self.random_blocks, dtype=torch.int32))
            self.reset_parameters()
        elif not isinstance(layout, str):
            self.register_buffer("table", _written(layout, num_heads))
            self.longest_row = max(1, int(self.table.sum(-1).max()))
        if max_len is not None:
            self._check_length(max_len)

    def reset_parameters(self) -> None:
        """Draws the numbers that random blocks are made of."""
        if self.layout == "random":
            draw = torch.Generator().manual_seed((self.seed * 1_000_003 + (self.layer or 0)) % (1 << 63))
            self.table.copy_(torch.randint(1 << 31, self.table.shape, generator=draw, device="cpu"))

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        self._check_length(keys.shape[2])
        dropout = self.dropout if self.training else 0.0
        if self.backend == "flex":
            sees = partial(self._sees, causal=mask.causal)
            return flex(q, keys, v, mask, bias, sees=sees, owner="BlockSparse", dropout=dropout)
        lists = partial(self._lists, blocks=-(-keys.shape[2] // self.block_size), causal=mask.causal)
        return gathered(q, keys, v, mask, bias, block=self.block_size, lists=lists, dropout=dropout)

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor:
        self._check_length(keys)
        device = None if self.layout == "fixed" else self.table.device
        return pattern(partial(self._sees, causal=causal), self.num_heads, queries, keys, causal, device)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says which back end runs."""
        if self.backend == "flex":
            return "FlexAttention, as backend='flex' asks"
        return f"SDPA over blocks of {self.block_size} queries and the keys gathered for each"

    def extra_repr(self) -> str:
        """A written layout is told by its size."""
        text = super().extra_repr()
        return text if isinstance(self.layout, str) else text.replace(f"{self.layout}", f"{tuple(self.table.shape)}")

    def _check_length(self, keys: int) -> None:
        if not isinstance(self.layout, str) and keys > self.table.shape[1] * self.block_size:
            raise ValueError(
                f"BlockSparse: a layout of {self.table.shape[1]} blocks of {self.block_size} covers "
                f"{self.table.shape[1] * self.block_size} tokens, {keys} came; write a larger one"
            )

    def _reach(self, causal: bool) -> tuple[int, int]:
        """How many blocks before and after its own a row of "random" sees."""
        return (self.local_blocks - 1, 0) if causal else (self.local_blocks // 2, self.local_blocks // 2)

    def _drawn(self, head: Tensor, row: Tensor, number: int) -> Tensor:
        """The random block of a row from the given part of those before its window; -1 where that is empty."""
        free = (row - self.local_blocks + 1 - self.global_blocks).clamp(min=0)
        begin, end = (free * part // self.random_blocks for part in (number, number + 1))
        drawn = self.table[:, :, number][head, row % DRAWS] % (end - begin).clamp(min=1)
        return torch.where(end > begin, self.global_blocks + begin + drawn, -1)

    def _sees(self, head: Tensor, place: Tensor, key: Tensor, causal: bool) -> Tensor:
        row, column = place // self.block_size, key // self.block_size
        if self.layout == "fixed":
            run = self.local_blocks
            return (row // run == column // run) | (column % run >= run - self.global_blocks)
        if self.layout == "random":
            before, after = self._reach(causal)
            seen = (column >= row - before) & (column <= row + after) | (column < self.global_blocks)
            for number in range(self.random_blocks):
                seen = seen | (column == self._drawn(head, row, number))
            return seen
        layouts, rows, _ = self.table.shape
        own = head if layouts > 1 else 0
        return self.table[own, row.clamp(0, rows - 1), column.clamp(0, rows - 1)] & (row >= 0)

    def _lists(self, start: Tensor, size: int, blocks: int, causal: bool) -> Tensor:
        row = (start // self.block_size)[:, None, :, None]
        found = self._columns(row, blocks, causal)
        return (found[..., None] * self.block_size + arange(self.block_size, device=start.device)).flatten(-2)

    def _columns(self, row: Tensor, blocks: int, causal: bool) -> Tensor:
        """The blocks that each row [B|1, 1, n, 1] sees, [B|1, H|1, n, any], negative where there is none."""
        device = row.device
        if self.layout == "fixed":
            near = self.local_blocks
            own = row // near * near + arange(near, device=device)
            begins = arange(0, blocks, near, device=device)[:, None]
            last = (begins + arange(near - self.global_blocks, near, device=device)).flatten()
            return torch.cat([own, torch.where(last // near == row // near, -1, last)], -1)
        if self.layout == "random":
            before, after = self._reach(causal)
            head = arange(self.num_heads, device=device)[:, None, None]
            window = row + arange(-before, after + 1, device=device)
            window = window.masked_fill(window < self.global_blocks, -1)
            seen = [window, arange(self.global_blocks, device=device).expand(*row.shape[:3], -1)]
            drawn = [self._drawn(head, row, number) for number in range(self.random_blocks)]
            return torch.cat([x.expand(-1, self.num_heads, -1, -1) for x in (*seen, *drawn)], -1)
        chosen = self.table[:, row[:, 0, :, 0].clamp(0, self.table.shape[1] - 1)].transpose(0, 1) & (row >= 0)
        count = chosen.shape[-1]
        # No two values are equal, so the order is the same from every sort; ONNX has none that is stable.
        found = (arange(count, device=device) + count * ~chosen).argsort(dim=-1)[..., : self.longest_row]
        return torch.where(chosen.gather(-1, found), found, -1)


def _written(layout: object, num_heads: int) -> Tensor:
    """[1 or H, N, N] bool from nested lists."""
    try:
        if not isinstance(layout, (list, tuple)):
            raise ValueError
        table = torch.tensor(layout, device="cpu")
    except (ValueError, TypeError):
        table = torch.empty(0)
    table = table[None] if table.dim() == 2 else table
    square = table.dim() == 3 and table.shape[0] in (1, num_heads) and table.shape[1] == table.shape[2] > 0
    if not square or not ((table == 0) | (table == 1)).all():
        raise ValueError(
            f"BlockSparse: layout must be nested lists of 0 and 1, [N][N] or [{num_heads}][N][N], or one of "
            f"{get_args(Named)}; got {type(layout).__name__} {tuple(table.shape)}; write a tensor as x.int().tolist()"
        )
    return table.bool()
