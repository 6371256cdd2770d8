"""The numbers of each mechanism against its own formula."""

import functools
import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnzoo import (
    LSH,
    Additive,
    Axial,
    BlockSparse,
    Differential,
    FeedForward,
    GlobalLocal,
    Mask,
    Mechanism,
    MixtureOfExperts,
    MultiheadAttention,
    MultiheadLatentAttention,
    Nystrom,
    OffsetBias,
    Performer,
    Softmax,
    attention_map,
)
from attnzoo.catalogue import construct
from attnzoo.laws import SITE
from attnzoo.positions import RelativeBias, Rotary, Shaw, SwinBias

Make = Callable[..., Mechanism]
Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_d2_every_length_from_one(make_exact: Make, brute: Brute, causal: bool, random_qkv: Draw) -> None:
    """D2: any T >= 1, and the pattern of the reference."""
    attn = make_exact(2, 4)
    for length in range(1, 36):
        q, k, v = random_qkv(length, length, batch=1)
        close(attn(q, k, v, Mask(causal=causal)), brute(attn, q, k, v, Mask(causal=causal)))


@pytest.mark.parametrize("length", [1, 7, 127, 129, 1025])
def test_a11_odd_lengths(make_exact: Make, brute: Brute, length: int, random_qkv: Draw) -> None:
    """A11: finite gradients and the reference's numbers where kernels change their blocks."""
    attn = make_exact(1, 4)
    q, k, v = random_qkv(length, length, batch=1, heads=1, groups=1)
    out = attn(q, k, v, Mask(causal=True))
    close(out, brute(attn, q, k, v, Mask(causal=True)))
    out.square().mean().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, *attn.parameters()))
    # A lone key has weight 1 whatever its score, so there only v is felt.
    felt = (v,) if length == 1 else (q, k, v, *attn.parameters())
    assert all(x.grad is not None and x.grad.any() for x in felt)


def test_g1_causal_with_padding_and_with_bias(make_exact: Make, brute: Brute, random_qkv: Draw) -> None:
    """G1: causal alone, with padding, with a bias, with both."""
    attn = make_exact(2, 4)
    q, k, v = random_qkv(11, 11)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[0, :4], keep[1, 9:] = False, False
    for mask in (Mask(causal=True), Mask(causal=True, key_keep=keep)):
        for bias in (None, torch.randn(2, 2, 11, 11)):
            close(attn(q, k, v, mask, bias), brute(attn, q, k, v, mask, bias))


@pytest.mark.parametrize("shape", [(6, 9), (1, 1, 6, 9), (2, 1, 6, 9), (1, 2, 6, 9), (2, 2, 6, 9)])
def test_b4_and_b5_bias_shapes_and_masks_by_pair(
    make_exact: Make,
    brute: Brute,
    shape: tuple[int, ...],
    random_qkv: Draw,
) -> None:
    """B4, B5: a bias for each pair beside a mask for each pair, T other than S."""
    attn = make_exact(2, 4)
    q, k, v = random_qkv(6, 9)
    mask, bias = Mask(pair_keep=torch.rand(shape) < 0.7), torch.randn(shape, requires_grad=True)
    out = attn(q, k, v, mask, bias)
    close(out, brute(attn, q, k, v, mask, bias))
    out.square().sum().backward()
    assert bias.grad is not None
    assert bias.grad.isfinite().all()
    assert bias.grad.any()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (6, 9), (9, 9), (9, 4), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_an_offset_bias_is_its_dense_form(
    make_exact: Make,
    brute: Brute,
    queries: int,
    keys: int,
    causal: bool,
    random_qkv: Draw,
) -> None:
    """Query i and key j take values[h, j - i + T - 1]; gradients agree with those of the dense form."""
    attn = make_exact(2, 4)
    q, k, v = random_qkv(queries, keys)
    values = torch.randn(2, queries + keys - 1, requires_grad=True)
    out = attn(q, k, v, Mask(causal=causal), OffsetBias(values))
    close(out, brute(attn, q, k, v, Mask(causal=causal), OffsetBias(values)))
    out.square().sum().backward()
    short, values.grad = values.grad, None
    dense = OffsetBias(values).dense(queries)
    assert dense.shape == (1, 2, queries, keys)
    attn(q, k, v, Mask(causal=causal), dense).square().sum().backward()
    assert short is not None
    assert values.grad is not None
    close(short, values.grad)


@pytest.mark.traits("causal", "bidirectional", "pair_keep", "key_keep")
@pytest.mark.parametrize("causal", [False, True])
def test_packed_segments_are_sequences_by_themselves(make: Make, causal: bool, random_qkv: Draw) -> None:
    """Three sequences packed in one row give what each gives alone."""
    attn = make(2, 4)
    q, k, v = random_qkv(20, 20, batch=1)
    segments = torch.tensor([[0] * 5 + [1] * 3 + [2] * 12])
    whole = attn(q, k, v, Mask(causal=causal, segments=segments))
    for part in (slice(0, 5), slice(5, 8), slice(8, 20)):
        close(whole[:, :, part], attn(q[:, :, part], k[:, :, part], v[:, :, part], Mask(causal=causal)))
    keep = torch.rand(1, 20) < 0.6
    packed = attn(q, k, v, Mask(causal=causal, segments=segments, key_keep=keep))
    for part in (slice(0, 5), slice(5, 8), slice(8, 20)):
        alone = attn(q[:, :, part], k[:, :, part], v[:, :, part], Mask(causal=causal, key_keep=keep[:, part]))
        close(packed[:, :, part], alone)


def test_f3_widths_are_free(make_exact: Make, brute: Brute, random_qkv: Draw) -> None:
    """F3: the value width has nothing to do with the key width."""
    attn = make_exact(2, 4)
    for value in (1, 3, 7):
        q, k, v = random_qkv(6, 6, value=value)
        out = attn(q, k, v, Mask(causal=True))
        assert out.shape == (2, 2, 6, value)
        close(out, brute(attn, q, k, v, Mask(causal=True)))


def test_m11_groups_of_heads(make_exact: Make, brute: Brute, random_qkv: Draw) -> None:
    """M11: query head h uses key/value head h div (H / G)."""
    attn = make_exact(4, 4)
    q = torch.zeros(1, 4, 3, 4)
    v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 3, 4)
    assert attn(q, torch.randn(1, 2, 3, 4) * 0, v)[0, :, 0, 0].tolist() == [1, 1, 2, 2]
    q, k, v = random_qkv(6, 6, heads=4, groups=2)
    close(attn(q, k, v), brute(attn, q, k, v))
    with pytest.raises(ValueError, match=r"4.*3"):
        attn(*random_qkv(6, 6, heads=4, groups=3))


def test_k3_the_scale_of_the_scores() -> None:
    """K3: q . k = 16 in a head of width 16 scores 4, for one head and for eight."""
    for heads in (1, 8):
        q = torch.ones(1, heads, 1, 16)
        k = torch.stack([torch.ones(16), torch.zeros(16)]).expand(1, heads, 2, 16)
        weights = attention_map(Softmax(heads, 16), q, k)
        close(weights, torch.tensor([4.0, 0.0]).softmax(0).expand(1, heads, 1, 2))
        close(attention_map(Softmax(heads, 16, scale=1.0), q, k)[0, 0, 0], torch.tensor([16.0, 0.0]).softmax(0))


def test_additive_scores_without_a_scale() -> None:
    """w . tanh(W_q q + W_k k), with numbers worked out by hand."""
    attn = Additive(1, 1, hidden_dim=2)
    with torch.no_grad():
        attn.query_weight.copy_(torch.tensor([[[1.0, 0.0]]]))
        attn.key_weight.copy_(torch.tensor([[[0.0, 2.0]]]))
        attn.score_weight.copy_(torch.tensor([[3.0, 1.0]]))
    q, k = torch.tensor([0.5]).view(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    # The first term is the same for both keys; tanh(0) = 0 and tanh(2) = 0.96403 remain.
    expected = torch.tensor([0.0, 0.964028]).softmax(0)
    close(attention_map(attn, q, k).flatten(), expected)


def test_a_bias_of_minus_infinity_can_empty_a_row(make_exact: Make, random_qkv: Draw) -> None:
    """Where the bias hides the only key that the mask leaves, the row is 0 and gradients are finite."""
    attn = make_exact(1, 4)
    q, k, v = random_qkv(2, 2, batch=1, heads=1, groups=1)
    mask = Mask(pair_keep=torch.tensor([[True, False], [True, True]]))
    out = attn(q, k, v, mask, torch.tensor([[-torch.inf, 0.0], [0.0, 0.0]]))
    assert (out[0, 0, 0] == 0).all()
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.traits("bidirectional", "bias")
def test_shapes_that_do_not_fit(make: Make, random_qkv: Draw) -> None:
    """D3: the message holds the expected shape and the one that came."""
    attn = make(2, 4)
    q, k, v = random_qkv(5, 5)
    cases: list[tuple[tuple[Tensor, Tensor, Tensor], str]] = [
        ((q[0], k, v), r"\[B, H, T, D\].*\(2, 5, 4\)"),
        ((torch.randn(2, 3, 5, 4), k, v), "num_heads=2"),
        ((torch.randn(2, 2, 5, 6), k, v), "head_dim=4"),
        ((q, torch.randn(2, 2, 6, 4), v), r"k \(2, 2, 6, 4\)"),
        ((q, k[:1], v[:1]), r"k \(1, 2, 5, 4\)"),
        ((q, k[:, :0], v[:, :0]), "key/value heads, 0"),
    ]
    for inputs, message in cases:
        with pytest.raises(ValueError, match=message):
            attn(*inputs)
    with pytest.raises(ValueError, match=r"OffsetBias must be \[H, T \+ S - 1\] = \(2, 9\), got \(2, 8\)"):
        attn(q, k, v, None, OffsetBias(torch.zeros(2, 8)))
    with pytest.raises(ValueError, match=r"bias must be floating point.*mask"):
        attn(q, k, v, None, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\)"):
        make(2, 4, dropout=1.0)


@pytest.mark.traits("causal", "bidirectional", "rectangular")
def test_no_tokens_at_all(make: Make, random_qkv: Draw) -> None:
    """No queries give no rows; no keys give rows of 0."""
    attn = make(2, 4)
    q, k, v = random_qkv(0, 0)
    assert attn(q, k, v, Mask(causal=True)).shape == (2, 2, 0, 4)
    out = attn(torch.randn(2, 2, 3, 4), k, v)
    assert out.shape == (2, 2, 3, 4)
    assert (out == 0).all()


def inputs(attn: Mechanism, random_qkv: Draw, **sizes: int) -> tuple[list[Tensor], Mask]:
    """q, k and v of 40 tokens, k being q where keys must be the queries, and a causality that the mechanism has."""
    q, k, v = random_qkv(40, 40, width=8, **sizes)
    return [q, q if attn.traits.shared_qk else k, v], Mask(causal=attn.traits.causal)


def test_no_samples_at_all(make: Make, random_qkv: Draw) -> None:
    """A batch that happens to be empty gives an empty output, and gradients."""
    attn = make(2, 8)
    given, mask = inputs(attn, random_qkv, batch=0)
    out = attn(*given, mask)
    assert out.shape == (0, 2, 40, 8)
    out.sum().backward()
    assert given[0].grad is not None
    assert given[2].grad is not None


def test_shapes_without_numbers(make: Make, random_qkv: Draw) -> None:
    """On the device "meta", where sizes of models are tried out before there is memory for them."""
    attn = make(2, 8).to("meta")
    given, mask = inputs(attn, random_qkv)
    q, k, v = (x.detach().to("meta") for x in given)
    assert attn(q, q if attn.traits.shared_qk else k, v, mask).shape == (2, 2, 40, 8)


def test_whole_numbers_are_refused(make: Make, random_qkv: Draw) -> None:
    """Tokens are no vectors: what was meant to be embedded first is told so, with its type."""
    attn = make(2, 8)
    given, mask = inputs(attn, random_qkv)
    given[2] = given[2].long()
    with pytest.raises(ValueError, match=r"takes floating-point q, k and v; got torch.float32, .*, torch.int64"):
        attn(*given, mask)


def test_sizes_are_whole_numbers(kind: type[Mechanism]) -> None:
    """A block of 2.5 keys would be taken for something; it is refused by the name of the option."""
    sizes = [
        name
        for name, option in inspect.signature(kind).parameters.items()
        if type(option.default) is int and name != "seed"
    ]
    for name in sizes:
        with pytest.raises(ValueError, match=rf"{name} must be .*(whole|even) number.*, got 2.5|{name}.*; got 2.5"):
            construct(functools.partial(kind, **{name: 2.5}), 4, 8, **SITE)
    with pytest.raises(ValueError, match=r"num_heads must be a whole number, got 4.0"):
        construct(kind, 4.0, 8, **SITE)  # type: ignore[arg-type]


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: MultiheadAttention(64, "4"), "num_heads must be a whole number, got '4'"),  # type: ignore[arg-type]
    (lambda: MultiheadAttention(64, 4, num_kv_heads=2.0), "num_kv_heads must be a whole number, got 2.0"),  # type: ignore[arg-type]
    (lambda: MultiheadAttention(64, 4, value_dim=-3), "value_dim must be at least 1, got -3"),
    (lambda: MultiheadAttention(64, 4, value_dim=0), "value_dim must be at least 1, got 0"),
    (lambda: MultiheadAttention(64, 4, out_dim=0), "out_dim must be at least 1, got 0"),
    (lambda: MultiheadAttention(64, 4, context_dim=0), "context_dim must be at least 1, got 0"),
    (lambda: MultiheadAttention(64, 4, max_len=-1), "max_len must be at least 1, got -1"),
    (lambda: MultiheadAttention(64, 4, causal="no"), "causal must be True or False, got 'no'"),  # type: ignore[arg-type]
    (lambda: MultiheadAttention(64, 4, grid=5), "grid must hold the length of each axis"),  # type: ignore[arg-type]
    (lambda: MultiheadLatentAttention(64, 4, layer=-1), "layer must be at least 0, got -1"),
    (lambda: GlobalLocal(4, 8, prefix_tokens=-1), "prefix_tokens must be at least 0, got -1"),
    (lambda: GlobalLocal(4, 8, seed="zz"), "seed must be a whole number, got 'zz'"),  # type: ignore[arg-type]
    (lambda: Axial(4, 8, grid=5), "Axial: grid must hold the length of each axis"),  # type: ignore[arg-type]
    (lambda: Axial(4, 8, grid=(2.5, 2)), "Axial: grid must hold the length of each axis"),  # type: ignore[arg-type]
    (lambda: Nystrom(4, 8, kernel_size=2.5), "kernel_size must be a whole number, got 2.5"),  # type: ignore[arg-type]
    (lambda: LSH(4, 8, seed=2.5), "seed must be a whole number, got 2.5"),  # type: ignore[arg-type]
    (lambda: LSH(4, 8, layer="zz"), "layer must be a whole number, got 'zz'"),  # type: ignore[arg-type]
    (lambda: Performer(4, 8, seed=2.5), "seed must be a whole number, got 2.5"),  # type: ignore[arg-type]
    (lambda: Performer(4, 8, layer="zz"), "layer must be a whole number, got 'zz'"),  # type: ignore[arg-type]
    (lambda: BlockSparse(4, 8, seed="zz"), "seed must be a whole number, got 'zz'"),  # type: ignore[arg-type]
    (lambda: Differential(4, 8, layer=float("nan")), "layer must be a whole number, got nan"),  # type: ignore[arg-type]
    (lambda: Softmax(4, 8, dropout="0.1"), "dropout must be a number, got '0.1'"),  # type: ignore[arg-type]
    (lambda: SwinBias(4, grid=(2.5, 2)), "SwinBias needs grid=(rows, columns)"),  # type: ignore[arg-type]
    (lambda: MixtureOfExperts(8, num_experts=4, top_k=1.5), "top_k must be a whole number, got 1.5"),  # type: ignore[arg-type]
    (lambda: FeedForward(8, 0), "hidden_dim must be at least 1, got 0"),
    (lambda: Softmax(4, 8).init_state(2, -1), "max_len must be at least 0, got -1"),
    (lambda: MultiheadAttention(64, 4, position=Shaw(16)).init_state(2, -1), "max_len must be at least 0, got -1"),
    (lambda: MultiheadLatentAttention(64, 4).init_state(-2, 1), "batch_size must be at least 0, got -2"),
]


@pytest.mark.parametrize(("make_it", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused_by_its_name(make_it: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_it()


def test_inputs_are_of_one_kind_with_the_weights(random_qkv: Draw) -> None:
    """Both kinds are named, in whole calls and in steps; autocast brings them together itself."""
    attn, x = MultiheadAttention(8, 2).eval(), torch.randn(2, 5, 8)
    for call in (
        attn,
        lambda x: attn(torch.randn(2, 5, 8), x),
        lambda x: attn.step(x, attn.init_state(2, 5)),
        attn.memory,
    ):
        with pytest.raises(ValueError, match=r"must be torch.float32, as the weights are; got torch.float64"):
            call(x.double())
        with pytest.raises(ValueError, match="must be of floating-point numbers, got torch.int64"):
            call(x.long())
    q, k, v = random_qkv(5, 5)
    with pytest.raises(
        ValueError, match=r"of one floating-point type; got torch.float32, torch.float64, torch.float32"
    ):
        Softmax(2, 4)(q, k.double(), v)
    with torch.autocast("cpu", torch.bfloat16):
        assert attn(x, x.bfloat16()).dtype == torch.bfloat16
        assert Softmax(2, 4)(q, k.bfloat16(), v).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "position", [Rotary(4), Shaw(4), RelativeBias(2)], ids=lambda position: type(position).__name__
)
@pytest.mark.parametrize("places", ["a", [0, 1, 2]])
def test_places_are_a_tensor(position: Rotary | Shaw | RelativeBias, places: object) -> None:
    with pytest.raises(ValueError, match="positions must be a tensor of numbers, got (str|list)"):
        MultiheadAttention(8, 2, position=position)(torch.randn(1, 3, 8), positions=places)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_checks_hold_in_a_compiled_and_in_an_exported_attention() -> None:
    """They read no numbers of a tensor, so a length stays free."""
    attn, x = MultiheadAttention(8, 2).eval(), torch.randn(2, 5, 8)
    compiled = torch.compile(attn, backend="eager", fullgraph=True, dynamic=True)
    assert compiled(x).shape == (2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x.bfloat16()).dtype == torch.bfloat16
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    exported = torch.export.export(attn, (x,), dynamic_shapes=(free,))
    assert exported.module()(torch.randn(3, 9, 8)).shape == (3, 9, 8)


def test_the_map_of_no_keys_has_no_columns() -> None:
    nothing = torch.randn(1, 2, 0, 4)
    assert attention_map(Softmax(2, 4), nothing, nothing).shape == (1, 2, 0, 0)
    assert attention_map(Softmax(2, 4), torch.randn(1, 2, 3, 4), nothing).shape == (1, 2, 3, 0)


def test_a_mask_in_the_place_of_a_context() -> None:
    """What is easily written is told what it would have been."""
    with pytest.raises(ValueError, match=r"context must be a tensor, got Mask; a mask is given as mask=\.\.\."):
        MultiheadAttention(8, 2)(torch.randn(1, 5, 8), Mask(causal=True))  # type: ignore[arg-type]
