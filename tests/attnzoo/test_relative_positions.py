"""Positions in the scores: T5's buckets, ALiBi, the vectors of Shaw, Swin's grid (B4, B7, A12, P10)."""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnzoo import Additive, Local, Mask, MultiheadAttention, OffsetBias, Softmax, attention_map, record, reorder
from attnzoo.positions import Alibi, Relative, RelativeBias, Rotary, ScoreTerms, Shaw, SwinBias, T5Bias
from attnzoo.traits import Traits

MADE: dict[str, Callable[[], ScoreTerms]] = {
    "offset": lambda: RelativeBias(2, 4),
    "t5": lambda: T5Bias(2, num_buckets=8, max_distance=16),
    "t5_causal": lambda: T5Bias(2, num_buckets=8, max_distance=16, bidirectional=False),
    "alibi": lambda: Alibi(2),
    "shaw": lambda: Shaw(4, max_distance=3),
    "swin": lambda: SwinBias(2, grid=(3, 4), prefix_tokens=1),
}


def made(name: str) -> ScoreTerms:
    """With tables that are not zero."""
    position = MADE[name]()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


# --- T5 ---------------------------------------------------------------------------------------------------------------

# From the formula by hand: 16 buckets a side, one each below 8; bucket 8 + k begins at 8 * 16^(k / 8) = 8 * 2^(k / 2).
BOTH_SIDES = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (11, 8), (12, 9), (15, 9),
              (16, 10), (22, 10), (23, 11), (31, 11), (32, 12), (45, 12), (46, 13), (63, 13), (64, 14), (90, 14),
              (91, 15), (127, 15), (128, 15), (1000, 15)]  # fmt: skip
# 32 buckets for the past, one each below 16; bucket 16 + k begins at 16 * 8^(k / 16) = 16 * 2^(3 k / 16).
THE_PAST = [*((n, n) for n in range(16)), (16, 16), (18, 16), (19, 17), (20, 17), (21, 18), (23, 18), (24, 19),
            (26, 19), (27, 20), (30, 20), (31, 21), (34, 21), (35, 22), (39, 22), (40, 23), (45, 23), (46, 24),
            (51, 24), (52, 25), (58, 25), (59, 26), (66, 26), (67, 27), (76, 27), (77, 28), (86, 28), (87, 29),
            (98, 29), (99, 30), (112, 30), (113, 31), (127, 31), (128, 31), (1000, 31)]  # fmt: skip


def test_the_buckets_of_t5_in_both_directions() -> None:
    """A literal list: keys before the query take buckets 0 to 15, keys after it 16 more."""
    distances, buckets = map(list, zip(*BOTH_SIDES, strict=True))
    bias = T5Bias(1)
    assert bias.bucket(-torch.tensor(distances)).tolist() == buckets
    assert bias.bucket(torch.tensor(distances[1:])).tolist() == [bucket + 16 for bucket in buckets[1:]]


def test_the_buckets_of_t5_for_the_past_alone() -> None:
    """A literal list: all 32 buckets for keys before the query; those after it fall into bucket 0."""
    distances, buckets = map(list, zip(*THE_PAST, strict=True))
    bias = T5Bias(1, bidirectional=False)
    assert bias.bucket(-torch.tensor(distances)).tolist() == buckets
    assert bias.bucket(torch.tensor([1, 5, 200])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("buckets", "distance", "both"), [(8, 16, True), (6, 9, False), (32, 17, False), (4, 2, True)])
def test_buckets_of_other_sizes_follow_the_formula(buckets: int, distance: int, both: bool) -> None:
    """Each distance against the logarithm, where it is no whole number; all buckets stay inside the table."""
    bias = T5Bias(1, num_buckets=buckets, max_distance=distance, bidirectional=both)
    side = buckets // 2 if both else buckets
    single = side // 2
    for n in range(3 * distance):
        share = 0.0 if n < single else math.log(n / single) / math.log(distance / single) * (side - single)
        if n >= single and abs(share - round(share)) < 1e-9:
            share = round(share)  # where the logarithm is exact and floating point is not
        expected = n if n < single else min(single + math.floor(share), side - 1)
        assert bias.bucket(torch.tensor(-n)).item() == expected, n


def test_p10_t5_beyond_the_trained_range() -> None:
    """P10: from 128 on all distances of a side share a term; the same distance on the other side has another."""
    bias = T5Bias(2)
    nn.init.normal_(bias.table)
    values = bias(300, 300).dense(300)[0]
    for far in (128, 129, 299):
        assert torch.equal(values[:, 0, far], values[:, 0, 128])
        assert torch.equal(values[:, 299, 299 - far], values[:, 299, 171])
    assert (values[:, 0, 128] != values[:, 299, 171]).all()
    assert (values[:, 0, 7] != values[:, 0, 128]).all()
    assert MultiheadAttention(8, 2, position=bias)(torch.randn(1, 300, 8)).isfinite().all()


def test_t5_has_no_scale_and_may_be_shared_by_all_layers() -> None:
    """T5's form is Softmax(scale=1.0) with a bias; one instance in two layers is one table."""
    bias = T5Bias(1, num_buckets=4, max_distance=4)
    nn.init.normal_(bias.table)
    layers = nn.ModuleList(MultiheadAttention(4, 1, functools.partial(Softmax, scale=1.0), position=bias) for _ in "ab")
    assert sum(p is bias.table for p in layers.parameters()) == 1
    x = torch.randn(1, 3, 4)
    attn = layers[0]
    q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    scores = q @ k.mT
    for i, j in itertools.product(range(3), range(3)):
        scores[0, i, j] += bias.table[0, bias.bucket(torch.tensor(j - i))]
    close(attn(x), attn.out_proj(scores.softmax(-1) @ v))


def test_sizes_that_make_no_buckets() -> None:
    """The message names the numbers."""
    for options in ({"num_buckets": 7}, {"num_buckets": 2}, {"num_buckets": 1, "bidirectional": False}):
        with pytest.raises(ValueError, match=rf"num_buckets must be .*got {options['num_buckets']}"):
            T5Bias(2, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_distance must be above 8.*got 8"):
        T5Bias(2, max_distance=8)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        Alibi(0)
    with pytest.raises(ValueError, match=r"grid=\(0, 3\)"):
        SwinBias(2, grid=(0, 3))
    with pytest.raises(ValueError, match="max_distance must be at least 0, got -1"):
        Shaw(4, max_distance=-1)


# --- ALiBi ------------------------------------------------------------------------------------------------------------

SLOPES = {
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
    12: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256,
         0.7071067811865476, 0.35355339059327373, 0.17677669529663687, 0.08838834764831843],
    1: [1 / 256],
}  # fmt: skip


@pytest.mark.parametrize("heads", SLOPES)
def test_the_slopes_of_alibi(heads: int) -> None:
    """Powers of two, and two series interleaved as published where H is none."""
    values = Alibi(heads)(queries=1, keys=2).values
    torch.testing.assert_close(-values[:, 0], torch.tensor(SLOPES[heads]), atol=0, rtol=1e-6)
    assert (values[:, 1] == 0).all()


def test_b7_alibi_never_rewards_the_future() -> None:
    """B7: without causal it is minus the absolute distance, on both sides alike."""
    terms = Alibi(2)(5, 5).dense(5)[0]
    for i, j in itertools.product(range(5), range(5)):
        assert terms[:, i, j].tolist() == [-abs(i - j) / 16, -abs(i - j) / 256]
    attn = MultiheadAttention(8, 2, position=Alibi(2)).eval()
    with torch.no_grad():
        attn.q_proj.weight.zero_()  # all scores equal, but for the distance
    with record(attn) as sites:
        attn(torch.randn(1, 7, 8))
    weights = sites["attention"][0].map()[0, :, 3]
    close(weights, weights.flip(-1))
    assert (weights[:, :4].diff(dim=-1) > 0).all()


def test_alibi_keeps_nothing_and_is_exact_in_half_precision() -> None:
    """P08 of what is computed: nothing in the state dict; slopes and distances are not rounded with the model."""
    position = Alibi(12)
    assert position.state_dict() == {}
    low = position.to(torch.bfloat16)(1, 1000).values
    assert low.dtype == torch.float32
    torch.testing.assert_close(low[8, 0].item(), -999 * 2**-0.5, atol=1e-3, rtol=0)
    attn = MultiheadAttention(24, 12, position=position).to(torch.bfloat16).eval()
    with record(attn) as sites:
        assert attn(torch.randn(1, 9, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16
    bias = sites["attention"][0].bias
    assert isinstance(bias, OffsetBias)
    assert bias.values.dtype == torch.bfloat16  # mechanisms get terms of the kind of q


# --- Shaw -------------------------------------------------------------------------------------------------------------


def shaw_by_loops(shaw: Shaw, q: Tensor, k: Tensor, v: Tensor, mask: Mask, offset: Tensor) -> Tensor:
    """The formula pair by pair in float64; ``offset`` [B, T, S] is p_j - p_i."""
    batch, heads, queries, width = q.shape
    share = heads // k.shape[1]
    rows = []
    for b, h, i in itertools.product(range(batch), range(heads), range(queries)):
        scores, values = [], []
        for j in range(k.shape[2]):
            if mask.causal and j > i + k.shape[2] - queries:
                continue
            if mask.key_keep is not None and not mask.key_keep[b, j]:
                continue
            far = max(-shaw.max_distance, min(shaw.max_distance, int(offset[b, i, j]))) + shaw.max_distance
            key = k[b, h // share, j].double() + shaw.key_table[far].double()
            scores.append((q[b, h, i].double() * key).sum() / width**0.5)
            values.append(v[b, h // share, j].double() + shaw.value_table[far].double())
        empty = torch.zeros(v.shape[-1], dtype=torch.float64)
        rows.append(torch.stack(scores).softmax(0) @ torch.stack(values) if scores else empty)
    return torch.stack(rows).view(batch, heads, queries, -1)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (1, 7), (7, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_shaw_is_the_double_loop(queries: int, keys: int, causal: bool) -> None:
    """Outputs and gradients, T other than S, fewer key/value heads, values of another width, padding, empty rows."""
    torch.manual_seed(0)
    shaw = Shaw(4, value_dim=3, max_distance=2)
    for table in shaw.parameters():
        nn.init.normal_(table)
    q = torch.randn(2, 4, queries, 4, requires_grad=True)
    k, v = torch.randn(2, 2, keys, 4, requires_grad=True), torch.randn(2, 2, keys, 3, requires_grad=True)
    keep = torch.ones(2, keys, dtype=torch.bool)
    keep[0, 0] = False
    offset = (torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)).expand(2, -1, -1)
    for mask in (Mask(causal=causal), Mask(causal=causal, key_keep=keep)):
        out = shaw.attend(Softmax(4, 4), q, k, v, mask, shaw.terms(q, keys, None), None)
        expected = shaw_by_loops(shaw, q, k, v, mask, offset)
        close(out.double(), expected)
        asked = [q, k, v, *shaw.parameters()]
        weigh = torch.linspace(-1, 1, out.numel()).view_as(out)
        got, right = (torch.autograd.grad((y * weigh).sum(), asked) for y in (out, expected))
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_shaw_takes_given_places_between_two_sequences() -> None:
    """Cross-attention acts by places when both are given, per row too; without them it is refused."""
    torch.manual_seed(0)
    shaw = made("shaw")
    assert isinstance(shaw, Shaw)
    attn = MultiheadAttention(8, 2, position=shaw, context_dim=5)
    x, context = torch.randn(2, 3, 8), torch.randn(2, 6, 5)
    places, others = torch.tensor([[0, 4, 5], [3, 1, 9]]), torch.arange(6)
    out = attn.attend(x, context, positions=places, context_positions=others)
    q, k, v = (
        p(y).unflatten(-1, (2, 4)).transpose(1, 2)
        for p, y in ((attn.q_proj, x), (attn.k_proj, context), (attn.v_proj, context))
    )
    close(out.double(), shaw_by_loops(shaw, q, k, v, Mask(), others - places[..., None]))
    with pytest.raises(ValueError, match="Shaw has no meaning between two sequences; give positions"):
        attn(x, context)
    with pytest.raises(ValueError, match="Shaw has no meaning on a memory"):
        attn.memory(context)


def test_the_vectors_of_the_values_see_the_dropout_of_the_weights() -> None:
    """One call of the mechanism: what a weight loses, v and rV lose alike."""
    shaw = Shaw(4, max_distance=2)
    attn = MultiheadAttention(8, 2, functools.partial(Softmax, dropout=0.5), position=shaw).train()
    with torch.no_grad():
        attn.v_proj.weight.zero_()
        attn.v_proj.bias.copy_(torch.tensor([1.0, 0, 0, 0] * 2))
        shaw.value_table[:, 1] = 1.0
    heads = attn.attend(torch.randn(2, 9, 8))
    close(heads[..., 0], heads[..., 1])
    assert heads[..., 0].std() > 0.05


def test_the_map_of_an_attention_with_shaw() -> None:
    """J2: what record() gives is the weights, the part of the keys included."""
    attn = MultiheadAttention(8, 2, position=made("shaw")).eval()
    with record(attn) as sites:
        heads = attn.attend(torch.randn(1, 5, 8))
    call = sites["attention"][0]
    weights = call.map()
    close(weights, call.heads[..., 4:])
    close(weights.sum(-1), torch.ones(1, 2, 5))
    assert heads.shape == (1, 2, 5, 4)
    bare = attention_map(attn.mechanism, call.q, call.k)
    assert not torch.allclose(weights, bare, atol=1e-3)


class _NoBias(Softmax):
    traits = Traits(bias=False)
    reasons = {"bias": "it has no scores"}


class _Bent(Softmax):
    traits = Traits(linear_in_v=False)


class _Halves(Softmax):
    qk_parts = 2


def test_what_shaw_cannot_work_with_is_refused() -> None:
    """At construction, with the reason and what could serve."""
    for kind, reason in (
        (_NoBias, "_NoBias does not take a relative bias: it has no scores"),
        (_Bent, "_Bent does not take position=Shaw: it is not linear_in_v"),
        (_Halves, "_Halves has 2 parts in each; RelativeBias serves"),
        (functools.partial(Softmax, scale=1.0), "Softmax has a scale of its own"),
        (functools.partial(Softmax, softcap=5.0), "Softmax has a softcap of its own"),
    ):
        with pytest.raises(ValueError, match=reason):
            MultiheadAttention(8, 2, kind, position=Shaw(4))
    with pytest.raises(ValueError, match=r"head_dim=8, value_dim=8, the attention has 4, 4"):
        MultiheadAttention(8, 2, position=Shaw(8))
    with pytest.raises(ValueError, match=r"value_dim=4, the attention has 4, 6"):
        MultiheadAttention(8, 2, position=Shaw(4), value_dim=6)
    attn = MultiheadAttention(8, 2, position=Shaw(4)).eval()
    with pytest.raises(ValueError, match="make it by init_state of the attention"):
        attn.step(torch.randn(1, 1, 8), attn.mechanism.init_state(1, 3))
    with pytest.raises(ValueError, match="holds 0 of max_len=2 tokens and 3 more came"):
        attn.step(torch.randn(1, 3, 8), attn.init_state(1, 2))


# --- Swin -------------------------------------------------------------------------------------------------------------


def swin_by_loops(table: Tensor, prefix: int, rows: int, columns: int) -> Tensor:
    """The terms of all tokens of a grid with tokens before it, [H, N, N]."""
    tokens = prefix + rows * columns
    terms = torch.zeros(table.shape[0], tokens, tokens)
    for i, j in itertools.product(range(tokens), range(tokens)):
        if i >= prefix and j >= prefix:
            (qr, qc), (kr, kc) = divmod(i - prefix, columns), divmod(j - prefix, columns)
            terms[:, i, j] = table[:, (kr - qr + rows - 1) * (2 * columns - 1) + kc - qc + columns - 1]
        elif j >= prefix:
            terms[:, i, j] = table[:, -3]
        elif i >= prefix:
            terms[:, i, j] = table[:, -2]
        else:
            terms[:, i, j] = table[:, -1]
    return terms


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_swin_is_the_double_loop(prefix: int) -> None:
    """A grid of 3 x 4, tokens before it, and the last few queries alone."""
    position = SwinBias(2, grid=(3, 4), prefix_tokens=prefix)
    assert position.table.shape == (2, 5 * 7 + (3 if prefix else 0))
    nn.init.normal_(position.table)
    tokens = prefix + 12
    expected = swin_by_loops(position.table, prefix, 3, 4)
    assert torch.equal(position(tokens, tokens)[0], expected)
    assert torch.equal(position(2, tokens - 3)[0], expected[:, tokens - 5 : tokens - 3, : tokens - 3])
    attn = MultiheadAttention(8, 2, position=position)
    plain = MultiheadAttention(8, 2)
    plain.load_state_dict({name: value for name, value in attn.state_dict().items() if "position" not in name})
    x = torch.randn(2, tokens, 8)
    close(attn(x), plain(x, bias=expected[None]))
    more = torch.randn(2, 2, tokens, tokens)
    close(attn(x, bias=more), plain(x, bias=expected[None] + more))
    both = OffsetBias(torch.randn(2, 2 * tokens - 1))
    close(attn(x, bias=both), plain(x, bias=expected[None] + both.dense(tokens)))


def test_a_grid_that_the_tokens_do_not_fill_or_that_is_not_one() -> None:
    """More tokens than places, places by hand, segments and a context are refused, each with its reason."""
    attn = MultiheadAttention(8, 2, position=SwinBias(2, grid=(3, 4), prefix_tokens=1))
    with pytest.raises(ValueError, match=r"1 \+ 3 x 4 = 13 tokens.*T=14, S=14"):
        attn(torch.randn(1, 14, 8))
    x = torch.randn(1, 6, 8)
    with pytest.raises(ValueError, match=r"positions were given, but position=SwinBias does not read them"):
        attn(x, positions=torch.arange(6))
    with pytest.raises(ValueError, match="SwinBias goes by the slots of one grid and cannot tell segments apart"):
        attn(x, mask=Mask(segments=torch.zeros(1, 6, dtype=torch.long)))
    with pytest.raises(ValueError, match="SwinBias has no meaning between two sequences; build"):
        attn(x, x)


# --- All of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MADE if name != "swin"])
def test_b4_given_places_act_as_those_counted(name: str) -> None:
    """B4: places by hand, per row too; moved all alike they change nothing; stretched they do."""
    attn = MultiheadAttention(8, 2, position=made(name)).eval()
    x = torch.randn(2, 5, 8)
    expected = attn(x)
    close(attn(x, positions=torch.arange(5)), expected)
    close(attn(x, positions=torch.stack([torch.arange(5), torch.arange(5) + 40])), expected)
    assert not torch.allclose(attn(x, positions=torch.arange(5) * 2), expected, atol=1e-4)
    order = torch.tensor([3, 0, 4, 1, 2])
    close(attn(x[:, order], positions=order), expected[:, order])
    with pytest.raises(ValueError, match=r"positions must be \(5,\) or \(2, 5\)"):
        attn(x, positions=torch.arange(4))


@pytest.mark.parametrize("name", ["offset", "t5", "alibi"])
def test_b4_given_places_between_two_sequences(name: str) -> None:
    """Cross-attention takes relative terms only with places for both, and then equals the dense bias."""
    position = made(name)
    assert isinstance(position, Relative)
    attn, plain = MultiheadAttention(8, 2, position=position), MultiheadAttention(8, 2)
    plain.load_state_dict({name: value for name, value in attn.state_dict().items() if "position" not in name})
    x, context = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    places, others = torch.tensor([2, 0, 7]), torch.tensor([[0, 1, 2, 3], [9, 1, 1, 0]])
    bias = torch.stack([position.values(row - places[:, None]) for row in others])
    close(attn(x, context, positions=places, context_positions=others), plain(x, context, bias=bias))
    with pytest.raises(ValueError, match="together"):
        attn(x, context, context_positions=others)


BACKENDS = {
    "auto": Softmax,
    "math": functools.partial(Softmax, backend="math"),
    "local": functools.partial(Local, window=(20, 20)),
}


@pytest.mark.parametrize("name", MADE)
def test_a12_the_gradient_of_a_table_is_the_same_on_all_back_ends(name: str) -> None:
    """A12, B4: the same outputs and the same gradients of the tables, under every mask."""
    torch.manual_seed(0)
    x, pairs = torch.randn(2, 9, 8), torch.rand(9, 9) < 0.7
    keep = torch.rand(2, 9) < 0.7
    for mask in (Mask(), Mask(causal=True), Mask(key_keep=keep), Mask(pair_keep=pairs)):
        results = []
        position, weights = made(name), None
        for kind in BACKENDS.values():
            attn = MultiheadAttention(8, 2, kind, position=position)
            weights = attn.state_dict() if weights is None else weights
            attn.load_state_dict(weights)
            y = attn(x, mask=mask)
            tables = list(position.parameters())
            results.append([y, *(torch.autograd.grad(y.square().sum(), tables) if tables else ())])
        for other in results[1:]:
            for a, b in zip(other, results[0], strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        assert all(gradient.abs().max() > 1e-3 for gradient in results[0][1:])


@pytest.mark.parametrize("shape", [(1, 2, 6, 6), (2, 2, 6, 6), (6, 6)])
def test_b4_a_given_bias_beside_each_encoding(shape: tuple[int, ...]) -> None:
    """B4: (1, H, T, S), (B, H, T, S) and (T, S) are added to the terms, whatever works between the heads."""
    bias, x = torch.randn(shape), torch.randn(2, 6, 8)
    for kind in (*BACKENDS.values(), Additive):
        for name in ("t5", "alibi", "swin"):
            position = made(name)
            attn, plain = MultiheadAttention(8, 2, kind, position=position), MultiheadAttention(8, 2, kind)
            plain.load_state_dict({key: value for key, value in attn.state_dict().items() if "position" not in key})
            terms = position(6, 6)
            dense = terms.dense(6) if isinstance(terms, OffsetBias) else terms
            close(attn(x, bias=bias), plain(x, bias=dense + bias))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("between", [Softmax, functools.partial(Local, window=4)], ids=["Softmax", "Local"])
def test_b1_any_chunking_equals_one_pass(name: str, between: Callable[..., Softmax | Local]) -> None:
    """B1: with every encoding, fewer key/value heads, and room to spare."""
    attn = MultiheadAttention(8, 2, between, position=made(name), causal=True, num_kv_heads=1).eval()
    x = torch.randn(2, 9, 8)
    expected = attn(x)
    for chunks in ([1] * 9, [4, 1, 1, 3], [9]):
        state, parts = attn.init_state(2, 12), []
        for part in x.split(chunks, dim=1):
            out, state = attn.step(part, state)
            parts.append(out)
        close(torch.cat(parts, 1), expected)
        assert state.used == 9


@pytest.mark.parametrize("name", ["t5_causal", "alibi", "shaw"])
def test_b3_left_padded_decoding_equals_unpadded(name: str) -> None:
    """B3: a row padded with NaN on the left, and rows picked anew in the middle."""
    attn = MultiheadAttention(8, 2, position=made(name), causal=True).eval()
    x = torch.randn(2, 6, 8)
    alone = attn(x[1:, 2:])
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, :2] = False
    padded = x.masked_fill(~keep[..., None], torch.nan)
    first, state = attn.step(padded[:, :3], attn.init_state(2, 6), mask=Mask(key_keep=keep[:, :3]))
    assert state.length.tolist() == [3, 1]
    assert not state.fixed
    rows = torch.tensor([1, 1, 0])
    last, state = attn.step(x[rows, 3:], reorder(state, rows))
    close(first[1:, 2:], alone[:, :1])
    close(last[:2], alone[:, 1:].expand(2, -1, -1))
    close(last[2:], attn(x[:1])[:, 3:])


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a15_one_graph_with_each_encoding(name: str) -> None:
    """A15: compiled as a whole, the same numbers; places by hand too."""
    torch._dynamo.reset()
    attn = MultiheadAttention(8, 2, position=made(name)).eval()
    compiled = torch.compile(attn, backend="eager", fullgraph=True)
    x = torch.randn(2, 7, 8)
    mask = Mask(causal=True, key_keep=torch.rand(2, 7) < 0.7)
    close(compiled(x, mask=mask), attn(x, mask=mask))
    if name != "swin":
        close(compiled(x, positions=torch.arange(7) * 2), attn(x, positions=torch.arange(7) * 2))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_m07_every_precision(name: str, dtype: torch.dtype) -> None:
    """M07: the output is of the model's own kind, and near to that in float64; T = 1 too."""
    attn = MultiheadAttention(8, 2, position=made(name)).eval()
    x = torch.randn(2, 9, 8)
    exact = attn.double()(x.double())
    low = attn.to(dtype)
    out = low(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=3e-2 if dtype != torch.float64 else 1e-6, rtol=3e-2)
    assert low(x[:, :1].to(dtype)).isfinite().all()


@pytest.mark.parametrize("name", MADE)
def test_under_autocast(name: str) -> None:
    """Tables in float32, heads in bfloat16: both meet in one kind."""
    attn = MultiheadAttention(8, 2, position=made(name))
    x = torch.randn(2, 9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = attn(x)
    torch.testing.assert_close(y.float(), attn(x), atol=5e-2, rtol=5e-2)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attn.position.parameters())


def test_an_encoding_of_ones_own() -> None:
    """A subclass of Relative with one method works in the shell, whole and by steps."""

    class Parity(Relative):
        def __init__(self, num_heads: int) -> None:
            super().__init__()
            self.num_heads = num_heads

        def values(self, offset: Tensor) -> Tensor:
            return (offset % 2).float().expand(self.num_heads, *offset.shape)

    attn, plain = MultiheadAttention(8, 2, position=Parity(2)), MultiheadAttention(8, 2)
    plain.load_state_dict(attn.state_dict())
    x = torch.randn(1, 4, 8)
    odd = torch.tensor([[0.0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]])
    close(attn(x), plain(x, bias=odd))
    close(attn(x, positions=torch.arange(4) + 1), plain(x, bias=odd))


@pytest.mark.parametrize("layout", ["neighbours", "halves"])
def test_rotary_turns_each_part_by_itself(layout: str) -> None:
    """Two parts of a head of width 8 are turned as two heads of width 4; one position fits every mechanism."""
    rotary, part = Rotary(8, layout=layout), Rotary(4, layout=layout)  # type: ignore[arg-type]
    x, places = torch.randn(2, 3, 5, 8), torch.tensor([0, 3, 4, 5, 9])
    expected = torch.cat([part(x[..., :4], places), part(x[..., 4:], places)], -1)
    assert torch.equal(rotary(x, places, parts=2), expected)
    attn = MultiheadAttention(16, 2, _Halves, position=rotary).eval()
    with record(attn) as sites:
        attn(y := torch.randn(2, 5, 16), positions=places)
    q = attn.q_proj(y).unflatten(-1, (2, 8)).transpose(1, 2)
    assert torch.equal(sites["attention"][0].q, rotary(q, places, parts=2))
    with pytest.raises(ValueError, match=r"_Halves has 2 parts in head_dim=6.*multiple of 2 x 2"):
        MultiheadAttention(12, 2, _Halves, position=Rotary(6))
    with pytest.raises(ValueError, match="is for head_dim=4, the attention has 8"):
        MultiheadAttention(16, 2, _Halves, position=part)
    with pytest.raises(ValueError, match="is for head_dim=4, got a width of 8"):
        part(x, places)
