"""Strided and fixed attention of the Sparse Transformer.

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, section 4.3.

    "strided"  A1 = { j : p - l < j <= p }             A2 = { j <= p : (p - j) mod l = 0 }
    "fixed"    A1 = { j <= p : j div l = p div l }     A2 = { j <= p : j mod l >= l - c }
    V(i) = A1 or A2;    o_i = softmax over V(i) of (q_i . k_j / sqrt(D) + bias_ij)  times v_j

    p, j: places, counted among the real tokens of the sequence that a token belongs to;  l = stride, c = summary
    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]

A1 holds l keys, the query's own among them (the paper's t = max(0, i - l) would be l + 1). Without causal, which the
paper does not have, "j <= p" falls away and A1 of "strided" is |p - j| < l.

Both sets are in every head, in one softmax: the paper's "merged" form. Left out: one set per head, and one per layer.
"strided" is worked out in two tables, T x 2l near keys and, after the sequence is folded into rows of l, the columns:
time T (l + T / l), least at l near sqrt(T). Long tables are made in parts, so memory stays linear.

Use it when data has a period that you know: "strided" with l = the width of a picture in raster order or the season of
a series; "fixed" for text, where what stands at the ends of blocks sums them up. l near sqrt(T) is the cheapest.

Not when T is a few times l, or l is far from sqrt(T), where time is quadratic again; nor "strided" for data without a
period, for which the paper finds it worse than "fixed".
"""

from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, arange
from torch.nn.functional import dropout

from attnzoo.bias import Bias
from attnzoo.kernels.flex import Backend, check_backend, flex
from attnzoo.kernels.gathered import gathered, in_parts, pairs, pattern, pick
from attnzoo.kernels.seats import leave, seats
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least, whole
from attnzoo.traits import Traits

Kind = Literal["strided", "fixed"]


class Strided(Mechanism):
    """Near keys, and one far key of each ``stride``.

    Args:
        num_heads: H.
        head_dim: D.
        stride: l.
        kind: "strided", every l-th key counted from the query; or "fixed", the last c keys of each block of l.
        summary: c, 1 if None; only for "fixed".
        backend: "blocks" gathers keys for the ordinary kernels; "flex" is torch's FlexAttention (kernels/flex.py).
        dropout: share of the attention weights dropped in training.

    Raises:
        ValueError: for a stride below 1, a summary outside 1..stride, or one for "strided".

    Example:
        >>> Strided(1, 8, stride=3).pattern(6, 6, causal=True).int()
        tensor([[1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [1, 1, 1, 1, 0, 0],
                [0, 1, 1, 1, 1, 0],
                [0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    """

    traits = Traits(cross=False, linear_memory=True, complexity="T (l + S / l) D")
    reasons = {"cross": "places of queries and keys are compared; Softmax or Additive can cross"}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        stride: int = 8,
        kind: Kind = "strided",
        summary: int | None = None,
        backend: Backend = "blocks",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        check_backend("Strided", backend, dropout)
        if kind not in get_args(Kind):
            raise ValueError(f"Strided: kind must be one of {get_args(Kind)}, got {kind!r}")
        at_least(1, "Strided", stride=stride)
        whole("Strided", summary=summary)
        if kind == "strided" and summary is not None:
            raise ValueError(f"Strided: summary={summary} is not read by kind='strided'; leave it None")
        if summary is not None and not 1 <= summary <= stride:
            raise ValueError(f"Strided: summary must lie in 1..stride={stride}, got {summary}")
        self.stride = stride
        self.kind = kind
        self.summary = 1 if kind == "fixed" and summary is None else summary
        self.backend = backend

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        share = self.dropout if self.training else 0.0
        if self.backend == "flex":
            return flex(q, keys, v, mask, bias, sees=self._sees, owner="Strided", dropout=share)
        before = min(self.stride, max(q.shape[2], keys.shape[2])) - 1
        window = before, 0 if mask.causal else before
        # Queries that stand alone - steps, packed segments - have no rows to fold into.
        alone = q.shape[2] < self.stride or mask.segments is not None
        if self.kind == "strided" and not alone:
            return self._folded(q, keys, v, mask, bias, window, share)
        lists = partial(self._lists, keys=keys.shape[2], window=window)
        block = self.stride if self.kind == "fixed" else 1
        return gathered(q, keys, v, mask, bias, block=block, lists=lists, dropout=share)

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor:
        return pattern(self._sees, self.num_heads, queries, keys, causal)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says which back end runs."""
        if self.backend == "flex":
            return "FlexAttention, as backend='flex' asks"
        return "SDPA over gathered keys" if self.kind == "fixed" else "plain torch operations on near keys and columns"

    def _sees(self, head: Tensor, place: Tensor, key: Tensor) -> Tensor:
        if self.kind == "fixed":
            assert self.summary is not None
            return (key // self.stride == place // self.stride) | (key % self.stride >= self.stride - self.summary)
        return self._in_window(head, place, key) | ((place - key) % self.stride == 0)

    def _in_window(self, head: Tensor, place: Tensor, key: Tensor) -> Tensor:
        return (key > place - self.stride) & (key < place + self.stride)

    def _lists(self, start: Tensor, size: int, keys: int, window: tuple[int, int]) -> Tensor:
        rows = arange(-(-keys // self.stride), device=start.device)[:, None] * self.stride
        if self.kind == "strided":  # each query a group of its own
            place = start[:, None, :, None]
            far = place % self.stride + rows[:, 0]
            return torch.cat([_near(start, size, window), far.masked_fill(far == place, -1)], -1)
        assert self.summary is not None
        begin = (start // self.stride * self.stride)[:, None, :, None]
        own = begin + arange(self.stride, device=start.device)
        far = (rows + arange(self.stride - self.summary, self.stride, device=start.device)).flatten()
        return torch.cat([own, torch.where(far // self.stride * self.stride == begin, -1, far)], -1)

    def _folded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        bias: Bias | None,
        window: tuple[int, int],
        share: float,
    ) -> Tensor:
        """A1 and A2 of "strided" for whole rows of l queries: those of one column meet the keys of that column."""
        queries, width = q.shape[2:]
        keys, groups = k.shape[2], k.shape[1]
        cells, seat = seats(mask, queries, keys, self.stride, q.device)
        rows = -(-keys // self.stride)
        columns = arange(self.stride, device=q.device)[:, None] + arange(rows, device=q.device) * self.stride
        slots = cells.order[:, columns.clamp(max=keys - 1), None].transpose(2, 3)
        far_keys, far_values = pick(k, slots), pick(v, slots)

        def run(begin: int, end: int) -> Tensor:
            part = cells.part(begin, end)
            near = _near(part.place[:, :, 0], self.stride, window)[:, :, :, None]
            slot, visible, terms = pairs(q, k, mask, bias, part, near, self._in_window)
            _, column_visible, column_terms = pairs(q, k, mask, bias, part, columns[None, None, None], _elsewhere)
            seen = torch.cat([visible, column_visible], -1).transpose(1, 2)
            asked = pick(q, part.query.clamp(min=0)[:, :, None]).unflatten(2, (groups, -1)) * width**-0.5
            near_keys, near_values = (pick(x, slot[:, :, :, 0].transpose(1, 2)) for x in (k, v))
            near_scores = torch.einsum("bnghcd,bngjd->bnghcj", asked, near_keys)
            far_scores = torch.einsum("bnghcd,bcgjd->bnghcj", asked, far_keys)
            scores = torch.cat([near_scores, far_scores], -1).flatten(2, 3)
            if terms is not None and column_terms is not None:
                added = torch.cat([terms, column_terms], -1).transpose(1, 2)
                scores, seen = scores + added, seen & (added > -torch.inf)
            weights = dropout(masked_softmax(scores, seen), share).unflatten(2, (groups, -1))
            near_weights, far_weights = weights.split([near.shape[-1], rows], -1)
            out = torch.einsum("bnghcj,bngjd->bnghcd", near_weights, near_values)
            return (out + torch.einsum("bnghcj,bcgjd->bnghcd", far_weights, far_values)).flatten(2, 3)

        reach = self.stride + sum(window)
        work = max(self.stride * (reach + rows), reach * max(width, v.shape[3]))
        return leave(in_parts(run, cells.place.shape[1], work, queries), seat)


def _near(start: Tensor, size: int, window: tuple[int, int]) -> Tensor:
    """Places that the windows of ``size`` queries from ``start`` on cover, [B|1, 1, n, any]."""
    before, after = window
    return start[:, None, :, None] + arange(-before, size + after, device=start.device)


def _elsewhere(head: Tensor, place: Tensor, key: Tensor) -> Tensor:
    """A query's own place is in A1 and in A2, and counts once."""
    return key != place
