"""Sums over the calls of one site, from which the figures of its heads follow.

They add up over batches and over processes, so that every process can come to the same figures.

Letters: B batch, H query heads, T queries, S keys, C columns, Dv value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.heads.entropy import entropy
from attnzoo.heads.probe import SIGNED, TINY, Even, even, readable, received, shares_of, signs, through
from attnzoo.heads.sites import Passed, Site
from attnzoo.heads.trace import sum_of_squares
from attnzoo.mask import Mask
from attnzoo.record import Call

FEWEST = 4
"""A sequence of fewer queries does not show that they all look at one key."""

CUTS = 256
"""Places between keys at which the weight that crosses them is read."""

BY_HEAD = (
    "norm", "rows", "square", "spread", "spread_rows", "seen", "first", "sink", "sink_rows", "distance",
    "distance_rows", "varied", "varied_of", "entropy", "entropy_rows",
)  # fmt: skip
"""Sums that each head has for itself; ``rows`` are the queries that they were taken over."""


class Sums(NamedTuple):
    """What is known of one site so far, in float64.

    Attributes:
        tokens: how many tokens went into the output projection, scalar.
        total: the sum of what went in, [H Dv].
        outer: the sum of its outer products, [H Dv, H Dv].
        heads: the sums named in ``BY_HEAD``, [number of names, H].
    """

    tokens: Tensor
    total: Tensor
    outer: Tensor
    heads: Tensor

    @classmethod
    def none(cls, site: Site) -> "Sums":
        """Nothing seen yet."""
        weight = site.out_proj.weight
        width = site.num_heads * site.value_dim
        shapes = ((), (width,), (width, width), (len(BY_HEAD), site.num_heads))
        return cls(*(weight.new_zeros(shape, dtype=torch.float64) for shape in shapes))

    def head(self, name: str) -> Tensor:
        """One of ``BY_HEAD``, [H]."""
        return self.heads[BY_HEAD.index(name)]

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


def outputs(site: Site, passed: Passed, real: Tensor | None) -> Sums:
    """What the heads gave: means, products, norms behind the output projection.

    Args:
        site: where.
        passed: one call.
        real: bool [B, T], the queries that count; all if None.
    """
    known = Sums.none(site)
    heads = passed.heads.detach()
    flat = (heads.flatten(0, -2) if real is None else heads[real]).double()
    gram = _gram(site)
    by_head = flat.unflatten(-1, (site.num_heads, site.value_dim))
    norms = torch.einsum("nhv,hvw,nhw->nh", by_head, gram, by_head).clamp(min=0).sqrt()
    known.head("norm").copy_(norms.sum(0))
    return known._replace(tokens=known.tokens + len(flat), total=flat.sum(0), outer=flat.T @ flat)


def _gram(site: Site) -> Tensor:
    slices = site.slices().detach().double()
    return slices @ slices.transpose(1, 2)


def weights(site: Site, passed: Passed, real: Tensor | None, columns: int, generator: torch.Generator) -> Sums:
    """What the heads attended to, by probes. The mechanism must be linear in v.

    Args:
        site: where.
        passed: one call.
        real: bool [B, T], the queries that count; all if None.
        columns: how many columns of random signs.
        generator: of these, on the CPU.
    """
    known = Sums.none(site)
    call = readable(passed.call)
    keys = call.k.shape[2]
    pairs = _pairs(call.mask, len(call.q))
    random = signs(keys, columns, int(pairs.max()) + 1, generator).to(call.q)[pairs]
    total = shares_of(call)
    estimate = through(call, random) / total
    baseline = even(call, random)
    rows = _rows(baseline, real, total[..., 0])
    apart = (estimate - baseline.seen).square().mean(-1)
    _add(known, "spread", torch.where(rows, apart / baseline.square.clamp(min=TINY), 0))
    _add(known, "spread_rows", rows.double())
    if isinstance(call.mechanism, SIGNED):
        return known
    _add(known, "seen", torch.where(rows, 1 / baseline.square.clamp(min=TINY), 0))
    away = _away(estimate, rows)
    mass, squares = _squares(call, away, random, total, rows)
    of_mean = mass.square().sum(-1) / rows.sum(-1).clamp(min=1)
    _add(known, "rows", rows.double())
    _add(known, "square", (squares + of_mean)[..., None])
    _mass(known, mass, call.mask.key_keep, rows)
    # Of the same signs as the difference of two rows, whose noise it shares.
    _variation(known, pairs, estimate, mass, away.square().mean(-1).sum(-1) + of_mean, rows)
    if not passed.cross and keys > 1:
        _add(known, "distance", torch.where(rows, _distance(call, total), 0))
        _add(known, "distance_rows", rows.double())
    nats = entropy(call)
    if nats is not None:
        _add(known, "entropy", torch.where(rows, nats, 0))
        _add(known, "entropy_rows", rows.double())
    return known


def _pairs(mask: Mask, batch: int) -> Tensor:
    """Which sequences share their signs: two of one length each, [B]; a number that stands once has no partner."""
    if mask.segments is not None or (mask.pair_keep is not None and mask.pair_keep.dim() == 4):
        return torch.arange(batch)
    group = torch.zeros(batch, dtype=torch.long)
    if mask.key_keep is not None:
        group = torch.unique(mask.key_keep.cpu(), dim=0, return_inverse=True)[1]
    order = group.argsort(stable=True)
    place = torch.arange(batch) - torch.searchsorted(group[order], group[order])
    first = place % 2 == 0
    pairs = torch.empty_like(group)
    pairs[order] = first.long().cumsum(0) - 1
    return pairs


def _distance(call: Call, total: Tensor) -> Tensor:
    """sum_j a_ij |i - j|, [B, H, T]: |i - j| counts the cuts between i and j, so it is the weight that crosses each.

    Of more than ``CUTS`` cuts so many are read, evenly spread, and stand for their neighbours.
    """
    queries, keys = call.q.shape[2], call.k.shape[2]
    own, places = (torch.arange(n, device=call.q.device) for n in (queries, keys))
    crossed = torch.zeros_like(total[..., 0])
    runs = places[:-1].tensor_split(min(CUTS, keys - 1))
    for some in torch.arange(len(runs)).split(call.mechanism.head_dim):
        cuts = torch.stack([runs[number][len(runs[number]) // 2] for number in some.tolist()])
        upto = (places[:, None] <= cuts).to(call.q)
        before = through(call, upto[None]) / total
        crossing = torch.where((own + keys - queries)[:, None] <= cuts, 1 - before, before)
        crossed += crossing @ torch.tensor([len(runs[number]) for number in some.tolist()]).to(crossing)
    return crossed


def _rows(baseline: Even, real: Tensor | None, total: Tensor) -> Tensor:
    """Queries that count, bool [B, H, T]: real ones that see more than one key."""
    rows = (total.abs() >= TINY) & (baseline.square < 1 - 1e-4)
    return rows if real is None else rows & real[:, None]


def _away(estimate: Tensor, rows: Tensor) -> Tensor:
    """How far rows [B, H, T, C] lie from the mean of those that count; the mean is known without the signs."""
    count = rows.sum(-1).clamp(min=1)
    estimate = torch.where(rows[..., None], estimate, 0)
    return torch.where(rows[..., None], estimate - (estimate.sum(2) / count[..., None])[:, :, None], 0)


def _squares(call: Call, away: Tensor, columns: Tensor, total: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What falls on each key from all queries, [B, H, S], and sum_ij a_ij^2 without that of the mean row, [B, H]."""
    keys = call.k.shape[2]
    inverse = torch.where(rows, 1 / total[..., 0], 0)[..., None]
    if keys <= 2 * columns.shape[2]:  # unit columns, which are exact
        return received(call, inverse)[..., 0], away.square().mean(-1).sum(-1)
    # One column less, so that the others and the mass find room in one pass.
    found = received(call, torch.cat([inverse, away[..., 1:] * inverse], dim=-1))
    return found[..., 0], sum_of_squares(columns[..., 1:], found[..., 1:], 1 << (keys - 1).bit_length())


def _mass(known: Sums, mass: Tensor, keep: Tensor | None, rows: Tensor) -> None:
    """What falls on the first key, and on the one most used of each sequence."""
    first = torch.zeros(len(mass), dtype=torch.long, device=mass.device) if keep is None else keep.int().argmax(1)
    _add(known, "first", mass.gather(2, first[:, None, None].expand(-1, mass.shape[1], 1)))
    count = rows.sum(-1)
    enough = count >= FEWEST
    _add(known, "sink", torch.where(enough, mass.amax(-1), 0)[..., None])
    _add(known, "sink_rows", torch.where(enough, count, 0)[..., None])


def _variation(known: Sums, pairs: Tensor, estimate: Tensor, mass: Tensor, square: Tensor, rows: Tensor) -> None:
    """How the rows of A differ between two sequences of one length, at the same place; their mean rows are known."""
    order = pairs.argsort(stable=True)
    partners = (pairs[order][1:] == pairs[order][:-1]).nonzero()[:, 0]
    one, other = order[partners], order[partners + 1]
    # Where they do not count the same queries, their squares are no measure for the difference.
    alike, count = (rows[one] == rows[other]).all(-1), rows[one].sum(-1).clamp(min=1)
    away = _away(estimate[one] - estimate[other], rows[one])
    varied = away.square().mean(-1).sum(-1) + (mass[one] - mass[other]).square().sum(-1) / count
    _add(known, "varied", torch.where(alike, varied, 0)[..., None])
    _add(known, "varied_of", torch.where(alike, square[one] + square[other], 0)[..., None])


def _add(known: Sums, name: str, values: Tensor) -> None:
    """Adds values [B, H, any], summed over all but the head."""
    known.head(name).add_(values.double().sum((0, 2)))
