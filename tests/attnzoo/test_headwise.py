"""What the shell does to each head by itself: qk-norm, gate, head norm; alone, by steps and with positions."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnzoo import Local, Mask, Mechanism, MultiheadAttention, Softmax, record
from attnzoo.bias import Bias
from attnzoo.headwise import Gate, HeadNorm, QKNorm
from attnzoo.positions import Alibi, Rotary, Shaw
from attnzoo.traits import Traits

FORMS = ["rms", "layer", "l2"]
EVERYTHING = [
    {"qk_norm": form, "gate": gate, "head_norm": norm}
    for form, gate, norm in [("rms", "elementwise", True), ("l2", "head", None), ("layer", None, True)]
]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def drawn(attn: MultiheadAttention) -> MultiheadAttention:
    """With gains that are not one and biases that are not zero."""
    with torch.no_grad():
        for name, parameter in attn.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0)
    return attn


def heads_of(x: Tensor, projection: nn.Linear | None, heads: int) -> Tensor:
    assert projection is not None
    return projection(x).unflatten(-1, (heads, -1)).transpose(1, 2)


class Halves(Softmax):
    """Two maps from two parts of q and k, one minus half of the other: the form of differential attention."""

    qk_parts = 2
    norm_gain = 0.25

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, -1), keys.chunk(2, -1)
        return super().attend(q1, k1, v, mask, bias) - super().attend(q2, k2, v, mask, bias) / 2


class Shared(Softmax):
    """Keys are the queries, each of length one, as in the Reformer."""

    traits = Traits(shared_qk=True, cross=False)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return super().attend(q, nn.functional.normalize(keys, dim=-1), v, mask, bias)


# --- qk-norm ----------------------------------------------------------------------------------------------------------


def plain_norm(x: Tensor, form: str, gain: Tensor | None) -> Tensor:
    """Each vector by itself, in float64."""
    x = x.detach().double()
    out = torch.empty_like(x)
    for index in itertools.product(*map(range, x.shape[:-1])):
        row = x[index]
        if form == "l2":
            out[index] = row / sum(value**2 for value in row) ** 0.5
            continue
        row = row - sum(row) / len(row) if form == "layer" else row
        assert gain is not None
        out[index] = row / (sum(value**2 for value in row) / len(row) + 1e-6) ** 0.5 * gain.double()
    return out


@pytest.mark.parametrize("form", FORMS)
def test_qk_norm_is_the_plain_formula(form: str) -> None:
    """Per head, before the rotary position; under l2 the scores are ten times the cosine, whatever the width."""
    torch.manual_seed(0)
    attn = drawn(MultiheadAttention(24, 3, num_kv_heads=1, position=Rotary(8), qk_norm=form))  # type: ignore[arg-type]
    x = torch.randn(2, 5, 24)
    assert attn.q_norm is not None
    assert attn.k_norm is not None
    q = plain_norm(heads_of(x, attn.q_proj, 3), form, attn.q_norm.weight)
    k = plain_norm(heads_of(x, attn.k_proj, 1), form, attn.k_norm.weight)
    places = torch.arange(5)
    q, k = Rotary(8)(q, places), Rotary(8)(k, places)
    scores = q @ k.mT * (10.0 if form == "l2" else 8**-0.5)
    expected = scores.softmax(-1) @ heads_of(x, attn.v_proj, 1).double()
    close(attn.attend(x).double(), expected)
    names = [name for name, _ in attn.named_parameters() if "norm" in name]
    assert names == ([] if form == "l2" else ["q_norm.weight", "k_norm.weight"])


@pytest.mark.parametrize("form", FORMS)
def test_qk_norm_bounds_the_scores(form: str) -> None:
    """Inputs a thousand times as large give the same weights."""
    attn = MultiheadAttention(16, 2, qk_norm=form).eval()  # type: ignore[arg-type]
    x = torch.randn(1, 6, 16)
    maps = []
    for scale in (1.0, 1000.0):
        with record(attn) as sites:
            attn(x * scale)
        maps.append(sites["attention"][0].map())
    torch.testing.assert_close(maps[1], maps[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a_query_of_zero_has_finite_gradients(form: str) -> None:
    """Padding comes in as zeros, whose length has no gradient; under l2, without eps, nothing explodes there."""
    attn = MultiheadAttention(8, 2, qk_norm=form)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 8).masked_fill(torch.tensor([0, 1, 0, 0]).bool()[:, None], 0).requires_grad_()
    keep = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    attn(x, mask=Mask(key_keep=keep)).sum().backward()
    grads = [x.grad, *(p.grad for p in attn.parameters())]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    if form == "l2":
        assert max(grad.abs().max() for grad in grads if grad is not None) < 1e3


def test_qk_norm_of_parts_is_that_of_heads() -> None:
    """A part is normalised by itself, so a part far longer than the other changes nothing."""
    for form in FORMS:
        attn = MultiheadAttention(16, 2, Halves, qk_norm=form, head_norm=False)  # type: ignore[arg-type]
        x = torch.randn(1, 4, 16)
        before = attn.attend(x)
        with torch.no_grad():
            attn.q_proj.weight.view(2, 2, 4, 16)[:, 0] *= 100
        torch.testing.assert_close(attn.attend(x), before, atol=1e-3, rtol=1e-3)
        q = QKNorm(4, form)(torch.randn(1, 2, 4, 8))  # type: ignore[arg-type]
        half = QKNorm(4, form)(q[..., :4])  # type: ignore[arg-type]
        torch.testing.assert_close(q[..., :4], half, atol=1e-4, rtol=1e-4)


def test_l2_scores_of_parts_are_ten_cosines() -> None:
    """The scale that a part brings is undone by its own width."""
    attn = MultiheadAttention(16, 2, Halves, qk_norm="l2", head_norm=False)
    x = torch.randn(1, 5, 16)
    parts = [plain_norm(heads_of(x, p, 2).unflatten(-1, (2, 4)), "l2", None) for p in (attn.q_proj, attn.k_proj)]
    scores = torch.einsum("bhtpd,bhspd->bhpts", *parts) * 10
    maps = scores.softmax(-1)
    expected = (maps[:, :, 0] - maps[:, :, 1] / 2) @ heads_of(x, attn.v_proj, 2).double()
    close(attn.attend(x).double(), expected)


@pytest.mark.parametrize("form", FORMS)
def test_shared_keys_are_the_normalised_queries(form: str) -> None:
    """One norm for both; under l2 the scores are ten cosines here too."""
    attn = drawn(MultiheadAttention(8, 2, Shared, qk_norm=form)).eval()  # type: ignore[arg-type]
    assert attn.k_norm is None
    with record(attn) as sites:
        attn(x := torch.randn(1, 5, 8))
    call = sites["attention"][0]
    assert torch.equal(call.q, call.k)
    if form == "l2":
        unit = nn.functional.normalize(heads_of(x, attn.q_proj, 2), dim=-1)
        close(call.map(), (10 * unit @ unit.mT).softmax(-1))


def test_a_scale_below_ten_cosines_is_refused() -> None:
    """Two scales on top of each other are one too many."""
    with pytest.raises(ValueError, match=r"qk_norm='l2' fixes the scale at 10.0, Softmax has one of its own"):
        MultiheadAttention(8, 2, functools.partial(Softmax, scale=1.0), qk_norm="l2")
    MultiheadAttention(8, 2, functools.partial(Softmax, scale=1.0), qk_norm="rms")


# --- gate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["elementwise", "head"])
def test_the_gate_is_the_plain_formula(form: str) -> None:
    """out_h * sigmoid(W_g x) at the query; values of another width; the context has no say."""
    attn = MultiheadAttention(12, 3, value_dim=5, context_dim=7, gate=form)  # type: ignore[arg-type]
    bare = MultiheadAttention(12, 3, value_dim=5, context_dim=7)
    bare.load_state_dict({name: value for name, value in attn.state_dict().items() if "gate" not in name})
    x, context = torch.randn(2, 4, 12), torch.randn(2, 6, 7)
    assert attn.gate is not None
    width = 5 if form == "elementwise" else 1
    assert attn.gate.proj.weight.shape == (3 * width, 12)
    heads = bare.attend(x, context)
    gates = torch.sigmoid(x @ attn.gate.proj.weight.T)
    expected = torch.stack([heads[:, h] * gates[..., h * width : (h + 1) * width] for h in range(3)], 1)
    close(attn.attend(x, context), expected)
    memory = attn.memory(context)
    close(attn.step(x, memory, on_memory=True)[0], attn(x, context))


def test_a_gate_leaves_the_output_linear_in_v() -> None:
    """Twice the values are twice the heads; the map of the mechanism is what it was."""
    attn = MultiheadAttention(8, 2, gate="elementwise").eval()
    x = torch.randn(1, 5, 8)
    with record(attn) as sites:
        heads = attn.attend(x)
    call = sites["attention"][0]
    assert attn.gate is not None
    close(call.map() @ call.v * attn.gate(x), heads)
    with torch.no_grad():
        attn.v_proj.weight.mul_(2)
    close(attn.attend(x), 2 * heads)


# --- head norm --------------------------------------------------------------------------------------------------------


def test_head_norm_is_the_plain_formula() -> None:
    """Over Dv of each head by itself, eps 1e-5, a learned weight, and the gain that the mechanism asks for."""
    attn = drawn(MultiheadAttention(16, 2, Halves))
    bare = MultiheadAttention(16, 2, Halves, head_norm=False)
    bare.load_state_dict({name: value for name, value in attn.state_dict().items() if "head_norm" not in name})
    x = torch.randn(2, 4, 16)
    heads = bare.attend(x)
    assert attn.head_norm is not None
    assert bare.head_norm is None
    size = (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(attn.attend(x), heads / size * attn.head_norm.weight * 0.25)
    assert MultiheadAttention(8, 2).head_norm is None
    unasked = MultiheadAttention(16, 2, head_norm=True)
    torch.testing.assert_close(unasked.attend(100 * x).square().mean(-1), torch.ones(2, 2, 4), atol=1e-4, rtol=0)


def test_a_row_without_keys_is_zero_behind_the_norm_too() -> None:
    """And its gradients are finite; after the output projection it is the bias."""
    attn = drawn(MultiheadAttention(16, 2, Halves, gate="elementwise", qk_norm="rms"))
    x = torch.randn(2, 3, 16, requires_grad=True)
    mask = Mask(causal=True, key_keep=torch.tensor([[0, 1, 1], [0, 0, 0]]).bool())
    heads = attn.attend(x, mask=mask)
    assert (heads[0, :, 0] == 0).all()
    assert (heads[1] == 0).all()
    assert (heads[0, :, 1:] != 0).any()
    assert torch.equal(attn.merge(heads)[1], attn.out_proj.bias.expand(3, 16))
    heads.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attn.parameters() if p is not attn.out_proj.bias
               and p is not attn.out_proj.weight)  # fmt: skip


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
@pytest.mark.parametrize("position", [None, Rotary(4), Alibi(2), Shaw(4)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("between", [Softmax, functools.partial(Local, window=3)], ids=["Softmax", "Local"])
def test_b1_options_by_steps(options: dict, position: nn.Module, between: Callable[..., Mechanism]) -> None:
    """B1: any chunking equals one pass, left-padded with NaN too."""
    attn = MultiheadAttention(8, 2, between, num_kv_heads=1, position=position, causal=True, **options)  # type: ignore[arg-type]
    attn = drawn(attn).eval()
    x = torch.randn(2, 7, 8)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, :2] = False
    x = x.masked_fill(~keep[..., None], torch.nan)
    expected = attn(x, mask=Mask(key_keep=keep))
    for chunks in ([1] * 7, [3, 4]):
        state, parts, start = attn.init_state(2, 7), [], 0
        for part in x.split(chunks, dim=1):
            new = keep[:, start : start + part.shape[1]]
            out, state = attn.step(part, state, mask=Mask(key_keep=new))
            parts.append(out)
            start += part.shape[1]
        close(torch.cat(parts, 1)[keep], expected[keep])
    close(expected[1:, 2:], attn(x[1:, 2:]))


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_options_with_every_mechanism(kind: type[Mechanism], options: dict) -> None:
    """Each catalogue name takes them without further options, and every parameter learns."""
    attn = MultiheadAttention(8, 2, kind, max_len=16, grid=(2, 3), layer=1, **options)
    mask = Mask(causal=not kind.traits.bidirectional)
    attn(torch.randn(2, 6, 8), mask=mask).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("options", EVERYTHING, ids=str)
def test_a15_options_in_one_graph_and_in_every_precision(options: dict) -> None:
    """A15, M07: one compiled graph; half precision near float64, under autocast too."""
    torch._dynamo.reset()
    attn = drawn(MultiheadAttention(16, 2, Halves, position=Rotary(8), **options)).eval()
    x = torch.randn(2, 7, 16)
    mask = Mask(causal=True, key_keep=torch.tensor([[1] * 7, [0, 0, 1, 1, 0, 1, 1]]).bool())
    whole = attn(x, mask=mask)
    close(torch.compile(attn, backend="eager", fullgraph=True)(x, mask=mask), whole)
    with torch.autocast("cpu", torch.bfloat16):
        low = attn(x, mask=mask)
    assert low.dtype == torch.bfloat16
    assert (low.double() - whole).abs().max() < 0.1 * whole.abs().max()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        low = attn.to(dtype)(x.to(dtype), mask=mask)
        assert low.dtype == dtype
        assert (low.double() - whole).abs().max() < 0.1 * whole.abs().max()


def test_sums_of_half_precision_are_made_in_float32() -> None:
    """A float16 square of 300 is infinite, and eps of 1e-6 would be nothing."""
    x = torch.full((1, 1, 1, 8), 300.0, dtype=torch.float16)
    for norm in (QKNorm(8, "rms"), QKNorm(8, "l2", 8**0.5), HeadNorm(8)):
        torch.testing.assert_close(norm.half()(x), torch.ones_like(x))
    assert (QKNorm(8, "l2").half()(torch.zeros_like(x)) == 0).all()


def test_unknown_options_are_named() -> None:
    """What came and what is allowed."""
    with pytest.raises(ValueError, match="qk_norm must be one of rms, layer, l2 or None, got 'batch'"):
        MultiheadAttention(8, 2, qk_norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gate must be one of elementwise, head or None, got 'on'"):
        MultiheadAttention(8, 2, gate="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Halves has 2 parts, which do not divide head_dim=5"):
        MultiheadAttention(10, 2, Halves, qk_norm="rms")


def test_weights_begin_anew() -> None:
    """reset_parameters reaches gains and gates."""
    attn = drawn(MultiheadAttention(8, 2, Halves, qk_norm="layer", gate="head"))
    attn.reset_parameters()
    assert attn.q_norm is not None
    assert attn.head_norm is not None
    assert (torch.cat([attn.q_norm.weight, attn.head_norm.weight]) == 1).all()  # type: ignore[list-item]
    gates = Gate(64, 2, 4, "elementwise")(torch.randn(1, 100, 64))
    assert 0.3 < gates.mean() < 0.7
