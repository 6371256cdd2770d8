"""Axial attention: along one axis of a grid at a time.

Ho et al. 2019, "Axial Attention in Multidimensional Transformers", arXiv:1912.12180.

Tokens are P prefix tokens (a class token), then the cells c = (c_1, .., c_r) of a grid (g_1, .., g_r) in raster
order. On axis a, a cell sees the prefix and the cells that differ from it in c_a alone, itself among them:

    (A_a x)_c = softmax over them of (q_c . k_j / sqrt(D))  times x_j        x_j = v_j at prefix tokens

    sequence:   o = A_1 A_2 .. A_r v        each axis attends to what the one behind it has gathered
    sum:        o = (A_1 v + .. + A_r v) / r

Causal: what comes before c in raster order falls into r parts; part a agrees with c in c_1 .. c_{a-1} and is smaller
in c_a. x^a = A_{a+1} .. A_r v, unmasked, gathers at a cell all cells that agree with it in the first a coordinates.
So the cells before c on axis a, read through x^a, are part a: all of it and nothing else.

    o_c = softmax over { prefix, c, the cells before c on axis 1, .., on axis r } of (q_c . k_j / sqrt(D))
          times v_j at the prefix and at c, x^a_j at the cells before c on axis a

With sum there is such a softmax over { prefix, c, the cells before c on axis a } for each axis, and their mean.
A prefix token attends once, to all tokens; causal, to the prefix tokens up to itself.

    q [B, H, T, D]   k [B, G, T, D]   v [B, G, T, Dv]   o [B, H, T, Dv]
    T <= P + g_1 .. g_r; fewer tokens fill the first cells, the others are hidden like padding

Padded rows are packed first, for cells are counted among real tokens; a token hidden by key_keep has no cell, its
output is 0. Deviations: all axes share one q and k (the paper stacks layers of one axis, each with projections of its
own), and the causal form is one softmax where the paper shifts and adds. Left out: the row and column in one softmax
of criss-cross attention (Huang et al. 2019, arXiv:1811.11721), a bias for each axis.

Use it when tokens lie on a grid too large for all pairs, as in big images, video or spectrograms: at 64 x 64 a query
meets 128 keys instead of 4096, and still sees the whole grid in one layer, also in raster order.

Not when tokens form a plain sequence, or single far pairs decide: two cells on no common axis meet only through the
cell where their axes cross, which a last row that is not full may lack. On small grids Softmax is quicker.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from attnzoo.bias import Bias
from attnzoo.kernels.heads import by_heads
from attnzoo.kernels.packing import front, take
from attnzoo.kernels.sdpa import dense, fused
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.mask import Mask, hide_keys
from attnzoo.mechanism import Mechanism, at_least, check_grid
from attnzoo.traits import Traits

Combine = Literal["sequence", "sum"]

Part = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]
"""Some of the keys of every cell: scores [B, H, *grid, n], which of them are visible, and weights -> weighted sum."""


class Axial(Mechanism):
    """Attention along each axis of a grid: time O(T (g_1 + .. + g_r)), and no tensor of T x S elements.

    Args:
        num_heads: H.
        head_dim: D.
        combine: "sequence" applies the axes one after the other, "sum" takes the mean of them.
        dropout: share of the attention weights of each axis dropped in training.
        grid: a fact of the site: the lengths of the axes, one or more; the first one counts the rows.
        prefix_tokens: a fact of the site: P, how many tokens stand before the grid; 0 if None.

    Raises:
        ValueError: without a grid, for an axis or a prefix below its least length, for an unknown ``combine``.

    Example:
        >>> q = k = v = torch.randn(1, 2, 13, 8)                  # a class token and 3 x 4 patches
        >>> Axial(2, 8, grid=(3, 4), prefix_tokens=1)(q, k, v, Mask(causal=True)).shape
        torch.Size([1, 2, 13, 8])
    """

    traits = Traits(
        cross=False,
        rectangular=False,
        pair_keep=False,
        bias=False,
        streaming=False,
        exact=False,
        complexity="T (sum of axes) D",
    )
    reasons = {
        "cross": "queries and keys must lie on one grid; Softmax or Additive can cross",
        "rectangular": "queries and keys must be the same cells of one grid; Softmax takes T other than S",
        "pair_keep": "a hidden pair would still meet through a third cell; Local or Softmax can hide pairs",
        "bias": "scores exist within an axis only, not for every pair; Local or Softmax take a bias",
        "streaming": "an earlier row is gathered only when it is whole; Local or Softmax can go token by token",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        combine: Combine = "sequence",
        dropout: float = 0.0,
        grid: tuple[int, ...] | None = None,
        prefix_tokens: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if combine not in get_args(Combine):
            raise ValueError(f"Axial: combine must be one of {', '.join(get_args(Combine))}; got {combine!r}")
        if grid is None:
            raise ValueError(
                "Axial: grid is missing, the lengths of the axes: give grid=(rows, columns), here or to the "
                "MultiheadAttention that it is put in"
            )
        check_grid("Axial", grid)
        at_least(0, "Axial", prefix_tokens=prefix_tokens)
        self.combine = combine
        self.grid = tuple(grid)
        self.prefix_tokens = prefix_tokens or 0

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        length, room = q.shape[2], self.prefix_tokens + math.prod(self.grid)
        if length > room:
            raise ValueError(
                f"Axial: {length} tokens came, but prefix_tokens={self.prefix_tokens} and grid={self.grid} "
                f"have room for {room}"
            )
        return by_heads(self._heads, q, keys, v, mask, bias)

    def _heads(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None, part: slice) -> Tensor:
        share = q.shape[1] // keys.shape[1]
        k, v = (x.repeat_interleave(share, dim=1) for x in (keys, v))
        dropped = self.dropout if self.training else 0.0
        if mask.key_keep is None:
            return self._packed(q, k, v, None, mask.causal, dropped)
        order = front(mask.key_keep)
        # A hidden token is no query of an axis either: what it would gather never meets a weight, not even one of 0.
        q, k, v = (take(x, order) for x in (hide_keys(q, mask.key_keep), k, v))
        out = self._packed(q, k, v, mask.key_keep.gather(1, order), mask.causal, dropped)
        return hide_keys(take(out, order.argsort(dim=1)), mask.key_keep)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, dropped: float) -> Tensor:
        prefix = min(self.prefix_tokens, q.shape[2])
        seen = slice(0, prefix) if causal else slice(None)
        kept = Mask(causal=causal, key_keep=None if keep is None else keep[:, seen])
        outs = []
        if prefix:
            outs.append(dense(q[:, :, :prefix], k[:, :, seen], v[:, :, seen], kept, None, dropout=dropped))
        if prefix < q.shape[2]:
            outs.append(self._cells(q, k, v, keep, causal, dropped, prefix))
        return torch.cat(outs, dim=2)

    def _cells(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, dropped: float, prefix: int
    ) -> Tensor:
        """The outputs of the tokens behind the prefix, real ones first."""
        count = q.shape[2] - prefix
        row = math.prod(self.grid[1:])
        grid = (-(-count // row), *self.grid[1:])  # rows without any token cost nothing
        filler = grid[0] * row - count

        def cells(x: Tensor) -> Tensor:
            return pad(x[:, :, prefix:], (0, 0, 0, filler)).unflatten(2, grid)

        whole = keep is None and filler == 0
        if keep is None:
            keep = torch.ones(1, q.shape[2], dtype=torch.bool, device=q.device)
        exists = cells(keep[:, None, :, None])
        q, own_k, own_v = cells(q), cells(k), cells(v)
        first_k, first_v, first = k[:, :, :prefix], v[:, :, :prefix], keep[:, :prefix]
        axes = range(len(grid))

        def along(axis: int, x: Tensor) -> Tensor:
            """A_a x: each cell with the prefix and all cells of its line on an axis, one line a batch item."""
            at = axis + 2
            others = (*grid[:axis], *grid[axis + 1 :])

            def lines(y: Tensor) -> Tensor:
                return y.movedim(at, -2).movedim(1, -3).flatten(0, -4)

            def with_prefix(y: Tensor, own: Tensor) -> Tensor:
                if prefix == 0:
                    return lines(y)
                every = own.view(own.shape[0], *(1 for _ in others), *own.shape[1:])
                return torch.cat([lines(y), every.expand(-1, *others, -1, -1, -1).flatten(0, -4)], dim=2)

            visible = None if whole else with_prefix(exists, first[:, None, :, None]).mT
            if visible is not None and visible.shape[0] < q.shape[0] * math.prod(others):
                visible = visible.repeat(q.shape[0], 1, 1, 1)
            keys, values = with_prefix(own_k, first_k), with_prefix(x, first_v)
            out = fused(lines(q), keys, values, visible, dropout=dropped)
            return out.unflatten(0, (q.shape[0], *others)).movedim(-3, 1).movedim(-2, at)

        if causal:
            return self._before(q, own_k, own_v, exists, (first_k, first_v, first), along, dropped)[:, :, :count]
        if self.combine == "sequence":
            out = own_v
            for axis in reversed(axes):
                out = along(axis, out)
        else:
            out = torch.stack([along(axis, own_v) for axis in axes]).mean(0)
        return out.flatten(2, -2)[:, :, :count]

    def _before(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        exists: Tensor,
        prefix: tuple[Tensor, Tensor, Tensor],
        along: Callable[[int, Tensor], Tensor],
        dropped: float,
    ) -> Tensor:
        """The causal outputs of all cells, [B, H, cells, Dv]: each sees the prefix, itself and the cells before it."""
        grid, (first_k, first_v, first) = q.shape[2:-1], prefix
        q = q * self.head_dim**-0.5
        everywhere: list[Part] = [((q * k).sum(-1, keepdim=True), exists, lambda weights: weights * v)]
        if first.shape[1]:
            visible = first.view(-1, *(1 for _ in grid), 1, first.shape[1]).expand(-1, 1, *grid, -1)
            scores = torch.einsum("bh...d,bhpd->bh...p", q, first_k)
            everywhere.append((scores, visible, lambda weights: torch.einsum("bh...p,bhpd->bh...d", weights, first_v)))

        def earlier(axis: int, x: Tensor) -> Part:
            """The cells before the query's own on an axis, with their x [B, H, *grid, Dv]."""
            at = axis + 2

            def mix(weights: Tensor) -> Tensor:
                return (weights.movedim(at, -2) @ x.movedim(at, -2)).movedim(-2, at)

            pairs = q.movedim(at, -2) @ k.movedim(at, -2).mT
            order = torch.ones(grid[axis], grid[axis], dtype=torch.bool, device=q.device).tril(-1)
            order = order.view(grid[axis], *(1 for _ in grid[axis + 1 :]), grid[axis])
            return pairs.movedim(-2, at), exists.transpose(at, -1).expand(-1, -1, *grid, -1) & order, mix

        parts, behind = [], v
        for axis in reversed(range(len(grid))):
            parts.append(earlier(axis, behind))
            if axis > 0:
                behind = along(axis, behind)
        groups = [parts] if self.combine == "sequence" else [[part] for part in parts]
        return torch.stack([_weighted_sum([*group, *everywhere], dropped) for group in groups]).mean(0).flatten(2, -2)

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor:
        # What gathers what over several axes is best asked of the code itself: uniform weights, identity as v.
        q, v = torch.zeros(1, 1, queries, self.head_dim), torch.eye(keys)[None, None]
        return self._packed(q, q, v, None, causal, 0.0)[0, 0] > 0


def _weighted_sum(parts: list[Part], dropped: float) -> Tensor:
    """One softmax over all keys of all parts; 0 for a cell that sees none."""
    scores, visible, mixes = zip(*parts, strict=True)
    weights = dropout(masked_softmax(torch.cat(scores, -1), torch.cat(visible, -1)), dropped)
    shares = weights.split([part.shape[-1] for part in scores], -1)
    out = mixes[0](shares[0])
    for mix, share in zip(mixes[1:], shares[1:], strict=True):
        out = out + mix(share)
    return out
