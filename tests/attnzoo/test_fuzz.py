"""Random calls of every mechanism against its float64 formula: shapes, masks, biases, options and precisions together.

The laws try each of these by itself, with sizes that somebody chose; here Hypothesis draws all of them at once. The
draws are the same in every run. A failure prints the smallest ``Case`` that fails: paste it into ``compare``.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnzoo import CATALOGUE, Mask, Mechanism, OffsetBias, Softmax
from attnzoo.bias import Bias
from attnzoo.catalogue import construct
from attnzoo.reference import formula_of, reference

SITE = {"max_len": 64, "grid": (8, 8), "layer": 1}

DRAWS, SLOW_DRAWS = 12, 120
"""Of each mechanism; so no other one changes what is drawn for it. About 200 and 2,000 of all together."""

SELECTS = {"LSH", "MoBA"}
"""Mechanisms that pick keys by comparing: what rounding turns over there is no rounding error any more."""

WITHOUT_FORMULA: set[str] = set()
"""Mechanisms that cannot be compared, for want of a formula."""

OPTIONS = {
    "window": st.sampled_from([1, 3, 5, 9, 31]),
    "hidden_dim": st.integers(1, 6),
    "block_size": st.sampled_from([1, 2, 3, 4, 8, 16]),
    "bucket_size": st.sampled_from([1, 3, 8]),
    "num_buckets": st.sampled_from([2, 4, 8]),
    "num_rounds": st.integers(1, 3),
    "num_landmarks": st.integers(1, 9),
    "num_features": st.integers(1, 20),
    "num_global": st.integers(0, 3),
    "num_random": st.integers(0, 3),
    "max_span": st.integers(1, 20),
    "rank": st.sampled_from([1, 5, 16]),
    "stride": st.integers(1, 9),
    "factor": st.integers(1, 5),
    "top_k": st.integers(1, 4),
    "scale": st.sampled_from([0.25, 1.0]),
    "seed": st.integers(0, 99),
}
"""What may be drawn for an option of this name, in any mechanism that has it, beside the words of a Literal."""


@dataclass(frozen=True)
class Case:
    """One call. ``seed`` draws the numbers; the masks are drawn from it, too, by their kinds.

    Attributes:
        key_keep: where padding is: left, right, or holes of which many or few are left open; rows may be all padding.
        pair_keep: shape of the mask of pairs.
        bias: shape of the bias, or "offset".
        size: of the numbers in q and k.
    """

    options: dict[str, Any]
    batch: int
    heads: int
    groups: int
    width: int
    value_dim: int
    queries: int
    keys: int
    causal: bool
    key_keep: Literal["left", "right", "open", "sparse"] | None
    pair_keep: tuple[int, ...] | None
    segments: bool
    bias: tuple[int, ...] | Literal["offset"] | None
    dtype: torch.dtype
    size: float
    training: bool
    seed: int


def words(cls: type[Mechanism]) -> dict[str, st.SearchStrategy[Any]]:
    """Options of the class that can be drawn. The back ends of one mechanism are compared elsewhere."""
    hints = get_type_hints(cls.__init__)
    found = {}
    for name in inspect.signature(cls).parameters:
        if name in OPTIONS:
            found[name] = OPTIONS[name]
        elif get_origin(hints.get(name)) is Literal and name != "backend":
            found[name] = st.sampled_from(get_args(hints[name]))
    return found


@st.composite
def cases(draw: st.DrawFn, cls: type[Mechanism], longest: int) -> Case:
    """A call that the traits of the class allow."""
    traits = cls.traits
    batch = draw(st.integers(1, 2))
    heads, groups = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 3), (6, 2)]))
    queries = draw(st.integers(1, longest))
    keys = draw(st.integers(1, longest)) if traits.rectangular else queries

    def pairs() -> st.SearchStrategy[tuple[int, ...]]:
        four = [(b, h, queries, keys) for b in {1, batch} for h in {1, heads}]
        return st.sampled_from([(queries, keys), *sorted(four)])

    options = {name: draw(strategy) for name, strategy in words(cls).items() if draw(st.booleans())}
    dtypes = [torch.float32, torch.float64, *([] if cls.__name__ in SELECTS else [torch.bfloat16, torch.float16])]
    return Case(
        options,
        batch,
        heads,
        groups=groups if traits.grouped else heads,
        width=2 * draw(st.integers(1, 4)),
        value_dim=draw(st.integers(1, 9)),
        queries=queries,
        keys=keys,
        causal=draw(st.sampled_from([False] * traits.bidirectional + [True] * traits.causal)),
        key_keep=draw(st.sampled_from([None, "left", "right", "open", "sparse"])) if traits.key_keep else None,
        pair_keep=draw(st.none() | pairs()) if traits.pair_keep else None,
        segments=draw(st.booleans()) if traits.pair_keep and queries == keys else False,
        bias=draw(st.none() | st.just("offset") | pairs()) if traits.bias else None,
        dtype=draw(st.sampled_from(dtypes)),
        size=draw(st.sampled_from([0.3, 1.0, 3.0])),
        training=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


def mask_of(case: Case, generator: torch.Generator) -> Mask:
    shape = (case.batch, case.keys)
    keep, pairs, segments = None, None, None
    if case.key_keep in ("left", "right"):
        places = torch.arange(case.keys)
        lengths = torch.randint(0, case.keys + 1, (case.batch, 1), generator=generator)
        keep = places < lengths if case.key_keep == "right" else places >= case.keys - lengths
    elif case.key_keep is not None:
        keep = torch.rand(shape, generator=generator) < (0.7 if case.key_keep == "open" else 0.1)
    if case.pair_keep is not None:
        pairs = torch.rand(case.pair_keep, generator=generator) < 0.6
    if case.segments:
        segments = torch.randint(0, 3, shape, generator=generator)
    return Mask(case.causal, keep, pairs, segments)


def bias_of(case: Case, generator: torch.Generator) -> Bias | None:
    if case.bias is None:
        return None
    shape = (case.heads, case.queries + case.keys - 1) if case.bias == "offset" else case.bias
    values = torch.randn(shape, generator=generator).to(case.dtype).requires_grad_()
    return OffsetBias(values) if case.bias == "offset" else values


def compare(cls: type[Mechanism], case: Case) -> None:
    """The output is that of the formula but for rounding, whatever stands at hidden keys; gradients are finite."""
    torch.manual_seed(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    factory = functools.partial(cls, **case.options)
    module = construct(factory, case.heads, case.width, **SITE).to(case.dtype).train(case.training)
    shapes = ((case.heads, case.queries, case.width), (case.groups, case.keys, case.width))
    q, k = (case.size * torch.randn(case.batch, *shape, generator=generator) for shape in shapes)
    v = torch.randn(case.batch, case.groups, case.keys, case.value_dim, generator=generator)
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    mask, bias = mask_of(case, generator), bias_of(case, generator)
    terms = bias.values if isinstance(bias, OffsetBias) else bias
    shared = cls.traits.shared_qk

    def right(*inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return reference(module, inputs[0], inputs[0] if shared else inputs[1], inputs[2], mask, bias)

    inputs = [x.double() for x in (q, k, v)]
    expected = right(*inputs)

    dirty = [q, k, v]
    if mask.key_keep is not None:
        hidden = ~mask.key_keep[:, None, :, None]
        dirty = [q, *(x.masked_fill(hidden, torch.nan) for x in (k, v))]
    leaves = [x.requires_grad_() for x in dirty]
    out = module(leaves[0], leaves[0] if shared else leaves[1], leaves[2], mask, bias)
    assert out.dtype == case.dtype
    assert out.shape == expected.shape

    allowed = tolerance(right, inputs, expected, generator, case.dtype)
    error = (out.double() - expected).abs().max().item()
    assert error <= allowed, f"off by {error:.3g}, {allowed:.3g} is allowed"

    (out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    asked = [*leaves, *module.parameters(), *([] if terms is None else [terms])]
    assert all(x.grad is None or x.grad.isfinite().all() for x in asked), "a gradient is not finite"


def tolerance(
    right: Callable[..., Tensor], inputs: list[Tensor], expected: Tensor, generator: torch.Generator, dtype: torch.dtype
) -> float:
    """How far rounding may move the output.

    A sound computation gives the exact result for inputs that are off by a few roundings. How much that is depends on
    mechanism and inputs, so it is measured: by how much the formula moves when each number in q, k and v goes up or
    down by one part in 10^8, twice over, as one throw of signs may cancel out.
    """
    step = 1e-8
    moves = []
    for _ in range(2):
        signs = [2 * torch.randint(0, 2, x.shape, generator=generator).double() - 1 for x in inputs]
        moved = right(*(x * (1 + step * sign) for x, sign in zip(inputs, signs, strict=True)))
        moves.append((moved - expected).abs().max().item() / step)
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps * (max(moves) + inputs[2].abs().max().item())


ROUNDINGS = {torch.float64: 4, torch.float32: 4, torch.float16: 1, torch.bfloat16: 1}
"""How many of them. Half precision has its sums in float32, so that only weights and results are rounded to it."""


def fuzz(cls: type[Mechanism], draws: int, longest: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Compares ``draws`` calls; the first one that fails is made as small as it goes, and printed."""

    @settings(
        max_examples=draws,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(case=cases(cls, longest))
    def run(case: Case) -> None:
        compare(cls, case)

    run()


COMPARED = [name for name, cls in CATALOGUE.items() if formula_of(construct(cls, 1, 2, **SITE)) is not None]


@pytest.mark.parametrize("name", COMPARED)
def test_g4_a_random_call_gives_what_the_formula_gives(name: str) -> None:
    """G4: masks with empty rows, and everything else at random with them."""
    fuzz(CATALOGUE[name], DRAWS, longest=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_g4_many_random_calls_give_what_the_formula_gives(name: str) -> None:
    """G4 with ten times as many draws, and longer ones."""
    fuzz(CATALOGUE[name], SLOW_DRAWS, longest=40)


def test_nobody_is_left_out_unless_named() -> None:
    """A mechanism without a formula would not be compared at all."""
    assert set(CATALOGUE) - set(COMPARED) == WITHOUT_FORMULA


class OneKeyTooFar(Softmax):
    """Causal, a query sees the key behind its own place, too."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        if mask.causal:
            seen = torch.ones(q.shape[2], v.shape[2], dtype=torch.bool).tril(v.shape[2] - q.shape[2] + 1)
            pairs = seen if mask.pair_keep is None else seen & mask.pair_keep
            mask = mask._replace(causal=False, pair_keep=pairs)
        return super().attend(q, keys, v, mask, bias)


class TopLeft(Softmax):
    """Causal as SDPA has it: wrong by S - T, right for squares."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        if mask.causal:
            seen = torch.ones(q.shape[2], v.shape[2], dtype=torch.bool).tril()
            pairs = seen if mask.pair_keep is None else seen & mask.pair_keep
            mask = mask._replace(causal=False, pair_keep=pairs)
        return super().attend(q, keys, v, mask, bias)


class PaddingCounts(Softmax):
    """Hidden keys are zero, but take their share of the weights."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return super().attend(q, keys, v, mask._replace(key_keep=None), bias)


class TileOrder(Softmax):
    """Query head h uses group h mod G."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        share = q.shape[1] // v.shape[1]
        return super().attend(q, keys.repeat(1, share, 1, 1), v.repeat(1, share, 1, 1), mask, bias)


class NoOffsets(Softmax):
    """A bias by offset is dropped."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return super().attend(q, keys, v, mask, None if isinstance(bias, OffsetBias) else bias)


class HalfSums(Softmax):
    """Scores are rounded to bfloat16, whatever comes in."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return super().attend(q.bfloat16().to(q.dtype), keys, v, mask, bias)


@pytest.mark.parametrize("broken", [OneKeyTooFar, TopLeft, PaddingCounts, TileOrder, NoOffsets, HalfSums])
def test_a_planted_bug_is_found_in_the_quick_draws_and_the_call_is_printed(broken: type[Mechanism]) -> None:
    """The error says by how much, its note which call it was."""
    with pytest.raises(AssertionError, match=r"off by .* is allowed") as failure:
        fuzz(broken, DRAWS, longest=24, phases=(Phase.generate,))
    (note,) = (note for note in failure.value.__notes__ if "Case(" in note)
    assert all(f"{name}=" in note for name in Case.__dataclass_fields__)
