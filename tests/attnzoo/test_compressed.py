"""MemoryCompressed: blocks, their kernels and their causality by hand, steps, chunks."""

import pytest
import torch
from test_mixed_keys import close, qkv, random_start
from torch import Tensor

from attnzoo import Mask, Softmax
from attnzoo.mechanisms import memory_compressed
from attnzoo.mechanisms.memory_compressed import MemoryCompressed
from attnzoo.record import attention_map
from attnzoo.state import reorder


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]


def test_compressed_by_hand() -> None:
    """Factor 2, q = k = 0, means of v = 1 2 | 4 8 | 16: what is missing in the last block counts as 0."""
    attn = MemoryCompressed(1, 1, factor=2).eval()
    zero, v = torch.zeros(1, 1, 5, 1), column(1, 2, 4, 8, 16)
    close(attn(zero, zero, v), column(*[(1.5 + 6 + 8) / 3] * 5))
    causal = attn(zero, zero, v, Mask(causal=True))
    close(causal, column(1, (1 + 2) / 2, (1.5 + 4) / 2, (1.5 + 4 + 8) / 3, (1.5 + 6 + 16) / 3))
    # No block is added where the length divides, and a block of padding alone has no weight.
    close(attn(zero[:, :, :4], zero[:, :, :4], v[:, :, :4]), column(*[(1.5 + 6) / 2] * 4))
    keep = torch.tensor([[False, True, False, False, True]])
    close(attn(zero, zero, v, Mask(key_keep=keep)), column(*[(2 + 16) / 2] * 5))


def test_compressed_kernels_by_hand() -> None:
    """The key kernel turns channels place by place, scores divide by sqrt(D), the value kernel weighs places."""
    attn = MemoryCompressed(1, 4, factor=2).eval()
    with torch.no_grad():
        attn.key_kernel.zero_()
        attn.key_kernel[0, 0, 1, 0] = 1.0  # channel 1 of the first key of a block goes to channel 0,
        attn.key_kernel[0, 1, 0, 0] = 2.0  # and twice channel 0 of the second
        attn.value_kernel.copy_(torch.tensor([[1.0, -1]]))
    q, k = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    q[..., 0] = 2.0
    k[0, 0, :, :2] = torch.tensor([[9, 1], [3, 9], [9, 2], [2, 9]])
    scores = torch.tensor([7.0, 6.0])  # 2 (1 + 2 x 3) / sqrt(4), 2 (2 + 2 x 2) / sqrt(4)
    expected = scores.softmax(0) @ torch.tensor([1.0 - 2, 4.0 - 8])
    close(attn(q, k, column(1, 2, 4, 8)), column(*[expected.item()] * 4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_compressing_nothing_is_softmax(causal: bool, groups: int) -> None:
    """Factor 1 compresses one key into itself; causal, a factor beyond the length leaves one block of single keys."""
    q, k, v = qkv(9, groups=groups)
    keep = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0], [1] * 9]).bool()
    for factor in (1, 12) if causal else (1,):
        for mask in (Mask(causal=causal), Mask(causal=causal, key_keep=keep)):
            close(MemoryCompressed(2, 4, factor=factor).eval()(q, k, v, mask), Softmax(2, 4)(q, k, v, mask))


def test_e05_and_m03_no_output_sees_ahead_and_token_0_is_seen() -> None:
    """E05, M03: factor 4, T=16; token j moves no output before j (exactly), and its own and all later ones."""
    attn = random_start(MemoryCompressed(2, 4, factor=4))
    q, k, v = qkv(16)
    before = attn(q, k, v, Mask(causal=True))
    for j in range(16):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, j] += 3.0
        moved = (attn(*changed, Mask(causal=True)) != before).any(-1).any(1).any(0)
        assert moved.tolist() == [i >= j for i in range(16)]


def test_e05_a_block_is_one_key_only_after_its_last_token() -> None:
    """E05: with the mean as the kernel, tokens of a block weigh the same from the next block on, not before."""
    q, k, _ = qkv(16)
    weights = attention_map(MemoryCompressed(2, 4, factor=4), q, k, Mask(causal=True))
    for i in range(16):
        for block in range(4):
            own = weights[:, :, i, 4 * block : 4 * block + 4]
            if block < i // 4:
                close(own, own[..., :1].expand(-1, -1, 4))
            elif block == i // 4:
                sees = own[..., : i % 4 + 1]
                assert (sees > 0).all()
                assert own[..., i % 4 + 1 :].count_nonzero() == 0
                assert i % 4 == 0 or (sees[..., 1:] != sees[..., :1]).all()
            else:
                assert own.count_nonzero() == 0


@pytest.mark.parametrize("queries", [1, 2, 5, 9, 11])
def test_compressed_with_fewer_or_more_queries(queries: int) -> None:
    """B3: the last query belongs to the last key; queries before the first key give 0."""
    attn = random_start(MemoryCompressed(2, 4, factor=2))
    q, k, v = qkv(9)
    keep = torch.tensor([[0, 1, 0, 1, 1, 1, 1, 1, 0], [1] * 9]).bool()
    for key_keep in (None, keep):
        mask = Mask(causal=True, key_keep=key_keep)
        whole = attn(q, k, v, mask)
        if queries <= 9:
            close(attn(q[:, :, 9 - queries :], k, v, mask), whole[:, :, 9 - queries :])
        else:
            more = torch.cat([torch.randn(2, 2, queries - 9, 4), q], 2)
            close(attn(more, k, v, mask), torch.cat([torch.zeros(2, 2, queries - 9, 5), whole], 2))


@pytest.mark.parametrize("factor", [1, 2, 3, 5, 20])
def test_compressed_steps_equal_the_pass_whatever_is_padded(factor: int) -> None:
    """B1: tokens and padding come in pieces of 0 to 6; every output, those at padding too, equals the one pass."""
    attn = random_start(MemoryCompressed(4, 4, factor=factor))
    q, k, v = qkv(17, batch=4, heads=4)
    keep = torch.rand(4, 17) < 0.6
    keep[0], keep[1, :6], keep[1, 6:], keep[2] = True, False, True, False
    whole = attn(q, k, v, Mask(causal=True, key_keep=keep))
    for pieces in ((1,) * 17, (6, 1, 1, 1, 2, 1, 3, 2), (2, 0, 5, 4, 6), (17,)):
        state, place = attn.init_state(4, 17, num_kv_heads=2, value_dim=5), 0
        sizes = [x.shape for x in state[:5]]
        for piece in pieces:
            part = slice(place, place + piece)
            place += piece
            out, state = attn.step(q[:, :, part], k[:, :, part], v[:, :, part], state, Mask(key_keep=keep[:, part]))
            close(out, whole[:, :, part])
            assert state.length.tolist() == keep[:, :place].sum(1).tolist()
            assert state.used == place
            assert [x.shape for x in state[:5]] == sizes
    with pytest.raises(ValueError, match=r"full.*17 of max_len=17 tokens and 1 more"):
        attn.step(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)
    assert state.keys.shape == (4, 4, 17 // factor, 4)
    assert state.tail_values.shape == (4, 2, factor, 5)


def test_compressed_rows_are_reordered_between_steps() -> None:
    """Rows that stand at different places of their blocks go on from where the picked row stood."""
    attn = random_start(MemoryCompressed(2, 4, factor=3))
    q, k, v = qkv(11, batch=3)
    keep = torch.ones(3, 11, dtype=torch.bool)
    keep[1, :4], keep[2, :2] = False, False
    rows = torch.tensor([2, 2, 1, 0])
    _, state = attn.step(
        *(x[:, :, :7] for x in (q, k, v)), attn.init_state(3, 11, value_dim=5), Mask(key_keep=keep[:, :7])
    )
    state = reorder(state, rows)
    whole = attn(q[rows], k[rows], v[rows], Mask(causal=True, key_keep=keep[rows]))
    for t in range(7, 11):
        out, state = attn.step(*(x[rows][:, :, t : t + 1] for x in (q, k, v)), state)
        close(out, whole[:, :, t : t + 1])


def test_gradients_flow_through_compressed_steps() -> None:
    """A loss at the last step reaches the first token, through blocks that were compressed long before."""
    attn = random_start(MemoryCompressed(2, 4, factor=2))
    leaves = [x.requires_grad_() for x in qkv(7)]
    state, parts = attn.init_state(2, 7, value_dim=5), []
    for t in range(7):
        out, state = attn.step(*(x[:, :, t : t + 1] for x in leaves), state)
        parts.append(out)
    wanted = [*leaves, *attn.parameters()]
    by_steps = torch.autograd.grad(torch.cat(parts, 2).square().sum(), wanted)
    at_once = torch.autograd.grad(attn(*leaves, Mask(causal=True)).square().sum(), wanted)
    for a, b in zip(by_steps, at_once, strict=True):
        close(a, b)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compressed_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    """Queries in chunks of 4, recomputed for gradients, over left padding and more keys than queries."""
    attn = random_start(MemoryCompressed(2, 4, factor=3, dropout=dropout)).train()
    q, k, v = (x.requires_grad_() for x in qkv(14))
    keep = torch.ones(2, 14, dtype=torch.bool)
    keep[0, :5] = False
    results = []
    for chunk in (256, 4):
        monkeypatch.setattr(memory_compressed, "CHUNK", chunk)
        torch.manual_seed(0)
        out = attn(q[:, :, 1:], k, v, Mask(causal=True, key_keep=keep))
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, *attn.parameters()))])
    if dropout == 0:
        for a, b in zip(*results, strict=True):
            close(a, b)
    # The output is linear in v, so <dL/dv, v> = sum of out * dL/dout, whatever was dropped.
    for out, _, _, dv, *_ in results:
        close((dv * v).sum(), 2 * out.square().sum(), 1e-4)
