"""Mixture of block attention against its definition, and against dense attention where the two are one."""

import math

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, MultiheadAttention, OffsetBias, Softmax, attention_map, check_attention
from attnzoo.mechanisms.moba import MoBA
from attnzoo.positions import Rotary
from attnzoo.reference.selected import moba as formula


def chosen_keys(attn: MoBA, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Bool [B, H, T, S]: the visible keys of the blocks that each query looks into, by the words of the header."""
    batch, heads, queries, _ = q.shape
    length, size = k.shape[2], attn.block_size
    keep = torch.ones(batch, length, dtype=torch.bool) if mask.key_keep is None else mask.key_keep
    seen = torch.zeros(batch, heads, queries, length, dtype=torch.bool)
    for b in range(batch):
        real = keep[b].nonzero()[:, 0]
        for h in range(heads if len(real) else 0):
            keys = k[b, h * k.shape[1] // heads, real].detach().double()
            for i in range(queries):
                place = i + length - queries
                own = max(int((real <= place).sum()) - 1, 0) // size
                last = own if mask.causal else (len(real) - 1) // size
                worth = {c: q[b, h, i].double() @ keys[c * size : (c + 1) * size].mean(0) for c in range(last + 1)}
                best = sorted(worth, key=lambda c: (c != own, -worth[c]))[: attn.top_k]
                for c in best:
                    seen[b, h, i, real[c * size : (c + 1) * size]] = True
                if mask.causal:
                    seen[b, h, i, max(place + 1, 0) :] = False
    return seen


def brute(attn: MoBA, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Tensor | None = None) -> Tensor:
    mask = mask or Mask()
    seen = chosen_keys(attn, q, k, mask)
    k, v = (x.detach().double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.detach().double() @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.detach().double()
    seen = seen & (scores > -math.inf)
    return scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0) @ v


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=1e-5)


def qkv(queries: int, keys: int, batch: int = 2, heads: int = 2, groups: int = 2, width: int = 4) -> list[Tensor]:
    sizes = (heads, queries, width), (groups, keys, width), (groups, keys, 3)
    return [torch.randn(batch, *size) for size in sizes]


def places(*values: float) -> Tensor:
    """[1, 1, n, 1]."""
    return torch.tensor(values, dtype=torch.float32)[None, None, :, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "top_k"), [(1, 2), (3, 2), (4, 3), (64, 1)])
def test_d2_and_e02_every_length_equals_the_definition(causal: bool, size: int, top_k: int) -> None:
    """D2, E02: T from 1 to 40; the last block may be short, the only one too."""
    attn = MoBA(1, 2, block_size=size, top_k=top_k)
    for length in range(1, 41):
        q, k, v = qkv(length, length, 1, 1, 1, 2)
        close(attn(q, k, v, Mask(causal=causal)), brute(attn, q, k, v, Mask(causal=causal)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (1, 13), (5, 13), (9, 4), (2, 1)])
def test_sizes_masks_groups_and_bias_equal_the_definition(causal: bool, queries: int, keys: int) -> None:
    """T != S stands at the end of the keys; padding has holes and an empty row; terms may be -inf."""
    attn = MoBA(4, 4, block_size=3, top_k=2)
    q, k, v = qkv(queries, keys, 3, 4)
    bias = torch.randn(3, 4, queries, keys)
    bias[torch.rand(bias.shape) < 0.2] = -math.inf
    keep = torch.rand(3, keys) < 0.7
    keep[2] = False
    for mask in (Mask(causal), Mask(causal, key_keep=keep)):
        close(attn(q, k, v, mask, bias), brute(attn, q, k, v, mask, bias))


def test_a_bias_by_offset_equals_the_dense_one() -> None:
    attn, bias = MoBA(2, 4, block_size=2, top_k=2), OffsetBias(torch.randn(2, 17))
    q, k, v = qkv(7, 11)
    keep = torch.rand(2, 11) < 0.7
    for mask in (Mask(), Mask(True, key_keep=keep)):
        close(attn(q, k, v, mask, bias), brute(attn, q, k, v, mask, bias.dense(7)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(21, 21), (6, 21), (21, 6)])
def test_dense_attention_when_all_blocks_are_chosen(causal: bool, queries: int, keys: int) -> None:
    """top_k * block_size >= S: softmax over everything, padding and gradients included."""
    keep = torch.rand(2, keys) < 0.7
    for mask in (Mask(causal), Mask(causal, key_keep=keep)):
        results = []
        inputs = qkv(queries, keys, groups=1)
        for attn in (MoBA(2, 4, block_size=4, top_k=6), Softmax(2, 4)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = attn(*leaves, mask)
            out.square().sum().backward()
            results.append([out.detach(), *(x.grad for x in leaves)])
        for ours, dense in zip(*results, strict=True):
            close(ours, dense)


def test_the_best_blocks_by_hand() -> None:
    """Blocks of two with means 1, -1, 3, 0 and keys of the last one in front of it: causal, then both ways."""
    k = places(0, 2, -1, -1, 3, 3, 0, 0)
    attn = MoBA(1, 1, block_size=2, top_k=2)

    def seen(query: float, place: int, causal: bool) -> list[int]:
        q = torch.zeros(1, 1, 8, 1)
        q[:, :, place] = query
        return (attention_map(attn, q, k, Mask(causal=causal))[0, 0, place] > 0).nonzero()[:, 0].tolist()

    assert seen(1.0, 7, causal=True) == [4, 5, 6, 7]
    assert seen(-1.0, 7, causal=True) == [2, 3, 6, 7]
    assert seen(1.0, 3, causal=True) == [0, 1, 2, 3]  # block 2 lies ahead
    assert seen(1.0, 4, causal=True) == [0, 1, 4]  # key 5 of the own block too
    assert seen(1.0, 1, causal=True) == [0, 1]
    assert seen(1.0, 1, causal=False) == [0, 1, 4, 5]
    assert seen(-1.0, 7, causal=False) == [2, 3, 6, 7]


@pytest.mark.parametrize("causal", [False, True])
def test_the_own_block_is_always_in(causal: bool) -> None:
    """Queries that dislike their own block most see it nevertheless, and see nothing else with top_k = 1."""
    k = torch.randn(1, 1, 12, 4)
    q = -k.unflatten(2, (3, 4)).mean(3).repeat_interleave(4, 2)
    own = torch.arange(12) // 4
    visible = own[:, None] == own
    if causal:
        visible &= torch.ones(12, 12).tril().bool()
    for top_k in (1, 2):
        seen = attention_map(MoBA(1, 4, block_size=4, top_k=top_k), q, k, Mask(causal=causal))[0, 0] > 0
        assert seen[visible].all()
        assert top_k > 1 or not seen[~visible].any()


def test_a_short_last_block_has_the_mean_of_its_own_keys() -> None:
    """Block 2 holds one key, 1.0: it wins over a block whose mean is 0.5, which a sum over its size would hide."""
    k, q = places(0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1.0), torch.ones(1, 1, 9, 1)
    seen = attention_map(MoBA(1, 1, block_size=4, top_k=2), q, k)[0, 0, 0] > 0
    assert seen.tolist() == [True] * 4 + [False] * 4 + [True]


def test_of_equal_blocks_the_earlier_one_is_taken() -> None:
    """In one pass and in steps alike."""
    attn, x, v = MoBA(1, 2, block_size=2, top_k=2), torch.ones(1, 1, 12, 2), torch.randn(1, 1, 12, 3)
    whole = attn(x, x, v, Mask(causal=True))
    close(whole[0, 0, 11], v[0, 0, [0, 1, 10, 11]].mean(0))
    state = attn.init_state(1, 12, value_dim=3)
    for t in range(12):
        part = slice(t, t + 1)
        out, state = attn.step(x[:, :, part], x[:, :, part], v[:, :, part], state)
        close(out, whole[:, :, part])


def test_a_bias_does_not_choose() -> None:
    """Terms in favour of a block that was not chosen change nothing; within those chosen they count."""
    attn = MoBA(1, 1, block_size=2, top_k=2)
    q, k, v = torch.ones(1, 1, 6, 1), places(3, 3, 0, 0, 1, 1), torch.randn(1, 1, 6, 2)
    bias = torch.zeros(6, 6)
    bias[5, 2:4] = 50
    close(attn(q, k, v, None, bias)[:, :, 5], attn(q, k, v)[:, :, 5])
    bias[5, 0] = 50
    close(attn(q, k, v, None, bias)[0, 0, 5], v[0, 0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_e2_padded_equals_cropped(causal: bool) -> None:
    """E2, J3: rows of 20, 13 and 6 real tokens, left, right and with holes, give what each gives alone."""
    attn = MoBA(2, 4, block_size=3, top_k=2)
    q, k, v = qkv(20, 20, 3)
    keep = torch.ones(3, 20, dtype=torch.bool)
    keep[1, :7] = False
    keep[2, torch.randperm(20)[:14]] = False
    out = attn(q, k, v, Mask(causal=causal, key_keep=keep))
    for b in range(3):
        alone = [x[b : b + 1, :, keep[b]] for x in (q, k, v)]
        close(out[b : b + 1, :, keep[b]], attn(*alone, Mask(causal=causal)))


def test_m03_the_future_is_hidden() -> None:
    """M03: token j, made huge, moves no output before j by one bit, and moves its own."""
    attn = MoBA(2, 4, block_size=3, top_k=2)
    q, k, v = qkv(20, 20)
    clean = attn(q, k, v, Mask(causal=True))
    for j in range(20):
        other, values = k.clone(), v.clone()
        other[:, :, j], values[:, :, j] = 1e30, 1e30
        moved = attn(q, other, values, Mask(causal=True)) != clean
        assert not moved[:, :, :j].any()
        assert moved[:, :, j].any()


def test_b1_steps_equal_one_pass_in_the_shell() -> None:
    """B1, B3: chunks of tokens with rotary positions, two groups of heads, rows padded on the left."""
    attn = MultiheadAttention(32, 4, MoBA, num_kv_heads=2, position=Rotary(8), causal=True).eval()
    x, keep = torch.randn(2, 40, 32), torch.ones(2, 40, dtype=torch.bool)
    keep[1, :11] = False
    whole = attn(x, mask=Mask(key_keep=keep))
    for chunk in (1, 7, 40):
        state, parts = attn.init_state(2, 40), []
        for start in range(0, 40, chunk):
            part = slice(start, start + chunk)
            out, state = attn.step(x[:, part], state, mask=Mask(key_keep=keep[:, part]))
            parts.append(out)
        close(torch.cat(parts, 1), whole)


def test_groups_equal_repeated_heads() -> None:
    """M11: blocks are chosen by each query head, from keys that its group shares."""
    attn = MoBA(4, 4, block_size=3, top_k=2)
    q, k, v = qkv(17, 17, heads=4)
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    close(attn(q, k, v, Mask(causal=True)), attn(q, *repeated, Mask(causal=True)))
    seen = attention_map(attn, q, k) > 0
    assert not torch.equal(seen[:, 0], seen[:, 1])


def test_at_most_half_of_the_pairs_by_default() -> None:
    """T = 64: three blocks of eight."""
    q, k, _ = qkv(64, 64, width=8)
    seen = attention_map(MoBA(2, 8), q, k) > 0
    assert (seen.sum(-1) == 24).all()


def test_a_long_needle_is_found() -> None:
    """One block of eight that answers a query is read wherever it stands, and the output is what it holds."""
    for place in range(0, 448, 64):
        k, v = 0.1 * torch.randn(1, 1, 512, 16), torch.randn(1, 1, 512, 4)
        k[:, :, place : place + 8, 0], v[:, :, place : place + 8] = 12, 1
        q = torch.zeros(1, 1, 1, 16)
        q[..., 0] = 5
        close(MoBA(1, 16)(q, k, v, Mask(causal=True)), torch.ones(1, 1, 1, 4), atol=1e-2)


@pytest.mark.parametrize("extra", ["nothing", "padding", "offset bias"])
def test_e08_memory_grows_with_the_length_alone(extra: str) -> None:
    """E08: from T=2048 to T=4096 the largest tensor, forward and back, doubles at most by a little more."""
    peaks = []
    for length in (2048, 4096):
        q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
        mask = Mask(causal=True, key_keep=torch.rand(1, length) < 0.8 if extra == "padding" else None)
        bias = OffsetBias(torch.zeros(1, 2 * length - 1, requires_grad=True)) if extra == "offset bias" else None
        with Made() as seen:
            MoBA(1, 4)(q, k, v, mask, bias).sum().backward()
        peaks.append(seen.elements)
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 4096 * 60


@pytest.mark.parametrize("option", ["block_size", "top_k"])
def test_options_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"MoBA: {option} must be at least 1, got 0"):
        MoBA(2, 4, **{option: 0})


def test_c4_what_is_denied_raises_with_a_reason() -> None:
    """C4: pairs, segments, another sequence."""
    attn, x = MoBA(2, 4), torch.randn(1, 2, 5, 4)
    for mask in (Mask(pair_keep=torch.ones(5, 5).bool()), Mask(segments=torch.zeros(1, 5).long())):
        with pytest.raises(ValueError, match=r"MoBA.*mask\.(pair_keep|segments).*its block's mean"):
            attn(x, x, x, mask)
    with pytest.raises(ValueError, match="MoBA.*memory.*own block"):
        attn.memory(x, x)


def test_the_laws_hold_for_other_options() -> None:
    """Those of which options decide; tests/laws runs all laws on the default."""
    attn = MoBA(2, 4, block_size=3, top_k=2)
    check_attention(attn, formula=formula, laws=["formula", "future", "padding", "streaming", "grouped", "linear in v"])
