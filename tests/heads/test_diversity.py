"""How alike heads are: numbers against brute force in float64, and what must not matter."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnzoo.heads.diversity import cka, li_cosine, li_position, overlap, projected

B, H, T, D, E = 2, 3, 7, 4, 10

Measure = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def keep_some() -> Tensor:
    """Padding on the right of one row, and on the left of the other."""
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[0, 5:] = False
    keep[1, :1] = False
    return keep


def real_tokens(x: Tensor, keep: Tensor | None) -> list[Tensor]:
    """x [B, H, T, n] as a float64 [H, n] for each real token."""
    return [
        x[b, :, t].double() for b in range(x.shape[0]) for t in range(x.shape[2]) if keep is None or bool(keep[b, t])
    ]


def brute_projected(heads: Tensor, weight: Tensor, keep: Tensor | None) -> float:
    """Y_h = O_h W_h made for each head, then cosines one by one."""
    count, width = heads.shape[1], heads.shape[3]
    found = []
    for token in real_tokens(heads, keep):
        y = [weight[:, h * width : (h + 1) * width].double() @ token[h] for h in range(count)]
        found += [float((y[i] @ y[j]) / (y[i].norm() * y[j].norm())) ** 2 for i in range(count) for j in range(i)]
    return sum(found) / len(found)


def hsic(k: Tensor, m: Tensor) -> float:
    """Song et al. 2012, equation 5: from the N x N kernels, their diagonals at 0."""
    n, one = len(k), torch.ones(len(k), dtype=torch.float64)
    k, m = k - k.diag().diag(), m - m.diag().diag()
    third = 2 / (n - 2) * float(one @ k @ m @ one)
    return (float((k @ m).trace()) + float((one @ k @ one) * (one @ m @ one)) / (n - 1) / (n - 2) - third) / n / (n - 3)


def brute_cka(heads: Tensor, keep: Tensor | None) -> float:
    """Kernels of all tokens for each head; nothing centred."""
    x = torch.stack(real_tokens(heads, keep), dim=1)  # [H, N, D]
    kernels = [head @ head.T for head in x]
    found = []
    for k, m in itertools.combinations(kernels, 2):
        found.append(max(0.0, hsic(k, m)) / (hsic(k, k) * hsic(m, m)) ** 0.5)
    return sum(found) / len(found)


def brute_overlap(probe: Tensor, keep: Tensor | None) -> float:
    tokens = real_tokens(probe, keep)
    found = []
    for i, j in itertools.combinations(range(probe.shape[1]), 2):
        dots = [sum(float(p[a] @ p[b]) for p in tokens) for a, b in ((i, j), (i, i), (j, j))]
        found.append(abs(dots[0]) / (dots[1] * dots[2]) ** 0.5)
    return sum(found) / len(found)


def brute_li(vectors: Tensor, keep: Tensor | None) -> float:
    """All pairs, those of a head with itself too."""
    found = []
    for token in real_tokens(vectors, keep):
        pairs = itertools.product(token, repeat=2)
        found.append(sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / len(token) ** 2)
    return sum(found) / len(found)


def brute_li_position(weights: Tensor, keep: Tensor | None) -> float:
    found = [
        sum(float((a * b).abs().sum()) for a, b in itertools.product(token, repeat=2)) / len(token) ** 2
        for token in real_tokens(weights, keep)
    ]
    return sum(found) / len(found)


@pytest.mark.parametrize("padded", [False, True])
def test_numbers_are_those_of_brute_force(padded: bool) -> None:
    """Each formula pair by pair and token by token, in float64, without anything that the code shares."""
    keep = keep_some() if padded else None
    heads, weight = torch.randn(B, H, T, D) + 0.5, torch.randn(E, H * D)
    shares = torch.rand(B, H, T, 5).softmax(-1)
    assert projected(heads, weight, keep).item() == pytest.approx(brute_projected(heads, weight, keep), rel=1e-5)
    assert cka(heads, keep).item() == pytest.approx(brute_cka(heads, keep), rel=1e-4)
    assert overlap(heads, keep).item() == pytest.approx(brute_overlap(heads, keep), rel=1e-5)
    assert li_cosine(heads, keep).item() == pytest.approx(brute_li(heads, keep), rel=1e-5)
    assert li_position(shares, keep).item() == pytest.approx(brute_li_position(shares, keep), rel=1e-5)


def test_li_by_hand() -> None:
    """Two heads, one token: at a right angle, the same, opposite; weights that share half of what they look at."""
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 2.0])
    for other, expected in ((y, 0.5), (2 * x, 1.0), (-x, 0.0)):
        assert li_cosine(torch.stack([x, other]).view(1, 2, 1, 2)).item() == pytest.approx(expected, abs=1e-6)
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]).view(1, 2, 1, 3)
    # |A1 A1| = |A2 A2| = 1/4 + 1/4 and |A1 A2| = 1/4, twice: (1/2 + 1/2 + 1/4 + 1/4) / 4
    assert li_position(weights).item() == pytest.approx(0.375)


def of_heads(measure: str, heads: Tensor, weight: Tensor | None = None, keep: Tensor | None = None) -> float:
    """A measure of heads whose slices of the output projection are all the same, or ``weight``."""
    if measure == "projected":
        same = torch.eye(heads.shape[3]).repeat(1, heads.shape[1]) if weight is None else weight
        return projected(heads, same, keep).item()
    return {"cka": cka, "overlap": overlap}[measure](heads, keep).item()


@pytest.mark.parametrize("measure", ["projected", "cka", "overlap"])
def test_copies_are_1_whatever_their_sign_and_one_head_is_0(measure: str) -> None:
    """Anti-parallel heads are the same up to the output projection, so they count as the same."""
    head = torch.randn(2, 1, 40, D)
    assert of_heads(measure, head.repeat(1, 3, 1, 1)) == pytest.approx(1, abs=1e-5)
    assert of_heads(measure, torch.cat([head, -head], 1)) == pytest.approx(1, abs=1e-5)
    assert of_heads(measure, head) == 0


def test_heads_at_right_angles_are_0() -> None:
    """Projected: in spaces of their own; overlap: on keys of their own; CKA: independent tokens, without the bias."""
    heads = torch.randn(2, 3, 40, D)
    assert of_heads("projected", heads, torch.eye(3 * D)) == 0
    apart = torch.zeros(2, 3, 40, 3)
    for head in range(3):
        apart[:, head, :, head] = torch.rand(2, 40)
    assert of_heads("overlap", apart) == 0
    # 32 tokens of width 16: the plain estimate of CKA would be about a third.
    assert of_heads("cka", torch.randn(1, 8, 32, 16)) < 0.05


def test_cka_knows_no_basis_and_no_scale() -> None:
    """Each head turned and scaled by itself, and moved: the same number. Other tokens: another one."""
    heads = torch.randn(2, H, 30, D)
    heads[:, 1] += heads[:, 0]
    turned = heads.clone()
    for head in range(H):
        turn, _ = torch.linalg.qr(torch.randn(D, D))
        turned[:, head] = 10.0 ** (head - 1) * heads[:, head] @ turn + head
    assert cka(heads).item() > 0.1
    assert cka(turned).item() == pytest.approx(cka(heads).item(), rel=1e-3)
    assert projected(10 * heads, torch.ones(E, H * D)).item() == pytest.approx(1)


def test_of_too_few_tokens_cka_says_nothing() -> None:
    """Three tokens: 0, and gradients that are finite."""
    heads = torch.randn(1, 2, 6, D, requires_grad=True)
    value = cka(heads, torch.arange(6)[None] < 3)
    value.backward()
    assert value.item() == 0
    assert heads.grad is not None and heads.grad.count_nonzero() == 0


@pytest.mark.parametrize("tokens", [512, 6])
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
def test_what_stands_at_padding_reaches_nothing(tokens: int, filler: float) -> None:
    """Neither number nor gradient, all tokens looked at or a sample of them."""
    keep, weight = keep_some(), torch.randn(E, H * D)
    measures: list[Measure] = [
        lambda x: projected(x, weight, keep, tokens=tokens),
        lambda x: cka(x, keep, tokens=tokens),
        lambda x: overlap(x, keep),
        lambda x: li_cosine(x, keep),
        lambda x: li_position(x, keep),
    ]
    clean = torch.randn(B, H, T, D).masked_fill(~keep[:, None, :, None], 0)
    dirty = clean.masked_fill(~keep[:, None, :, None], filler)
    for measure in measures:
        found = []
        for x in (clean, dirty):
            torch.manual_seed(1)
            x = x.clone().requires_grad_()
            value = measure(x)
            value.backward()
            found.append((value.detach(), x.grad))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        assert found[0][0] > 0


def test_a_sample_takes_real_tokens_and_follows_the_generator() -> None:
    """The real tokens alone are a third of all: a sample as large as they are is all of them; 1 of 1,000 is one."""
    heads, weight = torch.randn(4, 2, 300, D), torch.randn(E, 2 * D)
    keep = torch.zeros(4, 300, dtype=torch.bool)
    keep[:, ::3] = True
    whole = projected(heads, weight, keep, tokens=1200)
    assert projected(heads, weight, keep, tokens=400).item() == pytest.approx(whole.item(), rel=1e-5)
    seen = set()
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        seen.add(projected(heads, weight, keep, tokens=50).item())
    assert len(seen) == 3
    assert all(value == pytest.approx(whole.item(), abs=0.1) for value in seen)
    token = projected(heads, weight, keep, tokens=1).item()
    each = [projected(heads[b, :, t][None, :, None], weight).item() for b in range(4) for t in range(0, 300, 3)]
    assert min(abs(token - value) for value in each) < 1e-6


def test_gradients_are_those_of_finite_differences() -> None:
    keep = keep_some()
    heads = torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(E, H * D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: projected(x, w, keep), (heads, weight))
    heads = (heads.detach() + heads.detach()[:, :1]).requires_grad_()  # alike, so that no pair of CKA is cut off at 0
    for measure in (cka, overlap, li_cosine):
        assert torch.autograd.gradcheck(lambda x, m=measure: m(x, keep), (heads,))
    shares = torch.rand(B, H, T, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: li_position(x, keep), (shares,))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_half_precision_and_autocast_give_what_float32_gives(scale: float) -> None:
    """Sums of squares of 1e6 leave the range of a half, and autocast would round products to 8 bits."""
    heads, weight = torch.randn(2, H, 40, D) * scale, torch.randn(E, H * D)
    heads, weight = heads.bfloat16(), weight.bfloat16()
    for measure in (lambda x: projected(x, weight), cka, overlap, li_cosine):
        expected = measure(heads.float())
        with torch.autocast("cpu", torch.bfloat16):
            found = measure(heads)
        assert found.dtype == torch.float32
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        assert 0 <= found <= 1


def test_dead_heads_are_0_with_finite_gradients() -> None:
    """A head whose output is 0 is like nothing; one that is nearly so does not get gradients without bound."""
    weight = torch.randn(E, 2 * D)
    for size in (0.0, 1e-20, 1e-5):
        heads = torch.randn(1, 2, 20, D)
        heads[:, 1] *= size
        heads.requires_grad_()
        for measure in (lambda x: projected(x, weight), cka, overlap, li_cosine):
            (gradient,) = torch.autograd.grad(measure(heads), heads)
            assert gradient.isfinite().all()
            assert gradient.norm() < 1000
    assert projected(heads.detach() * torch.tensor([1.0, 0.0]).view(1, 2, 1, 1), weight).item() == 0
