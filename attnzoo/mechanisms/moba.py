"""Mixture of block attention: each query picks the blocks of keys that it looks into.

Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189, section 2.

    block c = the real keys number c m .. (c + 1) m - 1 of a row,  m = block_size
    s_ic    = q_i . mean of the keys of block c
    C(i)    = the own block of i, and the top_k - 1 others with the largest s_ic
    o_i     = softmax over the visible keys of the blocks in C(i) of (q_i . k_j / sqrt(D) + bias_ij)  times v_j

The own block is that of the last real key at or before p = i + S - T, the first block where there is none. Causal,
the others lie wholly before it, and within it keys after p are hidden. Keys hidden by key_keep are in no block, so
padding on either side moves no border; the last block's mean is over as many keys as it has.

Blocks are chosen by the keys alone: a bias counts for the tokens, not for the choice, and the choice has no gradient.
The paper is causal only; without causal the others may also lie behind. Each (query, block) pair gives a partial
softmax, as in the authors' code: queries are sorted by block, and partial results are joined by their log-sum-exp.
Left out: switching between this and full attention by layer or during training, which is the model's matter.

Use it when sequences are long and what a query needs stands in few places, near together, that only the content
tells: retrieval from a long context. It reads any number of key/value heads, and decodes with an ordinary cache.

Not when what matters is spread thinly over all keys, so that no block's mean shows it; or when sequences have no more
than top_k blocks, where it is dense attention with a detour.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from attnzoo.bias import Bias
from attnzoo.kernels.hashing import lay_out, terms_at
from attnzoo.kernels.heads import by_heads
from attnzoo.kernels.packing import front, take
from attnzoo.kernels.precision import full_precision
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least
from attnzoo.traits import Traits


class MoBA(Mechanism):
    """Each query attends to its own block of keys and to the ``top_k - 1`` that suit it best.

    Args:
        num_heads: H.
        head_dim: D.
        block_size: m, the number of keys in a block.
        top_k: how many blocks a query sees, its own included.
        dropout: share of the attention weights dropped in training.

    Raises:
        ValueError: for a size below 1.

    Example:
        >>> q = k = v = torch.randn(1, 2, 100, 8)
        >>> MoBA(2, 8, block_size=8, top_k=3)(q, k, v, Mask(causal=True)).shape
        torch.Size([1, 2, 100, 8])
    """

    traits = Traits(
        cross=False,
        pair_keep=False,
        exact=False,
        linear_memory=True,
        budget="top_k",
        complexity="T top_k block D + T (S / block) D",
    )
    reasons = {
        "cross": "the own block of a query is where it stands among the keys; Softmax or Additive can cross",
        "pair_keep": "a key hidden from one query would still count in its block's mean; Softmax and Local take pairs",
    }

    def __init__(
        self, num_heads: int, head_dim: int, *, block_size: int = 8, top_k: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "MoBA", block_size=block_size, top_k=top_k)
        self.block_size = block_size
        self.top_k = top_k

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return by_heads(self._heads, q, keys, v, mask, bias)

    def _heads(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None, part: slice) -> Tensor:
        kind, queries, length = q.dtype, q.shape[2], keys.shape[2]
        q, keys, v = (x.to(torch.promote_types(kind, torch.float32)) for x in (q, keys, v))
        ends = (torch.arange(queries, device=q.device) + length - queries + 1).clamp(min=0)
        source = torch.arange(length, device=q.device)[None]
        reached, real = ends[None], torch.full((1, 1), length, device=q.device)
        if mask.key_keep is not None:
            reached = pad(mask.key_keep.long(), (1, 0)).cumsum(1)[:, ends]
            real = mask.key_keep.sum(1, keepdim=True)
            source = front(mask.key_keep)
            keys, v = take(keys, source), take(v, source)
        size = min(self.block_size, length)
        keys, v = (pad(x, (0, 0, 0, -length % size)).unflatten(2, (-1, size)) for x in (keys, v))
        chosen = self.choose(q, keys, reached, real, mask.causal)
        limit = reached if mask.causal else real.expand(-1, queries)
        return self._read(q, keys, v, chosen, limit, source, bias).to(kind)

    def choose(self, q: Tensor, blocks: Tensor, reached: Tensor, real: Tensor, causal: bool) -> Tensor:
        """The blocks that each query looks into.

        Args:
            q: [B, H, T, D].
            blocks: keys, the real ones in front and zeros behind them, [B, G, blocks, size, D].
            reached: int64 [B or 1, T], how many real keys stand at or before the place of each query.
            real: int64 [B or 1, 1], how many there are.
            causal: whether only blocks before the own one may be chosen.

        Returns:
            int64 [B, H, T, top_k or fewer], the own block first; last, where too few are allowed, some that hold
            nothing visible.
        """
        groups, count, size = blocks.shape[1:4]
        number = torch.arange(count, device=q.device)
        home = ((reached - 1).clamp(min=0) // size)[:, None, None, :, None]
        exists = number * size < real[:, None, None, :, None]
        found = []
        with torch.no_grad(), full_precision(q):
            means = blocks.sum(3) / (real - number * size).clamp(1, size)[:, None, :, None]
            # So many queries at once that the scores of blocks take no more room than q itself.
            some = max(1, q.shape[2] * q.shape[3] // count)
            for part, own in zip(q.split(some, 2), home.split(some, 3), strict=True):
                scores = part.unflatten(1, (groups, -1)) @ means[:, :, None].mT
                scores = scores.masked_fill(~(number < own if causal else exists), -torch.inf)
                scores = scores.masked_fill(number == own, torch.inf)
                found.append(self._largest(scores))
        return torch.cat(found, 3).flatten(1, 2)

    def _largest(self, scores: Tensor) -> Tensor:
        """The places of the ``top_k`` largest scores, of equal ones the earlier, in steps as in one pass."""
        # argmax takes the first of equal numbers. What may not be chosen stays above what has been.
        scores, found = scores.clamp(min=torch.finfo(scores.dtype).min), []
        for _ in range(min(self.top_k, scores.shape[-1])):
            found.append(scores.argmax(-1, keepdim=True))
            scores = scores.scatter(-1, found[-1], -torch.inf)
        return torch.cat(found, -1)

    def _read(
        self, q: Tensor, blocks: Tensor, v: Tensor, chosen: Tensor, limit: Tensor, source: Tensor, bias: Bias | None
    ) -> Tensor:
        """Softmax over those of the first ``limit`` [B or 1, T] keys that lie in the chosen blocks."""
        heads, queries, choices = chosen.shape[1:]
        groups, count, size = blocks.shape[1:4]
        pairs = queries * choices
        # Chunks of queries as long as a block, shorter where a block is chosen less often: one by one in a step.
        length = max(1, min(size, pairs // count))
        slot, item = lay_out(chosen.flatten(2), count, length)
        row = item // choices
        block = pad(chosen.flatten(2), (0, 1)).gather(2, item).unflatten(2, (-1, length))[..., 0]

        def rows(x: Tensor) -> Tensor:
            """[B, H, T, width] -> [B, H, chunks, length, width]."""
            index = row[..., None].expand(-1, -1, -1, x.shape[-1])
            return pad(x, (0, 0, 0, 1)).gather(2, index).unflatten(2, (-1, length))

        def columns(x: Tensor) -> Tensor:
            """[B, G, blocks, size, width] -> [B, H, chunks, size, width]."""
            flat = x.flatten(3).repeat_interleave(heads // groups, dim=1)
            index = block[..., None].expand(-1, -1, -1, flat.shape[-1])
            return flat.gather(2, index).unflatten(3, (size, -1))

        def collect(x: Tensor) -> Tensor:
            """[B, H, chunks, length, width] -> [B, H, T, choices, width]."""
            index = slot[..., None].expand(-1, -1, -1, x.shape[-1])
            return x.flatten(2, 3).gather(2, index).unflatten(2, (queries, choices))

        # In a slot without a query, whose limit is 0, nothing is visible.
        place = (block[..., None] * size + torch.arange(size, device=q.device))[..., None, :]
        visible = place < rows(limit[:, None, :, None].expand(q.shape[0], heads, -1, -1))
        scores = rows(q) @ columns(blocks).mT * q.shape[-1] ** -0.5
        if bias is not None:
            keys = source.shape[1]
            column = source.expand(len(q), -1).gather(1, place.flatten(1).clamp(max=keys - 1)).view_as(place)
            terms = terms_at(bias, row.unflatten(2, (-1, length))[..., None], column, queries, keys)
            scores = scores + terms.to(scores.dtype)
        scores = scores.masked_fill(~visible, -torch.inf)
        highest = scores.detach().amax(-1, keepdim=True)
        grown = torch.exp(scores - highest.masked_fill(highest == -torch.inf, 0))
        highest = collect(highest)
        top = highest.amax(3, keepdim=True)
        share = torch.exp(highest - top.masked_fill(top == -torch.inf, 0))
        total = (share * collect(grown.sum(-1, keepdim=True))).sum(3)
        mixed = (share * collect(dropout(grown, self.dropout, self.training) @ columns(v))).sum(3)
        return mixed / total.masked_fill(total == 0, 1)
