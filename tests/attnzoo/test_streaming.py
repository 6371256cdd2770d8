"""Token by token: any chunking equals one pass, a memory equals cross-attention (B1, B3)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnzoo import DecoderBlock, Mask, Mechanism, MultiheadAttention, Softmax, reorder
from attnzoo.laws import SITE
from attnzoo.positions import RelativeBias, Rotary

Make = Callable[..., Mechanism]
Draw = Callable[..., tuple[Tensor, ...]]
POSITIONS = {
    "none": lambda: None,
    "rope": lambda: Rotary(4),
    "rope_halves": lambda: Rotary(4, layout="halves"),
    "offset": lambda: RelativeBias(2, 4),
}
CHUNKS = [[1] * 9, [9], [4, 1, 1, 3], [2, 7], [8, 1]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def shell(kind: type[Mechanism], position: str = "none", **options: int) -> MultiheadAttention:
    attn = MultiheadAttention(8, 2, kind, position=POSITIONS[position](), causal=True, **SITE, **options)
    if isinstance(attn.position, RelativeBias):
        torch.nn.init.normal_(attn.position.table)
    return attn.eval()


@pytest.mark.traits("streaming")
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_b1_any_chunking_equals_one_pass(make: Make, random_qkv: Draw, chunks: list[int]) -> None:
    """B1: on bare heads."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(9, 9, value=3))
    state = attn.init_state(2, 9, value_dim=3)
    parts, start = [], 0
    for size in chunks:
        new = [x[:, :, start : start + size] for x in (q, k, v)]
        out, state = attn.step(*new, state)
        parts.append(out)
        start += size
    close(torch.cat(parts, 2), attn(q, k, v, Mask(causal=True)))
    assert state.length.tolist() == [9, 9]


@pytest.mark.traits("streaming")
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_b1_in_the_shell_with_every_position(kind: type[Mechanism], position: str, chunks: list[int]) -> None:
    """B1: projections and positions by steps; room to spare changes nothing."""
    if position == "offset" and not kind.traits.bias:
        with pytest.raises(ValueError, match=f"{kind.__name__} does not take a relative bias"):
            shell(kind, position)
        return
    attn = shell(kind, position)
    x = torch.randn(2, 9, 8)
    expected = attn(x)
    state = attn.init_state(2, 20)
    parts = []
    for part in x.split(chunks, dim=1):
        out, state = attn.step(part, state)
        parts.append(out)
    close(torch.cat(parts, 1), expected)


@pytest.mark.traits("streaming", "grouped")
def test_b1_with_grouped_heads_and_another_value_width(kind: type[Mechanism]) -> None:
    """B1: one key/value head for two query heads, values wider than keys."""
    attn = shell(kind, num_kv_heads=1, value_dim=7)
    x = torch.randn(2, 6, 8)
    state = attn.init_state(2, 6)
    parts = []
    for part in x.split(1, dim=1):
        out, state = attn.step(part, state)
        parts.append(out)
    close(torch.cat(parts, 1), attn(x))


@pytest.mark.traits("streaming", "key_keep")
@pytest.mark.parametrize("position", POSITIONS)
def test_b3_left_padded_decoding_equals_unpadded(kind: type[Mechanism], position: str) -> None:
    """B3: a batch of prefixes of length 2 and 5, padded on the left with NaN, then 4 steps more."""
    if position == "offset" and not kind.traits.bias:
        with pytest.raises(ValueError, match=f"{kind.__name__} does not take a relative bias"):
            shell(kind, position)
        return
    attn = shell(kind, position)
    rows = [torch.randn(1, 2 + 4, 8), torch.randn(1, 5 + 4, 8)]
    x = torch.full((2, 9, 8), torch.nan)
    keep = torch.zeros(2, 9, dtype=torch.bool)
    for row, real in enumerate(rows):
        x[row, 9 - real.shape[1] :] = real[0]
        keep[row, 9 - real.shape[1] :] = True
    state = attn.init_state(2, 9)
    prefix, state = attn.step(x[:, :5], state, mask=Mask(key_keep=keep[:, :5]))
    parts = [prefix]
    for t in range(5, 9):
        assert state.length.tolist() == [t - 3, t]
        out, state = attn.step(x[:, t : t + 1], state)
        parts.append(out)
    y = torch.cat(parts, 1)
    for row, real in enumerate(rows):
        close(y[row : row + 1, 9 - real.shape[1] :], attn(real))


@pytest.mark.traits("causal", "rectangular")
def test_b3_a_few_queries_are_the_last_rows(make: Make, random_qkv: Draw) -> None:
    """B3: T from 1 to 5 against S = 9 gives the last rows of the whole call."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(9, 9))
    whole = attn(q, k, v, Mask(causal=True))
    for queries in range(1, 6):
        close(attn(q[:, :, -queries:], k, v, Mask(causal=True)), whole[:, :, -queries:])


@pytest.mark.traits("streaming", "pair_keep", "bias")
def test_pair_masks_and_biases_cover_all_so_far(make: Make, random_qkv: Draw) -> None:
    """In a step pair_keep and bias are [t, all keys so far]."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(8, 8))
    pairs, bias = torch.rand(8, 8) < 0.7, torch.randn(2, 2, 8, 8)
    expected = attn(q, k, v, Mask(causal=True, pair_keep=pairs), bias)
    state = attn.init_state(2, 8)
    parts = []
    for start, end in [(0, 3), (3, 4), (4, 8)]:
        rows = slice(start, end)
        out, state = attn.step(
            q[:, :, rows],
            k[:, :, rows],
            v[:, :, rows],
            state,
            Mask(pair_keep=pairs[rows, :end]),
            bias[:, :, rows, :end],
        )
        parts.append(out)
    close(torch.cat(parts, 2), expected)


@pytest.mark.traits("cross")
def test_a_memory_equals_cross_attention(kind: type[Mechanism]) -> None:
    """Keys made once, queries by steps, padding in the context, and a NaN under it."""
    attn = MultiheadAttention(8, 2, kind, context_dim=5, **SITE).eval()
    x, context = torch.randn(2, 4, 8), torch.randn(2, 7, 5)
    keep = torch.rand(2, 7) < 0.6
    keep[0] = False
    context = context.masked_fill(~keep[..., None], torch.nan)
    expected = attn(x, context, mask=Mask(key_keep=keep))
    memory = attn.memory(context, mask=Mask(key_keep=keep))
    parts = []
    for part in x.split([1, 1, 2], dim=1):
        out, memory = attn.step(part, memory, on_memory=True)
        parts.append(out)
    close(torch.cat(parts, 1), expected)
    assert torch.equal(expected[0], attn.out_proj.bias.expand(4, 8))


@pytest.mark.traits("streaming")
def test_states_are_reordered_by_rows(kind: type[Mechanism]) -> None:
    """Beams: rows picked, repeated and dropped go on as if each had been decoded alone."""
    attn = shell(kind, "rope")
    x, more = torch.randn(3, 4, 8), torch.randn(4, 3, 8)
    keep = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]).bool()
    _, state = attn.step(x, attn.init_state(3, 7), mask=Mask(key_keep=keep))
    rows = torch.tensor([2, 0, 2, 1])
    state = reorder(state, rows)
    parts = []
    for t in range(3):
        out, state = attn.step(more[:, t : t + 1], state)
        parts.append(out)
    y = torch.cat(parts, 1)
    for row, source in enumerate(rows.tolist()):
        alone = torch.cat([x[source][keep[source]], more[row]])[None]
        close(y[row : row + 1], attn(alone)[:, -3:])


@pytest.mark.traits("streaming")
def test_branches_of_one_state_do_not_touch_each_other(kind: type[Mechanism]) -> None:
    """A state copied by ``reorder`` is its own."""
    attn = shell(kind)
    _, state = attn.step(torch.randn(1, 3, 8), attn.init_state(1, 5), mask=Mask(key_keep=torch.tensor([[0, 1, 1]]) > 0))
    branch = reorder(state, torch.tensor([0]))
    before = [part.clone() if isinstance(part, Tensor) else part for part in branch]
    attn.step(torch.randn(1, 1, 8), state)
    for part, old in zip(branch, before, strict=True):
        assert torch.equal(part, old) if isinstance(part, Tensor) else part == old


@pytest.mark.traits("streaming")
def test_gradients_through_steps_are_those_of_one_pass(kind: type[Mechanism]) -> None:
    """Training on steps: earlier steps keep what their gradients need, padded rows too."""
    attn = shell(kind, "rope")
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    base = torch.randn(2, 6, 8)
    grads = []
    for by_steps in (False, True):
        x = base.clone().requires_grad_()
        attn.zero_grad()
        if by_steps:
            state, parts = attn.init_state(2, 6), []
            for t in range(6):
                out, state = attn.step(x[:, t : t + 1], state, mask=Mask(key_keep=keep[:, t : t + 1]))
                parts.append(out)
            y = torch.cat(parts, 1)
        else:
            y = attn(x, mask=Mask(key_keep=keep))
        y[keep].square().sum().backward()
        assert x.grad is not None
        grads.append([x.grad, *(p.grad.clone() for p in attn.parameters() if p.grad is not None)])
    for whole, stepped in zip(*grads, strict=True):
        close(stepped, whole)


@pytest.mark.traits("streaming")
def test_gradients_of_queries_alone_by_steps(make: Make, random_qkv: Draw) -> None:
    """Keys and values frozen, queries not: what an earlier step saved is not written over by a later one."""
    attn = make(2, 4).requires_grad_(False)
    q, k, v = random_qkv(5, 5)
    k, v = k.detach(), v.detach()
    state, parts = attn.init_state(2, 5), []
    for t in range(5):
        now = slice(t, t + 1)
        out, state = attn.step(q[:, :, now], k[:, :, now], v[:, :, now], state)
        parts.append(out)
    stepped = torch.autograd.grad(torch.cat(parts, 2).square().sum(), q)[0]
    close(stepped, torch.autograd.grad(attn(q, k, v, Mask(causal=True)).square().sum(), q)[0])


@pytest.mark.traits("streaming")
def test_half_precision_by_steps(kind: type[Mechanism]) -> None:
    """A bfloat16 model decodes in bfloat16, and under autocast a float32 model does not stumble."""
    attn = shell(kind, "rope")
    x = torch.randn(2, 5, 8)
    expected = attn(x)
    with torch.autocast("cpu", torch.bfloat16):
        state, parts = attn.init_state(2, 5), []
        for part in x.split(1, dim=1):
            out, state = attn.step(part, state)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1).float(), expected, atol=5e-2, rtol=5e-2)
    low = attn.bfloat16()
    state, parts = low.init_state(2, 5), []
    for part in x.bfloat16().split(1, dim=1):
        out, state = low.step(part, state)
        parts.append(out)
    assert parts[0].dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts, 1).float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.traits("streaming")
def test_a_full_state_says_how_long_it_is(make: Make, random_qkv: Draw) -> None:
    """Room for 4; the fifth token raises and names max_len."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(5, 5))
    with pytest.raises(ValueError, match=r"full.*max_len=4"):
        attn.step(q, k, v, attn.init_state(2, 4))
    _, state = attn.step(q[:, :, :4], k[:, :, :4], v[:, :, :4], attn.init_state(2, 4))
    with pytest.raises(ValueError, match=r"full.*4 of max_len=4 tokens and 1 more"):
        attn.step(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state)


@pytest.mark.traits("streaming", "cross")
def test_steps_that_make_no_sense_are_refused(make: Make, random_qkv: Draw) -> None:
    """Half of k and v, segments, a mask that a memory holds already, float masks: each by its own message."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(2, 2))
    with pytest.raises(ValueError, match="k and v together"):
        attn.step(q, k, None, attn.init_state(2, 4))
    with pytest.raises(ValueError, match="segments"):
        attn.step(q, k, v, attn.init_state(2, 4), Mask(segments=torch.zeros(2, 2, dtype=torch.int64)))
    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"state.*{rows}.*2"):
            attn.step(q, k, v, attn.init_state(rows, 4))
    with pytest.raises(ValueError, match=r"state.*2.*1"):
        attn.step(q[:1], k[:1], v[:1], attn.init_state(2, 4))
    memory = attn.memory(k, v)
    with pytest.raises(ValueError, match="memory holds its key_keep"):
        attn.step(q, None, None, memory, Mask(key_keep=torch.ones(2, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="key_keep only"):
        attn.memory(k, v, Mask(causal=True))
    with pytest.raises(ValueError, match=r"mask\.key_keep must be boolean"):
        attn.step(q, k, v, attn.init_state(2, 4), Mask(key_keep=torch.ones(2, 2)))
    with pytest.raises(ValueError, match=r"mask\.key_keep must be \[B, S\] = \(2, 2\)"):
        attn.step(q, k, v, attn.init_state(2, 4), Mask(key_keep=torch.ones(2, 4, dtype=torch.bool)))


@pytest.mark.traits("streaming")
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_decoder_block_by_steps(kind: type[Mechanism], norm_first: bool) -> None:
    """Past and memory together equal the whole pass, with padding in the context and on the left."""
    block = DecoderBlock(8, 2, kind, context_dim=5, norm_first=norm_first, position=Rotary(4), **SITE).eval()
    x, context = torch.randn(2, 6, 8), torch.randn(2, 7, 5)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    context_mask = Mask.from_lengths(torch.tensor([3, 7]))
    expected, _ = block(x, context, mask=Mask(key_keep=keep), context_mask=context_mask)
    state = block.init_state(context, 6, context_mask=context_mask)
    first, state = block.step(x[:, :3], state, mask=Mask(key_keep=keep[:, :3]))
    parts = [first]
    for t in range(3, 6):
        out, state = block.step(x[:, t : t + 1], state)
        parts.append(out)
    close(torch.cat(parts, 1)[keep], expected[keep])


def test_keys_that_the_state_was_not_made_for_are_refused() -> None:
    """Before anything is written into it."""
    attn = Softmax(4, 8).eval()
    q, grouped = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8)
    state = attn.init_state(1, 4)
    with pytest.raises(ValueError, match=r"made for 4 heads of 8 keys, 2 of 8 came; see num_kv_heads"):
        attn.step(q, grouped, grouped, state)
    with pytest.raises(ValueError, match="made for 4 heads of 8 values, 4 of 3 came"):
        attn.step(q, q, q[..., :3], state)
    with pytest.raises(ValueError, match="does not fit"):
        attn.step(q, q[:, :, :1], q, state)
    assert state.k.count_nonzero() == 0
