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
from attnzoo.kernels.heads import by_heads
from attnzoo.kernels.precision import full_precision
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least, whole
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
        at_least(1, "LSH", bucket_size=bucket_size, num_rounds=num_rounds)
        at_least(0, "LSH", layer=layer)
        whole("LSH", num_buckets=num_buckets, seed=seed)
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
        return _buckets(k, self.rotations)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return by_heads(self._heads, q, keys, v, mask, bias)

    def _heads(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None, part: slice) -> Tensor:
        (batch, heads, length, _), queries, kind = keys.shape, q.shape[2], q.dtype
        bucket = _buckets(keys, self.rotations[:, part])
        if mask.key_keep is not None:
            bucket = bucket.masked_fill(~mask.key_keep[:, None, None], self.num_buckets)
        size = min(self.bucket_size, length)
        slot, item = lay_out(bucket, self.num_buckets + 1, size)
        # Consecutive within a bucket, a gap of one between buckets; what fills empty slots comes behind the tokens.
        chunk = (slot // size + bucket).masked_fill(bucket == self.num_buckets, NOWHERE).int()
        chunk = pad(chunk, (0, 1), value=NOWHERE)
        # An empty chunk in front of each head: all chunks in one row, each may look at the one before it.
        item = pad(item, (size, 0), value=length)
        head = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
        source = item + head * (length + 1)
        target = slot + head * item.shape[3]

        with full_precision(q):
            q, keys, v = (x.to(torch.promote_types(kind, torch.float32)) for x in (q, keys, v))
            # A step brings the last queries alone; they stand at the last keys.
            whole = pad(q, (0, 0, length - queries, 0))
            rows, columns, values = (pad(x, (0, 0, 0, 1)).flatten(0, 2) for x in (whole, _unit(keys), v))
            rounds = []
            for number in range(self.num_rounds):
                laid = source[:, :, number].reshape(-1, size)
                places = [chunk[:, :, other].flatten()[laid] for other in range(number + 1)]
                terms = None
                if bias is not None:
                    row = item[:, :, number].unflatten(2, (-1, size))
                    column = torch.stack([row, row.flatten(0, 2).roll(1, 0).view_as(row)], 3)
                    row = row[:, :, :, None, :, None] - (length - queries)
                    terms = terms_at(bias, row, column[..., None, :], queries, length).flatten(0, 2)[1:].unbind(1)
                laid_out = _rows(rows, laid[1:]), _rows(columns, laid), _rows(values, laid)
                found = self._round(*laid_out, places, mask.causal, terms)
                rounds.append([_rows(x.flatten(0, 1), target[:, :, number]) for x in found])
            high = torch.stack([high for high, _, _ in rounds])
            share = torch.exp(high - _finite(high.amax(0)))
            total = (share * torch.stack([total for _, total, _ in rounds])).sum(0)
            mixed = torch.stack([part * mixed for part, (_, _, mixed) in zip(share, rounds, strict=True)]).sum(0)
            empty = total == 0
            alone = empty
            if bias is not None:
                own = torch.arange(length, device=q.device).expand(batch, heads, -1)
                alone = empty & (terms_at(bias, own - (length - queries), own, queries, length) > -torch.inf)[..., None]
            out = (mixed + dropout(alone.to(v.dtype), self.dropout, self.training) * v) / total.masked_fill(empty, 1)
            return out[:, :, length - queries :].to(kind)

    def _round(
        self,
        q: Tensor,
        keys: Tensor,
        v: Tensor,
        places: list[Tensor],
        causal: bool,
        terms: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The softmax of one round, undivided: each chunk but the first sees its own keys and those of the one before.

        Args:
            q: [chunks - 1, size, D].
            keys: [chunks, size, D], of length 1.
            v: [chunks, size, Dv].
            places: int32 [chunks, size], the chunk that each slot's token has, in each round up to this one.
            causal: whether keys must be earlier tokens.
            terms: the bias at own keys and at those before, [chunks - 1, size, size].

        Returns:
            The highest score [chunks - 1, size, 1], the sum of exp(score - highest), and that of the same times v.
        """
        *earlier, place = places
        pairs = torch.ones(place.shape[1], place.shape[1], dtype=torch.bool, device=q.device)
        # In a bucket tokens keep their order, and a chunk that another one continues is full.
        order = pairs.tril(-1) if causal else pairs.tril(-1) | pairs.triu(1)
        own = order & (place[1:, None] != NOWHERE)
        before = (place[1:, :1, None] - place[:-1, :1, None]) == 1
        scores = []
        for number, (visible, which) in enumerate(((own, slice(1, None)), (before, slice(-1)))):
            for other in earlier:
                # A key that an earlier round has met counts there.
                row, column = other[1:, :, None], other[which, None]
                visible = visible & ~((row == column) | (row - 1 == column))
            score = q @ keys[which].mT
            if terms is not None:
                score = score + terms[number].to(score.dtype)
            scores.append(score.masked_fill_(~visible, -torch.inf))
        high = torch.maximum(*(score.detach().amax(-1, keepdim=True) for score in scores))
        # In place: at this size it costs more to get memory than to compute what stands in it.
        here, there = (score.sub_(_finite(high)).exp_() for score in scores)
        total = here.sum(-1, keepdim=True) + there.sum(-1, keepdim=True)
        here, there = (dropout(grown, self.dropout, self.training) for grown in (here, there))
        return high, total, torch.baddbmm(here @ v[1:], there, v[:-1])


def _buckets(k: Tensor, rotations: Tensor) -> Tensor:
    # One token, one bucket: the discrete choice has no gradient, and must not follow the precision of autocast.
    with torch.no_grad(), full_precision(k):
        wide = torch.promote_types(k.dtype, torch.float32)
        turned = torch.einsum("bhsd,rhdn->bhrsn", _unit(k.to(wide)), rotations.to(wide))
        return torch.cat([turned, -turned], -1).argmax(-1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] of x [N, width]; a gather along the first axis has the faster gradient."""
    return x.gather(0, index.flatten()[:, None].expand(-1, x.shape[1])).view(*index.shape, x.shape[1])


def _finite(high: Tensor) -> Tensor:
    """0 where a row has no key."""
    return high.masked_fill(high == -torch.inf, 0)


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1, without overflow on the way; a row of zeros stays."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    x = x / largest.masked_fill(zero, 1)
    return x / x.norm(dim=-1, keepdim=True).masked_fill(zero, 1)
