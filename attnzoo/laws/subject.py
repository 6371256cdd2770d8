"""What a law looks at: a mechanism, its formula, and inputs drawn from a seed."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.reference.rows import Formula
from attnzoo.traits import Traits


class LawBroken(AssertionError):
    """A mechanism does not do what its traits claim; the message says what was seen."""


@dataclass
class Subject:
    """One mechanism under examination.

    Attributes:
        mechanism: the original; laws work on copies.
        formula: the slow formula that it must equal, or None where it has none.
        max_len: the longest sequence that it can take here.
    """

    mechanism: Mechanism
    formula: Formula | None
    max_len: int

    @property
    def traits(self) -> Traits:
        return self.mechanism.traits

    def copy(self, dtype: torch.dtype = torch.float32, training: bool = False) -> Mechanism:
        """A copy on the CPU in the precision asked for, in evaluation unless told otherwise."""
        return copy.deepcopy(self.mechanism).to("cpu", dtype).train(training)

    def inputs(
        self,
        queries: int,
        keys: int | None = None,
        *,
        batch: int = 2,
        groups: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v from a seed; k is q where the mechanism shares them."""
        heads, width = self.mechanism.num_heads, self.mechanism.head_dim
        keys = queries if keys is None else keys
        groups = heads if groups is None else groups
        draw = torch.Generator().manual_seed(seed)
        shapes = (heads, queries, width), (groups, keys, width), (groups, keys, value_dim or width)
        q, k, v = (torch.randn(batch, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
        return q, (q if self.traits.shared_qk else k), v

    def lengths(self) -> list[int]:
        """Sequence lengths to try: every small one, and some around block sizes."""
        return [n for n in (*range(1, 18), 33, 65) if n <= self.max_len]

    def sizes(self) -> list[tuple[int, int]]:
        """(T, S) to try against the slow formula: equal, fewer queries, more queries."""
        square = [(n, n) for n in (1, 2, 3, 5, 8, 13, 33) if n <= self.max_len]
        return square + ([(1, 7), (3, 8), (9, 4), (2, 1)] if self.traits.rectangular else [])

    def causal_modes(self) -> list[bool]:
        """The values of ``mask.causal`` that the mechanism claims to take."""
        return [False] * self.traits.bidirectional + [True] * self.traits.causal

    def causal(self) -> bool:
        """One mode that the mechanism takes; not causal where it can choose."""
        return not self.traits.bidirectional

    def masks(self, queries: int, keys: int, batch: int = 2, seed: int = 0) -> list[Mask]:
        """Every kind of mask that the mechanism claims, empty rows included."""
        draw = torch.Generator().manual_seed(seed)
        heads = self.mechanism.num_heads
        found = []
        for causal in self.causal_modes():
            found.append(Mask(causal=causal))
            if self.traits.key_keep:
                keep = torch.rand(batch, keys, generator=draw) < 0.7
                keep[0, 0] = False
                found.append(Mask(causal=causal, key_keep=keep))
            if self.traits.pair_keep:
                pairs = torch.rand(batch, heads, queries, keys, generator=draw) < 0.7
                pairs[0, 0, 0] = False
                found.append(Mask(causal=causal, pair_keep=pairs))
                found.append(Mask(causal=causal, pair_keep=pairs[0, 0]))
                if queries == keys:
                    segments = torch.randint(0, 3, (batch, queries), generator=draw).sort(1).values
                    found.append(Mask(causal=causal, segments=segments))
        return found

    def biases(self, queries: int, keys: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Bias]:
        """A dense bias for each sample and head, one shared by all, and one by offset; none if not claimed."""
        if not self.traits.bias:
            return []
        draw = torch.Generator().manual_seed(seed)
        heads = self.mechanism.num_heads
        shapes = (2, heads, queries, keys), (queries, keys), (heads, queries + keys - 1)
        made = [torch.randn(*shape, generator=draw).to(dtype) for shape in shapes]
        return [made[0], made[1], OffsetBias(made[2])]


def must_equal(got: Tensor, right: Tensor, tolerance: float, what: str) -> None:
    """Raises ``LawBroken`` with the largest difference; NaN is never equal."""
    if got.shape != right.shape:
        raise LawBroken(f"{what}: shape {tuple(got.shape)} instead of {tuple(right.shape)}")
    if got.numel() == 0:
        return
    difference = (got.double() - right.double()).abs().max().item()
    if not difference <= tolerance:
        raise LawBroken(f"{what}: off by {difference:.3g}, more than {tolerance:.3g}")


def must_be_finite(x: Tensor | None, what: str) -> None:
    """Raises ``LawBroken`` if a number is NaN or infinite, or there is no tensor at all."""
    if x is None or not torch.isfinite(x).all():
        raise LawBroken(f"{what} is {'missing' if x is None else 'not finite'}")


def parts(mask: Mask) -> str:
    """Names what a mask hides by."""
    named = [name for name in ("key_keep", "pair_keep", "segments") if getattr(mask, name) is not None]
    return " and ".join((["causal"] if mask.causal else []) + named) or "no mask"
