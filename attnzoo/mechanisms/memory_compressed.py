"""Memory-compressed attention: a strided convolution makes one key of each few.

Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198.

    block b holds the real keys  b c .. b c + c - 1;   c = factor, kernel = stride = c
    K'_b = sum_r k_{bc + r} A_r      A [H, c, D, D]: over time and over the channels of a head
    V'_b = sum_r w_r v_{bc + r}      w [H, c]: over time alone, so that the output is linear in v and Dv is free

    without causal:  o_i = softmax over the blocks b of (q_i . K'_b / sqrt(D))  times V'_b
    causal:          one softmax over the blocks that ended before the block of query i, and over the single
                     keys of its own block up to itself

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   ->   out [B, H, T, Dv]

Only real keys are counted: they are moved to the front first, so that padding shifts no block. What is missing in a
short last block counts as 0. Query i, which n real keys stand up to, has the block that begins at c ((n - 1) div c).

Deviations: causal, the paper's early queries see a null key, and layers of local attention in between serve what
a block hides from its own tokens. Here a query sees its own block token by token, so it always sees itself and
nothing has to be added. Each query head has a kernel of its own, without bias, instead of one over the whole width;
so blocks have H heads even where the keys are grouped, and a state is c G / H times smaller than the keys.
Kernels start as the mean over the block, so compressed and single keys meet the queries in the same space.

Use it when neighbouring tokens say much the same and the whole past is wanted, causal or not, at a c-th of the
price; also in decoding, for the smaller state.

Not when single keys far back must be told apart (copying, looking up): behind its own block a query sees mixtures.
It saves a factor, no power: at great lengths Local or a linear attention is cheaper.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad
from torch.utils.checkpoint import checkpoint

from attnzoo.bias import Bias
from attnzoo.kernels.packing import front, take
from attnzoo.kernels.sdpa import fused
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism, at_least
from attnzoo.state import check_new, check_room
from attnzoo.traits import Traits

CHUNK = 256
"""How many causal queries are taken at once; more of them are recomputed for gradients, so memory stays linear."""


class CompressedState(NamedTuple):
    """The past of a causal sequence: blocks that are over as one key each, the last block token by token.

    Attributes:
        keys: compressed keys [B, H, max_len div c, D].
        values: compressed values [B, H, max_len div c, Dv].
        tail_keys: the last block [B, G, c, D]; it is compressed when a token comes that belongs to the next.
        tail_values: [B, G, c, Dv].
        length: real tokens, int64 [B].
        used: tokens, padding included.
        max_len: how many there is room for.
        fixed: keys come step by step.
    """

    keys: Tensor
    values: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    length: Tensor
    used: int
    max_len: int
    fixed: bool = False


class CompressedMemory(NamedTuple):
    """Fixed keys of cross-attention, compressed once.

    Attributes:
        keys: [B, H, ceil(S / c), D].
        values: [B, H, ceil(S / c), Dv].
        length: real tokens, int64 [B].
        used: S, padding included.
        fixed: all keys came at once.
    """

    keys: Tensor
    values: Tensor
    length: Tensor
    used: int
    fixed: bool = True


class MemoryCompressed(Mechanism):
    """Each query attends to S / c convolved keys, and causally to the single keys of its own block.

    Args:
        num_heads: H.
        head_dim: D.
        factor: c, how many keys become one: kernel and stride of the convolutions.
        dropout: share of the attention weights dropped in training.

    Raises:
        ValueError: if ``factor`` is below 1.

    Example:
        >>> q = k = v = torch.randn(1, 2, 50, 8)
        >>> MemoryCompressed(2, 8, factor=4)(q, k, v, Mask(causal=True)).shape
        torch.Size([1, 2, 50, 8])
    """

    traits = Traits(
        pair_keep=False,
        bias=False,
        normalised=False,
        exact=False,
        linear_memory=True,
        complexity="T (S / c + c) D",
    )
    reasons = {
        "pair_keep": "a block of keys is seen or hidden as a whole; Softmax and Local can hide single pairs",
        "bias": "the scores belong to blocks of keys, not to keys; Softmax and Local take a bias",
    }

    def __init__(self, num_heads: int, head_dim: int, *, factor: int = 3, dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "MemoryCompressed", factor=factor)
        self.factor = factor
        self.key_kernel = nn.Parameter(torch.empty(num_heads, factor, head_dim, head_dim))
        self.value_kernel = nn.Parameter(torch.empty(num_heads, factor))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The mean over the block."""
        with torch.no_grad():
            self.key_kernel.copy_(torch.eye(self.head_dim) / self.factor)
            self.value_kernel.fill_(1 / self.factor)

    def compress(self, keys: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[B, G, S, D], [B, G, S, Dv] -> [B, H, ceil(S / c), D], [B, H, ceil(S / c), Dv]."""
        groups, length = keys.shape[1:3]
        blocks = -(-length // self.factor)
        k, v = (pad(x, (0, 0, 0, blocks * self.factor - length)) for x in (keys, v))
        k, v = (x.unflatten(2, (blocks, self.factor)) for x in (k, v))
        by_group = (groups, self.num_heads // groups)
        k = torch.einsum("bgnrd,ghrde->bghne", k, self.key_kernel.unflatten(0, by_group))
        v = torch.einsum("bgnrv,ghr->bghnv", v, self.value_kernel.unflatten(0, by_group))
        return k.flatten(1, 2), v.flatten(1, 2)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        batch, queries, length = q.shape[0], q.shape[2], keys.shape[2]
        if mask.key_keep is not None:
            order = front(mask.key_keep)
            keys, v = take(keys, order), take(v, order)
        blocks = self.compress(keys, v)
        if not mask.causal:
            return self._over_blocks(q, *blocks, None if mask.key_keep is None else mask.key_keep.sum(1))
        upto = (torch.arange(queries, device=q.device) + length - queries + 1).clamp(min=0)
        count = None if mask.key_keep is None else pad(mask.key_keep.long().cumsum(1), (1, 0))
        seen = upto.expand(batch, -1) if count is None else count[:, upto]
        return self._look_back(q, blocks, (keys, v), seen, seen.new_zeros(batch), length - queries)

    def start(self, keys: Tensor, v: Tensor, max_len: int) -> CompressedState:
        batch, groups, c = keys.shape[0], keys.shape[1], self.factor
        blocks, tails = (
            [x.new_zeros(batch, heads, slots, x.shape[3]) for x in (keys, v)]
            for heads, slots in ((self.num_heads, max_len // c), (groups, c))
        )
        length = torch.zeros(batch, dtype=torch.int64, device=keys.device)
        return CompressedState(blocks[0], blocks[1], tails[0], tails[1], length, 0, max_len)

    def advance(
        self, q: Tensor, keys: Tensor, v: Tensor, state: CompressedState, mask: Mask, bias: Bias | None
    ) -> tuple[Tensor, CompressedState]:
        c, more, device = self.factor, keys.shape[2], q.device
        check_new(keys, v, tuple(state.tail_keys.shape), tuple(state.tail_values.shape))
        check_room(state.used, more, state.max_len)
        new = torch.ones(q.shape[0], more, dtype=torch.bool, device=device) if mask.key_keep is None else mask.key_keep
        seen = state.length[:, None] + new.cumsum(1)
        length = state.length + new.sum(1)
        # Blocks that were over before, and tokens of the tail; then blocks that the new tokens have ended.
        over = _blocks_over(state.length, c)
        held = state.length - over * c
        ended = _blocks_over(length, c) - over

        order = front(torch.cat([torch.arange(c, device=device) < held[:, None], new], 1))
        tails = (state.tail_keys, keys), (state.tail_values, v)
        raw_keys, raw_values = (take(torch.cat([tail, x.to(tail.dtype)], 2), order) for tail, x in tails)
        fresh = self.compress(raw_keys, raw_values)
        place = torch.arange(state.keys.shape[2], device=device) - over[:, None]
        written = ((place >= 0) & (place < ended[:, None]))[:, None, :, None]
        place = place.clamp(0, fresh[0].shape[2] - 1)
        blocks = tuple(
            torch.where(written, take(x, place).to(old.dtype), old)
            for x, old in zip(fresh, (state.keys, state.values), strict=True)
        )
        last = (ended[:, None] * c + torch.arange(c, device=device)).clamp(max=c + more - 1)
        out = self._look_back(q, (blocks[0], blocks[1]), (raw_keys, raw_values), seen, over * c, state.used)
        tail = take(raw_keys, last), take(raw_values, last)
        return out, CompressedState(blocks[0], blocks[1], *tail, length, state.used + more, state.max_len)

    def remember(self, keys: Tensor, v: Tensor, key_keep: Tensor | None) -> CompressedMemory:
        real = torch.full(v.shape[:1], v.shape[2], device=v.device)
        if key_keep is not None:
            order, real = front(key_keep), key_keep.sum(1)
            keys, v = take(keys, order), take(v, order)
        return CompressedMemory(*self.compress(keys, v), real, keys.shape[2])

    def recall(self, q: Tensor, state: CompressedMemory, mask: Mask, bias: Bias | None) -> Tensor:
        return self._over_blocks(q, state.keys, state.values, state.length)

    def _over_blocks(self, q: Tensor, keys: Tensor, values: Tensor, real: Tensor | None) -> Tensor:
        """All queries over all blocks that hold a real key; ``real`` counts the keys, [B]; None for all of them."""
        visible = None
        if real is not None:
            first = torch.arange(keys.shape[2], device=q.device) * self.factor
            visible = (first < real[:, None])[:, None, None]
        return fused(q, keys, values, visible, dropout=self.dropout if self.training else 0.0)

    def _look_back(
        self,
        q: Tensor,
        blocks: tuple[Tensor, Tensor],
        raw: tuple[Tensor, Tensor],
        seen: Tensor,
        passed: Tensor,
        before: int,
    ) -> Tensor:
        """Causal rows, in chunks.

        Args:
            q: [B, H, T, D].
            blocks: compressed keys and values [B, H, N, ...], from the first token on.
            raw: single keys and values [B, G, n, ...], from token ``passed`` on.
            seen: real keys up to each query, int64 [B, T].
            passed: real tokens that stand before ``raw``, int64 [B].
            before: places that stand before the first query: tells which blocks no query of a chunk can see.
        """
        queries = q.shape[2]
        parts = []
        for start in range(0, max(queries, 1), CHUNK):
            end = min(start + CHUNK, queries)
            most = max(0, before + end - 1) // self.factor
            args = (q[:, :, start:end], *(x[:, :, :most] for x in blocks), *raw, seen[:, start:end], passed)
            parts.append(self._rows(*args) if queries <= CHUNK else checkpoint(self._rows, *args, use_reentrant=False))
        return torch.cat(parts, 2)

    def _rows(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        raw_keys: Tensor,
        raw_values: Tensor,
        seen: Tensor,
        passed: Tensor,
    ) -> Tensor:
        c, groups, blocks = self.factor, raw_keys.shape[1], keys.shape[2]
        place = torch.arange(c, device=q.device)
        first = (_blocks_over(seen, c) * c)[..., None]
        slots = (first - passed[:, None, None] + place).clamp(max=raw_keys.shape[2] - 1)
        own_keys, own_values = (take(x, slots.flatten(1)).unflatten(2, (q.shape[2], c)) for x in (raw_keys, raw_values))
        by_group = (groups, self.num_heads // groups)
        q = q * self.head_dim**-0.5
        near = torch.einsum("bghtd,bgtcd->bghtc", q.unflatten(1, by_group), own_keys).flatten(1, 2)
        over = torch.arange(blocks, device=q.device) * c < first
        visible = torch.cat([over, first + place < seen[..., None]], -1)[:, None]
        weights = masked_softmax(torch.cat([q @ keys.mT, near], -1), visible)
        far, near = dropout(weights, self.dropout, self.training).split([blocks, c], -1)
        own = torch.einsum("bghtc,bgtcv->bghtv", near.unflatten(1, by_group), own_values)
        return far @ values + own.flatten(1, 2)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how many blocks stand for how many keys."""
        blocks = f"{-(-k.shape[2] // self.factor)} blocks that stand for {k.shape[2]} keys"
        if as_mask(mask).causal:
            return f"plain torch operations over {blocks}, and the own block of each query token by token"
        return f"SDPA over {blocks}"


def _blocks_over(tokens: Tensor, factor: int) -> Tensor:
    """How many blocks ended before the block of the last of so many tokens."""
    return (tokens - 1).clamp(min=0) // factor
