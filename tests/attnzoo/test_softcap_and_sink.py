"""The two options of Softmax that change its formula: softcap and sink, against the formulas written out row by row."""

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import Mask, OffsetBias, Softmax, attention_map, build
from attnzoo.mechanisms.flash import Flash

Draw = Callable[..., tuple[Tensor, ...]]

OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 0.7},
    "sink": {"sink": True},
    "both": {"softcap": 1.3, "sink": True, "scale": 0.9},
}


def made(heads: int, width: int, **options: Any) -> Softmax:
    """In evaluation, with sinks that differ from head to head."""
    attn = Softmax(heads, width, **options).eval()
    if attn.sink_scores is not None:
        torch.nn.init.normal_(attn.sink_scores)
    return attn


def by_rows(attn: Softmax, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, terms: Tensor) -> Tensor:
    """exp(s) / (exp(b) + sum of exp(s)) over the keys of ``seen`` [B, H, T, S], in float64 and differentiable."""
    share = q.shape[1] // k.shape[1]
    out = []
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        keys = seen[b, h, i].nonzero()[:, 0].tolist()
        row = torch.zeros(v.shape[3], dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        if attn.sink_scores is not None:
            total = total + attn.sink_scores[h].double().exp()
        for j in keys:
            s = (q[b, h, i].double() * k[b, h // share, j].double()).sum()
            s = s * (q.shape[3] ** -0.5 if attn.scale is None else attn.scale)
            if attn.softcap is not None:
                s = attn.softcap * (s / attn.softcap).tanh()
            weight = (s + terms[b, h, i, j].double()).exp()
            row, total = row + weight * v[b, h // share, j].double(), total + weight
        out.append(row / total if keys else row)
    return torch.stack(out).view(*q.shape[:3], v.shape[3])


def seen_by(mask: Mask, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Each pair by itself."""
    seen = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in seen.shape)).tolist():
        seen[b, h, i, j] = (
            (not mask.causal or j <= i + keys - queries)
            and (mask.key_keep is None or bool(mask.key_keep[b, j]))
            and (mask.pair_keep is None or bool(mask.pair_keep.expand(batch, heads, queries, keys)[b, h, i, j]))
            and (mask.segments is None or bool(mask.segments[b, i] == mask.segments[b, j]))
        )
    return seen


def masks(queries: int, keys: int) -> Iterator[Mask]:
    """Every kind, with rows that see nothing."""
    keep = torch.rand(2, keys) < 0.6
    keep[0, 0] = False
    keep[1] = False
    pairs = torch.rand(2, 2, queries, keys) < 0.6
    pairs[0, 1, 0] = False
    for causal in (False, True):
        yield Mask(causal)
        yield Mask(causal, key_keep=keep)
        yield Mask(causal, pair_keep=pairs[:, :1])
        yield Mask(causal, key_keep=keep, pair_keep=pairs[0, 0])
        if queries == keys:
            yield Mask(causal, segments=torch.arange(keys).expand(2, -1) // 2)
            yield Mask(causal, key_keep=keep, segments=torch.arange(keys).expand(2, -1) // 2, pair_keep=pairs)


def spread(terms: Tensor | OffsetBias | None, queries: int, keys: int) -> Tensor:
    """Any form of bias as [B, H, T, S]."""
    if terms is None:
        return torch.zeros(2, 2, queries, keys)
    if isinstance(terms, OffsetBias):
        rows = [terms.values[:, queries - 1 - i : queries - 1 - i + keys] for i in range(queries)]
        return torch.stack(rows, 1).expand(2, -1, -1, -1)
    return terms.expand(2, 2, queries, keys)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 5), (4, 2), (1, 3)])
def test_by_brute_force(name: str, queries: int, keys: int, random_qkv: Draw) -> None:
    """A1, G1, G4: output and every gradient, the sink's too, under every mask and bias; a row without keys gives 0."""
    attn = made(2, 4, **OPTIONS[name])
    for mask in masks(queries, keys):
        seen = seen_by(mask, 2, 2, queries, keys)
        biases = None, torch.randn(1, 2, queries, keys), OffsetBias(torch.randn(2, queries + keys - 1))
        for bias in biases if mask.pair_keep is None else biases[:1]:
            q, k, v = random_qkv(queries, keys, groups=1, value=3)
            values = bias.values if isinstance(bias, OffsetBias) else bias
            leaves = [q, k, v, *attn.parameters(), *([] if values is None else [values.requires_grad_()])]
            out = attn(q, k, v, mask, bias)
            expected = by_rows(attn, q, k, v, seen, spread(bias, queries, keys))
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
            assert not out[~seen.any(3)].count_nonzero()
            down = torch.linspace(-1, 1, out.numel()).view_as(out)
            ours = torch.autograd.grad(out, leaves, down)
            zeros = [torch.zeros_like(x) for x in leaves]
            right: Any = zeros
            if seen.any():
                right = torch.autograd.grad(expected, leaves, down.double(), allow_unused=True)
            for a, b, zero in zip(ours, right, zeros, strict=True):
                torch.testing.assert_close(a, zero if b is None else b, atol=2e-5, rtol=1e-4)


def test_scale_then_cap_then_bias() -> None:
    """K3: one query of 3, keys of 2 and -1 and scale 0.5, by hand."""
    q, k = torch.full((1, 1, 1, 1), 3.0), torch.tensor([2.0, -1.0]).view(1, 1, 2, 1)
    bias = torch.tensor([[0.25, 4.0]])
    first = math.exp(2 * math.tanh(3.0 / 2) + 0.25)
    second = math.exp(2 * math.tanh(-1.5 / 2) + 4.0)
    weights = attention_map(Softmax(1, 1, scale=0.5, softcap=2.0), q, k, bias=bias)
    torch.testing.assert_close(weights.flatten(), torch.tensor([first, second]) / (first + second))
    with_sink = attention_map(Softmax(1, 1, scale=0.5, softcap=2.0, sink=True), q, k, bias=bias)
    torch.testing.assert_close(with_sink.flatten(), torch.tensor([first, second]) / (first + second + 1))


def test_a_softcap_bounds_the_scores(random_qkv: Draw) -> None:
    """Scores of thousands, capped at 1: no weight is more than e^2 times another; a wide cap changes nothing."""
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    weights = attention_map(Softmax(2, 4, softcap=1.0), 1e3 * q, k)
    assert (weights.amax(-1) / weights.amin(-1)).max() <= math.exp(2) * 1.0001
    torch.testing.assert_close(Softmax(2, 4, softcap=1e4)(q, k, v), Softmax(2, 4)(q, k, v), atol=1e-5, rtol=1e-5)


def test_a_sink_takes_its_share(random_qkv: Draw) -> None:
    """J2: sinks start at 0; the rows sum to sum(e^s) / (1 + sum(e^s)), and a sink far below 0 is none."""
    q, k, v = (x.detach() for x in random_qkv(5, 7))
    attn = Softmax(2, 4, sink=True)
    assert attn.sink_scores is not None
    assert torch.equal(attn.sink_scores, torch.zeros(2))
    total = (q @ k.mT / 2).exp().sum(-1)
    torch.testing.assert_close(attention_map(attn, q, k).sum(-1), total / (1 + total), atol=1e-5, rtol=1e-5)
    torch.nn.init.constant_(attn.sink_scores, -30.0)
    torch.testing.assert_close(attn(q, k, v), Softmax(2, 4)(q, k, v), atol=1e-5, rtol=1e-5)
    torch.nn.init.constant_(attn.sink_scores, 30.0)
    assert attn(q, k, v).abs().max() < 1e-6


def test_only_an_object_with_a_sink_denies_that_its_rows_sum_to_one() -> None:
    """The class, which the catalogue and the docs read, still claims it; a copy of the object does not."""
    attn = Softmax(2, 4, sink=True)
    saved = io.BytesIO()
    torch.save(attn, saved)
    saved.seek(0)
    for sunk in (attn, copy.deepcopy(attn), torch.load(saved, weights_only=False)):
        assert not sunk.traits.normalised
        assert sunk.traits.exact
    assert Softmax.traits.normalised
    assert Softmax(2, 4, softcap=2.0).traits.normalised
    assert build("Softmax", 2, 4).traits == Softmax.traits


@pytest.mark.parametrize("name", OPTIONS)
def test_a5_three_ways_to_hide_a_key(name: str, random_qkv: Draw) -> None:
    """A5: as boolean mask, as bias -inf and as bias finfo.min: one answer wherever a key is left."""
    attn = made(2, 4, **OPTIONS[name])
    q, k, v = random_qkv(6, 6)
    keep = torch.rand(2, 2, 6, 6) < 0.5
    keep[0, 0, 0] = False
    left = keep.any(-1)
    results = []
    for hidden in (None, -torch.inf, torch.finfo(torch.float32).min):
        terms = None if hidden is None else torch.zeros(keep.shape).masked_fill(~keep, hidden)
        out = attn(q, k, v, Mask(pair_keep=keep) if hidden is None else None, terms)
        results.append([out[left], *torch.autograd.grad(out[left].square().sum(), (q, k, v))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_a4_what_stands_at_a_hidden_key_goes_nowhere(name: str, random_qkv: Draw) -> None:
    """A4: NaN under key_keep, 1e30 under causal and pairs: bit for bit the same."""
    attn = made(2, 4, **OPTIONS[name])
    q, k, v = (x.detach() for x in random_qkv(5, 5))
    keep = torch.tensor([1, 1, 1, 0, 0]).bool().expand(2, -1)
    for mask, hidden, filler in (
        (Mask(key_keep=keep), slice(3, 5), torch.nan),
        (Mask(pair_keep=keep[0].expand(5, -1)), slice(3, 5), 1e30),
    ):
        results = []
        for value in (0.0, filler):
            leaves = [x.clone() for x in (q, k, v)]
            for x in leaves[1:]:
                x[:, :, hidden] = value
            out = attn(*(x.requires_grad_() for x in leaves), mask)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean, dirty)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype, random_qkv: Draw) -> None:
    """The softmax is summed in float32: 2,000 small weights of values 1, to one rounding of the result."""
    attn = made(2, 8, **OPTIONS[name]).to(dtype)
    q, k, _ = (x.detach().to(dtype) for x in random_qkv(4, 2000, width=8))
    v = torch.ones_like(k)
    low = attn(q, k, v)
    assert low.dtype == dtype
    # Scores and bias are added in float32 too: in bfloat16 nothing below 1 would be left beside 200.
    few, bias = k[:, :, :40], torch.full((4, 40), 200.0, dtype=dtype)
    beside = attn(q, few, few, bias=bias)
    attn.double()
    right = attn(q.double(), k.double(), v.double())
    torch.testing.assert_close(low.double(), right, atol=0, rtol=2 * torch.finfo(dtype).eps)
    right = attn(q.double(), few.double(), few.double(), bias=bias.double())
    torch.testing.assert_close(beside.double(), right, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_dropout_acts_in_training_only(name: str, random_qkv: Draw) -> None:
    """A9: equal in evaluation, and in training right on average; a share of the rows loses all its weights."""
    attn = made(2, 4, dropout=0.5, **OPTIONS[name])
    q, k, v = (x.detach() for x in random_qkv(3, 2))
    exact = attn(q, k, v)
    assert torch.equal(exact, attn(q, k, v))
    attn.train()
    draws = torch.stack([attn(q, k, v) for _ in range(3000)])
    assert (draws.mean(0) - exact).abs().max() < 0.12
    assert 0.2 < (draws == 0).all(-1).float().mean() < 0.3


@pytest.mark.parametrize("name", OPTIONS)
def test_b1_by_steps_and_on_a_memory(name: str, random_qkv: Draw) -> None:
    """B1, B3: left-padded steps equal one causal pass; a memory equals cross-attention."""
    attn = made(2, 4, **OPTIONS[name])
    q, k, v = (x.detach() for x in random_qkv(7, 7, value=3))
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[0, :3] = False
    state, parts = attn.init_state(2, 7, value_dim=3), []
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        new = (x[:, :, start:stop] for x in (q, k, v))
        out, state = attn.step(*new, state, Mask(key_keep=keep[:, start:stop]))
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), attn(q, k, v, Mask(True, keep)), atol=1e-5, rtol=1e-5)
    out, _ = attn.step(q, None, None, attn.memory(k, v, Mask(key_keep=keep)))
    torch.testing.assert_close(out, attn(q, k, v, Mask(key_keep=keep)), atol=1e-5, rtol=1e-5)


def test_a15_one_graph(random_qkv: Draw) -> None:
    """A15: softcap and sink together compile without a break."""
    attn = made(2, 4, **OPTIONS["both"])
    q, k, v = (x.detach() for x in random_qkv(6, 6, groups=1))
    mask = Mask(True, key_keep=torch.rand(2, 6) < 0.7)
    torch._dynamo.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask), attn(q, k, v, mask), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_is_refused_at_construction() -> None:
    """H1, C4: no fused kernel has a softcap or a sink, so one asked for by name beside them raises."""
    for backend in ("flash", "efficient", "cudnn"):
        for options in ({"softcap": 50.0}, {"sink": True}):
            with pytest.raises(ValueError, match=f"Softmax: backend='{backend}' has neither softcap nor sink"):
                build("Softmax", 2, 4, backend=backend, **options)
    for cls in (Softmax, Flash):
        for softcap in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ValueError, match=rf"{cls.__name__}: softcap must be a finite number above 0, got"):
                cls(2, 4, softcap=softcap)
    assert "softcap=50.0, sink=True" in repr(Softmax(2, 4, backend="math", softcap=50.0, sink=True))


def test_explain_says_that_no_kernel_runs(random_qkv: Draw) -> None:
    """Neither flash nor math of torch: plain operations, by the profiler too."""
    q, k, v = (x.detach() for x in random_qkv(4, 4))
    attn = Softmax(2, 4, softcap=3.0)
    assert attn.explain(q, k, v).startswith("plain torch operations on T x S numbers")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attn(q, k, v)
    assert not any("scaled_dot_product" in event.key for event in profile.key_averages())
