"""Linear and Performer: sums of features against every weight by itself, and what must never move them."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, Softmax, attention_map, record, reorder
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.linear import Linear
from attnzoo.mechanisms.performer import Performer
from attnzoo.reference.features import linear as linear_formula
from attnzoo.reference.features import performer as performer_formula

Draw = Callable[..., tuple[Tensor, ...]]

MAKERS: dict[str, Callable[[int, int], Mechanism]] = {
    "elu": lambda heads, width: Linear(heads, width),
    "relu": lambda heads, width: Linear(heads, width, feature_map="relu"),
    "exp": lambda heads, width: Linear(heads, width, feature_map="exp"),
    "Performer": lambda heads, width: Performer(heads, width, layer=1),
}

CHUNKED = (1, 2, 3, 5, 31, 63, 64, 65, 127, 128, 129, 200)
"""Lengths below, at and above one chunk and two."""


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int, int], Mechanism]:
    return MAKERS[request.param]


def close(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


def phi(module: Mechanism, x: Tensor) -> Tensor:
    """The features themselves, [..., D] -> [..., R], as the papers write them."""
    x = x.double()
    if isinstance(module, Performer):
        x = x / x.shape[-1] ** 0.25
        return torch.exp(x @ module.projection.double().mT - (x * x).sum(-1, keepdim=True) / 2)
    assert isinstance(module, Linear)
    if module.feature_map == "elu":
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return x.clamp(min=0) + 0.001 if module.feature_map == "relu" else x.exp()


def one_by_one(module: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask = Mask()) -> Tensor:  # noqa: B008
    """All T x S weights in float64, without any maximum taken out."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(share, 1) for x in (k, v))
    weights = phi(module, q) @ phi(module, k).mT
    queries, keys = weights.shape[2:]
    if mask.causal:
        weights = weights * torch.ones(queries, keys).tril(keys - queries)
    if mask.key_keep is not None:
        weights = weights * mask.key_keep[:, None, None]
    total = weights.sum(-1, keepdim=True)
    return weights @ v / torch.where(total == 0, 1.0, total)


def token_by_token(module: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The paper's recurrent network: M and z grow by one outer product a token."""
    features_q, features_k, v = phi(module, q), phi(module, k), v.double()
    memory = torch.zeros(*q.shape[:2], features_k.shape[-1], v.shape[-1], dtype=torch.float64)
    z = torch.zeros(*q.shape[:2], features_k.shape[-1], dtype=torch.float64)
    rows = []
    for t in range(q.shape[2]):
        memory = memory + features_k[:, :, t, :, None] * v[:, :, t, None]
        z = z + features_k[:, :, t]
        over = (features_q[:, :, t, None] @ memory)[:, :, 0]
        rows.append(over / (features_q[:, :, t] * z).sum(-1, keepdim=True))
    return torch.stack(rows, 2)


def in_steps(
    module: Mechanism, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], keep: Tensor | None = None
) -> Tensor:
    state, parts, start = (
        module.init_state(q.shape[0], q.shape[2], num_kv_heads=k.shape[1], value_dim=v.shape[3]),
        [],
        0,
    )
    for size in sizes:
        now = slice(start, start + size)
        mask = Mask(key_keep=None if keep is None else keep[:, now])
        out, state = module.step(q[:, :, now], k[:, :, now], v[:, :, now], state, mask)
        parts.append(out)
        start += size
    assert start == state.used == q.shape[2]
    real = torch.full((q.shape[0],), start) if keep is None else keep.sum(1)
    assert torch.equal(state.length, real)
    return torch.cat(parts, 2)


# What is computed


def test_weights_by_hand() -> None:
    """One number a key, so that phi(k) alone weighs: elu 1 and 2, relu 0.001 and 1.001, exp 1 and 3."""
    q, v = torch.zeros(1, 1, 1, 1), torch.tensor([[[[6.0], [12.0]]]])
    for name, keys, right in [
        ("elu", (0.0, 1.0), (1 * 6 + 2 * 12) / 3),
        ("elu", (-1e9, 1.0), 12.0),
        ("relu", (-5.0, 1.0), (0.001 * 6 + 1.001 * 12) / 1.002),
        ("exp", (0.0, 3.0**0.0 * 1.0986122886681098), (1 * 6 + 3 * 12) / 4),
    ]:
        out = MAKERS[name](1, 1)(q, torch.tensor(keys)[None, None, :, None], v)
        close(out, torch.tensor([[[[right]]]]))
    module = Performer(1, 4, num_features=2)
    w = module.projection
    q, k = torch.tensor([1.0, 0, 2, 0]), torch.tensor([[0.0, 1, 0, 0], [1.0, 1, -1, 0]])
    weights = [
        sum(float(torch.exp(w[r] @ q / 4**0.25 + w[r] @ key / 4**0.25 - key @ key / 4)) for r in range(2)) for key in k
    ]
    right = (weights[0] * 6 + weights[1] * 12) / sum(weights)
    close(module(q[None, None, None], k[None, None], v), torch.tensor([[[[right]]]]))


def test_outputs_and_gradients(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """Every weight by itself in float64: T below, at and above S and the chunk, grouped heads, holes in the keys."""
    module = make(4, 4)
    for queries, keys in [(1, 1), (1, 70), (70, 1), (9, 130), (130, 65), (65, 64), (64, 65), (100, 100)]:
        for groups in (1, 2, 4):
            for causal in (False, True):
                leaves = random_qkv(queries, keys, heads=4, groups=groups, value=3)
                mask = Mask(causal=causal, key_keep=torch.rand(2, keys) < 0.7)
                out, right = module(*leaves, mask), one_by_one(module, *leaves, mask)
                close(out, right)
                weigh = torch.randn(out.shape)
                for a, b in zip(
                    torch.autograd.grad((out * weigh).sum(), leaves),
                    torch.autograd.grad((right * weigh).sum(), leaves),
                    strict=True,
                ):
                    close(a, b, 5e-5)


def test_the_formula_is_the_same_thing(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """The row loop of ``attnzoo.reference`` against the matrix here: two writers, one function."""
    module = make(4, 4)
    formula = performer_formula if isinstance(module, Performer) else linear_formula
    q, k, v = random_qkv(5, 7, heads=4, groups=2, value=3)
    for causal in (False, True):
        mask = Mask(causal=causal, key_keep=torch.rand(2, 7) < 0.6)
        got = formula(module, q.double(), k.double(), v.double(), mask, None)
        close(got, one_by_one(module, q, k, v, mask), 1e-12)


@pytest.mark.parametrize("length", CHUNKED)
def test_chunks_equal_the_recurrence(make: Callable[[int, int], Mechanism], random_qkv: Draw, length: int) -> None:
    """Sums by chunk, and blocks inside, against M and z that grow token by token."""
    module = make(2, 4)
    q, k, v = random_qkv(length, length, value=3)
    close(module(q, k, v, Mask(causal=True)), token_by_token(module, q, k, v))


def test_float64_stays_float64(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    module = make(2, 4).double()
    q, k, v = (x.double() for x in random_qkv(70, 70))
    mask = Mask(causal=True)
    out = module(q, k, v, mask)
    assert out.dtype == torch.float64
    close(out, one_by_one(module, q, k, v, mask), 1e-11)
    close(in_steps(module, q, k, v, [3, 66, 1]), out, 1e-11)
    assert module.memory(k, v).sums.total.dtype == torch.float64


# Numbers that do not fit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_e07_sums_over_4096_keys_in_half_precision(
    make: Callable[[int, int], Mechanism], dtype: torch.dtype, causal: bool
) -> None:
    """E07: features about 30 at T=4096 add up to more than float16 holds; finite, and 2e-2 from float32."""
    module = make(1, 8)
    q, k = (29 + torch.randn(1, 1, 4096, 8) for _ in range(2))
    if isinstance(module, Linear) and module.feature_map == "exp":
        q, k = (x.log() for x in (q, k))
    q, k, v = (x.to(dtype) for x in (q, k, 1 + torch.rand(1, 1, 4096, 8)))
    if isinstance(module, Linear):
        z = phi(module, k).sum(2)
        assert z.min() > 1.2 * torch.finfo(torch.float16).max
        assert phi(module, q).mean() == pytest.approx(30, rel=0.05)
    right = make(1, 8)(q.float(), k.float(), v.float(), Mask(causal=causal))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = module(*leaves, Mask(causal=causal))
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert ((out.float() - right).abs() / right.abs()).max() < 2e-2
    out.float().square().mean().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves)
    state = module.memory(k, v)
    assert state.sums.total.dtype == torch.float32
    assert module.init_state(1, 5, dtype=dtype).sums.total.dtype == torch.float32


def test_e07_sums_under_autocast(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """E07: autocast reaches neither the features nor the sums, in the gradients and by steps no more than else."""
    module = make(2, 8)
    leaves = random_qkv(100, 100, width=8)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = module(*leaves, Mask(causal=True))
            stepped = in_steps(module, *leaves, [64, 36])
            crossed, _ = module.step(leaves[0], None, None, module.memory(*leaves[1:]))
            both = out.square().sum() + module(*leaves).square().sum()
        results.append((out, stepped, crossed, *torch.autograd.grad(both, leaves)))
    for plain, cast in zip(*results, strict=True):
        assert cast.dtype == torch.float32
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("shift", [-20.0, -60.0, -100.0, -300.0])
@pytest.mark.parametrize("name", ["elu", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_tiny_denominators(name: str, shift: float, causal: bool, random_qkv: Draw) -> None:
    """Features of e^-20 to e^-300, their products far below float32: outputs and gradients are those of float64."""
    module = MAKERS[name](2, 4)
    leaves = [(x + shift * (n < 2)).detach().requires_grad_() for n, x in enumerate(random_qkv(70, 70))]
    out, right = module(*leaves, Mask(causal=causal)), one_by_one(module, *leaves, Mask(causal=causal))
    assert right.abs().min() > 0
    close(out, right, 1e-4)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(right.square().sum(), leaves), strict=True
    ):
        close(a, b, 1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_exp_does_not_overflow(causal: bool, random_qkv: Draw) -> None:
    """Keys from -200 to 200 in one chunk, where exp ends at 88 in float32: still the numbers of float64."""
    module = MAKERS["exp"](2, 4)
    q, k, v = random_qkv(130, 130)
    q, k = ((60 * x).detach().requires_grad_() for x in (q, k))
    assert k.max() > 150
    assert k.min() < -150
    out = module(q, k, v, Mask(causal=causal))
    close(out, one_by_one(module, q, k, v, Mask(causal=causal)), 2e-4)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.square().sum(), (q, k, v)))
    # Where a float has no digits left behind the point, the largest key takes all.
    far = module(1e20 * q, 1e20 * k, v, Mask(causal=causal))
    assert torch.isfinite(far).all()
    assert far.any(-1).all()


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_performer_on_vectors_of_norm_30(width: int, causal: bool, random_qkv: Draw) -> None:
    """exp(-|x'|^2 / 2) is e^-159 at width 8: nothing may overflow, and nothing may vanish either."""
    module = Performer(2, width)
    q, k, v = random_qkv(100, 100, width=width)
    q, k = ((30 * x / x.norm(dim=-1, keepdim=True)).detach().requires_grad_() for x in (q, k))
    out, right = module(q, k, v, Mask(causal=causal)), one_by_one(module, q, k, v, Mask(causal=causal))
    assert right.abs().min() > 0
    close(out, right, 1e-3)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(right.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b, 1e-2)


# Who has no say


@pytest.mark.parametrize("place", [1, 40, 63, 64, 70])
@pytest.mark.parametrize("norm", [0.0, 100.0, 1e30])
@pytest.mark.parametrize("usual", [1.0, 30.0])
def test_e1_performers_constant_does_not_see_the_future(
    place: int, norm: float, usual: float, random_qkv: Draw
) -> None:
    """E1: a later key of norm 100, or the worse one of norm 0 among keys of norm 30: the same before it."""
    module = Performer(2, 8)
    q, k, v = (x.detach() for x in random_qkv(75, 75, width=8))
    k = usual * k / k.norm(dim=-1, keepdim=True)
    later = k.clone()
    later[:, :, place] = norm * k[:, :, place] / usual
    before, after = (module(q, x, v, Mask(causal=True)) for x in (k, later))
    torch.testing.assert_close(before[:, :, :place], after[:, :, :place], atol=2e-6, rtol=1e-5)
    assert not torch.equal(before[:, :, place:], after[:, :, place:])
    if norm < 1e30:
        close(after, one_by_one(module, q, later, v, Mask(causal=True)), 1e-3)


@pytest.mark.parametrize("place", [1, 40, 64])
@pytest.mark.parametrize("value", [-1e30, -100.0, 100.0, 1e30])
def test_e1_no_feature_sees_the_future(
    make: Callable[[int, int], Mechanism], place: int, value: float, random_qkv: Draw
) -> None:
    """E1: whatever a later key holds, the same before it; bits differ only where it asks for other sums."""
    module = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(75, 75))
    later = k.clone()
    later[:, :, place] = value
    before, after = (module(q, x, v, Mask(causal=True)) for x in (k, later))
    torch.testing.assert_close(before[:, :, :place], after[:, :, :place], atol=1e-6, rtol=1e-6)
    near = k.clone()
    near[:, :, place] += 1
    assert torch.equal(before[:, :, :place], module(q, near, v, Mask(causal=True))[:, :, :place])
    assert torch.isfinite(after).all()


def test_both_ways_to_sum_agree(
    make: Callable[[int, int], Mechanism], monkeypatch: pytest.MonkeyPatch, random_qkv: Draw
) -> None:
    """Plain chunks, taken where features are near to 1, and those with maxima: outputs and gradients."""
    module = make(4, 8)
    leaves = random_qkv(150, 190, heads=4, groups=2, width=8, value=5)
    keep = torch.rand(2, 190) < 0.8
    results = []
    for near in (30.0, 0.0):
        monkeypatch.setattr("attnzoo.kernels.streamed.NEAR", near)
        assert ("as they are" in module.explain(*leaves, Mask(causal=True, key_keep=keep))) == (near > 0)
        out = module(*leaves, Mask(causal=True, key_keep=keep))
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for plain, careful in zip(*results, strict=True):
        close(plain, careful)


@pytest.mark.parametrize("causal", [False, True])
def test_j3_batch_mates_and_other_heads_have_no_say(
    make: Callable[[int, int], Mechanism], causal: bool, random_qkv: Draw
) -> None:
    """J3: keys of norm 0 and 100 in the next row of the batch, or the next head, change no bit of this one."""
    module = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(70, 70))
    k = 20 * k
    out = module(q, k, v, Mask(causal=causal))
    for factor in (0.0, 100.0):
        mates, heads = k.clone(), k.clone()
        mates[1] *= factor
        heads[:, 1] *= factor
        assert torch.equal(module(q, mates, v, Mask(causal=causal))[0], out[0])
        assert torch.equal(module(q, heads, v, Mask(causal=causal))[:, 0], out[:, 0])
    close(module(q[:1], k[:1], v[:1], Mask(causal=causal)), out[:1])


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_i1_padding_is_not_in_the_normaliser(
    make: Callable[[int, int], Mechanism], side: str, batch: int, causal: bool, random_qkv: Draw
) -> None:
    """I1: what stands at padding moves no bit of an output or gradient, and cropped input gives the same."""
    module = make(2, 4)
    keep = torch.ones(70, dtype=torch.bool)
    hidden = {"left": slice(0, 20), "right": slice(50, 70), "holes": slice(3, 67, 3)}[side]
    keep[hidden] = False
    q, k, v = (x.detach() for x in random_qkv(70, 70, batch=batch))
    # Keys of norm 200 make those of padding, which would have norm 0, the largest by far.
    k = 200 * k / k.norm(dim=-1, keepdim=True) if isinstance(module, Performer) else k - 50
    mask = Mask(causal=causal, key_keep=keep.expand(batch, -1))
    runs = []
    for filler in (0.0, 50.0, float("nan"), float("inf")):
        leaves = [q.clone(), k.masked_fill(~keep[:, None], filler), v.masked_fill(~keep[:, None], filler)]
        leaves = [x.requires_grad_() for x in leaves]
        out = module(*leaves, mask)[:, :, keep]
        runs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    assert not runs[0][2][:, :, ~keep].any()
    assert not runs[0][3][:, :, ~keep].any()
    # Taken away altogether: the places differ, the sums do not.
    close(runs[0][0], module(q[:, :, keep], k[:, :, keep], v[:, :, keep], Mask(causal=causal)))


def test_rows_without_a_key_are_zero(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """A1: no key at all, none yet, and more queries than keys: 0, and gradients that are finite."""
    module = make(2, 4)
    keep = torch.ones(2, 70, dtype=torch.bool)
    keep[0], keep[1, :66] = False, False
    leaves = random_qkv(72, 70)
    for causal, empty in ((True, 68), (False, 0)):
        out = module(*leaves, Mask(causal=causal, key_keep=keep))
        assert not out[0].any()
        assert not out[1, :, :empty].any()
        assert out[1, :, empty:].any(-1).all()
        assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.square().sum(), leaves))
    memory = module.memory(leaves[1], leaves[2], Mask(key_keep=keep))
    assert not module.step(leaves[0], None, None, memory)[0][0].any()


# Stretches of time


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of one chunk, 64 places, so that 150 places are three of them."""
    monkeypatch.setattr("attnzoo.kernels.streamed.SIZE", 1)


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("far", [(), (0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_stretches_near_and_far_in_any_order(
    make: Callable[[int, int], Mechanism], causal: bool, far: tuple[int, ...], random_qkv: Draw
) -> None:
    """Keys beyond what plain chunks take in some stretches alone: outputs and gradients, groups, holes, T below S."""
    module = make(4, 4)
    q, k, v = random_qkv(150, 171, heads=4, groups=2, value=3)
    scale, shift = torch.ones(171), torch.zeros(171)
    for number in far:
        here = slice(21 + 64 * number, 21 + 64 * (number + 1))
        far_exp = isinstance(module, Linear) and module.feature_map == "exp"
        scale[here], shift[here] = (8, 0) if isinstance(module, Performer) else (1, 100 if far_exp else -40)
    k = (k * scale[:, None] + shift[:, None]).detach().requires_grad_()
    mask = Mask(causal=causal, key_keep=torch.rand(2, 171) < 0.8)
    out, right = module(q, k, v, mask), one_by_one(module, q, k, v, mask)
    close(out, right, 1e-4)
    weigh = torch.randn(out.shape)
    for a, b in zip(
        torch.autograd.grad((out * weigh).sum(), (q, k, v)),
        torch.autograd.grad((right * weigh).sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b, 1e-3)


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_and_their_gradients(make: Callable[[int, int], Mechanism], causal: bool, random_qkv: Draw) -> None:
    """Written out by hand they are those of finite differences, and so are those of what was made again for them."""
    module = make(2, 2).double()
    leaves = [x.detach().double().requires_grad_() for x in random_qkv(66, 68, batch=1, width=2, value=1)]
    mask = Mask(causal=causal, key_keep=(torch.arange(68) % 5 > 0)[None])

    def call(*inputs: Tensor) -> Tensor:
        return module(*inputs, mask)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.usefixtures("short_stretches")
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_kept_but_inputs_and_output(
    make: Callable[[int, int], Mechanism], causal: bool, random_qkv: Draw
) -> None:
    """Above q, k, v and the output only sums, one for a stretch of 64: less than R / 64 times v."""
    module = make(1, 16)
    leaves = random_qkv(2048, 2048, batch=1, heads=1, width=16)
    with kept() as found:
        module(*leaves, Mask(causal=causal))
    features = 44 if isinstance(module, Performer) else 16
    sums = 2048 // 64 * features * 18 if causal else 2 * features * 18
    constants = features * 16
    assert sum(found.values()) <= 4 * (4 * 2048 * 16 + sums + constants)


def test_gradients_under_autocast(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """E07: gradients that are asked for within autocast are the same numbers."""
    module = make(2, 8)
    leaves = random_qkv(100, 100, width=8)
    for causal in (False, True):
        plain = torch.autograd.grad(module(*leaves, Mask(causal=causal)).square().sum(), leaves)
        with torch.autocast("cpu", torch.bfloat16):
            cast = torch.autograd.grad(module(*leaves, Mask(causal=causal)).square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_under_torch_func(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """torch.func takes the formulas: gradients as ever, and gradients of each sample by itself."""
    module = make(2, 4)
    leaves = random_qkv(70, 70)

    def loss(*inputs: Tensor, causal: bool) -> Tensor:
        return module(*inputs, Mask(causal=causal)).square().sum()

    for causal in (False, True):
        right = torch.autograd.grad(loss(*leaves, causal=causal), leaves)
        detached = [x.detach() for x in leaves]
        for a, b in zip(torch.func.grad(loss, (0, 1, 2))(*detached, causal=causal), right, strict=True):
            close(a, b)
    each = torch.func.vmap(torch.func.grad(lambda *x: loss(*x, causal=False), (0, 1, 2)))
    right = torch.autograd.grad(loss(*leaves, causal=False), leaves)
    for a, b in zip(each(*(x.detach()[:, None] for x in leaves)), right, strict=True):
        close(a[:, 0], b)


def test_features_that_changed_before_the_gradients_are_noticed(random_qkv: Draw) -> None:
    """Features are made again for the gradients: with another W these would be wrong, and nobody would see."""
    module = Performer(2, 8, redraw_every=1)
    leaves = random_qkv(9, 9, width=8)
    for causal in (False, True):
        out = module(*leaves, Mask(causal=causal))
        module.after_step(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_slope_of_elu_at_0() -> None:
    """log(elu(k) + 1) has the slope 1 at 0 itself, where padding, ReLU and dropout put many numbers."""
    q, v = torch.zeros(1, 1, 1, 1), torch.tensor([[[[6.0], [12.0]]]])
    k = torch.zeros(1, 1, 2, 1, requires_grad=True)
    (grad,) = torch.autograd.grad(Linear(1, 1)(q, k, v).sum(), k)
    close(grad, torch.tensor([[[[-1.5], [1.5]]]]))


# By steps


@pytest.mark.parametrize("sizes", [[1] * 8, [150], [3, 0, 147], [64, 64, 22], [65, 1, 1, 83], [1, 128, 21]])
def test_steps_of_any_size_equal_one_pass(
    make: Callable[[int, int], Mechanism], sizes: list[int], random_qkv: Draw
) -> None:
    """B1: outputs and gradients, grouped heads, padding on the left, values of another width."""
    module = make(4, 4)
    length = sum(sizes)
    leaves = random_qkv(length, length, heads=4, groups=2, value=3)
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[1, : length // 3] = False
    for key_keep in (None, keep):
        whole = module(*leaves, Mask(causal=True, key_keep=key_keep))
        parts = in_steps(module, *leaves, sizes, key_keep)
        close(parts, whole)
        for a, b in zip(
            torch.autograd.grad(parts.square().sum(), leaves),
            torch.autograd.grad(whole.square().sum(), leaves),
            strict=True,
        ):
            close(a, b, 5e-5)


def test_the_state_neither_grows_nor_is_used_up(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """As large after 90 tokens as after none; a step taken twice from one state gives the same twice."""
    module = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(90, 90, value=3))
    empty = module.init_state(2, 1_000_000, value_dim=3)
    _, state = module.step(q, k, v, empty)
    assert [x.shape for x in state.sums] == [x.shape for x in empty.sums]
    assert sum(x.numel() for x in state.sums) < 1000
    assert (empty.used, state.used, state.length.tolist()) == (0, 90, [90, 90])
    once, _ = module.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)
    twice, _ = module.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)
    assert torch.equal(once, twice)


def test_memory_equals_cross_attention(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """The sums are made once; the queries may come in any portions; the memory counts its real tokens."""
    module = make(4, 4)
    leaves = random_qkv(9, 80, heads=4, groups=2, value=3)
    q, k, v = leaves
    keep = torch.rand(2, 80) < 0.6
    for mask in (Mask(), Mask(key_keep=keep)):
        whole = module(q, k, v, mask)
        state = module.memory(k, v, mask)
        assert state.fixed
        assert state.used == 80
        assert torch.equal(state.length, torch.full((2,), 80) if mask.key_keep is None else keep.sum(1))
        parts = []
        for rows in q.split([1, 3, 0, 5], dim=2):
            out, again = module.step(rows, None, None, state)
            assert again is state
            parts.append(out)
        close(torch.cat(parts, 2), whole)
        for a, b in zip(
            torch.autograd.grad(torch.cat(parts, 2).square().sum(), leaves),
            torch.autograd.grad(whole.square().sum(), leaves),
            strict=True,
        ):
            close(a, b, 5e-5)


def test_rows_of_a_state_are_reordered(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """Beam search picks rows, some of them twice."""
    module = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(10, 10, batch=3))
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[2, :4] = False
    _, state = module.step(q[:, :, :9], k[:, :, :9], v[:, :, :9], module.init_state(3, 10), Mask(key_keep=keep))
    rows = torch.tensor([2, 0, 0, 1])
    picked = reorder(state, rows)
    assert picked.length.tolist() == [5, 9, 9, 9]
    out, _ = module.step(*(x[rows][:, :, 9:] for x in (q, k, v)), picked)
    mask = Mask(causal=True, key_keep=torch.cat([keep, torch.ones(3, 1, dtype=torch.bool)], 1))
    close(out, module(q, k, v, mask)[rows][:, :, 9:])


def test_what_does_not_fit_a_state_is_refused(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """A full state names max_len; rows, heads and widths of another size are named."""
    module = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(5, 5))
    with pytest.raises(ValueError, match=r"full: it holds 0 of max_len=4 tokens and 5 more came"):
        module.step(q, k, v, module.init_state(2, 4))
    _, state = module.step(q[:, :, :4], k[:, :, :4], v[:, :, :4], module.init_state(2, 4))
    with pytest.raises(ValueError, match=r"full: it holds 4 of max_len=4 tokens and 1 more came"):
        module.step(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state)
    with pytest.raises(ValueError, match=r"holds 3 rows, 2 came"):
        module.step(q, k, v, module.init_state(3, 5))
    with pytest.raises(ValueError, match=r"1 heads of \d+ keys, 2 of \d+ came; see num_kv_heads"):
        module.step(q, k, v, module.init_state(2, 5, num_kv_heads=1))
    with pytest.raises(ValueError, match=r"2 heads of 3 values, 2 of 4 came"):
        module.step(q, k, v, module.init_state(2, 5, value_dim=3))


def test_what_cannot_be_honoured_is_refused(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """C4: pairs, segments and biases by name, with the reason and what could serve."""
    module = make(2, 4)
    name = type(module).__name__
    q, k, v = random_qkv(5, 5)
    pairs = torch.ones(5, 5, dtype=torch.bool)
    for mask in (Mask(pair_keep=pairs), Mask(segments=torch.zeros(2, 5, dtype=torch.long))):
        with pytest.raises(ValueError, match=rf"{name} does not take mask.*summed before a query comes.*Softmax"):
            module(q, k, v, mask)
    with pytest.raises(ValueError, match=rf"{name} does not take bias.*Softmax"):
        module(q, k, v, None, torch.zeros(5, 5))
    with pytest.raises(ValueError, match=rf"{name} does not take mask.pair_keep"):
        module.step(q, None, None, module.memory(k, v), Mask(pair_keep=pairs))
    with pytest.raises(ValueError, match=rf"{name} does not take bias"):
        module.step(q, k, v, module.init_state(2, 5), None, torch.zeros(5, 5))


# Memory, compilation, reading


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Storage -> bytes of what is kept for the gradients."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def measure(module: Mechanism, leaves: tuple[Tensor, ...], mask: Mask) -> tuple[int, int]:
    with Made() as seen:
        with kept() as found:
            out = module(*leaves, mask)
        out.sum().backward()
    return seen.largest_bytes, sum(found.values())


@pytest.mark.parametrize("causal", [False, True])
def test_e08_memory_is_linear(make: Callable[[int, int], Mechanism], causal: bool, random_qkv: Draw) -> None:
    """E08: from T=2048 to T=4096 the largest tensor, and all that is kept for the gradients, double at most."""
    peaks = [measure(make(1, 4), random_qkv(n, n, batch=1, heads=1), Mask(causal=causal)) for n in (2048, 4096)]
    assert peaks[1][0] <= 2.05 * peaks[0][0]
    assert peaks[1][1] <= 2.05 * peaks[0][1]


@pytest.mark.parametrize("name", MAKERS)
def test_g6_causal_at_4096_under_a_stated_bound(name: str, random_qkv: Draw) -> None:
    """G6: no tensor above 4 bytes for each place and key of its chunk, or feature; twice that kept."""
    module = MAKERS[name](2, 16)
    features = 44 if name == "Performer" else 16
    q, k, v = random_qkv(4096, 4096, batch=1, width=16)
    bound = 4 * 2 * 4096 * max(features, 64)
    assert bound < 3 * 2**20
    largest, held = measure(module, (q, k, v), Mask(causal=True))
    assert largest <= bound
    assert held <= 2 * bound


@pytest.mark.slow
def test_one_graph_over_many_chunks(monkeypatch: pytest.MonkeyPatch, random_qkv: Draw) -> None:
    """A15: three chunks, with gradients, under a compiler that takes the second T for a symbol."""
    monkeypatch.setattr("attnzoo.kernels.prefix.CHUNK", 4)
    module = Linear(2, 4)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (10, 11):
        leaves = random_qkv(length, length, batch=1, groups=1)
        out, right = compiled(*leaves, Mask(causal=True)), module(*leaves, Mask(causal=True))
        close(out, right)
        for a, b in zip(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(right.square().sum(), leaves),
            strict=True,
        ):
            close(a, b)


def test_maps_and_records(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """J2, K2: rows of weights sum to 1 over the keys they may see; a step has no keys to be read, and says so."""
    module = make(2, 4).eval()
    q, k, v = (x.detach() for x in random_qkv(9, 9))
    mask = Mask(causal=True)
    with record(module) as sites:
        module(q, k, v, mask)
    weights = sites["attention"][0].map()
    close(weights.sum(-1), torch.ones(2, 2, 9))
    assert not weights.triu(1).any()
    assert (weights >= 0).all()
    close(weights, attention_map(module, q, k, mask))
    with record(module), pytest.raises(ValueError, match="keeps no keys"):
        module.step(q, k, v, module.init_state(2, 9))
    assert "running sums" in module.explain(q, k, v, mask)
    assert "one sum" in module.explain(q, k, v)


def test_dropout_acts_on_the_output(make: Callable[[int, int], Mechanism], random_qkv: Draw) -> None:
    """In training a share of the numbers is 0 and the rest grows; by steps as well; in evaluation nothing."""
    module = make(2, 4)
    q, k, v = random_qkv(200, 200)
    whole = module(q, k, v)
    module.dropout = 0.25
    for out in (
        module(q, k, v),
        module.step(q, None, None, module.memory(k, v))[0],
    ):
        assert 0.2 < (out == 0).double().mean() < 0.3
        close(out[out != 0], (whole / 0.75)[out != 0])
    assert (in_steps(module, q, k, v, [199, 1]) == 0).any()
    close(module.eval()(q, k, v), whole, 1e-7)


# Options


def test_options() -> None:
    """R is D ln D, and stands under its own name; what makes no sense is refused with what came."""
    assert [Performer(1, width).num_features for width in (1, 2, 8, 16, 64)] == [2, 2, 17, 44, 266]
    assert Performer(1, 8, num_features=1).projection.shape == (1, 8)
    assert "num_features=17" in repr(Performer(2, 8))
    assert "feature_map=exp" in repr(Linear(2, 8, feature_map="exp"))
    with pytest.raises(ValueError, match="Linear: feature_map must be one of elu, relu, exp; got 'softmax'"):
        Linear(2, 8, feature_map="softmax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Performer: num_features must be at least 1, got 0"):
        Performer(2, 8, num_features=0)
    with pytest.raises(ValueError, match="Performer: redraw_every must be at least 1, got 0"):
        Performer(2, 8, redraw_every=0)


# Performer's features


def test_rows_are_orthogonal_and_as_long_as_normal_vectors() -> None:
    """Section 2.4: D at a time orthogonal; lengths differ and have the mean square D; each direction is as likely."""
    w = Performer(1, 8, num_features=8 * 250 + 3).projection.double()
    assert w.shape == (2003, 8)
    for block in w[:2000].unflatten(0, (250, 8)):
        between = block @ block.T
        assert (between - torch.diag(between.diagonal())).abs().max() < 1e-5
    lengths = w.norm(dim=1)
    assert lengths.square().mean() == pytest.approx(8, rel=0.05)
    assert lengths.square().var() == pytest.approx(16, rel=0.2)
    assert w.mean(0).abs().max() < 0.1
    assert ((w.T @ w / len(w)) - torch.eye(8)).abs().max() < 0.15


def test_the_features_estimate_the_exponential() -> None:
    """Without bias: over 4000 blocks phi(q) . phi(k) is exp(q . k / sqrt(D))."""
    module = Performer(1, 4, num_features=16_000)
    q, k = torch.tensor([0.3, -0.6, 0.2, 0.5]), torch.tensor([0.6, 0.1, -0.5, 0.6])
    estimate = (phi(module, q) * phi(module, k)).mean()
    assert estimate.item() == pytest.approx((q @ k / 2).exp().item(), rel=0.03)


@pytest.mark.parametrize("causal", [False, True])
def test_more_features_come_nearer_to_softmax(causal: bool, random_qkv: Draw) -> None:
    """Four times the features bring the mean error over 5 seeds to seven tenths or less, again and again."""
    q, k, v = (x.detach() for x in random_qkv(48, 48, width=8))
    q, k = 0.6 * q, 0.6 * k
    right = Softmax(2, 8)(q, k, v, Mask(causal=causal))
    errors = []
    for features in (16, 64, 256, 1024):
        found = [
            (Performer(2, 8, num_features=features, seed=seed)(q, k, v, Mask(causal=causal)) - right).abs().mean()
            for seed in range(5)
        ]
        errors.append(sum(found).item() / 5)
    assert all(more <= 0.7 * fewer for fewer, more in itertools.pairwise(errors)), errors


def test_e09_performer_repeats(random_qkv: Draw) -> None:
    """E09: twice the same bits, in training too; also by a module that was built from another seed."""
    module = Performer(2, 8, seed=3, layer=2, redraw_every=2)
    qkv = tuple(x.detach() for x in random_qkv(20, 20, width=8))
    out = module(*qkv, Mask(causal=True))
    assert torch.equal(module(*qkv, Mask(causal=True)), out)
    assert torch.equal(module.eval()(*qkv, Mask(causal=True)), out)
    other = Performer(2, 8, seed=9)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(*qkv, Mask(causal=True)), out)


def test_e09_features_are_redrawn_after_steps_of_training_alone() -> None:
    """E09: after every second step and in training; never by a call, in evaluation, or by default."""
    module = Performer(2, 8, redraw_every=2)
    drawn = [module.projection.clone()]
    x = torch.randn(1, 2, 5, 8)
    for step in range(1, 7):
        module(x, x, x)
        assert torch.equal(module.projection, drawn[-1])
        module.after_step(step)
        assert torch.equal(module.projection, drawn[-1]) == (step % 2 == 1)
        if step % 2 == 0:
            drawn.append(module.projection.clone())
    assert len({w.sum().item() for w in drawn}) == 4
    module.eval().after_step(8)
    assert torch.equal(module.projection, drawn[-1])
    forever = Performer(2, 8)
    first = forever.projection.clone()
    for step in range(1, 5):
        forever.after_step(step)
    assert torch.equal(forever.projection, first)


def test_e09_a_resumed_run_draws_the_same_features() -> None:
    """E09: seed, layer and step say all; the global generator is neither read nor moved."""
    whole = Performer(2, 8, redraw_every=2, seed=5, layer=3)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    resumed = Performer(2, 8, redraw_every=2, seed=5, layer=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(whole.projection, resumed.projection)
    for step in range(1, 5):
        whole.after_step(step)
    state = whole.state_dict()
    assert list(state) == ["projection"]
    resumed.load_state_dict(state)
    for step in (5, 6):
        whole.after_step(step)
        resumed.after_step(step)
    assert torch.equal(whole.projection, resumed.projection)
    assert not torch.equal(whole.projection, Performer(2, 8, seed=5, layer=3).projection)
    others = [Performer(2, 8, seed=5, layer=layer).projection for layer in (None, 1, 2)]
    others += [Performer(2, 8, seed=seed, layer=3).projection for seed in (5, 6, -1)]
    assert len({w.sum().item() for w in others}) == len(others)
