"""A window with global tokens: the pattern counted by hand, dense attention under it, padding, steps, memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, OffsetBias, Softmax, attention_map
from attnzoo.catalogue import construct
from attnzoo.mechanisms.global_local import GlobalLocal
from attnzoo.mechanisms.local import Local

Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


def by_hand(window: int, count: int, length: int, causal: bool) -> Tensor:
    """The pattern [T, T] without random keys, one pair after the other."""
    rows = []
    for p in range(length):
        if causal:
            rows.append([j <= p and (p - j < window or j < count) for j in range(length)])
        else:
            rows.append([abs(p - j) <= (window - 1) // 2 or j < count or p < count for j in range(length)])
    return torch.tensor(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "count"), [(1, 0), (1, 1), (3, 2), (5, 1), (9, 4), (4, 3), (41, 2), (3, 30)])
def test_c1_c2_patterns_by_brute_force(window: int, count: int, causal: bool) -> None:
    """C1, C2: for every T up to 24 the pattern, and what really runs, lets through what counting by hand does."""
    if window % 2 == 0 and not causal:
        return
    attn = GlobalLocal(1, 4, window=window, num_global=count)
    for length in range(1, 25):
        expected = by_hand(window, count, length, causal)
        assert torch.equal(attn.pattern(length, length, causal), expected)
        # Equal scores: the output is the mean of the visible keys, so each of them counts once.
        zero, v = torch.zeros(1, 1, length, 4), torch.randn(1, 1, length, 4)
        share = expected.double() / expected.sum(-1, keepdim=True)
        close(attn(zero, zero, v, Mask(causal=causal)), share @ v.double())


@pytest.mark.parametrize("causal", [False, True])
def test_c1_random_keys_by_brute_force(causal: bool) -> None:
    """C1, C2: the window, the globals, and one key from each third of what lies between, the same for 32 places."""
    attn = GlobalLocal(2, 4, window=7, num_global=2, num_random=3)
    pattern = attn.pattern(150, 150, causal)
    named = by_hand(7, 2, 150, causal)
    assert not (named & ~pattern).any()
    for head in range(2):
        for p in range(0 if causal else 2, 150):
            between = list(range(2, p // 32 * 32 - 6))
            drawn = (pattern[head, p] & ~named[p]).nonzero()[:, 0].tolist()
            thirds = [between[len(between) * n // 3 : len(between) * (n + 1) // 3] for n in range(3)]
            assert len(drawn) == sum(len(third) > 0 for third in thirds)
            assert all(sum(j in third for j in drawn) == (len(third) > 0) for third in thirds)
            if p % 32:
                assert pattern[head, p - 1][drawn].all()
    q, k, v = (torch.randn(2, 2, 150, 4) for _ in range(3))
    close(attn(q, k, v, Mask(causal=causal)), Softmax(2, 4)(q, k, v, Mask(pair_keep=pattern[None])))


VARIANTS = [
    GlobalLocal(2, 4, window=3, num_global=2),
    GlobalLocal(2, 4, window=3, num_global=1, num_random=2),
    GlobalLocal(2, 4, window=64 + 1, num_global=5),
]


@pytest.mark.parametrize(("queries", "keys"), [(63, 63), (64, 64), (65, 65), (130, 130), (130, 70), (70, 130), (9, 2)])
@pytest.mark.parametrize("attn", [*VARIANTS, GlobalLocal(2, 4, window=9, num_global=0)], ids=str)
def test_e02_b5_lengths_masks_and_biases(attn: GlobalLocal, queries: int, keys: int, random_qkv: Draw) -> None:
    """E02, B5: values and gradients of dense attention under the same pattern, with pairs and every form of bias."""
    q, k, v = random_qkv(queries, keys, groups=1, value=3)
    pairs = torch.rand(2, 1, queries, keys) < 0.9
    offsets = torch.randn(2, queries + keys - 1, requires_grad=True)
    dense = torch.randn(queries, keys, requires_grad=True)
    for causal in (False, True):
        pattern = attn.pattern(queries, keys, causal)
        for bias in (None, dense, OffsetBias(offsets)):
            leaves = [q, k, v, *([] if bias is None else [bias.values if isinstance(bias, OffsetBias) else bias])]
            results = []
            for module, keep in ((attn, pairs), (Softmax(2, 4), pairs & pattern)):
                out = module(q, k, v, Mask(causal=causal, pair_keep=keep), bias)
                results.append((out, torch.autograd.grad(out.square().sum(), leaves)))
            close(results[0][0], results[1][0])
            for ours, theirs in zip(results[0][1], results[1][1], strict=True):
                close(ours, theirs, 2e-5)


def test_global_tokens_see_everything_and_are_seen_by_all(random_qkv: Draw) -> None:
    """Rows and columns of the first tokens are whole; causal, the rows end at the diagonal."""
    attn = GlobalLocal(2, 4, window=3, num_global=2)
    q, k, _ = (x.detach() for x in random_qkv(50, 50))
    for causal in (False, True):
        weights = attention_map(attn, q, k, Mask(causal=causal))
        seen = torch.ones(50, 50).tril().bool() if causal else torch.ones(50, 50).bool()
        assert torch.equal(weights[0, 0, :2] > 0, seen[:2])
        assert torch.equal(weights[0, 0, :, :2] > 0, seen[:, :2])
        assert not weights[0, 0, 30, 2:25].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attn", VARIANTS, ids=str)
def test_e2_padding_is_never_global(attn: GlobalLocal, causal: bool, random_qkv: Draw) -> None:
    """E2: the first *real* tokens are; padding left, right and in holes gives what cropping gives, fewer than g too."""
    q, k, v = random_qkv(70, 70, batch=4)
    keep = torch.ones(4, 70, dtype=torch.bool)
    keep[0, :5] = False
    keep[1, 50:] = False
    keep[2, [0, 2, 3, 40, 41, 69]] = False
    keep[3] = torch.arange(70) == 33
    out = attn(q, k, v, Mask(causal=causal, key_keep=keep))
    for row in range(4):
        own = keep[row].nonzero()[:, 0]
        close(out[row : row + 1, :, own], attn(*(x[row : row + 1, :, own] for x in (q, k, v)), Mask(causal=causal)))
    weights = attention_map(attn, q, k, Mask(causal=causal, key_keep=keep))
    assert not weights[0, :, :, :5].any()
    assert (weights[0, :, 69, 5] > 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attn", VARIANTS, ids=str)
def test_packed_sequences_have_global_tokens_of_their_own(attn: GlobalLocal, causal: bool, random_qkv: Draw) -> None:
    """Values and gradients of a packed row are those of its sequences, one of them shorter than g."""
    q, k, v = random_qkv(90, 90, batch=1, groups=1, value=3)
    segments = torch.tensor([[7] * 30 + [0] * 1 + [3] * 59])
    keep = torch.ones(1, 90, dtype=torch.bool)
    keep[0, [0, 1, 12, 40, 89]] = False
    bias = torch.randn(1, 2, 90, 90)
    pairs = torch.rand(90, 90) < 0.9
    out = attn(q, k, v, Mask(causal, keep, pairs, segments), bias)
    total = torch.zeros(())
    for segment in (7, 0, 3):
        own = (keep & (segments == segment))[0].nonzero()[:, 0]
        mask = Mask(causal=causal, pair_keep=pairs[own][:, own])
        alone = attn(*(x[:, :, own] for x in (q, k, v)), mask, bias[:, :, own][..., own])
        close(out[:, :, own], alone)
        total = total + alone.square().sum()
    ours = torch.autograd.grad((out * keep[:, None, :, None]).square().sum(), (q, k, v))
    for a, b in zip(ours, torch.autograd.grad(total, (q, k, v)), strict=True):
        close(a, b, 2e-5)


def test_packed_global_tokens_drop_weights_in_training(random_qkv: Draw) -> None:
    """Packed rows have a path of their own for global tokens, in which dropout acts, and only in training."""
    q, k, v = random_qkv(40, 40)
    mask = Mask(segments=torch.arange(40).expand(2, 40) // 15)
    attn = GlobalLocal(2, 4, window=3, num_global=4, dropout=0.5)
    still = attn.eval()(q, k, v, mask)
    assert torch.equal(still, attn(q, k, v, mask))
    assert not torch.equal(still[:, :, :4], attn.train()(q, k, v, mask)[:, :, :4])


def test_a1_a_packed_global_token_that_a_bias_empties(random_qkv: Draw) -> None:
    """A1: -inf at every key of a global token gives 0 and finite gradients, in one sequence of a row or in many."""
    q, k, v = random_qkv(40, 40)
    bias = torch.zeros(40, 40).index_fill(0, torch.tensor([0, 16]), -torch.inf)
    attn = GlobalLocal(2, 4, window=3, num_global=2)
    for segments in (torch.zeros(2, 40).long(), torch.arange(40).expand(2, 40) // 15):
        out = attn(q, k, v, Mask(segments=segments), bias)
        assert not out[:, :, [0, 16]].any()
        assert out[:, :, [1, 15, 17]].all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), (q, k, v)))


def test_m11_groups_of_heads_with_keys_of_their_own(random_qkv: Draw) -> None:
    """M11: random keys differ from head to head; query head h still reads key/value head h div (H / G)."""
    q, k, v = random_qkv(70, 70, heads=4, groups=2)
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in (k, v))
    attn = GlobalLocal(4, 4, window=3, num_global=2, num_random=1)
    for mask in (Mask(), Mask(causal=True), Mask(segments=torch.arange(70).expand(2, 70) // 40)):
        close(attn(q, k, v, mask), attn(q, k2, v2, mask))


@pytest.mark.parametrize("attn", VARIANTS, ids=str)
def test_b3_left_padded_decoding_equals_one_pass_and_the_unpadded_row(attn: GlobalLocal, random_qkv: Draw) -> None:
    """B3: chunks of every size, beside a row that has no padding."""
    q, k, v = (x.detach() for x in random_qkv(70, 70, groups=1))
    keep = torch.ones(2, 70, dtype=torch.bool)
    keep[0, :13] = False
    whole = attn(q, k, v, Mask(causal=True, key_keep=keep))
    close(whole[:1, :, 13:], attn(*(x[:1, :, 13:] for x in (q, k, v)), Mask(causal=True)))
    for chunk in (1, 7, 33):
        state = attn.init_state(2, 70, num_kv_heads=1)
        parts = []
        for start in range(0, 70, chunk):
            part = slice(start, start + chunk)
            out, state = attn.step(*(x[:, :, part] for x in (q, k, v)), state, Mask(key_keep=keep[:, part]))
            parts.append(out)
        close(torch.cat(parts, 2), whole)


def test_random_keys_are_saved_and_depend_on_nothing_else() -> None:
    """Not on the global generator, not on the length; on the seed, the layer, the head; and they travel along."""

    def made(**options: Any) -> GlobalLocal:
        return GlobalLocal(2, 4, num_random=2, **options)

    torch.manual_seed(1)
    first = made(seed=3, layer=1)
    torch.manual_seed(2)
    expected = first.pattern(200, 200, False)
    assert torch.equal(expected, made(seed=3, layer=1).pattern(200, 200, False))
    for other in (made(seed=4, layer=1), made(seed=3, layer=2)):
        assert not torch.equal(expected, other.pattern(200, 200, False))
        other.load_state_dict(first.state_dict())
        assert torch.equal(expected, other.pattern(200, 200, False))
    assert not torch.equal(expected[0], expected[1])
    assert torch.equal(expected[:, :77, :77], first.pattern(77, 77, False))
    assert not GlobalLocal(2, 4).state_dict()


def test_without_global_tokens_it_is_a_window(random_qkv: Draw) -> None:
    """g = 0 and r = 0 is Local."""
    q, k, v = random_qkv(45, 45)
    for causal in (False, True):
        ours = GlobalLocal(2, 4, window=5, num_global=0)(q, k, v, Mask(causal=causal))
        close(ours, Local(2, 4, window=5)(q, k, v, Mask(causal=causal)))


def test_the_tokens_before_the_grid_are_global() -> None:
    """A class token and registers, where the site has them; one token where it has none or does not say."""
    for told, expected in ((None, 1), (0, 1), (1, 1), (5, 5)):
        made = construct(GlobalLocal, 2, 4, prefix_tokens=told)
        assert isinstance(made, GlobalLocal)
        assert made.num_global == expected
    assert GlobalLocal(2, 4, num_global=0, prefix_tokens=5).num_global == 0


def test_defaults_leave_out_half_of_the_pairs() -> None:
    """At T = 64 the default sees half of the pairs at most, and at least itself."""
    for causal in (False, True):
        pattern = GlobalLocal(1, 4).pattern(64, 64, causal)
        assert pattern.float().mean() <= 0.5
        assert pattern.diagonal().all()


def test_options_that_make_no_sense_are_refused(random_qkv: Draw) -> None:
    """By class, option, what came and what is allowed; an even window at construction where it can be known."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"window": 0}, r"GlobalLocal: window must be at least 1, got 0"),
        ({"num_global": -1}, r"GlobalLocal: num_global must be at least 0, got -1"),
        ({"num_random": -1}, r"GlobalLocal: num_random must be at least 0, got -1"),
        ({"backend": "cuda"}, r"GlobalLocal: backend must be one of \('blocks', 'flex'\), got 'cuda'"),
        ({"window": 8, "causal": False}, r"GlobalLocal: window=8 is even.*take 7 or 9"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            GlobalLocal(2, 4, **options)
    attn = GlobalLocal(2, 4, window=8)
    attn(*random_qkv(9, 9), Mask(causal=True))
    with pytest.raises(ValueError, match=r"window=8 is even"):
        attn(*random_qkv(9, 9))


@pytest.mark.parametrize("extra", ["nothing", "padding", "segments", "offset bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_e08_linear_memory(causal: bool, extra: str, random_qkv: Draw) -> None:
    """E08: twice the length makes nothing more than twice as large, and no tensor of T x S."""
    attn = GlobalLocal(1, 4, window=9, num_global=2, num_random=1)
    peaks = []
    for length in (1024, 2048):
        q, k, v = random_qkv(length, length, batch=1, heads=1, groups=1)
        mask = Mask(
            causal=causal,
            key_keep=torch.arange(length)[None] > 5 if extra == "padding" else None,
            segments=torch.arange(length)[None] // 700 if extra == "segments" else None,
        )
        bias = OffsetBias(torch.zeros(1, 2 * length - 1, requires_grad=True)) if extra == "offset bias" else None
        with Made() as seen:
            attn(q, k, v, mask, bias).sum().backward()
        peaks.append(seen.elements)
    assert peaks[1] <= 2.1 * peaks[0]
    assert peaks[1] <= 100 * 2048


def test_less_window_is_less_work(random_qkv: Draw) -> None:
    """A masked dense matrix would gain nothing; a window wider than the sequence costs the sequence."""
    q, k, v = (x.detach() for x in random_qkv(1024, 1024, batch=1))
    work = []
    for window in (9, 129, 1025, 10_000_001):
        attn = GlobalLocal(2, 4, window=window)
        with Made() as seen:
            attn(q, k, v)
        work.append(seen.total)
    assert 3 * work[0] < work[1]
    assert 3 * work[1] < work[2]
    assert work[3] < 2 * work[2]
