"""Adaptive spans: the soft mask by its numbers, the weights by brute force, what training does to a span."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import Local, Mask, OffsetBias, Softmax, attention_map
from attnzoo.mechanisms.adaptive_span import AdaptiveSpan

Draw = Callable[..., tuple[Tensor, ...]]


def spans(*ratios: float, max_span: int = 8, ramp: int = 4, width: int = 4, **options: Any) -> AdaptiveSpan:
    """One head for each ratio."""
    attn = AdaptiveSpan(len(ratios), width, max_span=max_span, ramp=ramp, **options)
    with torch.no_grad():
        attn.ratio.copy_(torch.tensor(ratios))
    return attn


def brute(
    attn: AdaptiveSpan, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, terms: Tensor | None = None
) -> Tensor:
    """m exp(s) / sum m exp(s) over all visible keys, in float64 and without any band."""
    queries, keys = q.shape[2], k.shape[2]
    q, k, v, z = (x.detach().double() for x in (q, k, v, attn.ratio))
    k, v = (torch.stack([x[:, h // (q.shape[1] // x.shape[1])] for h in range(q.shape[1])], 1) for x in (k, v))
    distance = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
    m = ((z.view(-1, 1, 1) * attn.max_span - distance) / attn.ramp + 1).clamp(0, 1) * (distance < attn.max_span)
    visible = None if mask is None else mask.visible(queries, keys)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + (0.0 if terms is None else terms)
    weights = m * scores.exp() * (1.0 if visible is None else visible)
    return torch.nan_to_num(weights / weights.sum(-1, keepdim=True)) @ v


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "table"),
    [
        (0.0, [1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0, 0]),
        (0.25, [1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0]),
        (0.3125, [1, 1, 1, 0.875, 0.625, 0.375, 0.125, 0, 0, 0]),
        (0.75, [1, 1, 1, 1, 1, 1, 1, 0.75, 0, 0]),
        (1.0, [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]),
    ],
)
def test_the_soft_mask_by_its_numbers(ratio: float, table: list[float]) -> None:
    """m(x) with W 8 and R 4: full up to z W, down to 0 over R keys, and never beyond W."""
    assert spans(ratio).soft_mask(torch.arange(10))[0].tolist() == table
    # Equal scores: the weights of a late query are the table itself, nearest key last.
    zero = torch.zeros(1, 1, 10, 4)
    weights = attention_map(spans(ratio), zero, zero, Mask(causal=True))[0, 0, -1]
    close(weights, torch.tensor(table).flip(0) / sum(table))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_weights_by_brute_force(causal: bool, groups: int, random_qkv: Draw) -> None:
    """A span for each head, every kind of mask and bias, T other than S, lengths below and above the span."""
    attn = spans(0.0, 0.21, 0.6, 1.0)
    for queries, keys in [(1, 1), (5, 5), (40, 40), (3, 20), (20, 3), (1, 33)]:
        q, k, v = random_qkv(queries, keys, heads=4, groups=groups, value=3)
        keep = torch.rand(2, keys) < 0.7
        masks = [Mask(causal), Mask(causal, key_keep=keep)]
        masks.append(Mask(causal, keep, torch.rand(2, 1, queries, keys) < 0.7))
        for mask in masks:
            close(attn(q, k, v, mask), brute(attn, q, k, v, mask))
            for bias in (torch.randn(queries, keys), torch.randn(2, 4, queries, keys)):
                close(attn(q, k, v, mask, bias), brute(attn, q, k, v, mask, bias))
            offsets = OffsetBias(torch.randn(4, queries + keys - 1))
            close(attn(q, k, v, mask, offsets), brute(attn, q, k, v, mask, offsets.dense(queries)))


def test_a_full_span_is_a_plain_window(random_qkv: Draw) -> None:
    """z = 1: Local with a window of W, its own place included."""
    q, k, v = random_qkv(50, 50)
    close(spans(1.0, 1.0)(q, k, v, Mask(causal=True)), Local(2, 4, window=8)(q, k, v, Mask(causal=True)))
    close(spans(1.0, 1.0)(q, k, v), Local(2, 4, window=(7, 7))(q, k, v))


def test_a_span_of_nothing_is_the_ramp_alone(random_qkv: Draw) -> None:
    """z = 0: the query's own place in full, R - 1 more keys in part."""
    q, k, v = random_qkv(30, 30)
    attn = spans(0.0, 0.0)
    weights = attention_map(attn, q.detach(), k.detach(), Mask(causal=True))
    past = torch.arange(30)[:, None] - torch.arange(30)
    assert torch.equal(weights > 0, ((past >= 0) & (past < 4)).expand_as(weights))
    s = (q @ k.transpose(-1, -2) / 2).exp() * torch.tensor([1, 0.75, 0.5, 0.25, *[0.0] * 26])[past.clamp(0)].tril()
    close(attn(q, k, v, Mask(causal=True)), s / s.sum(-1, keepdim=True) @ v)


@pytest.mark.parametrize("causal", [False, True])
def test_cutting_changes_nothing(causal: bool, random_qkv: Draw) -> None:
    """The band gives what a softmax over all keys gives; keys that are cut may hold anything finite."""
    q, k, v = (x.detach() for x in random_qkv(100, 100))
    attn = spans(0.15, 0.4, max_span=20, ramp=6)
    out = attn(q, k, v, Mask(causal=causal))
    distance = (torch.arange(199) - 99).abs()
    whole = Softmax(2, 4)(q, k, v, Mask(causal=causal), OffsetBias(attn.soft_mask(distance).log()))
    close(out, whole)
    # The widest span ends at 8 + 6 keys: from 14 away nothing is seen, at 13 something is.
    for away, moves in ((13, True), (14, False)):
        huge = [x.clone() for x in (k, v)]
        for x in huge:
            x[:, :, 50 - away] = 1e4
        assert torch.equal(attn(q, *huge, Mask(causal=causal))[:, :, 50], out[:, :, 50]) is not moves


def test_rows_sum_to_1_and_empty_rows_are_0(random_qkv: Draw) -> None:
    """A1: no eps shows; a query whose keys in the span are all padding gives exactly 0, with finite gradients."""
    attn = spans(0.1, 0.8)
    q, k, v = random_qkv(40, 40)
    keep = torch.arange(40).expand(2, 40) < 12
    weights = attention_map(attn, q.detach(), k.detach(), Mask(causal=True, key_keep=keep))
    # Head 0 reaches 4 keys back (0.8 + 4), head 1 all 8.
    for head, last in ((0, 15), (1, 18)):
        assert (weights[:, head, last + 1 :] == 0).all()
        close(weights[:, head, : last + 1].sum(-1), torch.ones(2, last + 1))
    out = attn(q * 100, k, v, Mask(causal=True, key_keep=keep))
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, attn.ratio))


def test_no_gradient_on_the_way_is_nan(random_qkv: Draw) -> None:
    """Keys of weight 0 have log 0: not even in passing may that make a NaN, which torch's anomaly mode stops at."""
    attn = spans(0.1, 0.8)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        attn(*random_qkv(20, 20), Mask(causal=True)).square().sum().backward()
    assert attn.ratio.grad is not None
    assert attn.ratio.grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_reaches_z(causal: bool) -> None:
    """It is that of finite differences, for each head by itself."""
    attn = spans(0.11, 0.43, 0.77).double()
    q, k, v = torch.randn(3, 2, 3, 15, 4, dtype=torch.float64)

    def output(ratio: Tensor) -> Tensor:
        return torch.func.functional_call(attn, {"ratio": ratio}, (q, k, v, Mask(causal=causal)))

    assert torch.autograd.gradcheck(output, (attn.ratio,))
    (gradient,) = torch.autograd.grad(output(attn.ratio).square().sum(), attn.ratio)
    assert gradient.count_nonzero() == 3


def test_a_gradient_at_the_bounds(random_qkv: Draw) -> None:
    """At z = 0 it says what growing would do, at z = 1 (no slope in sight) it is 0; both are finite."""
    q, k, v = (x.detach().double() for x in random_qkv(4, 4, heads=1))
    attn = spans(0.0).double()

    def loss(ratio: float) -> Tensor:
        with torch.no_grad():
            attn.ratio.fill_(ratio)
        return attn(q, k, v, Mask(causal=True)).square().sum()

    (gradient,) = torch.autograd.grad(loss(0.0), attn.ratio)
    assert gradient.item() == pytest.approx(((loss(1e-6) - loss(0.0)) / 1e-6).item(), rel=1e-4)
    (gradient,) = torch.autograd.grad(loss(1.0), attn.ratio)
    assert gradient.item() == 0


def test_z_stays_between_0_and_1_after_a_step() -> None:
    """An optimiser may push z out; after_step brings it back, in place, and leaves no graph behind."""
    attn = spans(0.5, 0.5, 0.5)
    optimiser = torch.optim.SGD(attn.parameters(), lr=1.0)
    attn.ratio.grad = torch.tensor([3.0, -3.0, 0.25])
    optimiser.step()
    assert attn.ratio.tolist() == [-2.5, 3.5, 0.25]
    kept = attn.ratio
    attn.after_step(1)
    assert attn.ratio is kept
    assert attn.ratio.tolist() == [0, 1, 0.25]
    assert attn.ratio.requires_grad
    assert attn.ratio.is_leaf


def test_what_a_span_costs() -> None:
    """span_cost x W x mean(z), and its gradient: the same for every head."""
    attn = spans(0.25, 0.75, span_cost=0.5)
    assert attn.penalty().item() == 0.5 * 8 * 0.5
    attn.penalty().backward()
    assert attn.ratio.grad is not None
    assert attn.ratio.grad.tolist() == [2.0, 2.0]
    assert spans(0.25, span_cost=0.0).penalty().item() == 0


def test_spans_learn_how_far_to_look() -> None:
    """A head that has to fetch what stood 5 places ago widens its span; one that needs nothing gives it up."""
    attn = AdaptiveSpan(2, 4, max_span=16, ramp=4, init_ratio=0.125, span_cost=1e-3)
    optimiser = torch.optim.Adam(attn.parameters(), lr=0.02)
    x = torch.randn(8, 1, 40, 1)
    zero = torch.zeros(8, 2, 40, 4)
    for step in range(60):
        # Equal scores: the output of head 0 comes nearer to the mean of 8 keys only by a longer span.
        out = attn(zero, zero, x.expand(-1, 2, -1, -1), Mask(causal=True))
        mean = x.unfold(2, 8, 1).mean(-1)
        loss = (out[:, :1, 7:] - mean).square().mean() + attn.penalty()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        attn.after_step(step)
    assert attn.ratio[0] * 16 > 4
    assert attn.ratio[1] == 0


def test_c2_the_pattern_is_that_of_the_map(random_qkv: Draw) -> None:
    """C2: for each head; fresh, at T = 64, fewer than half of the pairs, and so at its widest."""
    attn = spans(0.0, 0.4, 1.0)
    q, k, _ = (x.detach() for x in random_qkv(3, 14, heads=3))
    for causal in (False, True):
        weights = attention_map(attn, q, k, Mask(causal=causal))
        assert torch.equal((weights > 0)[0], attn.pattern(3, 14, causal))
    for ratio in (0.125, 1.0):
        assert AdaptiveSpan(1, 4, init_ratio=ratio).pattern(64, 64, False).float().mean() < 0.5


def test_half_precision_starts_where_the_parameter_does() -> None:
    """The soft mask is made in float32 whatever the module holds."""
    attn = spans(0.25, 0.5)
    for dtype in (torch.bfloat16, torch.float16):
        half = spans(0.25, 0.5).to(dtype)
        assert torch.equal(half.soft_mask(torch.arange(9)), attn.soft_mask(torch.arange(9)))
        q, k, v = torch.randn(3, 1, 2, 20, 4).to(dtype)
        out = half(q, k, v, Mask(causal=True))
        torch.testing.assert_close(out.double(), brute(half, q, k, v, Mask(causal=True)), atol=2e-2, rtol=2e-2)


def test_what_makes_no_sense_is_refused() -> None:
    """C4: by name, with what came and what is allowed; and no crossing."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_span": 0}, "max_span must be at least 1, got 0"),
        ({"ramp": 1}, "ramp must be at least 2.*got 1"),
        ({"init_ratio": 1.5}, r"init_ratio must lie in \[0, 1\], got 1.5"),
        ({"init_ratio": float("nan")}, "init_ratio"),
        ({"span_cost": -1e-3}, "span_cost must be at least 0, got -0.001"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=f"AdaptiveSpan: {message}"):
            AdaptiveSpan(2, 4, **options)
    with pytest.raises(ValueError, match="AdaptiveSpan does not take memory: a span needs keys"):
        spans(0.5).memory(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4))
