"""The mechanisms under test, and what they should give, written out slowly in float64."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnzoo import CATALOGUE, Additive, Local, Mask, Mechanism, OffsetBias, Softmax, build
from attnzoo.catalogue import construct
from attnzoo.laws import SITE

Make = Callable[..., Mechanism]
Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test on each mechanism of the catalogue that has the traits it is marked with."""
    if "kind" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("traits")
        needed = {} if marker is None else {**dict.fromkeys(marker.args, True), **marker.kwargs}
        kinds = [
            cls
            for cls in CATALOGUE.values()
            if all(getattr(cls.traits, trait) is value for trait, value in needed.items())
        ]
        metafunc.parametrize("kind", kinds, ids=[cls.__name__ for cls in kinds])


@pytest.fixture
def make(kind: type[Mechanism]) -> Make:
    """Builds the mechanism under test: ``make(num_heads, head_dim, **options)``, in eval."""

    def made(num_heads: int, head_dim: int, **options: object) -> Mechanism:
        return construct(functools.partial(kind, **options), num_heads, head_dim, **SITE).eval()

    return made


@pytest.fixture(params=["Softmax", "Local", "Additive"])
def make_exact(request: pytest.FixtureRequest) -> Make:
    """As ``make``, for the mechanisms whose formula ``brute`` knows."""
    name: str = request.param

    def made(num_heads: int, head_dim: int, **options: object) -> Mechanism:
        return build(name, num_heads, head_dim, **options).eval()

    return made


@pytest.fixture
def random_qkv() -> Draw:
    """``random_qkv(queries, keys, ...)``: q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv], with gradients."""
    return _random_qkv


@pytest.fixture
def brute() -> Brute:
    """``brute(mechanism, q, k, v, mask, bias)``: the formula of a mechanism, pair by pair, in float64."""
    return _brute


def _random_qkv(
    queries: int,
    keys: int,
    *,
    batch: int = 2,
    heads: int = 2,
    groups: int | None = None,
    width: int = 4,
    value: int | None = None,
) -> tuple[Tensor, ...]:
    groups = heads if groups is None else groups
    shapes = (heads, queries, width), (groups, keys, width), (groups, keys, width if value is None else value)
    return tuple(torch.randn(batch, *shape, requires_grad=True) for shape in shapes)


def _brute(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    bias: Tensor | OffsetBias | None = None,
) -> Tensor:
    mask = Mask() if mask is None else mask
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.detach().double() for x in (q, k, v))
    k, v = (torch.stack([x[:, h // groups] for h in range(q.shape[1])], 1) for x in (k, v))
    scores = _scores(mechanism, q, k)
    visible = _visible(mechanism, mask, *scores.shape)
    if isinstance(bias, OffsetBias):
        queries = q.shape[2]
        for i in range(queries):
            for j in range(k.shape[2]):
                scores[:, :, i, j] += bias.values.detach()[:, j - i + queries - 1].double()
    elif bias is not None:
        scores = scores + bias.detach().double()
    weights = torch.zeros_like(scores)
    # What a hidden key holds must not matter, so only visible scores are ever read.
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape[:3])).tolist():
        row = visible[b, h, i]
        if row.any():
            weights[b, h, i, row] = scores[b, h, i, row].softmax(-1)
    return weights @ torch.where(visible.any((1, 2))[:, None, :, None], v, 0.0)


def _scores(mechanism: Mechanism, q: Tensor, k: Tensor) -> Tensor:
    if isinstance(mechanism, Additive):
        queries = torch.einsum("bhtd,hda->bhta", q, mechanism.query_weight.detach().double())
        keys = torch.einsum("bhsd,hda->bhsa", k, mechanism.key_weight.detach().double())
        pairs = (queries[:, :, :, None] + keys[:, :, None]).tanh()
        return torch.einsum("bhtsa,ha->bhts", pairs, mechanism.score_weight.detach().double())
    scale = mechanism.scale if isinstance(mechanism, Softmax) else None
    return torch.einsum("bhtd,bhsd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _visible(mechanism: Mechanism, mask: Mask, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    for i in range(queries):
        place = i + keys - queries
        if mask.causal:
            seen[:, :, i, max(place + 1, 0) :] = False
        if isinstance(mechanism, Local):
            left, right = _reach(mechanism.window, mask.causal)
            seen[:, :, i, : max(place - left, 0)] = False
            seen[:, :, i, max(place + right + 1, 0) :] = False
    if mask.key_keep is not None:
        seen &= mask.key_keep[:, None, None]
    if mask.pair_keep is not None:
        seen &= mask.pair_keep
    if mask.segments is not None:
        seen &= (mask.segments[:, :, None] == mask.segments[:, None])[:, None]
    return seen


def _reach(window: int | tuple[int, int], causal: bool) -> tuple[int, int]:
    if isinstance(window, tuple):
        return window[0], 0 if causal else window[1]
    return (window - 1, 0) if causal else ((window - 1) // 2, (window - 1) // 2)
