"""Differential attention against two softmax maps written out, and the numbers of its lambda."""

import math
from collections.abc import Callable

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, MultiheadAttention, OffsetBias, attention_map
from attnzoo.mechanisms.differential import Differential

Draw = Callable[..., tuple[Tensor, ...]]


def two_maps(attn: Differential, q: Tensor, k: Tensor, visible: Tensor, terms: Tensor, lam: float) -> Tensor:
    """softmax(q1 k1 / sqrt(D/2) + terms) - lambda softmax(q2 k2 / sqrt(D/2) + terms), [B, H, T, S]."""
    half = attn.head_dim // 2
    k = torch.stack([k[:, h // (q.shape[1] // k.shape[1])] for h in range(q.shape[1])], 1)
    maps = []
    for part in (slice(0, half), slice(half, None)):
        scores = torch.einsum("bhtd,bhsd->bhts", q[..., part], k[..., part]) / half**0.5 + terms
        weights = scores.exp() * visible
        maps.append(torch.nan_to_num(weights / weights.sum(-1, keepdim=True)))
    return maps[0] - lam * maps[1]


def set_lambda(attn: Differential, first: float, second: float) -> float:
    """lambda = exp(first) - exp(second) + l0."""
    with torch.no_grad():
        for vector in attn.parameters():
            vector.zero_()
        attn.lambda_q1[0], attn.lambda_k1[0] = first, 1
        attn.lambda_q2[-1], attn.lambda_k2[-1] = second, 1
    return math.exp(first) - math.exp(second) + attn.lambda_init


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_two_softmax_maps(groups: int, causal: bool) -> None:
    """Every form of mask and bias acts on both maps; key/value heads in blocks; T other than S."""
    attn = Differential(4, 6, layer=2).double()
    lam = set_lambda(attn, 0.25, -0.5)
    for queries, keys in [(7, 7), (3, 7), (7, 3), (1, 1)]:
        q = torch.randn(2, 4, queries, 6, dtype=torch.float64)
        k, v = (torch.randn(2, groups, keys, width, dtype=torch.float64) for width in (6, 5))
        spread = torch.stack([v[:, h // (4 // groups)] for h in range(4)], 1)
        nothing = torch.zeros(())
        masks = [Mask(causal), Mask(causal, key_keep=torch.rand(2, keys) < 0.7)]
        for shape in [(queries, keys), (2, 1, queries, keys), (1, 4, queries, keys), (2, 4, queries, keys)]:
            masks.append(Mask(causal, pair_keep=torch.rand(shape) < 0.7))
        for mask in masks:
            visible = mask.visible(queries, keys)
            right = two_maps(attn, q, k, torch.ones(()) if visible is None else visible, nothing, lam) @ spread
            torch.testing.assert_close(attn(q, k, v, mask), right, atol=1e-12, rtol=1e-10)
        for shape in [(queries, keys), (1, 4, queries, keys), (2, 4, queries, keys), (2, 1, queries, keys)]:
            terms = torch.randn(shape, dtype=torch.float64)
            seen = Mask(causal).visible(queries, keys)
            right = two_maps(attn, q, k, torch.ones(()) if seen is None else seen, terms, lam) @ spread
            torch.testing.assert_close(attn(q, k, v, Mask(causal), terms), right, atol=1e-12, rtol=1e-10)
        offsets = OffsetBias(torch.randn(4, queries + keys - 1, dtype=torch.float64))
        dense = attn(q, k, v, Mask(causal), offsets.dense(queries))
        torch.testing.assert_close(attn(q, k, v, Mask(causal), offsets), dense)


@pytest.mark.parametrize(("layer", "start"), [(None, 0.2), (0, 0.2), (3, 0.8 - 0.6 * 0.40656966), (1000, 0.8)])
def test_lambda_by_depth(layer: int | None, start: float) -> None:
    """l0 = 0.8 - 0.6 exp(-0.3 layer) from layer 0; the gain of the norm behind it is 1 - l0."""
    attn = Differential(2, 8, layer=layer)
    assert attn.lambda_init == pytest.approx(start, abs=1e-7)
    assert attn.norm_gain == pytest.approx(1 - start, abs=1e-7)
    set_lambda(attn, 0.0, 0.0)
    assert attn.lam().item() == pytest.approx(start, abs=1e-6)
    set_lambda(attn, 1.0, -1.0)
    assert attn.lam().item() == pytest.approx(start + 2.7182818 - 0.3678794, abs=1e-5)


def test_lambda_learns_from_vectors_of_its_own() -> None:
    """Four vectors [D/2] from N(0, 0.1), shared by the heads; each of them gets a gradient."""
    attn = Differential(2, 4000)
    assert {name: tuple(p.shape) for name, p in attn.named_parameters()} == {
        f"lambda_{name}": (2000,) for name in ("q1", "k1", "q2", "k2")
    }
    assert all(abs(p.std().item() - 0.1) < 0.01 and abs(p.mean().item()) < 0.01 for p in attn.parameters())
    small = Differential(2, 4)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    small(q, k, v).square().sum().backward()
    assert all(p.grad is not None and p.grad.count_nonzero() == 2 for p in small.parameters())


def test_weights_below_zero_and_sums_of_rows() -> None:
    """What both maps attend to cancels: rows sum to 1 - lambda, and some weights are negative."""
    attn = Differential(2, 8)
    lam = set_lambda(attn, 0.5, 0.2)
    weights = attention_map(attn, torch.randn(1, 2, 9, 8) * 3, torch.randn(1, 2, 9, 8))
    torch.testing.assert_close(weights.sum(-1), torch.full((1, 2, 9), 1 - lam))
    assert weights.min() < -0.01
    # Equal halves: one map, (1 - lambda) times softmax.
    q, k = (torch.randn(1, 2, 9, 4).repeat(1, 1, 1, 2) for _ in range(2))
    same = (q[..., :4] @ k[..., :4].transpose(-1, -2) / 2).softmax(-1) * (1 - lam)
    torch.testing.assert_close(attention_map(attn, q, k), same, atol=1e-6, rtol=1e-5)


def test_a1_empty_rows(random_qkv: Draw) -> None:
    """A1: 0 minus lambda times 0, gradients finite."""
    attn = Differential(2, 4)
    q, k, v = random_qkv(6, 6)
    pairs = torch.ones(6, 6, dtype=torch.bool)
    pairs[[0, 3]] = False
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1] = False
    out = attn(q, k, v, Mask(key_keep=keep, pair_keep=pairs))
    assert (out[:, :, [0, 3]] == 0).all()
    assert (out[1] == 0).all()
    assert out[0].any()
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, *attn.parameters()))


def test_dropout_acts_on_both_maps() -> None:
    """One key, dropout 0.5: each map keeps 2 or 0 by itself, so four outputs occur, and no others."""
    attn = Differential(1, 4, dropout=0.5).train()
    lam = set_lambda(attn, 0.0, 0.0)
    one = torch.ones(500, 1, 1, 4)
    seen = attn(one, one, one)[:, 0, 0, 0].detach()
    expected = torch.tensor([0.0, 2.0, -2 * lam, 2 - 2 * lam])
    nearest = (seen[:, None] - expected).abs()
    assert (nearest.min(1).values < 1e-6).all()
    assert set(nearest.argmin(1).tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(attn.eval()(one, one, one), torch.full_like(one, 1 - lam))


@pytest.mark.parametrize("value", [1, 2, 3, 9])
def test_f3_the_value_width_is_free(value: int) -> None:
    """F3: narrower and wider than a half and than a head."""
    attn = Differential(2, 4)
    q, k = torch.randn(2, 1, 2, 5, 4)
    v = torch.randn(1, 2, 5, value)
    torch.testing.assert_close(attn(q, k, v), attention_map(attn, q, k) @ v)


def test_a_fused_kernel_makes_both_maps() -> None:
    """Halves narrower than v would send torch to the kernel that writes T x S numbers."""
    q, k, v = torch.randn(3, 1, 1, 1024, 8)
    with Made() as seen:
        Differential(1, 8)(q.requires_grad_(), k, v, Mask(causal=True)).sum().backward()
    assert seen.elements < 1024 * 1024 / 8


def test_the_shell_tells_the_layer() -> None:
    """Depth is a fact of the site; a rotary position turns each half by itself."""
    attn = MultiheadAttention(8, 2, Differential, layer=3)
    assert isinstance(attn.mechanism, Differential)
    assert attn.mechanism.lambda_init == pytest.approx(0.556058, abs=1e-6)
    assert attn.mechanism.qk_parts == 2


def test_what_makes_no_sense_is_refused() -> None:
    """C4: an odd width has no halves, a layer counts from 0."""
    with pytest.raises(ValueError, match="Differential: head_dim must be even.*got 5"):
        Differential(2, 5)
    with pytest.raises(ValueError, match="Differential: layer counts from 0, got -1"):
        Differential(2, 4, layer=-1)
