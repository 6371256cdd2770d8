"""LSH attention: each query meets the keys that a random hash puts beside it.

Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2.

    k_j    = q_j / |q_j|                                  shared queries and keys
    h_r(j) = argmax [k_j R_r ; -k_j R_r]                  the bucket of token j in round r
    P_r(i) = { j != i : h_r(j) = h_r(i), j in the chunk of i or in the one before }
    o_i    = softmax over the visible keys of P_1(i) .. P_rounds(i) of (q_i . k_j + bias_ij)  times v_j
    o_i    = v_i  where there are none

    per head and round: R [D, buckets / 2], drawn once from the seed, a buffer

A bucket is cut, in the order of its tokens, into chunks of m = bucket_size. The paper gives each round a softmax and
joins them by their log-sum-exp, less log N_ij for a key met in N_ij rounds; that is one softmax over all of them,
which is what is computed: a key counts in the first round that meets it. Scores have no further 1/sqrt(D), as in
the authors' code, where keys have the length sqrt(D) before the division: so they are as large as in softmax.

Where we deviate, so that no output depends on the future, on padding or on the length of the input:
chunks are counted within a bucket, not across all of them, where one later token in an earlier bucket moves every
border behind it; the number of buckets is an option (take about length / m), not length / m of each input; nothing
wraps from the first chunk to the last. Left out: reversible layers, and the product of two hashes for many buckets.

Use it when sequences are long, each token needs few others, and those are like it: the pairs that it scores
are the likely ones, found without looking at all. More rounds find more of them.

Not when sequences are short, where sorting costs more than it saves, or a query has to find keys unlike itself: it is
its own key. Below about m x num_buckets tokens buckets run empty, and a lonely token sees itself alone.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from attnzoo.bias import Bias
from attnzoo.kernels.hashing import lay_out, terms_at
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.traits import Traits

NOWHERE = -2
"""The chunk of what is no key: two below the first one, so that nobody looks back to it."""


class LSH(Mechanism):
    """Attention within hash buckets; memory grows with T alone. The keys must be the queries.

    A token hidden by ``key_keep`` is in no bucket, so it takes no key's place and its own output is 0.

    Args:
        num_heads: H.
        head_dim: D.
        bucket_size: m, the length of a chunk; a round shows a query at most 2 m - 1 other keys.
        num_buckets: buckets of a round, an even number. About as many as chunks fit into the usual length.
        num_rounds: how often tokens are hashed.
        seed: where the hashes are drawn from, together with ``layer``.
        dropout: share of the attention weights dropped in training.
        layer: a fact of the site, filled in by the shell, so that each layer has hashes of its own.

    Raises:
        ValueError: for a size below 1, and for an odd number of buckets.

    Example:
        >>> q, v = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
        >>> LSH(2, 8, bucket_size=8, num_buckets=12)(q, q, v).shape
        torch.Size([1, 2, 100, 8])
    """

    traits = Traits(
        cross=False,
        rectangular=False,
        pair_keep=False,
        grouped=False,
        exact=False,
        shared_qk=True,
        linear_memory=True,
        budget="num_rounds",
        complexity="T (block + buckets) rounds D",
    )
    reasons = {
        "cross": "its keys are its queries; Softmax or Additive can cross",
        "rectangular": "its keys are its queries, so there are as many; Softmax takes any number",
        "pair_keep": "a key hidden from one query would still take a place in its bucket; Softmax and Local take pairs",
        "grouped": "its keys are its queries, so each head has its own; Softmax and Local take groups",
    }

    rotations: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        bucket_size: int = 8,
        num_buckets: int = 8,
        num_rounds: int = 2,
        seed: int = 0,
        dropout: float = 0.0,
        layer: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        for name, value in (("bucket_size", bucket_size), ("num_rounds", num_rounds)):
            if value < 1:
                raise ValueError(f"LSH: {name} must be at least 1, got {value}")
        if num_buckets < 2 or num_buckets % 2:
            raise ValueError(f"LSH: num_buckets must be an even number from 2 up, got {num_buckets}")
        self.bucket_size = bucket_size
        self.num_buckets = num_buckets
        self.num_rounds = num_rounds
        self.seed = seed
        draw = torch.Generator().manual_seed(seed + (layer or 0))
        rotations = torch.randn(num_rounds, num_heads, head_dim, num_buckets // 2, generator=draw)
        # In steps of 1/32, which half precision holds exactly: a model keeps its buckets when it is cast.
        self.register_buffer("rotations", (rotations * 32).round() / 32)

    def buckets(self, k: Tensor) -> Tensor:
        """The bucket of each key in each round.

        Args:
            k: [B, H, S, D], of any length.

        Returns:
            int64 [B, H, rounds, S].
        """
        # One token, one bucket: the discrete choice has no gradient, and must not follow the precision of autocast.
        with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
            wide = torch.promote_types(k.dtype, torch.float32)
            turned = torch.einsum("bhsd,rhdn->bhrsn", _unit(k.to(wide)), self.rotations.to(wide))
            return torch.cat([turned, -turned], -1).argmax(-1)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        length, queries, kind = keys.shape[2], q.shape[2], q.dtype
        bucket = self.buckets(keys)
        if mask.key_keep is not None:
            bucket = bucket.masked_fill(~mask.key_keep[:, None, None], self.num_buckets)
        hidden = bucket == self.num_buckets
        size = min(self.bucket_size, length)
        slot, item = lay_out(bucket, self.num_buckets + 1, size)
        # Consecutive within a bucket, a gap of one between buckets.
        chunk = slot // size + bucket

        def spread(x: Tensor, empty: float = 0.0) -> Tensor:
            """[B, H, S, width] -> [B, H, rounds, chunks, size, width]."""
            x = pad(x, (0, 0, 0, 1), value=empty)[:, :, None].expand(-1, -1, self.num_rounds, -1, -1)
            return x.gather(3, item[..., None].expand(-1, -1, -1, -1, x.shape[-1])).unflatten(3, (-1, size))

        def look_back(x: Tensor, empty: float = 0.0) -> Tensor:
            """[..., chunks, size, width] -> [..., chunks, 2 size, width], the chunk before in front."""
            return torch.cat([pad(x, (0, 0, 0, 0, 1, 0), value=empty)[..., :-1, :, :], x], -2)

        def collect(x: Tensor) -> Tensor:
            """[B, H, rounds, chunks, size, width] -> [B, H, rounds, S, width]."""
            return x.flatten(3, 4).gather(3, slot[..., None].expand(-1, -1, -1, -1, x.shape[-1]))

        place = item.unflatten(-1, (-1, size))[..., None]
        row, column = place, look_back(place).mT
        visible = (column < row) if mask.causal else (column != row)
        number = torch.arange(self.num_rounds, device=q.device).view(-1, 1, 1, 1)
        for other in range(self.num_rounds):
            mine = chunk[:, :, other, :, None]
            theirs = mine.masked_fill(hidden[:, :, other, :, None], NOWHERE)
            back = spread(mine) - look_back(spread(theirs, NOWHERE), NOWHERE).mT
            met = (back == 0) | (back == 1)
            # A key that an earlier round has met counts there.
            visible = visible & ((number < other) | (met ^ (number > other)))

        q, keys, v = (x.to(torch.promote_types(kind, torch.float32)) for x in (q, keys, v))
        # A step brings the last queries alone; they stand at the last keys.
        scores = spread(pad(q, (0, 0, length - queries, 0))) @ look_back(spread(_unit(keys))).mT
        if bias is not None:
            scores = scores + terms_at(bias, row - (length - queries), column, queries, length).to(scores.dtype)
        scores = scores.masked_fill(~visible, -torch.inf)
        highest = collect(scores.detach().amax(-1, keepdim=True)).amax(2)
        grown = torch.exp(scores - spread(highest.masked_fill(highest == -torch.inf, 0)))
        total = collect(grown.sum(-1, keepdim=True)).sum(2)
        mixed = collect(dropout(grown, self.dropout, self.training) @ look_back(spread(v))).sum(2)
        empty = total == 0
        alone = empty
        if bias is not None:
            own = torch.arange(length, device=q.device).expand(*q.shape[:2], -1)
            alone = empty & (terms_at(bias, own - (length - queries), own, queries, length) > -torch.inf)[..., None]
        out = (mixed + dropout(alone.to(v.dtype), self.dropout, self.training) * v) / total.masked_fill(empty, 1)
        return out[:, :, length - queries :].to(kind)


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1, without overflow on the way; a row of zeros stays."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    x = x / largest.masked_fill(zero, 1)
    return x / x.norm(dim=-1, keepdim=True).masked_fill(zero, 1)
