"""Rotary numbers and pairs (P05, P06, J7), and positions on a grid (P07)."""

import pytest
import torch
from torch import nn

from attnzoo import MultiheadAttention
from attnzoo.positions import Learned2D, Rotary, Rotary2D, Sinusoidal, Sinusoidal2D, halves_to_neighbours


def test_p05_tables_in_full_precision() -> None:
    """P05: head width 64, places 0-4095, bfloat16: within 0.004 of float64."""
    places = torch.arange(4096)
    angle = places[:, None].double() * 10000.0 ** (-torch.arange(32).double() / 32)
    cos, sin = Rotary(64).to(torch.bfloat16).tables(places, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert (cos.double() - angle.cos()).abs().max() <= 0.004
    assert (sin.double() - angle.sin()).abs().max() <= 0.004


def test_p05_a_whole_model_in_bfloat16() -> None:
    """P05: the shell cast to bfloat16 turns q by the same angles."""
    q = torch.randn(1, 1, 4096, 64)
    exact = Rotary(64)(q.double(), torch.arange(4096))
    low = nn.Sequential(Rotary(64)).bfloat16()[0](q.bfloat16(), torch.arange(4096))
    assert low.dtype == torch.bfloat16
    assert (low.double() - exact).abs().max() <= 0.06


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("neighbours", [0.5403, 0.8415, 0, 0]), ("halves", [0.5403, 0, 0.8415, 0])],
)
def test_p06_which_channels_form_a_pair(layout: str, expected: list[float]) -> None:
    """P06: x = [1, 0, 0, 0] at place 1; the option is named."""
    rotary = Rotary(4, layout=layout)  # type: ignore[arg-type]
    x = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4)
    torch.testing.assert_close(rotary(x, torch.tensor([1])).flatten(), torch.tensor(expected), atol=1e-4, rtol=0)


def test_p06_and_j7_one_reordering_between_the_pairings() -> None:
    """P06, J7: the two agree after one fixed reordering, on vectors and on projection weights."""
    order = halves_to_neighbours(8)
    x, places = torch.randn(2, 3, 5, 8), torch.arange(5)
    halves, neighbours = Rotary(8, layout="halves")(x, places), Rotary(8)(x[..., order], places)
    torch.testing.assert_close(halves[..., order], neighbours)

    a = MultiheadAttention(16, 2, position=Rotary(8, layout="halves"))
    b = MultiheadAttention(16, 2, position=Rotary(8))
    weights = a.state_dict()
    for name in ("q_proj.weight", "k_proj.weight", "q_proj.bias"):
        weights[name] = weights[name].unflatten(0, (2, 8))[:, order].flatten(0, 1)
    b.load_state_dict(weights)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(a(x), b(x), atol=1e-5, rtol=0)


def test_rotary_scores_depend_on_the_offset_alone() -> None:
    """q at place i and k at place j score the same as both moved by any number of places."""
    q, k = torch.randn(1, 1, 6, 8).double(), torch.randn(1, 1, 6, 8).double()
    for layout in ("neighbours", "halves"):
        rotary = Rotary(8, layout=layout)  # type: ignore[arg-type]
        scores = [rotary(q, torch.arange(6) + move) @ rotary(k, torch.arange(6) + move).mT for move in (0, 3, 100)]
        torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(scores[2], scores[0], atol=1e-4, rtol=0)


def test_rotary_on_a_grid() -> None:
    """Rows turn the first half of the channels, columns the second; a score depends on both offsets."""
    rotary = Rotary2D(8)
    x = torch.randn(1, 1, 1, 8)
    row, column = rotary(x, torch.tensor([[1, 0]])), rotary(x, torch.tensor([[0, 1]]))
    assert torch.equal(row[..., 4:], x[..., 4:])
    assert torch.equal(column[..., :4], x[..., :4])
    assert not torch.allclose(row[..., :4], x[..., :4])
    assert not torch.allclose(column[..., 4:], x[..., 4:])
    with pytest.raises(ValueError, match=r"positions.*\(3, 2\)"):
        rotary(torch.randn(1, 1, 3, 8), torch.arange(3))
    with pytest.raises(ValueError, match=r"divisible by 4, got 6"):
        Rotary2D(6)
    with pytest.raises(ValueError, match=r"must be even; got 5"):
        Rotary(5)
    with pytest.raises(ValueError, match=r"'neighbours' or 'halves', got 'pairs'"):
        Rotary(4, layout="pairs")  # type: ignore[arg-type]


def test_p07_a_learned_grid_resized() -> None:
    """P07: 4x6 with a class token to 8x12: a constant stays; column numbers rise along the width."""
    grid = Learned2D(2, (4, 6), prefix_tokens=1)
    with torch.no_grad():
        grid.table[0] = torch.tensor([7.0, -7.0])
        grid.table[1:, 0] = 3.0
        grid.table[1:, 1] = torch.arange(6.0).repeat(4)
    new = grid.resized((8, 12))()
    assert new.shape == (97, 2)
    assert torch.equal(new[0], torch.tensor([7.0, -7.0]))
    torch.testing.assert_close(new[1:, 0], torch.full((96,), 3.0))
    columns = new[1:, 1].view(8, 12)
    torch.testing.assert_close(columns, columns[:1].expand(8, 12), atol=1e-5, rtol=0)
    assert (columns[0].diff() > 0).all()
    torch.testing.assert_close(grid.resized((4, 6))(), grid())


def test_sinusoids_on_a_grid() -> None:
    """The first half of the channels knows the row alone, the second the column alone."""
    places = torch.cartesian_prod(torch.arange(3), torch.arange(5))
    out = Sinusoidal2D(8)(places).view(3, 5, 8)
    assert torch.equal(out[:, :, :4], out[:, :1, :4].expand(3, 5, 4))
    assert torch.equal(out[:, :, 4:], out[:1, :, 4:].expand(3, 5, 4))
    torch.testing.assert_close(out[:, 0, :4], Sinusoidal(4)(torch.arange(3)))
    assert torch.unique(out.flatten(0, 1).round(decimals=4), dim=0).shape[0] == 15
    with pytest.raises(ValueError, match=r"divisible by 4, got 6"):
        Sinusoidal2D(6)
