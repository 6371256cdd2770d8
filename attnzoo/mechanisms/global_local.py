"""Sliding window with global tokens, and random keys.

Beltagy et al. 2020, "Longformer", arXiv:2004.05150, section 3.1; Zaheer et al. 2020, "Big Bird", arXiv:2007.14062,
section 2.

    V(i) = { j : |p - j| <= (W - 1) / 2,  or j < g,  or 0 <= p < g,  or j one of r keys drawn for p }
    causal:    { j <= p : p - j < W,      or j < g,             or j one of r keys drawn for p }
    o_i  = softmax over V(i) of (q_i . k_j / sqrt(D) + bias_ij)  times v_j

    p, j: places, counted among the real tokens of the sequence that a token belongs to
    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv];   W = window, g = num_global, r = num_random

The first g real tokens are global: they see all and are seen by all, so padding never is. Causal, they do not look
ahead. Runs of places (as many as the largest power of two in W, 32 at least) share their random keys, one from each
of r equal parts of what lies before the window, so that a longer input never changes an earlier row.

W counts the query's own place, as in Local. ``attention_window`` w of Longformer in transformers reaches w / 2 to
either side: W = w + 1. Big Bird's window of 3 blocks of b reaches b to 2 b either way, by place: W = 3 b comes near.

Left out: projections of their own for global tokens (Longformer), dilation, global tokens other than the first.
Deviation: Big Bird draws random keys from the whole row, here they lie before the window, also where attention is not
causal.

Use it when sequences are long and a few tokens stand for the whole (a class token, a question before a document):
time and memory grow with T (W + g + r), and any two tokens are two steps apart.

Not when the first tokens mean nothing special and everything needed is near (Local), or T is a few times W: Softmax
is then as quick and sees more.
"""

from functools import partial

import torch
from torch import Tensor, arange

from attnzoo.bias import Bias
from attnzoo.kernels.flex import Backend, check_backend, flex
from attnzoo.kernels.gathered import Sees, gathered, meet, pairs, pattern, pick
from attnzoo.kernels.seats import along, leave, row, segmented
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism, at_least, whole, yes_or_no
from attnzoo.traits import Traits

DRAWS = 1024
"""Runs of places that have random numbers of their own; run 1024 takes those of run 0 again, for another range."""


class GlobalLocal(Mechanism):
    """A window for all, and a few tokens that see everything and are seen by everyone.

    Args:
        num_heads: H.
        head_dim: D.
        window: W, the number of keys including the query's own place; odd unless causal.
        num_global: g; the tokens before the grid where the site has such (``prefix_tokens``), else 1, if None.
        num_random: r.
        seed: random keys follow from it, from ``layer``, the head and the place.
        backend: "blocks" gathers keys for the ordinary kernels; "flex" is torch's FlexAttention (kernels/flex.py).
        dropout: share of the attention weights dropped in training.
        causal: a fact of the site; lets an even W be refused at construction.
        prefix_tokens: a fact of the site, see ``num_global``.
        layer: a fact of the site; gives each layer random keys of its own.

    Raises:
        ValueError: for a window below 1, an even one where attention is not causal, or a negative number.

    Example:
        >>> GlobalLocal(2, 8, window=3, num_global=1).pattern(5, 5, causal=False).int()
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 0, 0],
                [1, 1, 1, 1, 0],
                [1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1]], dtype=torch.int32)
    """

    traits = Traits(cross=False, linear_memory=True, complexity="T (W + g + r) D")
    reasons = {"cross": "a window needs keys that stand at the places of the queries; Softmax or Additive can cross"}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        window: int = 9,
        num_global: int | None = None,
        num_random: int = 0,
        seed: int = 0,
        backend: Backend = "blocks",
        dropout: float = 0.0,
        causal: bool | None = None,
        prefix_tokens: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "GlobalLocal", window=window)
        at_least(
            0, "GlobalLocal", num_global=num_global, num_random=num_random, prefix_tokens=prefix_tokens, layer=layer
        )
        whole("GlobalLocal", seed=seed)
        yes_or_no("GlobalLocal", causal=causal)
        self.window = window
        self.num_global = (prefix_tokens or 1) if num_global is None else num_global
        self.num_random = num_random
        check_backend("GlobalLocal", backend, dropout)
        self.seed = seed
        self.backend = backend
        self.layer = layer
        if causal is False:
            self.reach(causal=False)
        self.draws: Tensor
        if num_random:
            self.register_buffer("draws", torch.empty(num_heads, DRAWS, num_random, dtype=torch.int32))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the numbers that random keys are made of."""
        if self.num_random:
            draw = torch.Generator().manual_seed((self.seed * 1_000_003 + (self.layer or 0)) % (1 << 63))
            self.draws.copy_(torch.randint(1 << 31, self.draws.shape, generator=draw, device="cpu"))

    @property
    def run(self) -> int:
        """How many neighbouring places share their random keys: the largest power of two in W, at least 32."""
        return 1 << max(self.window, 32).bit_length() - 1

    def reach(self, causal: bool) -> tuple[int, int]:
        """How many keys before and after its own place a query's window holds."""
        if causal:
            return self.window - 1, 0
        if self.window % 2 == 0:
            raise ValueError(
                f"GlobalLocal: window={self.window} is even, which has no middle without causal; "
                f"take {self.window - 1} or {self.window + 1}"
            )
        return self.window // 2, self.window // 2

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        sees = partial(self._sees, causal=mask.causal)
        dropout = self.dropout if self.training else 0.0
        if self.backend == "flex":
            return flex(q, keys, v, mask, bias, sees=sees, owner="GlobalLocal", dropout=dropout)
        left, right = self.reach(mask.causal)
        # No window can show more than this, however wide it was set.
        left, right = min(left, keys.shape[2] - 1), min(right, max(q.shape[2], keys.shape[2]) - 1)
        lists = partial(self._lists, left=left, right=right)
        out = gathered(q, keys, v, mask, bias, block=self.run, sees=sees, lists=lists, growing=False, dropout=dropout)
        if mask.causal or self.num_global == 0:
            return out
        args = q, keys, v, mask, bias, self.num_global, sees, dropout
        rows, place = _rows(*args) if mask.segments is None else _rows_in_segments(*args)
        chosen = (place >= 0) & (place < self.num_global)
        return torch.where(chosen[:, None, :, None], rows.to(out.dtype), out)

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor:
        device = self.draws.device if self.num_random else None
        return pattern(partial(self._sees, causal=causal), self.num_heads, queries, keys, causal, device)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says which back end runs, and how far the window reaches here."""
        left, right = self.reach(as_mask(mask).causal)
        how = "FlexAttention, as backend='flex' asks" if self.backend == "flex" else "SDPA over gathered keys"
        return f"{how}: {left} keys before and {right} after each query, {self.num_global} global ones"

    def _drawn(self, head: Tensor, place: Tensor, number: int) -> Tensor:
        """The random key from the given part of the places before the window of a run; -1 where that is empty."""
        run = place // self.run
        free = (run * self.run - self.window + 1 - self.num_global).clamp(min=0)
        begin, end = (free * part // self.num_random for part in (number, number + 1))
        drawn = self.draws[:, :, number][head, run % DRAWS] % (end - begin).clamp(min=1)
        return torch.where(end > begin, self.num_global + begin + drawn, -1)

    def _sees(self, head: Tensor, place: Tensor, key: Tensor, causal: bool) -> Tensor:
        left, right = self.reach(causal)
        seen = (key >= place - left) & (key <= place + right) | (key < self.num_global)
        if not causal:
            seen = seen | (place >= 0) & (place < self.num_global)
        for number in range(self.num_random):
            seen = seen | (key == self._drawn(head, place, number))
        return seen

    def _lists(self, start: Tensor, size: int, left: int, right: int) -> Tensor:
        start = start[:, None, :, None]
        near = start + arange(-left, size + right, device=start.device)
        near = near.masked_fill(near < self.num_global, -1)
        found = [near, arange(self.num_global, device=start.device).expand(*start.shape[:3], -1)]
        if self.num_random:
            head = arange(self.num_heads, device=start.device)[:, None, None]
            found += [self._drawn(head, start, number) for number in range(self.num_random)]
            found = [x.expand(-1, self.num_heads, -1, -1) for x in found]
        return torch.cat(found, -1)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, count: int, sees: Sees, dropout: float
) -> tuple[Tensor, Tensor]:
    """The queries at places below ``count`` against all keys.

    Returns:
        [B, H, T, Dv], of which those rows are meant; [B|1, T], the place of each query.
    """
    own = row(mask, q.shape[2], k.shape[2], q.device)
    cells = own.seat(arange(count, device=q.device)[None, None])
    out = meet(q, k, v, mask, bias, cells, arange(k.shape[2], device=q.device)[None, None, None], sees, dropout, pick)
    return leave(out, own.places().clamp(0, count - 1)), own.places()


def _rows_in_segments(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, count: int, sees: Sees, dropout: float
) -> tuple[Tensor, Tensor]:
    """As ``_rows``, for each of the sequences in a row: every key meets the first queries of its own sequence."""
    assert mask.segments is not None
    batch, _, length, _ = q.shape
    groups = k.shape[1]
    alone = segmented(mask.segments, mask.key_keep)
    # A group of g cells for each key, so that nothing has T x S elements; softmax then runs over groups. Where a
    # sequence is shorter than g, cells past its end hold queries of the next one, whose results nobody takes.
    place = arange(count, device=q.device).expand(batch, length, -1)
    query = along(alone.order, (alone.offset[..., None] + place).clamp(max=length - 1))
    cells = alone._replace(place=place, query=query)
    slot, visible, terms = pairs(q, k, mask, bias, cells, alone.place[:, None, :, :, None], sees)
    visible = visible[..., 0].transpose(1, 2)

    queries = pick(q, query[:, :, None]).unflatten(2, (groups, -1))
    keys, values = (pick(x, slot[..., 0].transpose(1, 2)) for x in (k, v))
    scores = torch.einsum("bnghcd,bngkd->bnghc", queries * q.shape[3] ** -0.5, keys).flatten(2, 3)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    if terms is not None:
        scores = scores + terms[..., 0].transpose(1, 2)
        visible = visible & (scores > -torch.inf)
    # The sum over a sequence, told to each of its keys.
    home = alone.offset[:, :, None, None].expand(scores.shape)
    top = torch.full_like(scores, -torch.inf).scatter_reduce(
        1, home, scores.detach().masked_fill(~visible, -torch.inf), "amax"
    )
    top = top.gather(1, home).masked_fill(~visible, 0)
    weights = (scores.masked_fill(~visible, 0) - top).exp().masked_fill(~visible, 0)
    total = torch.zeros_like(weights).scatter_add(1, home, weights).gather(1, home)
    weights = weights / total.masked_fill(~visible, 1)
    weights = torch.nn.functional.dropout(weights, dropout)
    parts = weights.unflatten(2, (groups, -1))[..., None] * values[:, :, :, None]
    home = home[..., None].expand(*home.shape, v.shape[3])
    rows = torch.zeros_like(home, dtype=parts.dtype).scatter_add(1, home, parts.flatten(2, 3))
    seat = alone.offset * count + alone.place[:, :, 0].clamp(max=count - 1)
    back = alone.order.argsort(1)
    return leave(rows, along(seat, back)), along(alone.place[:, :, 0], back)
