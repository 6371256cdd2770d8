"""Position encodings: cases P01-P10 and J7, and what else a place is counted by."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnzoo import EncoderBlock, Local, Mask, MultiheadAttention, OffsetBias
from attnzoo.positions import Alibi, Learned, RelativeBias, Rotary, Shaw, Sinusoidal, SwinBias, T5Bias

LEFT = torch.tensor([[0, 0, 0, 1, 1, 1]]).bool()
RIGHT = torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()


class Encoder(nn.Module):
    """Tokens to vectors: the smallest network that has each encoding in it."""

    def __init__(self, encoding: str, max_len: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        added: dict[str, Callable[[], nn.Module]] = {
            "learned": lambda: Learned(8, max_len),
            "sinusoidal": lambda: Sinusoidal(8),
        }
        at_scores: dict[str, Callable[[], nn.Module]] = {
            "rope": lambda: Rotary(4),
            "rope_halves": lambda: Rotary(4, layout="halves"),
            "offset": lambda: RelativeBias(2, 4),
            "t5": lambda: T5Bias(2, num_buckets=8, max_distance=8),
            "alibi": lambda: Alibi(2),
            "shaw": lambda: Shaw(4, max_distance=4),
        }
        self.added = added[encoding]() if encoding in added else None
        position = at_scores[encoding]() if encoding in at_scores else None
        for table in () if position is None else position.parameters():
            nn.init.normal_(table)
        self.block = EncoderBlock(8, 2, position=position)

    def forward(self, tokens: Tensor, mask: Mask) -> Tensor:
        x = self.embedding(tokens)
        if self.added is not None:
            x = x + self.added(mask.positions(tokens.shape[1]))
        y: Tensor = self.block(x, mask=mask)[0]
        return y


ENCODINGS = ["learned", "sinusoidal", "rope", "rope_halves", "offset", "t5", "alibi", "shaw"]


def test_p01_an_odd_width() -> None:
    """P01: width 5, place 1."""
    expected = torch.tensor([[0.84147, 0.54030, 0.02512, 0.99968, 0.00063]])
    torch.testing.assert_close(Sinusoidal(5)(torch.tensor([1])), expected, atol=1e-5, rtol=0)
    assert Sinusoidal(1)(torch.tensor([2])).item() == pytest.approx(math.sin(2))


def test_p02_past_the_end_of_the_table() -> None:
    """P02: a learned table says both numbers; sinusoids go on, and what was before does not change."""
    with pytest.raises(ValueError, match=r"17.*16"):
        Learned(8, 16)(torch.arange(17))
    with pytest.raises(ValueError, match=r"17.*16"):
        Encoder("learned", max_len=16)(torch.zeros(1, 17, dtype=torch.int64), Mask())
    sixteen = Learned(8, 16)
    assert torch.equal(sixteen(torch.arange(16)), sixteen.table)
    long, short = Sinusoidal(8)(torch.arange(40)), Sinusoidal(8)(torch.arange(16))
    assert torch.equal(long[:16], short)
    assert long.shape == (40, 8)


def test_p02_only_real_tokens_count_against_the_table() -> None:
    """P02: 20 slots with 16 real tokens fit into 16 places, padded on either side."""
    tokens = torch.arange(20)[None] % 10
    for keep in (torch.arange(20)[None] < 16, torch.arange(20)[None] >= 4):
        assert Encoder("learned", max_len=16)(tokens, Mask(key_keep=keep)).isfinite().all()


def test_p03_and_p04_place_ids() -> None:
    """P03, P04: 0, 1, 2 for the real tokens; some valid place elsewhere; by segments each from 0."""
    assert Mask(key_keep=RIGHT).positions(6)[0, :3].tolist() == [0, 1, 2]
    assert Mask(key_keep=LEFT).positions(6)[0, 3:].tolist() == [0, 1, 2]
    for keep in (LEFT, RIGHT, torch.zeros(1, 6, dtype=torch.bool)):
        places = Mask(key_keep=keep).positions(6)
        assert ((places >= 0) & (places < 6)).all()
    assert Mask().positions(4).tolist() == [0, 1, 2, 3]
    packed = Mask(segments=torch.tensor([[0, 0, 0, 4, 4, 1]]))
    assert packed.positions(6).tolist() == [[0, 1, 2, 0, 1, 0]]
    mixed = Mask(segments=torch.tensor([[1, 0, 1, 0, 1, 1]]), key_keep=torch.tensor([[1, 1, 1, 1, 0, 1]]).bool())
    assert mixed.positions(6)[0, [0, 1, 2, 3, 5]].tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_p03_and_p04_padding_on_either_side(encoding: str) -> None:
    """P03, P04: outputs of the real tokens equal those of the run without padding."""
    net = Encoder(encoding).eval()
    tokens = torch.tensor([[3, 1, 4]])
    expected = net(tokens, Mask())
    padding = torch.tensor([[9, 9, 9]])
    right = net(torch.cat([tokens, padding], 1), Mask(key_keep=RIGHT))[:, :3]
    left = net(torch.cat([padding, tokens], 1), Mask(key_keep=LEFT))[:, 3:]
    torch.testing.assert_close(right, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(left, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packed_places_begin_anew(encoding: str) -> None:
    """Two texts packed in one row give what each gives alone, with every encoding."""
    net = Encoder(encoding).eval()
    a, b = torch.tensor([[3, 1, 4]]), torch.tensor([[1, 5, 9, 2]])
    packed = net(torch.cat([a, b], 1), Mask(segments=torch.tensor([[0, 0, 0, 1, 1, 1, 1]])))
    torch.testing.assert_close(packed, torch.cat([net(a, Mask()), net(b, Mask())], 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_p09_places_run_along_time(encoding: str) -> None:
    """P09: two equal samples get equal outputs; one token said five times gets different ones along time."""
    net = Encoder(encoding).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5]]).expand(2, 5)
    out = net(tokens, Mask())
    assert torch.equal(out[0], out[1])
    swapped = net(tokens[:, [1, 0, 2, 3, 4]], Mask())
    assert not torch.allclose(swapped[:, [1, 0, 2, 3, 4]], out, atol=1e-4)


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "rope_halves", "alibi"])
def test_p08_computed_tables_are_not_saved(encoding: str) -> None:
    """P08: saved at 512, loaded strictly into a model made for 2048; the first 512 outputs are equal."""
    first, second = Encoder(encoding, max_len=512).eval(), Encoder(encoding, max_len=2048).eval()
    tokens = torch.randint(0, 10, (1, 2048))
    before = first(tokens[:, :512], Mask(causal=True))
    assert not any("position" in name or "added" in name for name in first.state_dict())
    second(tokens, Mask(causal=True))
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(second(tokens[:, :512], Mask(causal=True)), before)
    assert second(tokens, Mask(causal=True)).shape == (1, 2048, 8)


def test_p10_relative_terms_beyond_the_trained_range() -> None:
    """P10: 16, 17 and 63 on one side share a value; the same distance on the other side does not."""
    bias = RelativeBias(2, max_distance=16)
    nn.init.normal_(bias.table)
    terms = bias(64, 64).dense(64)[0]
    for far in (16, 17, 63):
        assert torch.equal(terms[:, 0, far], terms[:, 0, 16])
        assert torch.equal(terms[:, 63, 63 - far], terms[:, 63, 47])
    assert (terms[:, 0, 16] != terms[:, 63, 47]).all()
    assert (terms[:, 0, 15] != terms[:, 0, 16]).all()
    attn = MultiheadAttention(8, 2, position=bias)
    assert attn(torch.randn(1, 64, 8)).isfinite().all()


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 7), (7, 2)])
def test_relative_terms_count_from_the_last_key(queries: int, keys: int) -> None:
    """T other than S: query i stands at place i + S - T, so its rows are the last ones of the square."""
    bias = RelativeBias(2, max_distance=3)
    nn.init.normal_(bias.table)
    terms = bias(queries, keys)
    assert isinstance(terms, OffsetBias)
    longest = max(queries, keys)
    square = bias(longest, longest).dense(longest)
    assert torch.equal(terms.dense(queries), square[:, :, longest - queries :, longest - keys :])


@pytest.mark.parametrize("position", [Rotary(4), RelativeBias(2, 4)], ids=["rope", "offset"])
def test_b4_windows_take_positions_too(position: Rotary | RelativeBias) -> None:
    """B4: Local over a window as wide as the text gives what dense attention gives, positions and all."""
    torch.manual_seed(1)
    dense = MultiheadAttention(8, 2, position=position)
    local = MultiheadAttention(8, 2, functools.partial(Local, window=(20, 20)), position=position)
    local.load_state_dict(dense.state_dict())
    x = torch.randn(2, 9, 8)
    for mask in (Mask(), Mask(causal=True), Mask(key_keep=torch.rand(2, 9) < 0.7)):
        torch.testing.assert_close(local(x, mask=mask), dense(x, mask=mask), atol=1e-5, rtol=0)


def test_b4_explicit_place_ids() -> None:
    """B4: given places are the ones that act, per row too; moved all alike they change nothing."""
    attn = MultiheadAttention(8, 2, position=Rotary(4)).eval()
    x = torch.randn(2, 5, 8)
    expected = attn(x)
    torch.testing.assert_close(attn(x, positions=torch.arange(5)), expected)
    moved = torch.stack([torch.arange(5), torch.arange(5) + 40])
    torch.testing.assert_close(attn(x, positions=moved), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(attn(x, positions=torch.arange(5) * 2), expected, atol=1e-4)


def test_positions_that_nothing_would_read_are_refused() -> None:
    """Places given to a site that has nothing for them to act on are an error, never dropped."""
    x, places = torch.randn(1, 3, 8), torch.tensor([0, 5, 9])
    for position in (None, SwinBias(2, grid=(1, 3))):
        with pytest.raises(ValueError, match="positions"):
            MultiheadAttention(8, 2, position=position)(x, positions=places)
        with pytest.raises(ValueError, match="positions"):
            MultiheadAttention(8, 2, position=position)(x, x, positions=places, context_positions=places)


def test_cross_attention_takes_places_only_when_both_are_given() -> None:
    """Two sequences count their places apart: without context_positions the rotary position does not act."""
    plain, turned = MultiheadAttention(8, 2), MultiheadAttention(8, 2, position=Rotary(4))
    turned.load_state_dict(plain.state_dict())
    x, context = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    assert torch.equal(turned(x, context), plain(x, context))
    with pytest.raises(ValueError, match="positions"):
        turned(x, context, context_positions=torch.arange(5))
    with pytest.raises(ValueError, match="context_positions"):
        turned(x, context, positions=torch.arange(3))
    both = turned(x, context, positions=torch.arange(3), context_positions=torch.arange(5))
    assert not torch.allclose(both, plain(x, context), atol=1e-4)
    q, k, _ = (
        p(y).unflatten(-1, (2, 4)).transpose(1, 2)
        for p, y in ((turned.q_proj, x), (turned.k_proj, context), (turned.v_proj, context))
    )
    rotary = Rotary(4)
    weights = (rotary(q, torch.arange(3)) @ rotary(k, torch.arange(5)).mT / 2).softmax(-1)
    heads = weights @ turned.v_proj(context).unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(turned.merge(heads), both, atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_tokens_at_all_with_every_encoding(encoding: str) -> None:
    """An empty text gives an empty output."""
    assert Encoder(encoding)(torch.zeros(2, 0, dtype=torch.int64), Mask()).shape == (2, 0, 8)


@pytest.mark.parametrize("shape", [(4,), (1,), (2, 4), (3, 3)])
def test_places_that_do_not_fit_the_tokens(shape: tuple[int, ...]) -> None:
    """One place for each token, said in full; a single place is not meant for all of them."""
    attn = MultiheadAttention(8, 2, position=Rotary(4))
    with pytest.raises(ValueError, match="positions"):
        attn(torch.randn(2, 3, 8), positions=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("form", ["offset", "dense"])
def test_relative_terms_and_a_given_bias_are_added(form: str) -> None:
    """Both act, in a whole call and by steps, whichever form the given one has."""
    position = RelativeBias(2, 3)
    nn.init.normal_(position.table)
    attn = MultiheadAttention(8, 2, position=position, causal=True).eval()
    bare = MultiheadAttention(8, 2, causal=True).eval()
    bare.load_state_dict(attn.state_dict(), strict=False)
    x, own = torch.randn(2, 5, 8), position(5, 5)
    given = OffsetBias(torch.randn(2, 9))
    bias = given if form == "offset" else given.dense(5)
    expected = bare(x, bias=OffsetBias(own.values + given.values))
    torch.testing.assert_close(attn(x, bias=bias), expected, atol=1e-5, rtol=0)
    state, parts = attn.init_state(2, 5), []
    for t in range(5):
        # One query at place t sees keys 0..t: offsets -t..0, which are entries 4 - t..4.
        row = given.values[:, 4 - t : 5]
        new = OffsetBias(row) if form == "offset" else row[None, :, None]
        out, state = attn.step(x[:, t : t + 1], state, bias=new)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)
