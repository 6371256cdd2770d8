"""Terms of the scores that know how far apart query and key stand: one number for each head and offset.

    s_ij = q_i . k_j / sqrt(D) + b_h(p_j - p_i)

All of them go by slots unless places are given: query i of T stands at slot i + S - T of S. They come as an
``OffsetBias``, which is never T x S numbers; places given by hand make a dense bias of [B, H, T, S].
"""

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias, OffsetBias
from attnzoo.checks import at_least, whole, yes_or_no
from attnzoo.positions.inside import Places, ScoreTerms, offsets, pair_offsets


class Relative(ScoreTerms):
    """Base of the encodings that add a number for each head and offset. A subclass writes ``values``."""

    num_heads: int

    def values(self, offset: Tensor) -> Tensor:
        """The terms of offsets p_j - p_i: int64 [...] -> [H, ...]."""
        raise NotImplementedError(f"{type(self).__name__} must define values()")

    def forward(self, queries: int, keys: int, device: torch.device | None = None) -> OffsetBias:
        """The terms for T queries and S keys, the last query at the last key."""
        return OffsetBias(self.values(offsets(queries, keys, device)))

    def terms(self, q: Tensor, keys: int, places: Places | None) -> Bias:
        if places is None:
            return self(q.shape[2], keys, q.device)
        dense = self.values(pair_offsets(q, keys, places))
        return dense[None] if dense.dim() == 3 else dense.transpose(0, 1)


class RelativeBias(Relative):
    """A learned term for each head and offset, clipped: s_ij += table[h, clip(p_j - p_i, -C, C)].

    The clipping of Shaw et al. 2018 (arXiv:1803.02155) with scalars instead of vectors; ``Shaw`` has the vectors.

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
        at_least(1, "RelativeBias", num_heads=num_heads)
        at_least(0, "RelativeBias", max_distance=max_distance)
        self.num_heads, self.max_distance = num_heads, max_distance
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))

    def values(self, offset: Tensor) -> Tensor:
        return self.table[:, offset.clamp(-self.max_distance, self.max_distance) + self.max_distance]


class T5Bias(Relative):
    """A learned term for each head and bucket of offsets (Raffel et al. 2019, arXiv:1910.10683, section 2.1).

        n = |p_j - p_i|, or max(p_i - p_j, 0) where only the past counts; N buckets for it
        bucket = n                                                                  for n < N/2
                 min(N/2 + floor(log(n / (N/2)) / log(max_distance / (N/2)) N/2), N - 1)  beyond

    so near offsets have a bucket each, far ones share them, all from ``max_distance`` on the last. With
    ``bidirectional`` half of the buckets are for keys before the query and half for those after it.

    T5 itself multiplies scores with 1, not with 1/sqrt(D): ``functools.partial(Softmax, scale=1.0)`` is its form.
    It has one table for all layers: give the same instance to each of them.

    Args:
        num_heads: H.
        num_buckets: how many buckets there are in all.
        max_distance: from here on all offsets share a bucket.
        bidirectional: whether keys after the query have buckets of their own; False for causal attention.

    Raises:
        ValueError: for fewer than two buckets a side, an odd number of them for two sides, or a
            ``max_distance`` that buckets of one offset reach already.

    Example:
        >>> T5Bias(1).bucket(torch.tensor([-200, -9, -1, 0, 1, 9]))
        tensor([15,  8,  1,  0, 17, 24])
    """

    def __init__(
        self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        at_least(1, "T5Bias", num_heads=num_heads)
        whole("T5Bias", num_buckets=num_buckets, max_distance=max_distance)
        yes_or_no("T5Bias", bidirectional=bidirectional)
        side = num_buckets // 2 if bidirectional else num_buckets
        if side < 2 or (bidirectional and num_buckets % 2):
            raise ValueError(
                f"T5Bias: num_buckets must be {'even and at least 4' if bidirectional else 'at least 2'} "
                f"with bidirectional={bidirectional}, got {num_buckets}"
            )
        if max_distance <= side // 2:
            raise ValueError(
                f"T5Bias: max_distance must be above {side // 2}, up to which each offset has a bucket of its own "
                f"with num_buckets={num_buckets}; got {max_distance}"
            )
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.bidirectional = bidirectional
        self.starts = _bucket_starts(side, max_distance)
        self.table = nn.Parameter(torch.zeros(num_heads, num_buckets))

    def bucket(self, offset: Tensor) -> Tensor:
        """The bucket of each offset p_j - p_i."""
        far = offset.abs() if self.bidirectional else (-offset).clamp(min=0)
        bucket = torch.zeros_like(far)
        for start in self.starts:  # numbers of the host, which need no copy that an accelerator would wait for
            bucket = bucket + (far >= start)
        return bucket + (offset > 0) * (self.num_buckets // 2) if self.bidirectional else bucket

    def values(self, offset: Tensor) -> Tensor:
        return self.table[:, self.bucket(offset)]


class Alibi(Relative):
    """A penalty that grows with the distance: s_ij -= m_h |p_j - p_i| (Press et al. 2021, arXiv:2108.12409).

    m_h = 2^(-8 h / H) for h = 1 .. H. Where H is no power of two, the first P heads, P the power of two below it,
    take the slopes for P, and the others every second one of those for 2 P, as published.

    The paper is about causal attention. In both directions the distance counts alike: keys after the query are
    penalised too, never rewarded. On the tokens of a picture the distance is that in raster order. Nothing is
    learned and nothing is saved.

    Args:
        num_heads: H.

    Example:
        >>> Alibi(2)(queries=1, keys=3).values
        tensor([[-0.1250, -0.0625,  0.0000],
                [-0.0078, -0.0039,  0.0000]])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        at_least(1, "Alibi", num_heads=num_heads)
        self.num_heads = num_heads

    def slopes(self, device: torch.device | None = None) -> Tensor:
        """m_h, float32 [H]: made on the fly, since a buffer would be rounded with the model."""
        power = 1 << (self.num_heads.bit_length() - 1)
        head = torch.arange(1, self.num_heads + 1, device=device)
        # In steps of half a head: 2 h of the series for P, then 1, 3, 5, ... of the series for 2 P.
        half = torch.where(head <= power, 2 * head, 2 * (head - power) - 1)
        return torch.exp2(half.float() * (-4.0 / power))

    def values(self, offset: Tensor) -> Tensor:
        return self.slopes(offset.device).view(-1, *[1] * offset.dim()) * -offset.abs()


def _bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance in each bucket after the first, in whole numbers.

    A logarithm in floating point would put distances that begin a bucket now here, now there. With e = N/2 single
    buckets and m = N - e shared ones, n lies in bucket e + k or a later one when
    n^m e^k >= max_distance^k e^m, which is log(n / e) / log(max_distance / e) m >= k.
    """
    single = buckets // 2
    shared = buckets - single
    starts = list(range(1, single + 1))
    for step in range(1, shared):
        n = starts[-1]
        while n**shared * single**step < max_distance**step * single**shared:
            n += 1
        starts.append(n)
    return tuple(starts)
