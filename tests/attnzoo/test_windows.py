"""Windows: Local against counting by hand, at every length, and against dense attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attnzoo import Local, Mask, OffsetBias, Softmax, attention_map, reorder
from attnzoo.bias import Bias
from attnzoo.state import State

Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_c1_windows_by_brute_force(causal: bool) -> None:
    """C1: every T <= 40 and W <= 12 lets through what counting on one's fingers lets through."""
    for window in range(1, 13):
        if not causal and window % 2 == 0:
            continue
        attn = Local(1, 1, window=window)
        left, right = (window - 1, 0) if causal else (window // 2, window // 2)
        for length in range(1, 41):
            offset = torch.arange(length) - torch.arange(length)[:, None]
            expected = (offset >= -left) & (offset <= right)
            pattern = attn.pattern(length, length, causal)
            assert pattern is not None
            assert torch.equal(pattern, expected)
            # Equal scores: the output is the mean of the keys in the window, so each of them counts.
            zero, v = torch.zeros(1, 1, length, 1), torch.randn(1, 1, length, 1, dtype=torch.float32)
            share = expected.float() / expected.sum(-1, keepdim=True)
            close(attn(zero, zero, v, Mask(causal=causal)), share @ v)


@pytest.mark.parametrize("window", [1, 2, 5, (3, 0), (0, 2), (4, 1), 12])
def test_c1_windows_on_rectangles(brute: Brute, window: int | tuple[int, int], random_qkv: Draw) -> None:
    """C1, E02: T below and above S, with masks and with every form of bias."""
    attn = Local(2, 4, window=window)
    causal_only = isinstance(window, int) and window % 2 == 0
    for queries, keys in [(1, 9), (3, 40), (39, 40), (40, 39), (40, 3), (9, 1)]:
        q, k, v = random_qkv(queries, keys, groups=1)
        for causal in {True, causal_only}:
            mask = Mask(causal=causal, key_keep=torch.rand(2, keys) < 0.7)
            full = mask._replace(pair_keep=torch.rand(2, 1, queries, keys) < 0.7)
            for m in (Mask(causal=causal), mask, full):
                for bias in (
                    None,
                    torch.randn(1, 2, queries, keys),
                    OffsetBias(torch.randn(2, queries + keys - 1)),
                ):
                    close(attn(q, k, v, m, bias), brute(attn, q, k, v, m, bias))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_e01_lengths_below_the_window(length: int, random_qkv: Draw) -> None:
    """E01: window 8; up to 8 tokens it is full causal attention, at 9 the last query loses key 0."""
    q, k, v = random_qkv(length, length)
    out = Local(2, 4, window=8)(q, k, v, Mask(causal=True))
    full = Softmax(2, 4)(q, k, v, Mask(causal=True))
    if length <= 8:
        close(out, full)
    else:
        close(out[:, :, :8], full[:, :, :8])
        weights = attention_map(Local(2, 4, window=8), q.detach(), k.detach(), Mask(causal=True))
        assert (weights[:, :, 8, 0] == 0).all()
        assert (weights[:, :, 8, 1:] > 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(63, 63), (64, 64), (65, 65), (130, 130), (130, 70), (70, 130)])
@pytest.mark.parametrize("window", [64, (20, 43), (63, 0)])
def test_e02_lengths_that_are_no_multiple_of_the_block(
    brute: Brute,
    queries: int,
    keys: int,
    window: int | tuple[int, int],
    random_qkv: Draw,
) -> None:
    """E02: blocks of 64; equal to dense attention under the same visible pattern."""
    attn = Local(1, 4, window=window)
    q, k, v = random_qkv(queries, keys, heads=1, groups=1)
    for mask in (Mask(causal=True), Mask(causal=True, key_keep=torch.rand(2, keys) < 0.9)):
        close(attn(q, k, v, mask), brute(attn, q, k, v, mask))
        pattern = attn.pattern(queries, keys, True)
        assert pattern is not None
        dense = Softmax(1, 4)(q, k, v, mask._replace(pair_keep=pattern))
        close(attn(q, k, v, mask), dense)


@pytest.mark.parametrize("reach", [0, 1, 31, 32, 33, 63, 64, 65, 100, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_e02_blocks_of_every_size(reach: int, causal: bool, random_qkv: Draw) -> None:
    """E02: half the band is a block, in steps of 32: equal to dense attention around each step, gradients too."""
    window = (reach, 0) if causal else (reach // 2, reach - reach // 2)
    attn = Local(2, 4, window=window)
    q, k, v = random_qkv(131, 131, batch=1, groups=1)
    pattern = attn.pattern(131, 131, causal)
    for mask in (Mask(causal), Mask(causal, key_keep=torch.rand(1, 131) < 0.8)):
        ours, dense = attn(q, k, v, mask), Softmax(2, 4)(q, k, v, mask._replace(pair_keep=pattern))
        close(ours, dense)
        for a, b in zip(
            torch.autograd.grad(ours.square().sum(), (q, k, v)),
            torch.autograd.grad(dense.square().sum(), (q, k, v)),
            strict=True,
        ):
            close(a, b)


def by_steps(
    attn: Local, state: State, sizes: list[int], qkv: tuple[Tensor, ...], mask: Mask, bias: Bias | None = None
) -> tuple[Tensor, State]:
    """Decodes in chunks of the sizes given; pairs and biases are cut as ``step`` wants them."""
    parts, start, total = [], 0, qkv[0].shape[2]
    for size in sizes:
        rows, end = slice(start, start + size), start + size
        now = Mask(
            key_keep=None if mask.key_keep is None else mask.key_keep[:, rows],
            pair_keep=None if mask.pair_keep is None else mask.pair_keep[..., rows, :end],
        )
        terms = bias
        if isinstance(bias, OffsetBias):
            terms = OffsetBias(bias.values[:, total - end : total - start + end - 1])
        elif bias is not None:
            terms = bias[..., rows, :end]
        q, k, v = (x[:, :, rows] for x in qkv)
        out, state = attn.step(q, k, v, state, now, terms)
        parts.append(out)
        start = end
    return torch.cat(parts, 2), state


@pytest.mark.parametrize("window", [1, 2, 8, (3, 5), 40])
@pytest.mark.parametrize("sizes", [[1] * 20, [20], [9, 1, 1, 6, 3], [3, 17]], ids=str)
def test_e01_decoding_in_a_ring(window: int | tuple[int, int], sizes: list[int], random_qkv: Draw) -> None:
    """E01, B1, B3: padded on the left, with pairs and with every form of bias: equal to one causal pass."""
    attn = Local(2, 4, window=window)
    qkv = tuple(x.detach() for x in random_qkv(20, 20, groups=1, value=3))
    keep = torch.ones(2, 20, dtype=torch.bool)
    keep[1, :11] = False
    pairs = torch.rand(2, 1, 20, 20) < 0.7
    for mask in (Mask(), Mask(key_keep=keep), Mask(pair_keep=pairs), Mask(key_keep=keep, pair_keep=pairs[0, 0])):
        for bias in (None, torch.randn(20, 20), torch.randn(1, 2, 20, 20), OffsetBias(torch.randn(2, 39))):
            state = attn.init_state(2, 20, num_kv_heads=1, value_dim=3)
            out, state = by_steps(attn, state, sizes, qkv, mask, bias)
            close(out, attn(*qkv, mask._replace(causal=True), bias))
            assert state.used == 20
            assert state.length.tolist() == ([20, 20] if mask.key_keep is None else [20, 9])


def numbers(state: Any) -> int:
    """What a state really holds on to."""
    return sum(x.untyped_storage().nbytes() // x.element_size() for x in state if isinstance(x, Tensor))


@pytest.mark.parametrize(("window", "left"), [(1, 0), (5, 4), ((7, 2), 7)])
def test_e01_the_state_holds_one_window(window: int | tuple[int, int], left: int, random_qkv: Draw) -> None:
    """E01: W - 1 keys after 10 tokens as after 60, however long the prefix; the room asked for costs nothing."""
    attn = Local(2, 4, window=window)
    sizes = []
    for tokens, chunk in ((10, 10), (10, 1), (60, 60), (60, 1), (60, 7)):
        q, k, v = (x.detach() for x in random_qkv(tokens, tokens, batch=3))
        state: Any = attn.init_state(3, 10**12)
        for part in zip(*(x.split(chunk, 2) for x in (q, k, v)), strict=True):
            keep = torch.ones(3, part[0].shape[2], dtype=torch.bool)
            _, state = attn.step(*part, state, Mask(key_keep=keep))
        assert state.k.shape[2] == left
        assert torch.equal(state.k, k[:, :, tokens - left :])
        assert torch.equal(state.v, v[:, :, tokens - left :])
        sizes.append(numbers(state))
    assert len(set(sizes)) == 1
    assert sizes[0] <= 3 * left * (2 * 4 + 2 * 4 + 1) + 3


def test_e01_a_window_of_padding_alone(random_qkv: Draw) -> None:
    """E01, A1: a hole wider than the window: rows inside see nothing and give 0, later ones never see beyond it."""
    attn = Local(2, 4, window=3)
    qkv = tuple(x.detach() for x in random_qkv(12, 12))
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0, 3:8] = False
    whole = attn(*qkv, Mask(True, key_keep=keep))
    assert not whole[0, :, 5:8].count_nonzero()
    out, state = by_steps(attn, attn.init_state(2, 12), [4, 1, 1, 1, 1, 1, 3], qkv, Mask(key_keep=keep))
    close(out, whole)
    assert state.length.tolist() == [7, 12]


def test_e01_the_ring_is_full_at_max_len(random_qkv: Draw) -> None:
    """The window has room for ever, the promise of init_state has not: it raises like every other state."""
    attn = Local(2, 4, window=2)
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    _, state = by_steps(attn, attn.init_state(2, 6), [5], (q[:, :, :5], k[:, :, :5], v[:, :, :5]), Mask())
    with pytest.raises(ValueError, match=r"full: it holds 5 of max_len=6 tokens and 2 more"):
        attn.step(q[:, :, :2], k[:, :, :2], v[:, :, :2], state)
    _, state = attn.step(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], state)
    with pytest.raises(ValueError, match=r"full: it holds 6 of max_len=6 tokens and 1 more"):
        attn.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)


def test_e01_rows_of_a_ring_are_picked(random_qkv: Draw) -> None:
    """Beams: rows go on as if each had been decoded alone, also those of another length."""
    attn = Local(2, 4, window=4)
    q, k, v = (x.detach() for x in random_qkv(9, 9))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, :4] = False
    _, state = by_steps(attn, attn.init_state(2, 9), [5, 3], (q[:, :, :8], k[:, :, :8], v[:, :, :8]), Mask(False, keep))
    rows = torch.tensor([1, 0, 1])
    state = reorder(state, rows)
    assert state.length.tolist() == [4, 8, 4]
    out, _ = attn.step(q[rows, :, 8:], k[rows, :, 8:], v[rows, :, 8:], state)
    close(out, attn(q, k, v, Mask(True, keep))[rows, :, 8:])


def test_windows_that_make_no_sense_are_refused(random_qkv: Draw) -> None:
    """Below one, negative, three numbers, or even without causal: by name, at construction where known."""
    for window in (0, -3, (-1, 2), (1, 2, 3), 3.0, True, "5"):
        wrong: Any = window
        with pytest.raises(ValueError, match="Local: window"):
            Local(2, 4, window=wrong)
    with pytest.raises(ValueError, match=r"window=8 is even.*7, 9"):
        Local(2, 4, window=8, causal=False)
    with pytest.raises(ValueError, match=r"window=8 is even.*7, 9"):
        Local(2, 4, window=8)(*random_qkv(9, 9))


def test_j6_work_falls_with_the_window() -> None:
    """J6: counted in multiplications; a dense matrix under a mask would gain nothing."""
    q, k, v = torch.randn(3, 1, 1, 1024, 8)
    work = []
    for window in (513, 129, 33):
        # By the kernel that is made of matrix products, which are what torch's counter knows.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            Local(1, 8, window=window)(q, k, v)
        work.append(counter.get_total_flops())
        assert work[-1] < 2 * 4 * 1024 * window * 8  # less than twice what the pattern needs
    assert work[0] > 3 * work[1] > 8 * work[2]
