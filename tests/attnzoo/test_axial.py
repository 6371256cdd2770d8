"""Axial attention against matrices written out over all pairs; causal raster order token by token; padding."""

import functools
from itertools import product
from typing import Any

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, MultiheadAttention, Softmax, attention_map, check_attention
from attnzoo.mechanisms.axial import Axial, Combine
from attnzoo.reference.axial import axial

GRIDS = [(3, 4), (2, 3, 2), (5,), (2, 2, 1, 3)]
COMBINES: list[Combine] = ["sequence", "sum"]


def draw(length: int, *, batch: int = 2, heads: int = 2, width: int = 4) -> list[Tensor]:
    return [torch.randn(batch, heads, length, width, dtype=torch.float64) for _ in range(3)]


def room(grid: tuple[int, ...], prefix: int) -> int:
    return prefix + len(list(product(*map(range, grid))))


def matrix(q: Tensor, k: Tensor, grid: tuple[int, ...], prefix: int, causal: bool, combine: Combine) -> Tensor:
    """What is applied to v, [B, H, T, T], from boolean matrices over all pairs of tokens."""
    length, rank = q.shape[2], len(grid)
    cells = list(product(*map(range, grid)))[: length - prefix]
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).exp()

    def pairs(keep: Any) -> Tensor:
        """True where ``keep(cell of the query, cell of the key)``; the prefix neither sees nor is seen."""
        seen = torch.zeros(length, length, dtype=torch.bool)
        for i, c in enumerate(cells):
            for j, d in enumerate(cells):
                seen[prefix + i, prefix + j] = keep(c, d)
        return seen

    def shares(seen: Tensor) -> Tensor:
        kept = scores * seen
        return torch.nan_to_num(kept / kept.sum(-1, keepdim=True))

    to_prefix = torch.zeros(length, length, dtype=torch.bool)
    to_prefix[prefix:, :prefix] = True
    stays = torch.diag((torch.arange(length) < prefix).double())
    lines = [pairs(lambda c, d, a=a: c[:a] + c[a + 1 :] == d[:a] + d[a + 1 :]) for a in range(rank)]
    steps = [shares(line | to_prefix) + stays for line in lines]
    if not causal:
        whole = steps[0]
        for step in steps[1:]:
            whole = whole @ step if combine == "sequence" else whole + step
        whole = whole if combine == "sequence" else whole / rank
        dense = torch.ones(length, length, dtype=torch.bool)
    else:
        behind = [torch.eye(length, dtype=torch.float64)]
        for step in reversed(steps[1:]):
            behind.insert(0, step @ behind[0])
        itself = torch.diag(torch.arange(length) >= prefix)
        earlier = [lines[a] & pairs(lambda c, d, a=a: d[a] < c[a]) for a in range(rank)]
        whole = torch.zeros_like(scores)
        groups = [range(rank)] if combine == "sequence" else [range(a, a + 1) for a in range(rank)]
        for group in groups:
            seen = to_prefix | itself
            for a in group:
                seen = seen | earlier[a]
            weights = shares(seen) / len(groups)
            whole = whole + weights * (to_prefix | itself)
            for a in group:
                whole = whole + (weights * earlier[a]) @ behind[a]
        dense = torch.ones(length, length, dtype=torch.bool).tril()
    return torch.cat([shares(dense)[:, :, :prefix], whole[:, :, prefix:]], 2)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("combine", COMBINES)
def test_every_length_equals_the_matrices_over_all_pairs(grid: tuple[int, ...], prefix: int, combine: Combine) -> None:
    """D2: full grids, short last rows, nothing but the prefix; both modes."""
    attn = Axial(2, 4, grid=grid, prefix_tokens=prefix, combine=combine)
    for length in range(1, room(grid, prefix) + 1):
        q, k, v = draw(length)
        for causal in (False, True):
            expected = matrix(q, k, grid, min(prefix, length), causal, combine) @ v
            torch.testing.assert_close(attn(q, k, v, Mask(causal=causal)), expected, atol=1e-12, rtol=1e-12)


def test_the_numbers_of_a_small_grid() -> None:
    """Equal scores on 2 x 2: means over lines, worked out by hand."""
    q, v = torch.zeros(1, 1, 4, 1), torch.arange(4.0).view(1, 1, 4, 1)
    grid = (2, 2)

    def outputs(combine: Combine, causal: bool) -> list[float]:
        return Axial(1, 1, grid=grid, combine=combine)(q, q, v, Mask(causal=causal)).flatten().tolist()

    assert outputs("sequence", False) == [1.5, 1.5, 1.5, 1.5]
    # Cell 0: the mean of its row is 0.5, of its column 1.
    assert outputs("sum", False) == [0.75, 1.25, 1.75, 2.25]
    # Cell 2: itself, and the cell above through the mean of the row above, 0.5. Cell 3: one more, to the left.
    assert outputs("sequence", True) == pytest.approx([0, 0.5, (2 + 0.5) / 2, (3 + 2 + 0.5) / 3])
    # Cell 0 and 1 have nothing above them: they themselves are the mean over the columns.
    assert outputs("sum", True) == pytest.approx([0, (0.5 + 1) / 2, (1.25 + 2) / 2, ((3 + 0.5) / 2 + 2.5) / 2])


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("grid", [(3, 4), (2, 3, 2), (5,)])
@pytest.mark.parametrize("combine", COMBINES)
def test_e1_raster_order_is_exact(grid: tuple[int, ...], prefix: int, combine: Combine) -> None:
    """E1: each token in turn is moved: no output before it moves, its own does, and so does every later one."""
    attn = Axial(2, 4, grid=grid, prefix_tokens=prefix, combine=combine)
    length = room(grid, prefix)
    inputs = draw(length)
    before = attn(*inputs, Mask(causal=True))
    for t in range(length):
        moved = [x.clone() for x in inputs]
        for x in moved:
            x[:, :, t] += 1
        change = (attn(*moved, Mask(causal=True)) - before).abs().amax((0, 1, 3))
        assert (change[:t] == 0).all()
        assert (change[t:] > 1e-9).all()


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("grid", [(3, 4), (2, 3, 2), (5,)])
def test_each_output_weighs_the_complete_past(grid: tuple[int, ...], prefix: int) -> None:
    """The map of a causal call is positive exactly at the token and before it, and its rows sum to 1."""
    q, k, _ = draw(room(grid, prefix))
    for combine in COMBINES:
        attn = Axial(2, 4, grid=grid, prefix_tokens=prefix, combine=combine)
        weights = attention_map(attn, q, k, Mask(causal=True))
        past = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().expand_as(weights)
        assert torch.equal(weights > 0, past)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_a_jacobian_by_tokens() -> None:
    """Through scores and values alike, output t hangs on all tokens up to t and on no other."""
    attn = Axial(1, 2, grid=(3, 3), prefix_tokens=1)
    q, k, v = draw(10, batch=1, heads=1, width=2)
    for at in (1, 2):  # k, and v

        def output(x: Tensor, at: int = at) -> Tensor:
            inputs = [q, k, v]
            inputs[at] = x
            return attn(*inputs, Mask(causal=True))[0, 0]

        jacobian = torch.autograd.functional.jacobian(output, (q, k, v)[at]).abs().amax((1, 2, 3, 5))
        first_sees_one_key = at == 1  # its weight is 1 whatever its score
        expected = torch.ones(10, 10, dtype=torch.bool).tril()
        expected[0, 0] &= not first_sees_one_key
        assert torch.equal(jacobian > 1e-12, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [(3, 4), (2, 3, 2), (12,)])
@pytest.mark.parametrize("combine", COMBINES)
def test_e2_padding_anywhere_equals_cropping(
    grid: tuple[int, ...], prefix: int, causal: bool, combine: Combine
) -> None:
    """E2: on the right, on the left, in holes, all but one token, all of them: places are those of real tokens."""
    attn = Axial(2, 4, grid=grid, prefix_tokens=prefix, combine=combine)
    length = room(grid, prefix)
    q, k, v = draw(length, batch=5)
    keep = torch.rand(5, length) < 0.6
    keep[0], keep[1], keep[3], keep[4] = torch.arange(length) < 7, torch.arange(length) >= 5, False, False
    keep[3, 6] = True
    hidden = ~keep[:, None, :, None]
    dirty = [x.masked_fill(hidden, torch.nan).requires_grad_() for x in (q, k, v)]
    out = attn(*dirty, Mask(causal=causal, key_keep=keep))
    for row in range(5):
        real = keep[row]
        assert (out[row, :, ~real] == 0).all()
        if real.any():
            cropped = (x[row : row + 1, :, real] for x in (q, k, v))
            alone = attn(*cropped, Mask(causal=causal))[0]
            torch.testing.assert_close(out[row, :, real], alone, atol=1e-12, rtol=1e-12)
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in dirty)
    weights = attention_map(attn, q, k, Mask(causal=causal, key_keep=keep))
    sums = keep[:, None].double().expand(5, 2, length)
    torch.testing.assert_close(weights.sum(-1), sums, atol=1e-12, rtol=1e-12)


def test_a_line_without_a_real_token() -> None:
    """A1: of 3 x 3 cells only the first row is real: columns below see nothing there, and nobody reads them."""
    attn = Axial(1, 2, grid=(3, 3))
    keep = torch.tensor([[True, True, True, *[False] * 6]])
    inputs = [x.requires_grad_() for x in draw(9, batch=1, heads=1, width=2)]
    for causal in (False, True):
        out = attn(*inputs, Mask(causal=causal, key_keep=keep))
        assert (out[:, :, 3:] == 0).all()
        row = Softmax(1, 2)(*(x[:, :, :3] for x in inputs), Mask(causal=causal))
        torch.testing.assert_close(out[:, :, :3], row)
        gradients = torch.autograd.grad(out.square().sum(), inputs)
        assert all(x.isfinite().all() and x[:, :, 3:].count_nonzero() == 0 for x in gradients)


@pytest.mark.parametrize("causal", [False, True])
def test_one_axis_is_dense_attention(causal: bool) -> None:
    """A grid of rank 1, prefix or not, is Softmax over all tokens."""
    q, k, v = draw(7)
    for prefix in (0, 2):
        out = Axial(2, 4, grid=(9,), prefix_tokens=prefix)(q, k, v, Mask(causal=causal))
        torch.testing.assert_close(out, Softmax(2, 4)(q, k, v, Mask(causal=causal)))


def test_c2_the_pattern_is_that_of_the_map() -> None:
    """C2: complete in sequence, the past where causal, the cross for a sum; a short row reaches less."""
    q, k, _ = draw(13)
    pairs: dict[tuple[Combine, bool], int] = {
        ("sequence", False): 13 * 13,
        ("sequence", True): 13 * 14 // 2,
        ("sum", False): 13 + 12 * (1 + 4 + 3 - 1),  # the prefix token, and for each cell prefix, row and column
        ("sum", True): 13 * 14 // 2,
    }
    for (combine, causal), count in pairs.items():
        attn = Axial(2, 4, grid=(3, 4), prefix_tokens=1, combine=combine, dropout=0.5).train()
        pattern = attn.pattern(13, 13, causal)
        assert pattern.sum() == count
        assert torch.equal(pattern.expand(2, 2, 13, 13), attention_map(attn, q, k, Mask(causal=causal)) > 0)
    # 11 tokens: the last row holds cells (2, 0) and (2, 1) alone, so columns 2 and 3 have no way to it.
    short = Axial(1, 4, grid=(3, 4), prefix_tokens=1).pattern(11, 11, False)
    assert (~short).nonzero().tolist() == [[i, j] for i in (3, 4, 7, 8) for j in (9, 10)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("combine", COMBINES)
def test_memory_at_64_by_64(causal: bool, combine: Combine) -> None:
    """4097 tokens: no tensor above T x (both axes, the prefix and the token itself), far below T x S."""
    inputs = [torch.randn(1, 1, 4097, 4, requires_grad=True) for _ in range(3)]
    attn = Axial(1, 4, grid=(64, 64), prefix_tokens=1, dropout=0.1, combine=combine)
    with Made() as seen:
        attn(*inputs, Mask(causal=causal, key_keep=torch.ones(1, 4097, dtype=torch.bool))).sum().backward()
    assert seen.elements <= 4096 * (64 + 64 + 1 + 1)


def test_groups_and_value_widths() -> None:
    """M11, F3: query head h uses key/value head h div (H / G); Dv is free."""
    attn = Axial(4, 4, grid=(3, 4), prefix_tokens=1)
    q = torch.randn(2, 4, 13, 4, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 13, width, dtype=torch.float64) for width in (4, 7))
    for causal in (False, True):
        full = matrix(q, k.repeat_interleave(2, 1), (3, 4), 1, causal, "sequence") @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(attn(q, k, v, Mask(causal=causal)), full)


@pytest.mark.slow
@pytest.mark.parametrize("combine", COMBINES)
def test_three_axes_and_a_prefix_keep_the_laws(combine: Combine) -> None:
    """The slow formula, in float64, with gradients, and what padding asks for."""
    attn = Axial(2, 8, grid=(4, 2, 16), prefix_tokens=2, combine=combine)
    check_attention(attn, formula=axial, laws=["formula", "padding", "empty rows"])


def test_dropout_in_training_alone() -> None:
    """Each axis drops weights of its own; outputs stay right on average; evaluation repeats bit for bit."""
    attn = Axial(1, 4, grid=(2, 2), prefix_tokens=1, dropout=0.5)
    q, k, v = (torch.randn(1, 1, 5, 4).expand(4000, -1, -1, -1) for _ in range(3))
    for causal in (False, True):
        trained, right = attn.train()(q, k, v, Mask(causal)), attn.eval()(q, k, v, Mask(causal))
        assert torch.equal(right, attn(q, k, v, Mask(causal)))
        assert (trained.std(0)[:, 1:] > 0.1).all()
        torch.testing.assert_close(trained.mean(0), right[0], atol=0.12, rtol=0)


def test_a_site_gives_grid_and_prefix() -> None:
    """Facts of the shell arrive, and a whole layer is causal in raster order."""
    attn = MultiheadAttention(8, 2, Axial, grid=(3, 4), prefix_tokens=1, causal=True).eval()
    assert isinstance(attn.mechanism, Axial)
    assert (attn.mechanism.grid, attn.mechanism.prefix_tokens) == ((3, 4), 1)
    x = torch.randn(1, 13, 8)
    moved = x.clone()
    moved[:, 6] += 1
    assert torch.equal(attn(moved)[:, :6], attn(x)[:, :6])
    with pytest.raises(ValueError, match=r"grid=\(2, 2\).*grid=\(3, 4\)"):
        MultiheadAttention(8, 2, functools.partial(Axial, grid=(2, 2)), grid=(3, 4))


def test_what_does_not_fit_is_refused() -> None:
    """C4: too many tokens with both numbers; a missing or senseless grid; arguments that axes cannot honour."""
    attn = Axial(2, 4, grid=(3, 4), prefix_tokens=1)
    with pytest.raises(ValueError, match=r"Axial: 14 tokens.*\(3, 4\).*room for 13"):
        attn(*draw(14))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, r"grid is missing.*give grid=\(rows, columns\)"),
        ({"grid": ()}, r"grid must hold.*got \(\)"),
        ({"grid": (3, 0)}, r"grid must hold.*at least 1; got \(3, 0\)"),
        ({"grid": (3, 4), "prefix_tokens": -1}, "prefix_tokens must be at least 0, got -1"),
        ({"grid": (3, 4), "combine": "product"}, "combine must be one of sequence, sum; got 'product'"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=f"Axial: {message}"):
            Axial(2, 4, **options)
    q, k, v = draw(6)
    with pytest.raises(ValueError, match=r"mask\.pair_keep: a hidden pair would still meet through a third cell"):
        attn(q, k, v, Mask(pair_keep=torch.ones(6, 6, dtype=torch.bool)))
    with pytest.raises(ValueError, match="bias: scores exist within an axis only"):
        attn(q, k, v, None, torch.zeros(6, 6))
    with pytest.raises(ValueError, match="same cells of one grid"):
        attn(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="step: an earlier row"):
        attn.init_state(2, 6)
    with pytest.raises(ValueError, match="memory: queries and keys must lie on one grid"):
        attn.memory(k, v)
