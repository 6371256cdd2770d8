"""The causal flag alone, dropout, and one answer in every mode."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnzoo import Mask, Mechanism

Make = Callable[..., Mechanism]
Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.traits("causal", "bidirectional", "key_keep")
def test_e06_the_causal_flag_alone(make: Make, random_qkv: Draw) -> None:
    """E06: nothing but the flag; the probe holds for each token, and an all-visible mask adds nothing."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(12, 12))
    out = attn(q, k, v, Mask(causal=True))
    for place in range(12):
        moved = [x.clone() for x in (q, k, v)]
        for x in moved:
            x[:, :, place] += 1
        assert torch.equal(attn(*moved, Mask(causal=True))[:, :, :place], out[:, :, :place])
    assert not torch.allclose(attn(q, k, v, Mask()), out, atol=1e-3)
    all_visible = Mask(causal=True, key_keep=torch.ones(2, 12, dtype=torch.bool))
    if attn.traits.pair_keep:
        all_visible = all_visible._replace(pair_keep=torch.ones(12, 12, dtype=torch.bool))
    torch.testing.assert_close(attn(q, k, v, all_visible), out, atol=1e-6, rtol=0)


@pytest.mark.traits("causal", "key_keep")
@pytest.mark.parametrize("dropout", [0.5, 0.9])
def test_e10_and_a9_no_dropout_in_evaluation(make: Make, dropout: float, random_qkv: Draw) -> None:
    """E10, A9: twice the same bits, those of the module built without dropout; in training it acts."""
    torch.manual_seed(3)
    plain = make(2, 4)
    dropped = make(2, 4, dropout=dropout)
    dropped.load_state_dict(plain.state_dict())
    q, k, v = (x.detach() for x in random_qkv(8, 8))
    for mask in (Mask(causal=True), Mask(causal=True, key_keep=torch.rand(2, 8) < 0.8)):
        once = dropped(q, k, v, mask)
        assert torch.equal(once, dropped(q, k, v, mask))
        assert torch.equal(once, plain(q, k, v, mask))
    dropped.train()
    assert not torch.equal(dropped(q, k, v, Mask(causal=True)), dropped(q, k, v, Mask(causal=True)))


@pytest.mark.traits("bidirectional")
def test_dropout_keeps_the_mean(make: Make, random_qkv: Draw) -> None:
    """Weights that stay are scaled up: over many draws the mean is the output without dropout."""
    attn = make(1, 4, dropout=0.5)
    q, k, v = (x.detach() for x in random_qkv(6, 6, batch=1, heads=1, groups=1))
    expected = attn(q, k, v)
    many = [x.expand(4000, -1, -1, -1) for x in (q, k, v)]
    attn.train()
    torch.testing.assert_close(attn(*many).mean(0, keepdim=True), expected, atol=0.1, rtol=0)


@pytest.mark.traits("causal", "key_keep")
def test_a3_train_eval_and_no_grad(make: Make, random_qkv: Draw) -> None:
    """A3: one answer in every mode, rows without a key included."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    mask = Mask(causal=True, key_keep=torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool())
    expected = attn(q, k, v, mask)
    assert (expected[0, :, :2] == 0).all()
    with torch.no_grad():  # terms that learn may ask for another kernel than terms that do not
        torch.testing.assert_close(attn(q, k, v, mask), expected, atol=1e-6, rtol=0)
    assert torch.equal(attn.train()(q, k, v, mask), expected)
    with_grad = [x.clone().requires_grad_() for x in (q, k, v)]
    close(attn(*with_grad, mask), expected)


@pytest.mark.slow
@pytest.mark.traits("causal", "key_keep")
def test_a3_compiled(make: Make, random_qkv: Draw) -> None:
    """A3: the compiled module gives it, too."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    mask = Mask(causal=True, key_keep=torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool())
    torch._dynamo.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    close(compiled(q, k, v, mask), attn(q, k, v, mask))


@pytest.mark.traits("causal")
def test_half_precision_inside_autocast(make: Make, random_qkv: Draw) -> None:
    """Autocast may hand float32 terms to bfloat16 scores; the call stands, and stays near float32."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    bias = torch.randn(2, 2, 6, 6) if attn.traits.bias else None
    expected = attn(q, k, v, Mask(causal=True), bias)
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(q.bfloat16(), k.bfloat16(), v.bfloat16(), Mask(causal=True), bias)
    torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.traits("bidirectional", "bias")
def test_a_float32_bias_in_half_precision(make: Make, random_qkv: Draw) -> None:
    """Learned terms are often kept in float32 where the rest is bfloat16."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(5, 5))
    bias = torch.randn(2, 2, 5, 5)
    expected = attn(q, k, v, None, bias)
    out = attn.bfloat16()(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, bias)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=5e-2, rtol=5e-2)
