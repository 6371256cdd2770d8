"""What stands at a hidden key reaches nothing, each form of a mask means the same, empty rows are 0."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnzoo import EncoderBlock, Mask, Mechanism, OffsetBias
from attnzoo.laws import SITE

Bias = Tensor | OffsetBias
Make = Callable[..., Mechanism]
Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


@pytest.mark.traits("causal", "bidirectional", "key_keep")
@pytest.mark.parametrize("filler", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("causal", [False, True])
def test_a4_what_stands_under_padding_reaches_nothing(
    make: Make, filler: float, causal: bool, random_qkv: Draw
) -> None:
    """A4: outputs and gradients are bit for bit those of the clean run."""
    attn = make(2, 4)
    mask = Mask(causal=causal, key_keep=torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool())
    assert mask.key_keep is not None
    q, k, v = random_qkv(5, 5)

    def run(value: float) -> list[Tensor]:
        hidden = ~mask.key_keep[:, None, :, None]  # type: ignore[index]
        inputs = [q.detach(), k.detach().masked_fill(hidden, value), v.detach().masked_fill(hidden, value)]
        for x in inputs:
            x.requires_grad_()
        attn.zero_grad()
        out = attn(*inputs, mask)
        out.square().sum().backward()
        return [out, *(x.grad for x in (*inputs, *attn.parameters()) if x.grad is not None)]

    for clean, dirty in zip(run(0.0), run(filler), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.traits("bidirectional", "key_keep")
@pytest.mark.parametrize("filler", [torch.nan, torch.inf])
def test_a4_in_shell_and_block(kind: type[Mechanism], filler: float) -> None:
    """A4: NaN in padded tokens reaches no real token and no parameter's gradient."""
    block = EncoderBlock(8, 2, kind, **SITE)
    mask = Mask(key_keep=torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool())
    assert mask.key_keep is not None
    x = torch.randn(2, 5, 8)

    def run(value: float) -> list[Tensor]:
        block.zero_grad()
        filled = x.masked_fill(~mask.key_keep[..., None], value).requires_grad_()  # type: ignore[index]
        y = block(filled, mask=mask)[0][mask.key_keep]
        y.square().sum().backward()
        assert filled.grad is not None
        return [y, filled.grad, *(p.grad for p in block.parameters() if p.grad is not None)]

    for clean, dirty in zip(run(0.0), run(filler), strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.traits("causal", "bidirectional", "pair_keep")
def test_a4_huge_numbers_hidden_by_pairs_or_the_future(make: Make, random_qkv: Draw) -> None:
    """A4: keys that only causality or pairs hide must be finite, and may be huge."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    pairs = torch.ones(6, 6, dtype=torch.bool)
    pairs[:, 5] = False
    for mask, rows in [(Mask(pair_keep=pairs), slice(0, 6)), (Mask(causal=True), slice(0, 5))]:
        clean = [x.clone().requires_grad_() for x in (q, k, v)]
        dirty = [x.clone() for x in (q, k, v)]
        dirty[1][:, :, 5], dirty[2][:, :, 5] = 1e30, 1e30
        dirty = [x.requires_grad_() for x in dirty]
        a, b = (attn(*inputs, mask)[:, :, rows] for inputs in (clean, dirty))
        assert torch.equal(a, b)
        a.sum().backward()
        b.sum().backward()
        for x, y in zip(clean, dirty, strict=True):
            assert x.grad is not None
            assert y.grad is not None
            torch.testing.assert_close(x.grad, y.grad, atol=1e-6, rtol=1e-5)


def test_a5_one_hidden_set_in_three_forms(make_exact: Make, random_qkv: Draw) -> None:
    """A5: as booleans, as a bias of -inf, as a bias of the lowest number."""
    attn = make_exact(2, 4)
    q, k, v = random_qkv(6, 6)
    pairs = (torch.rand(6, 6) < 0.5) | torch.eye(6, dtype=torch.bool)
    expected = attn(q, k, v, Mask(pair_keep=pairs))
    for lowest in (-torch.inf, torch.finfo(torch.float32).min):
        bias = torch.zeros(6, 6).masked_fill(~pairs, lowest)
        torch.testing.assert_close(attn(q, k, v, None, bias), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("train", [False, True])
def test_a6_the_shapes_of_a_mask(make_exact: Make, brute: Brute, train: bool, random_qkv: Draw) -> None:
    """A6: [T, S], [B, 1, T, S], [1, H, T, S] and [B, H, T, S] in train and eval."""
    attn = make_exact(2, 4).train(train)
    q, k, v = random_qkv(5, 5, batch=3)
    for shape in [(5, 5), (1, 1, 5, 5), (3, 1, 5, 5), (1, 2, 5, 5), (3, 2, 5, 5)]:
        mask = Mask(pair_keep=torch.rand(shape) < 0.7)
        torch.testing.assert_close(attn(q, k, v, mask).double(), brute(attn, q, k, v, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.traits("bidirectional")
def test_a6_three_dimensions_are_refused(make: Make, random_qkv: Draw) -> None:
    """A6: [B, T, S] and [H, T, S] look alike; the message says which unsqueeze is meant."""
    attn = make(2, 4)
    q, k, v = random_qkv(5, 5)
    with pytest.raises(ValueError, match=r"pair_keep has three dimensions.*unsqueeze\(1\).*unsqueeze\(0\)"):
        attn(q, k, v, Mask(pair_keep=torch.ones(2, 5, 5, dtype=torch.bool)))
    if attn.traits.bias:
        with pytest.raises(ValueError, match=r"bias has three dimensions.*unsqueeze\(1\).*unsqueeze\(0\)"):
            attn(q, k, v, None, torch.zeros(2, 5, 5))
    with pytest.raises(ValueError, match=r"\[T, S\] = \(5, 5\)"):
        attn(q, k, v, Mask(pair_keep=torch.ones(5, 4, dtype=torch.bool)))


@pytest.mark.traits("causal", "key_keep", "pair_keep")
def test_masks_and_inputs_are_left_as_they_were(make: Make, random_qkv: Draw) -> None:
    """A caller's tensors are read, never written."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(5, 5))
    segments = torch.zeros(2, 5, dtype=torch.int64)
    mask = Mask(True, torch.rand(2, 5) < 0.7, torch.rand(5, 5) < 0.7, segments)
    tensors = [x for x in (q, k, v, mask.key_keep, mask.pair_keep, mask.segments) if x is not None]
    before = [x.clone() for x in tensors]
    attn(q, k, v, mask)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_a1_empty_rows_are_zero_and_the_others_equal_the_formula(
    make_exact: Make, brute: Brute, random_qkv: Draw
) -> None:
    """A1."""
    attn = make_exact(2, 4)
    q, k, v = random_qkv(6, 6)
    pairs = torch.ones(6, 6, dtype=torch.bool)
    pairs[[0, 3]] = False
    out = attn(q, k, v, Mask(pair_keep=pairs))
    assert (out[:, :, [0, 3]] == 0).all()
    torch.testing.assert_close(out.double(), brute(attn, q, k, v, Mask(pair_keep=pairs)), atol=1e-5, rtol=1e-5)
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, *attn.parameters()))


def test_a1_a_row_that_the_mechanisms_own_pattern_empties(make_exact: Make, brute: Brute, random_qkv: Draw) -> None:
    """A1: what is left over by the mask lies outside of the window; 0 there too, gradients finite."""
    q, k, v = random_qkv(12, 12)
    mask = Mask(key_keep=torch.arange(12).expand(2, 12) < 2)
    attn = make_exact(2, 4)
    out = attn(q, k, v, mask)
    torch.testing.assert_close(out.double(), brute(attn, q, k, v, mask), atol=1e-5, rtol=1e-5)
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("with_bias", [False, True])
def test_g4_random_masks_with_empty_rows(make_exact: Make, brute: Brute, with_bias: bool, random_qkv: Draw) -> None:
    """G4: all parts of a mask at once, thin enough that rows are empty, over many shapes."""
    draw = torch.Generator().manual_seed(5)
    attn = make_exact(2, 4)
    empty = 0
    for trial in range(25):
        queries = int(torch.randint(1, 14, (), generator=draw))
        keys = queries if trial % 2 else int(torch.randint(1, 14, (), generator=draw))
        q, k, v = random_qkv(queries, keys)
        segments = torch.randint(0, 3, (2, queries), generator=draw) if queries == keys else None
        mask = Mask(
            causal=bool(trial % 3),
            key_keep=torch.rand(2, keys, generator=draw) < 0.6,
            pair_keep=torch.rand(2, 2, queries, keys, generator=draw) < 0.6,
            segments=segments,
        )
        bias = torch.randn(2, 1, queries, keys, generator=draw) if with_bias else None
        out = attn(q, k, v, mask, bias)
        expected = brute(attn, q, k, v, mask, bias)
        empty += int((expected == 0).all(-1).sum())
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        out.square().sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    assert empty > 20


class _Ones(Mechanism):
    """Careless: gives 1 wherever it is asked, NaN where no key is visible."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        ones = torch.ones(*q.shape[:3], v.shape[-1])
        visible = mask.visible(q.shape[2], v.shape[2], q.device)
        return ones if visible is None else ones / visible.any(-1, keepdim=True)


def test_a1_the_base_class_empties_rows_whatever_a_mechanism_gives(random_qkv: Draw) -> None:
    """A1: for every mixture of the parts of a mask, by whole calls and by steps."""
    attn = _Ones(2, 4)
    for trial in range(64):
        queries = trial % 7 + 1
        keys = queries if trial & 8 else (trial * 5) % 6 + 1
        mask = Mask(
            causal=bool(trial & 1),
            key_keep=torch.rand(2, keys) < 0.4 if trial & 2 else None,
            pair_keep=torch.rand(2, 1, queries, keys) < 0.4 if trial & 4 else None,
            segments=torch.randint(0, 3, (2, queries)) if trial & 8 and trial & 16 else None,
        )
        q, k, v = random_qkv(queries, keys)
        visible = mask.visible(queries, keys)
        seen = torch.ones(2, 2, queries) if visible is None else visible.any(-1).expand(2, 2, queries)
        assert torch.equal(attn(q, k, v, mask), seen[..., None].float().expand(2, 2, queries, 4))
    keep = torch.tensor([[False, False, True], [True, True, True]])
    out, _ = attn.step(*random_qkv(3, 3), attn.init_state(2, 3), Mask(key_keep=keep))
    assert out[:, 0, :, 0].tolist() == [[0, 0, 1], [1, 1, 1]]
