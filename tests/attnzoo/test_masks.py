"""What a mask means: cases M01-M08 and A1, A4-A6, A8, G4 of the reference, on every mechanism."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import EncoderBlock, Mask, Mechanism, MultiheadAttention, attention_map
from attnzoo.laws import SITE

Make = Callable[..., Mechanism]
Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


def column(*values: float, requires_grad: bool = False) -> Tensor:
    """One sample, one head, width one: [1, 1, T, 1]."""
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1).requires_grad_(requires_grad)


def keep(*flags: int) -> Tensor:
    """One row of key_keep."""
    return torch.tensor([flags], dtype=torch.bool)


def identity_shell(mechanism: type[Mechanism]) -> MultiheadAttention:
    """Width 1, one head: q = k = 0, v and output as they come in."""
    attn = MultiheadAttention(1, 1, mechanism, bias=False, **SITE)
    with torch.no_grad():
        attn.q_proj.weight.zero_()
        assert attn.k_proj is not None
        attn.k_proj.weight.zero_()
        attn.v_proj.weight.fill_(1)
        attn.out_proj.weight.fill_(1)
    return attn


@pytest.mark.traits("causal", "key_keep", "linear_in_v", "normalised", shared_qk=False)
def test_m01_two_masks_that_leave_one_query_empty(make: Make) -> None:
    """M01."""
    attn = make(1, 1)
    q, k, v = column(0, 0, 0, requires_grad=True), column(0, 0, 0, requires_grad=True), column(1, 2, 4)
    v.requires_grad_()
    mask = Mask(causal=True, key_keep=keep(0, 1, 1))
    out = attn(q, k, v, mask)
    assert out.flatten().tolist() == [0, 2, 3]
    weights = attention_map(attn, q, k, mask)[0, 0]
    assert weights.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0.5, 0.5]]
    out.sum().backward()
    assert v.grad is not None
    assert v.grad.flatten().tolist() == [0, 1.5, 0.5]
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, *attn.parameters()))


@pytest.mark.traits("causal", "key_keep", "normalised", shared_qk=False)
def test_m01_in_the_shell(kind: type[Mechanism]) -> None:
    """M01, with identity projections around the mechanism."""
    attn = identity_shell(kind)
    x = torch.tensor([[[1.0], [2.0], [4.0]]], requires_grad=True)
    y = attn(x, mask=Mask(causal=True, key_keep=keep(0, 1, 1)))
    assert y.flatten().tolist() == [0, 2, 3]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [0, 1.5, 0.5]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.traits("bidirectional", "key_keep")
def test_m02_a_sample_of_padding_alone(kind: type[Mechanism]) -> None:
    """M02: lengths [4, 0]; the loss over real places and every gradient are those of sample 1 alone."""
    block = EncoderBlock(8, 2, kind, **SITE)
    x, target = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    mask = Mask.from_lengths(torch.tensor([4, 0]), max_len=4)
    assert mask.key_keep is not None
    heads = block.attention.attend(x, mask=mask)
    assert (heads[1] == 0).all()
    with torch.no_grad():
        block.attention.out_proj.bias.uniform_()
    merged = block.attention(x, mask=mask)[1]
    assert torch.equal(merged, block.attention.out_proj.bias.expand(4, 8))

    def grads(x: Tensor, target: Tensor, mask: Mask) -> tuple[float, list[Tensor]]:
        block.zero_grad()
        y, _ = block(x, mask=mask)
        real = torch.ones(len(x), 4, dtype=torch.bool) if mask.key_keep is None else mask.key_keep
        loss = ((y - target).square() * real[..., None]).sum() / real.sum()
        loss.backward()
        return loss.item(), [p.grad.clone() for p in block.parameters() if p.grad is not None]

    loss, both = grads(x, target, mask)
    alone_loss, alone = grads(x[:1], target[:1], Mask())
    assert loss == pytest.approx(alone_loss, abs=1e-5)
    assert len(both) == len(list(block.parameters()))
    for ours, theirs in zip(both, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.traits("causal")
def test_m03_the_future_is_hidden_and_the_past_is_not(make: Make, random_qkv: Draw) -> None:
    """M03: T=8; the last token moves nothing before it, the first one moves all that see the whole past."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(8, 8))
    mask = Mask(causal=True)
    clean = attn(q, k, v, mask)

    def moved(place: int) -> Tensor:
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, :, place] += 1
        return (attn(*other, mask) - clean).abs().amax((0, 1, 3))

    assert (moved(7)[:7] == 0).all()
    assert moved(7)[7] > 0
    pattern = attn.pattern(8, 8, True)
    reach = torch.ones(8, dtype=torch.bool) if pattern is None else pattern[..., 0].reshape(-1, 8).any(0)
    assert reach[0]
    assert torch.equal(moved(0) > 1e-7, reach)


@pytest.mark.traits("causal")
def test_m03_in_a_causal_shell(kind: type[Mechanism]) -> None:
    """M03, for a site that is causal by construction, called without any mask."""
    attn = MultiheadAttention(8, 2, kind, causal=True, **SITE).eval()
    x = torch.randn(1, 8, 8)
    other = x.clone()
    other[:, 7] += 1
    assert torch.equal(attn(other)[:, :7], attn(x)[:, :7])
    other = x.clone()
    other[:, 0] += 1
    moved = (attn(other) - attn(x)).abs().amax(-1)[0] > 1e-7
    assert moved[0]
    if not kind.traits.shared_qk:  # where a hash decides, token 0 is in sight of some
        assert moved.all()


@pytest.mark.traits("bidirectional")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("part", ["key_keep", "pair_keep"])
def test_m04_and_a8_only_booleans_are_masks(make: Make, part: str, dtype: torch.dtype, random_qkv: Draw) -> None:
    """M04, A8: a mask of zeros and ones in numbers is refused by name, and told where numbers go."""
    attn = make(2, 4)
    q, k, v = random_qkv(5, 5)
    value = torch.ones((2, 5) if part == "key_keep" else (5, 5), dtype=dtype)
    arguments: dict[str, Any] = {part: value}
    with pytest.raises(ValueError, match=rf"mask\.{part} must be boolean.*bias argument"):
        attn(q, k, v, Mask(**arguments))
    if not attn.traits.cross:
        return
    with pytest.raises(ValueError, match=r"mask\.key_keep must be boolean"):
        attn.memory(k, v, Mask(key_keep=torch.ones(2, 5, dtype=dtype)))


@pytest.mark.traits("bidirectional")
def test_m04_a_bare_tensor_is_no_mask(make: Make, random_qkv: Draw) -> None:
    """M04: a tensor where a ``Mask`` belongs is refused, whatever it holds; so it is by the shell."""
    q, k, v = random_qkv(5, 5)
    for tensor in (torch.ones(5, 5), torch.ones(5, 5, dtype=torch.int64), torch.ones(5, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask must be.*Mask"):
            make(2, 4)(q, k, v, tensor)
        with pytest.raises(ValueError, match=r"mask must be.*Mask"):
            MultiheadAttention(8, 2)(torch.randn(2, 5, 8), mask=tensor)
        with pytest.raises(ValueError, match=r"mask must be.*Mask"):
            EncoderBlock(8, 2)(torch.randn(2, 5, 8), mask=tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("part", ["key_keep", "pair_keep"])
@pytest.mark.parametrize("module", [MultiheadAttention(8, 2), EncoderBlock(8, 2)], ids=["shell", "block"])
def test_m04_the_modules_refuse_with_the_same_words(module: torch.nn.Module, part: str, dtype: torch.dtype) -> None:
    """M04: shell and blocks read the mask before the mechanism does, and say the same."""
    arguments: dict[str, Any] = {part: torch.ones((2, 5) if part == "key_keep" else (5, 5), dtype=dtype)}
    with pytest.raises(ValueError, match=rf"mask\.{part} must be boolean"):
        module(torch.randn(2, 5, 8), mask=Mask(**arguments))


@pytest.mark.parametrize("module", [MultiheadAttention(8, 2), EncoderBlock(8, 2)], ids=["shell", "block"])
def test_m04_a_key_keep_of_another_length_is_refused(module: torch.nn.Module) -> None:
    """The shell says which shape it expects, also where broadcasting would have hidden the slip."""
    for shape in [(2, 4), (1, 5), (2, 1)]:
        with pytest.raises(ValueError, match=r"mask\.key_keep must be \[B, S\] = \(2, 5\)"):
            module(torch.randn(2, 5, 8), mask=Mask(key_keep=torch.ones(shape, dtype=torch.bool)))


def test_a8_polarity_shows_in_the_names() -> None:
    """A8: each foreign mask has its own door, and the wrong form is refused there."""
    real = torch.tensor([[True, True, False]])
    for mask in [
        Mask.from_lengths(torch.tensor([2]), max_len=3),
        Mask.from_attention_mask(torch.tensor([[1, 1, 0]])),
        Mask.from_key_padding_mask(torch.tensor([[False, False, True]])),
    ]:
        assert mask.key_keep is not None
        assert torch.equal(mask.key_keep, real)
    with pytest.raises(ValueError, match="key_padding_mask must be boolean"):
        Mask.from_key_padding_mask(torch.tensor([[0.0, 0.0, -torch.inf]]))
    with pytest.raises(ValueError, match="attention_mask must hold only 0"):
        Mask.from_attention_mask(torch.tensor([[1, 2, 0]]))
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\]"):
        Mask.from_attention_mask(torch.ones(1, 1, 3))
    with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.3, got \[4\]"):
        Mask.from_lengths(torch.tensor([4]), max_len=3)


def test_m05_one_query_sees_all_the_keys_before_it(make_exact: Make) -> None:
    """M05: the causal flag is aligned to the last key."""
    out = make_exact(1, 1)(column(0), column(*[0] * 8), column(*range(8)), Mask(causal=True))
    assert out.item() == 3.5


def test_m06_more_queries_than_keys(make_exact: Make) -> None:
    """M06: the first queries come before the first key and give nothing."""
    q, k, v = column(*[0] * 5, requires_grad=True), column(0, 0, requires_grad=True), column(4, 8)
    out = make_exact(1, 1)(q, k, v, Mask(causal=True))
    assert out.flatten().tolist() == [0, 0, 0, 4, 6]
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.traits("bidirectional", "key_keep")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_m07_padding_in_half_precision(make: Make, dtype: torch.dtype, random_qkv: Draw) -> None:
    """M07: hidden weights are exactly 0, rows sum to 1 within 1e-2, the output is near float32."""
    attn = make(2, 8)
    q, k, v = (x.detach() for x in random_qkv(6, 6, width=8))
    mask = Mask(key_keep=torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).bool())
    expected = attn(q, k, v, mask)
    attn = attn.to(dtype)
    out = attn(q.to(dtype), k.to(dtype), v.to(dtype), mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    if attn.traits.linear_in_v:
        weights = attention_map(attn, q.to(dtype), k.to(dtype), mask)
        assert mask.key_keep is not None
        assert (weights.masked_select(~mask.key_keep[:, None, None]) == 0).all()
        if attn.traits.normalised:
            sums = weights.float().sum(-1).transpose(1, 2)[mask.key_keep]
            torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-2, rtol=0)


@pytest.mark.traits("causal", "key_keep", "normalised")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_m08_two_masks_that_add_up_to_nothing(make: Make, dtype: torch.dtype) -> None:
    """M08: causal and padding meet in half precision."""
    q, v = column(0, 0).to(dtype), column(5, 7).to(dtype)
    out = make(1, 1).to(dtype)(q, q, v, Mask(causal=True, key_keep=keep(0, 1)))
    assert out.flatten().tolist() == [0, 7]
