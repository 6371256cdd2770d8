"""Multi-head latent attention: the formula, and steps that never make the keys of the heads."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnzoo import Additive, Local, Mask, Mechanism, OffsetBias, Softmax, record, reorder
from attnzoo.latent import MultiheadLatentAttention
from attnzoo.positions import Alibi, Rotary
from attnzoo.traits import Traits

SIZES = {"kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}


def made(mechanism: Callable[..., Mechanism] = Softmax, **options: object) -> MultiheadLatentAttention:
    """Three heads unless told otherwise, with weights of the norms that are not one."""
    given = {"num_heads": 3, **SIZES, **options}
    attn = MultiheadLatentAttention(16, mechanism=mechanism, **given).eval()  # type: ignore[arg-type]
    for module in attn.modules():
        if isinstance(module, nn.RMSNorm):
            nn.init.normal_(module.weight, 1.0)
    return attn


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def steps(attn: MultiheadLatentAttention, x: Tensor, chunks: list[int], keep: Tensor | None = None) -> Tensor:
    state, parts, start = attn.init_state(x.shape[0], x.shape[1]), [], 0
    for part in x.split(chunks, dim=1):
        new = None if keep is None else keep[:, start : start + part.shape[1]]
        out, state = attn.step(part, state, mask=Mask(key_keep=new))
        parts.append(out)
        start += part.shape[1]
    return torch.cat(parts, 1)


def rms(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()


@pytest.mark.parametrize("q_rank", [None, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_head_by_head(q_rank: int | None, causal: bool) -> None:
    """c = norm(W_dkv x), keys from c and one rope key, queries from x or from a latent of their own."""
    torch.manual_seed(0)
    attn = made(q_rank=q_rank)
    x = torch.randn(2, 5, 16)
    wide, places = x.double(), torch.arange(5)
    weight = {name: value.double() for name, value in attn.named_parameters()}
    latent = rms(wide @ weight["kv_down.weight"].T, attn.kv_norm)
    rope_key = Rotary(4)((wide @ weight["rope_proj.weight"].T)[:, None], places)[:, 0]
    if q_rank is None:
        queries = wide @ weight["q_proj.weight"].T
    else:
        own = rms(wide @ weight["q_proj.0.weight"].T, attn.q_proj[1])  # type: ignore[index, arg-type]
        queries = own @ weight["q_proj.2.weight"].T
    seen = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.ones(5, 5, dtype=torch.bool)
    heads = []
    for h in range(3):
        q = queries[..., h * 10 : (h + 1) * 10]
        nope, rope = q[..., :6], Rotary(4)(q[..., 6:][:, None], places)[:, 0]
        k = latent @ weight["k_up.weight"][h * 6 : (h + 1) * 6].T
        v = latent @ weight["v_up.weight"][h * 5 : (h + 1) * 5].T
        scores = (nope @ k.mT + rope @ rope_key.mT) / (6 + 4) ** 0.5
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v)
    expected = torch.stack(heads, 1)
    out = attn.attend(x, mask=Mask(causal=causal))
    close(out.double(), expected)
    y = attn(x, mask=Mask(causal=causal))
    assert torch.equal(y, attn.merge(out))
    close(y.double(), expected.transpose(1, 2).flatten(2) @ weight["out_proj.weight"].T)


@pytest.mark.parametrize("q_rank", [None, 7])
@pytest.mark.parametrize("mechanism", [Softmax, functools.partial(Local, window=4)], ids=["Softmax", "Local"])
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 1, 3], [9]], ids=str)
def test_absorbed_equals_expanded(mechanism: Callable[..., Mechanism], q_rank: int | None, chunks: list[int]) -> None:
    """B1: any chunking on latents equals one pass over the keys of the heads."""
    torch.manual_seed(0)
    attn = made(mechanism, q_rank=q_rank, causal=True)
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        x *= 3  # scores far from equal
    close(steps(attn, x, chunks), attn(x))


@pytest.mark.parametrize("options", [{"kv_rank": 3}, {"kv_rank": 40}, {"nope_dim": 1, "rope_dim": 2}, {"value_dim": 1}])
def test_absorbed_equals_expanded_at_other_widths(options: dict[str, int]) -> None:
    """The latent may be narrower or wider than the heads."""
    attn = made(causal=True, **options)
    x = 3 * torch.randn(2, 6, 16)
    close(steps(attn, x, [1, 2, 3]), attn(x))


def test_a_state_keeps_a_latent_and_one_rope_key_for_each_token() -> None:
    """kv_rank + rope_dim numbers for each token; the rope key is the same for every head."""
    attn = made(causal=True)
    state = attn.init_state(2, 7)
    numbers = sum(part.numel() for part in state if isinstance(part, Tensor))
    assert numbers == 2 * 7 * (10 + 4) + 2  # and how many tokens each row has
    x = torch.randn(2, 3, 16)
    _, state = attn.step(x, state)
    close(state.v[:, 0, :3], attn.kv_norm(attn.kv_down(x)))
    close(state.k[:, :, :3], Rotary(4)(attn.rope_proj(x)[:, None], torch.arange(3)))
    assert (state.used, state.fixed, state.length.tolist()) == (3, False, [3, 3])
    with record(attn) as sites:
        attn(x)
    k = sites["attention"][0].k
    assert torch.equal(k[..., 6:], state.k[:, :, :3].expand(-1, 3, -1, -1))
    assert not torch.allclose(k[:, 0, :, :6], k[:, 1, :, :6])
    with pytest.raises(ValueError, match="holds 3 of max_len=7 tokens and 5 more came"):
        attn.step(torch.randn(2, 5, 16), state)


def test_k3_the_scale_is_that_of_both_parts() -> None:
    """K3: scores are divided by the root of nope_dim + rope_dim, in a pass and in a step alike."""
    attn = made(causal=True)
    with torch.no_grad():
        attn.k_up.weight.zero_()
        attn.rope_proj.weight.zero_()
        attn.rope_proj.weight[0, 0] = 1.0
        attn.q_proj.weight.zero_()
        attn.q_proj.weight.view(3, 10, 16)[:, 6, 0] = 1.0
    x = torch.zeros(1, 2, 16)
    x[:, :, 0] = 4.0  # both tokens: q = k = 4 on the first rope channel, turned by one place between them
    angle = torch.tensor(1.0)
    expected = torch.stack([16 * angle.cos(), torch.tensor(16.0)]) / (6 + 4) ** 0.5
    with record(attn) as sites:
        attn(x)
        _, state = attn.step(x[:, :1], attn.init_state(1, 2))
        attn.step(x[:, 1:], state)
    close(sites["attention"][0].map()[0, :, 1], expected.softmax(0).expand(3, 2))
    close(sites["absorbed"][1].map()[0, :, 0], expected.softmax(0).expand(3, 2))


def test_b3_left_padded_decoding_equals_unpadded() -> None:
    """B3: rows padded with NaN on the left; places count real tokens."""
    attn = made(causal=True)
    x = torch.randn(3, 8, 16)
    keep = torch.ones(3, 8, dtype=torch.bool)
    keep[1, :3] = False
    keep[2, :5] = False
    padded = x.masked_fill(~keep[..., None], torch.nan)
    whole = attn(padded, mask=Mask(key_keep=keep))
    for chunks in ([1] * 8, [4, 4], [7, 1]):
        close(steps(attn, padded, chunks, keep)[keep], whole[keep])
    close(whole[1:2, 3:], attn(x[1:2, 3:]))
    close(whole[2:, 5:], attn(x[2:, 5:]))
    gradient = padded.requires_grad_()
    attn(gradient, mask=Mask(key_keep=keep))[keep].sum().backward()
    assert gradient.grad is not None
    assert gradient.grad.isfinite().all()
    assert (gradient.grad[~keep] == 0).all()


def test_rows_of_a_state_are_reordered() -> None:
    """Beams: rows picked and repeated go on as if each had been decoded alone."""
    attn = made(causal=True)
    x, more = torch.randn(3, 4, 16), torch.randn(4, 2, 16)
    rows = torch.tensor([2, 0, 2, 1])
    _, state = attn.step(x, attn.init_state(3, 6))
    out, state = attn.step(more, reorder(state, rows))
    close(out, attn(torch.cat([x[rows], more], 1))[:, 4:])
    assert state.length.tolist() == [6] * 4


def test_masks_of_pairs_and_a_bias_act_in_both_forms() -> None:
    """In a step pair_keep and bias cover all tokens so far; packed texts and places by hand in a pass."""
    torch.manual_seed(0)
    attn = made(causal=True)
    x, pairs, bias = torch.randn(2, 6, 16), torch.rand(6, 6) < 0.7, torch.randn(2, 3, 6, 6)
    expected = attn(x, mask=Mask(pair_keep=pairs), bias=bias)
    state, parts = attn.init_state(2, 6), []
    for start, end in [(0, 2), (2, 3), (3, 6)]:
        rows = slice(start, end)
        mask = Mask(pair_keep=pairs[rows, :end])
        out, state = attn.step(x[:, rows], state, mask=mask, bias=bias[:, :, rows, :end])
        parts.append(out)
    close(torch.cat(parts, 1), expected)
    by_offset = Alibi(3)(6, 6)
    close(attn(x, bias=by_offset), attn(x, bias=by_offset.dense(6)))
    last, _ = attn.step(
        x[:, 5:], attn.step(x[:, :5], attn.init_state(2, 6), bias=Alibi(3)(5, 5))[1], bias=Alibi(3)(1, 6)
    )
    close(last, attn(x, bias=by_offset)[:, 5:])
    packed = attn(x, mask=Mask(segments=torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)))
    close(packed, torch.cat([attn(x[:, :2]), attn(x[:, 2:])], 1))
    close(attn(x, positions=torch.arange(6) + 9), attn(x))
    assert not torch.allclose(attn(x, positions=torch.arange(6) * 2), attn(x), atol=1e-4)
    with pytest.raises(ValueError, match="OffsetBias must be"):
        attn(x, bias=OffsetBias(torch.randn(3, 5)))


@pytest.mark.parametrize("num_heads", [1, 3])
def test_steps_can_be_trained_through(num_heads: int) -> None:
    """Gradients of a pass, though the buffers of a state are written in place."""
    attn = made(num_heads=num_heads, causal=True)
    x = torch.randn(1, 5, 16, requires_grad=True)
    both = []
    for y in (attn(x), steps(attn, x, [2, 1, 2])):
        both.append(torch.autograd.grad(y.square().sum(), [x, *attn.parameters()]))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_m07_every_precision(dtype: torch.dtype) -> None:
    """M07: pass and steps, in the kind of the model."""
    attn = made(causal=True)
    x = torch.randn(2, 5, 16)
    exact = attn.double()(x.double())
    low = attn.to(dtype)
    for out in (low(x.to(dtype)), steps(low, x.to(dtype), [1, 4])):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, atol=3e-2, rtol=3e-2)


def test_a15_one_graph() -> None:
    """A15: a pass and a step compile as a whole."""
    torch._dynamo.reset()
    attn = made(causal=True, q_rank=6)
    x = torch.randn(2, 5, 16)
    mask = Mask(key_keep=torch.rand(2, 5) < 0.7)
    close(torch.compile(attn, backend="eager", fullgraph=True)(x, mask=mask), attn(x, mask=mask))
    step = torch.compile(attn.step, backend="eager", fullgraph=True)
    with torch.no_grad():
        _, state = attn.step(x[:, :3], attn.init_state(2, 5))
        close(step(x[:, 3:], state)[0], attn(x)[:, 3:])


def test_defaults_are_those_of_the_paper() -> None:
    """d_c = 4 d_h and d_r = d_h / 2."""
    attn = MultiheadLatentAttention(64, 4)
    assert (attn.nope_dim, attn.rope_dim, attn.kv_rank, attn.value_dim) == (16, 8, 64, 16)
    assert attn.mechanism.head_dim == 24
    assert attn(torch.randn(1, 3, 64)).shape == (1, 3, 64)
    for rows, tokens in itertools.product((0, 2), (0, 1)):
        assert attn(torch.randn(rows, tokens, 64)).shape == (rows, tokens, 64)


class _Hashed(Softmax):
    traits = Traits(exact=False)


class _Shared(Softmax):
    traits = Traits(shared_qk=True)


class _Halves(Softmax):
    qk_parts = 2


def test_what_cannot_run_on_latents_is_refused() -> None:
    """At construction where keys are made otherwise, at init_state where only steps are impossible."""
    with pytest.raises(ValueError, match="_Shared makes its keys from the queries"):
        made(_Shared)
    with pytest.raises(ValueError, match="_Halves has 2 equal parts in q and k"):
        made(_Halves)
    with pytest.raises(ValueError, match="leave out the scale of Softmax"):
        made(functools.partial(Softmax, scale=1.0))
    for kind, reason in ((Additive, "Additive has parameters"), (_Hashed, "_Hashed is no softmax of q . k")):
        attn = made(kind)
        assert attn(torch.randn(1, 4, 16)).shape == (1, 4, 16)
        with pytest.raises(ValueError, match=f"cannot decode: {reason}"):
            attn.init_state(1, 4)
        with pytest.raises(ValueError, match=f"cannot decode: {reason}"):
            attn.step(torch.randn(1, 1, 16), made().init_state(1, 4))
    with pytest.raises(ValueError, match="causal=False"):
        made(causal=False).init_state(1, 4)
    with pytest.raises(ValueError, match="causal=False"):
        made(causal=False)(torch.randn(1, 4, 16), mask=Mask(causal=True))
    state, packed = made().init_state(1, 4), Mask(segments=torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"takes no mask\.segments"):
        made().step(torch.randn(1, 1, 16), state, mask=packed)


def test_sizes_that_do_not_fit() -> None:
    """The message names the numbers that came."""
    with pytest.raises(ValueError, match="must be even; got 3"):
        made(rope_dim=3)
    with pytest.raises(ValueError, match="kv_rank must be at least 1, got 0"):
        made(kv_rank=0)
    with pytest.raises(ValueError, match="q_rank must be at least 1, got -1"):
        made(q_rank=-1)
    with pytest.raises(ValueError, match=r"dim=10.*num_heads=4; give nope_dim"):
        MultiheadLatentAttention(10, 4)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        MultiheadLatentAttention(8, 0)
    with pytest.raises(ValueError, match=r"x must be \[B, length, 16\], got \(2, 5, 8\)"):
        made()(torch.randn(2, 5, 8))
    with pytest.raises(ValueError, match=r"positions must be \(5,\)"):
        made()(torch.randn(2, 5, 16), positions=torch.arange(4))
