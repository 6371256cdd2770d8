"""Mechanisms with one planted bug each. ``BUGS`` names the law that has to catch it."""

import torch
from torch import Tensor

from attnzoo import Mask, Mechanism, Softmax, Traits
from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels import sdpa
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.state import State


class Plain(Mechanism):
    """Right, in plain steps that the bugs change one by one."""

    traits = Traits()

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        keys, v = self.repeat(keys), self.repeat(v)
        scores = self.add(self.scores(q, keys), bias, q.shape[2])
        weights = self.weights(scores, self.visible(q.shape[2], keys.shape[2], mask))
        return self.drop(weights) @ v

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.num_heads // x.shape[1], dim=1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.head_dim**-0.5

    def add(self, scores: Tensor, bias: Bias | None, queries: int) -> Tensor:
        if bias is None:
            return scores
        return scores + (bias.dense(queries) if isinstance(bias, OffsetBias) else bias)

    def visible(self, queries: int, keys: int, mask: Mask) -> Tensor | None:
        return mask.visible(queries, keys)

    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        return masked_softmax(scores, visible)

    def drop(self, weights: Tensor) -> Tensor:
        return torch.nn.functional.dropout(weights, self.dropout, self.training)


class SeesOneKeyTooFar(Plain):
    def visible(self, queries: int, keys: int, mask: Mask) -> Tensor | None:
        later = Mask(key_keep=mask.key_keep, pair_keep=mask.pair_keep, segments=mask.segments).visible(queries, keys)
        band = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + (1 if mask.causal else keys))
        return band if later is None else later & band


class AlignsCausalToTheFirstKey(Plain):
    def visible(self, queries: int, keys: int, mask: Mask) -> Tensor | None:
        rest = mask._replace(causal=False).visible(queries, keys)
        band = torch.ones(queries, keys, dtype=torch.bool).tril() if mask.causal else torch.ones(1, 1).bool()
        return band if rest is None else rest & band


class DropsThePaddingMask(Plain):
    def visible(self, queries: int, keys: int, mask: Mask) -> Tensor | None:
        return mask._replace(key_keep=None).visible(queries, keys)


class LeavesPaddingInTheNormaliser(Plain):
    """Zeroes k and v before the exponential, so a hidden key still counts exp(0) = 1."""

    traits = Traits(pair_keep=False, bias=False)

    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        visible = torch.ones(1, 1, dtype=torch.bool) if visible is None else visible
        grown = scores.exp().tril(scores.shape[-1] - scores.shape[-2])
        return grown * visible / grown.sum(-1, keepdim=True)


class MultipliesHiddenValuesByZero(Plain):
    """0 x NaN is NaN: hidden rows must be taken out, not weighted with 0."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> Tensor:
        mask = Mask() if mask is None else mask
        self.check_call(q, k, v, mask, bias)
        return self._attend(q, k, v, mask, bias)


class FillsHiddenScoresWithAConstant(Plain):
    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        return scores.softmax(-1) if visible is None else scores.masked_fill(~visible, -1e4).softmax(-1)

    def _attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return self.attend(q, keys, v, mask, bias)


class TakesSoftmaxOverQueries(Plain):
    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        return masked_softmax(scores.mT, None if visible is None else visible.mT).mT


class ScalesByTheWholeWidth(Plain):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * (self.head_dim * self.num_heads) ** -0.5


class RepeatsHeadsInTileOrder(Plain):
    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.num_heads // x.shape[1], 1, 1)


class TakesItsMaximumOverTheBatch(Plain):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores / scores.detach().abs().amax()


class ForgetsTheSecondChunk(Plain):
    def step(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        state: State,
        mask: Mask | None = None,
        bias: Bias | None = None,
    ) -> tuple[Tensor, State]:
        if state.used and k is not None and v is not None:
            k, v = torch.zeros_like(k), torch.zeros_like(v)
        return super().step(q, k, v, state, mask, bias)


class DropsPaddingFromAMemory(Plain):
    def memory(self, k: Tensor, v: Tensor, mask: Mask | None = None) -> State:
        return super().memory(k, v)


class DropsOutInEvaluation(Plain):
    def drop(self, weights: Tensor) -> Tensor:
        return torch.nn.functional.dropout(weights, self.dropout, True)


class IgnoresTheBias(Plain):
    def add(self, scores: Tensor, bias: Bias | None, queries: int) -> Tensor:
        return scores


class ChangesTheMaskInPlace(Plain):
    def visible(self, queries: int, keys: int, mask: Mask) -> Tensor | None:
        if mask.pair_keep is not None:
            mask.pair_keep.logical_not_().logical_not_()[..., :1] = True
        return mask.visible(queries, keys)


class AnswersInFloat32(Plain):
    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return super().attend(q, keys, v, mask, bias).float()


class CutsAParameterOff(Plain):
    traits = Traits(exact=False, normalised=False)

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads, head_dim)
        self.gain = torch.nn.Parameter(torch.ones(num_heads, 1, 1))

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return super().attend(q, keys, v, mask, bias) * self.gain.detach()


class DoublesAGradient(Plain):
    """Right forward; backward the values of one head get twice their gradient."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        twice = torch.arange(v.shape[1]).view(-1, 1, 1) == 0
        return super().attend(q, keys, torch.where(twice, 2 * v - v.detach(), v), mask, bias)


class SumsInHalfPrecision(Plain):
    def weights(self, scores: Tensor, visible: Tensor | None) -> Tensor:
        grown = scores.exp() if visible is None else scores.exp() * visible
        total = torch.zeros_like(grown[..., :1])
        for column in grown.split(1, dim=-1):
            total = total + column
        return grown / total.clamp(min=1e-9)


class NormalisesBehindTheSum(Plain):
    traits = Traits(exact=False)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        out = super().attend(q, keys, v, mask, bias)
        return out / (out.norm(dim=-1, keepdim=True) + 1e-6)


class MakesAllPairsInSecret(Plain):
    traits = Traits(linear_memory=True)


class IgnoresWhatItDenies(Plain):
    traits = Traits(bias=False, pair_keep=False)

    def require(self, trait: str, argument: str) -> None:
        """Lets everything pass."""


class BreaksTheGraph(Plain):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = super().scores(q, k)
        return scores if scores.sum().item() < 1e9 else scores * 2


class AttendsAcrossSegments(Softmax):
    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return sdpa.dense(q, keys, v, mask._replace(segments=None), bias)


class WastesItsBudget(Plain):
    traits = Traits(exact=False, budget="terms")

    def __init__(self, num_heads: int, head_dim: int, *, terms: int = 4) -> None:
        super().__init__(num_heads, head_dim)
        self.terms = terms

    def visible(self, queries: int, keys: int, mask: Mask) -> Tensor | None:
        return super().visible(queries, keys, mask._replace(causal=True))


BUGS: list[tuple[type[Mechanism], str]] = [
    (SeesOneKeyTooFar, "future"),
    (AlignsCausalToTheFirstKey, "formula"),
    (DropsThePaddingMask, "padding"),
    (LeavesPaddingInTheNormaliser, "padding"),
    (MultipliesHiddenValuesByZero, "padding"),
    (FillsHiddenScoresWithAConstant, "empty rows"),
    (TakesSoftmaxOverQueries, "normalised"),
    (ScalesByTheWholeWidth, "formula"),
    (RepeatsHeadsInTileOrder, "grouped"),
    (TakesItsMaximumOverTheBatch, "batch mates"),
    (ForgetsTheSecondChunk, "streaming"),
    (DropsPaddingFromAMemory, "memory"),
    (DropsOutInEvaluation, "repeats"),
    (IgnoresTheBias, "formula"),
    (ChangesTheMaskInPlace, "inputs unchanged"),
    (AnswersInFloat32, "shapes"),
    (CutsAParameterOff, "gradients"),
    (DoublesAGradient, "gradients"),
    (SumsInHalfPrecision, "low precision"),
    (NormalisesBehindTheSum, "linear in v"),
    (WastesItsBudget, "budget"),
    (MakesAllPairsInSecret, "linear memory"),
    (IgnoresWhatItDenies, "refusals"),
    (BreaksTheGraph, "compiles"),
    (AttendsAcrossSegments, "formula"),
]
