"""The figures of a head, and how they follow from the sums over calls; ``health.py`` says what they are.

Letters: H query heads, Dv value width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.heads.probe import SIGNED
from attnzoo.heads.sites import Passed, Site
from attnzoo.heads.sums import FEWEST, Sums
from attnzoo.mechanisms.lsh import LSH
from attnzoo.mechanisms.moba import MoBA


class Head(NamedTuple):
    """Names one head: a site, see ``find_sites``, and a number from 0."""

    site: str
    number: int


@dataclass(frozen=True)
class HeadHealth:
    """Figures of one head; None where a figure has no meaning, and ``Health.notes`` says why."""

    head: Head
    norm: float
    effective_keys: float | None
    visible_keys: float | None
    unevenness: float | None
    sink: float | None
    first_token: float | None
    distance: float | None
    content: float | None
    entropy: float | None
    redundancy: float | None
    nearest: int | None
    ablation: float | None = None


@dataclass
class Health:
    """Figures of all heads.

    Attributes:
        heads: one entry for each head, site by site.
        means: site name -> mean output of each head before the output projection, [H, Dv] in float64.
        loss: mean loss over the batches, None where no loss was given.
        notes: site name -> figure -> why it is missing, or what it means there.
    """

    heads: list[HeadHealth]
    means: dict[str, Tensor]
    loss: float | None = None
    notes: dict[str, dict[str, str]] = field(default_factory=dict)

    def __getitem__(self, head: tuple[str, int]) -> HeadHealth:
        """Figures of one head, by site and number."""
        return next(entry for entry in self.heads if entry.head == head)


def with_ablation(health: Health, rises: Sequence[float], heads: Sequence[Head] | None = None) -> Health:
    """The same figures with those of ``ablation`` filled in, for all heads or for ``heads``."""
    known = dict(zip([entry.head for entry in health.heads] if heads is None else heads, rises, strict=True))
    entries = [replace(entry, ablation=known[entry.head]) if entry.head in known else entry for entry in health.heads]
    return Health(entries, health.means, health.loss, health.notes)


def figures(site: Site, known: Sums) -> list[HeadHealth]:
    """The figures of a site from the sums over its calls."""
    norm = known.head("norm")
    norm = norm / norm.mean().clamp(min=torch.finfo(norm.dtype).tiny)
    similar = similarity(site, known)
    similar.fill_diagonal_(-1)

    def share(name: str, by: str, head: int) -> float | None:
        below = float(known.head(by)[head])
        return float(known.head(name)[head]) / below if below else None

    entries = []
    for head in range(site.num_heads):
        square = share("square", "rows", head)
        alone = site.num_heads == 1
        entries.append(
            HeadHealth(
                Head(site.name, head),
                norm=float(norm[head]),
                effective_keys=None if square is None else 1 / square if square > 0 else math.inf,
                visible_keys=share("seen", "spread_rows", head),
                unevenness=share("spread", "spread_rows", head),
                sink=share("sink", "sink_rows", head),
                first_token=share("first", "rows", head),
                distance=share("distance", "distance_rows", head),
                content=share("varied", "varied_of", head),
                entropy=share("entropy", "entropy_rows", head),
                redundancy=None if alone else float(similar[head].max()),
                nearest=None if alone else int(similar[head].argmax()),
            )
        )
    return entries


def similarity(site: Site, known: Sums) -> Tensor:
    """Linear CKA of the heads' contributions behind the output projection, [H, H]; 0 for one that never varies.

    By blocks: |Y_i^T Y_j|^2 = tr(C_ij^T G_ii C_ij G_jj), C the covariance of the heads, G the products of the slices.
    """
    mean = known.total / known.tokens
    covariance = known.outer / known.tokens - mean[:, None] * mean
    shape = (site.num_heads, site.value_dim)
    blocks = covariance.unflatten(1, shape).unflatten(0, shape).permute(0, 2, 1, 3)  # [H, H, Dv, Dv]
    slices = site.slices().detach().double()
    gram = slices @ slices.transpose(1, 2)
    cross = (blocks * (gram[:, None] @ blocks @ gram[None])).sum((2, 3)).clamp(min=0)
    own = cross.diagonal().sqrt()
    scale = own[:, None] * own
    return torch.where(scale > 0, cross / scale.clamp(min=torch.finfo(scale.dtype).tiny), 0)


ENOUGH = 32
"""Tokens for each number of a head: of fewer, heads that have nothing to do with each other look alike."""


SHARES = ("effective_keys", "visible_keys", "sink", "first_token", "distance", "content", "entropy")
"""Figures that take weights for shares of the keys."""


def notes(site: Site, passed: Passed, known: Sums) -> dict[str, str]:
    """Which figures are missing at a site, or mean something else, and why."""
    name, traits, tokens = type(site.mechanism).__name__, site.mechanism.traits, float(known.tokens)
    found: dict[str, str] = {}
    if not traits.linear_in_v:
        reason = f"{name} is not linear in v, so it applies no matrix that could be read"
        found |= dict.fromkeys((*SHARES, "unevenness"), reason)
    elif isinstance(site.mechanism, SIGNED):
        reason = f"the weights of {name} have either sign and any sum, so they are no shares of the keys"
        found |= dict.fromkeys(SHARES, reason)
    elif isinstance(site.mechanism, (LSH, MoBA)):
        reason = f"{name} chooses keys by content; these are compared with those that it takes at equal scores"
        found |= dict.fromkeys(("visible_keys", "unevenness"), reason)
    if passed.cross:
        found["distance"] = "queries and keys are two sequences, whose places cannot be compared"
    if not traits.normalised and "effective_keys" not in found:
        found["effective_keys"] = f"the weights of {name} are no shares; they are divided by their sum, and may be < 0"
    if "sink" not in found:
        found = _not_seen(name, known) | found
    if tokens < ENOUGH * site.value_dim:
        wanted = ENOUGH * site.value_dim
        found["redundancy"] = (
            f"{tokens:.0f} tokens are few for heads of {site.value_dim}: it is too high; give {wanted}"
        )
    if site.num_heads == 1:
        found |= dict.fromkeys(("redundancy", "nearest"), "there is one head")
    return found


def _not_seen(name: str, known: Sums) -> dict[str, str]:
    """Which figures of the weights have nothing that they could be taken from, and why."""
    without = [part for part in ("rows", "sink_rows", "varied_of", "entropy_rows") if not known.head(part).all()]
    if "rows" in without:
        return dict.fromkeys((*SHARES, "unevenness"), "no query of a head sees more than one key")
    reasons = {
        "sink_rows": ("sink", f"no sequence has {FEWEST} queries that see more than one key"),
        "varied_of": ("content", "no batch has two sequences of one length, whose weights could be compared"),
        "entropy_rows": ("entropy", f"it is taken from the scores of Softmax and Flash, and not known of {name}"),
    }
    return dict(reasons[part] for part in without)
