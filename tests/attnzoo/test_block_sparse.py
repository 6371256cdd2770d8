"""Block-sparse and strided attention: patterns counted by hand, numbers of dense attention under the same pattern."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, Mechanism, OffsetBias, Softmax, from_spec, reorder, spec
from attnzoo.mechanisms.block_sparse import BlockSparse
from attnzoo.mechanisms.strided import Strided

Draw = Callable[..., tuple[Tensor, ...]]
Pattern = Callable[[int, int, bool], bool]


def close(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


def by_hand(pattern: Pattern, length: int, causal: bool) -> Tensor:
    """The pattern [T, T], one pair after the other."""
    return torch.tensor(
        [[pattern(p, j, causal) and (j <= p or not causal) for j in range(length)] for p in range(length)]
    )


def fixed_blocks(block: int, run: int, few: int) -> Pattern:
    def sees(p: int, j: int, causal: bool) -> bool:
        row, column = p // block, j // block
        return row // run == column // run or column % run in range(run - few, run)

    return sees


WRITTEN = [[1, 0, 0, 0, 0, 0, 1, 0], [0] * 8] + [[int((r + c) % 3 == 0) for c in range(8)] for r in range(2, 8)]
"""Row 0 sees itself and a far block, row 1 sees nothing, block 7 is nobody's but rows 2 and 5's."""


def strided(p: int, j: int, causal: bool) -> bool:
    return abs(p - j) < 4 or abs(p - j) in range(0, 99, 4)


def fixed(p: int, j: int, causal: bool) -> bool:
    return p // 5 == j // 5 or j % 5 in (3, 4)


CASES: list[tuple[Mechanism, Pattern]] = [
    (BlockSparse(1, 4, block_size=2, local_blocks=3, global_blocks=1), fixed_blocks(2, 3, 1)),
    (BlockSparse(1, 4, block_size=3, local_blocks=2, global_blocks=2), fixed_blocks(3, 2, 2)),
    (BlockSparse(1, 4, block_size=4, local_blocks=1, global_blocks=0), fixed_blocks(4, 1, 0)),
    (BlockSparse(1, 4, block_size=3, layout=WRITTEN), lambda p, j, _: WRITTEN[p // 3][j // 3] == 1),
    (Strided(1, 4, stride=4), strided),
    (Strided(1, 4, stride=5, kind="fixed", summary=2), fixed),
    (Strided(1, 4, stride=1), lambda p, j, _: True),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("attn", "pattern"), CASES, ids=lambda x: type(x).__name__)
def test_c1_c2_patterns_by_brute_force(attn: Mechanism, pattern: Pattern, causal: bool) -> None:
    """C1, C2: for every T up to 24 the pattern, and what really runs, lets through what counting by hand does."""
    for length in range(1, 25):
        expected = by_hand(pattern, length, causal)
        told = attn.pattern(length, length, causal)
        assert told is not None
        assert torch.equal(told, expected)
        # Equal scores: the output is the mean of the visible keys, so each of them counts once.
        zero, v = torch.zeros(1, 1, length, 4), torch.randn(1, 1, length, 4)
        share = expected.double() / expected.sum(-1, keepdim=True).clamp(min=1)
        close(attn(zero, zero, v, Mask(causal=causal)), share @ v.double())


@pytest.mark.parametrize("causal", [False, True])
def test_c1_random_blocks_by_brute_force(causal: bool) -> None:
    """C1, C2: a window, the first block, and one block from each half of what lies between, for each head and row."""
    attn = BlockSparse(3, 4, block_size=2, layout="random", local_blocks=3, global_blocks=1, random_blocks=2)
    pattern = attn.pattern(60, 60, causal)
    assert pattern is not None
    blocks = pattern[:, 1::2, ::2]
    for head in range(3):
        for row in range(30):
            window = range(row - 2, row + 1) if causal else range(row - 1, row + 2)
            named = {0} | {c for c in window if 0 <= c < 30}
            drawn = {c for c in range(30) if blocks[head, row, c]} - named
            assert named - drawn <= {c for c in range(30) if blocks[head, row, c]}
            between = list(range(1, row - 2))
            half = len(between) // 2
            assert len(drawn & set(between[:half])) == (half > 0)
            assert len(drawn & set(between[half:])) == (len(between) > 0)
            assert drawn <= set(between)
    full = blocks.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(pattern, full.tril() if causal else full)
    q, k, v = (torch.randn(2, 3, 60, 4) for _ in range(3))
    dense = Softmax(3, 4)(q, k, v, Mask(pair_keep=pattern[None]))
    close(attn(q, k, v, Mask(causal=causal)), dense)


BLOCKS_OF_64 = [
    BlockSparse(2, 4, block_size=64, local_blocks=1),
    BlockSparse(2, 4, block_size=64, layout="random", local_blocks=1, global_blocks=0),
    BlockSparse(2, 4, block_size=64, layout=[[[1, 0, 1], [0, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 0, 1], [0, 0, 1]]]),
    Strided(2, 4, stride=64),
    Strided(2, 4, stride=64, kind="fixed", summary=7),
]


@pytest.mark.parametrize(("queries", "keys"), [(63, 63), (64, 64), (65, 65), (130, 130), (130, 70), (70, 130)])
@pytest.mark.parametrize("attn", BLOCKS_OF_64, ids=str)
def test_e02_lengths_that_are_no_multiple_of_the_block(
    attn: Mechanism, queries: int, keys: int, random_qkv: Draw
) -> None:
    """E02: blocks of 64, the last one short; equal to dense attention under the same visible pattern."""
    q, k, v = random_qkv(queries, keys, groups=1)
    for causal in (False, True):
        pattern = attn.pattern(queries, keys, causal)
        assert pattern is not None
        pattern = pattern if pattern.dim() == 2 else pattern[None]
        close(attn(q, k, v, Mask(causal=causal)), Softmax(2, 4)(q, k, v, Mask(pair_keep=pattern)))


SMALL = [
    BlockSparse(2, 4, block_size=2, local_blocks=2),
    BlockSparse(2, 4, block_size=3, layout="random", local_blocks=1),
    BlockSparse(2, 4, block_size=4, layout=WRITTEN),
    Strided(2, 4, stride=3),
    Strided(2, 4, stride=4, kind="fixed"),
]


@pytest.mark.parametrize("attn", SMALL, ids=str)
def test_b5_masks_for_each_pair_and_biases(attn: Mechanism, random_qkv: Draw) -> None:
    """B5: with masks and with every form of bias, T below and above S; values and gradients of dense attention."""
    for queries, keys in [(1, 9), (3, 20), (20, 20), (19, 20), (20, 7)]:
        for causal in (False, True):
            q, k, v = random_qkv(queries, keys, groups=1, value=3)
            pattern = attn.pattern(queries, keys, causal)
            assert pattern is not None
            pairs = torch.rand(2, 2, queries, keys) < 0.7
            offsets = torch.randn(2, queries + keys - 1, requires_grad=True)
            dense = torch.randn(1, 2, queries, keys, requires_grad=True)
            for bias in (None, dense, OffsetBias(offsets)):
                leaves = [q, k, v, *([] if bias is None else [bias.values if isinstance(bias, OffsetBias) else bias])]
                results = []
                for module, keep in ((attn, pairs), (Softmax(2, 4), pairs & pattern)):
                    out = module(q, k, v, Mask(causal=causal, pair_keep=keep), bias)
                    results.append((out, torch.autograd.grad(out.square().sum(), leaves)))
                close(results[0][0], results[1][0])
                for ours, theirs in zip(results[0][1], results[1][1], strict=True):
                    close(ours, theirs, 2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attn", SMALL, ids=str)
def test_e2_padding_moves_no_block(attn: Mechanism, causal: bool, random_qkv: Draw) -> None:
    """E2: places count real tokens, so padding left, right and in holes gives what cropping gives."""
    q, k, v = random_qkv(20, 20, batch=4)
    keep = torch.ones(4, 20, dtype=torch.bool)
    keep[0, :5] = False
    keep[1, 15:] = False
    keep[2, [0, 3, 4, 11, 19]] = False
    out = attn(q, k, v, Mask(causal=causal, key_keep=keep))
    for row in range(4):
        own = keep[row].nonzero()[:, 0]
        alone = attn(*(x[row : row + 1, :, own] for x in (q, k, v)), Mask(causal=causal))
        close(out[row : row + 1, :, own], alone)


@pytest.mark.parametrize("attn", SMALL, ids=str)
def test_b3_left_padded_decoding_equals_one_pass_and_the_unpadded_row(attn: Mechanism, random_qkv: Draw) -> None:
    """B3: chunks of every size, beside a row that has no padding; rows reordered on the way."""
    q, k, v = (x.detach() for x in random_qkv(14, 14, groups=1))
    keep = torch.ones(2, 14, dtype=torch.bool)
    keep[0, :5] = False
    whole = attn(q, k, v, Mask(causal=True, key_keep=keep))
    alone = attn(*(x[:1, :, 5:] for x in (q, k, v)), Mask(causal=True))
    close(whole[:1, :, 5:], alone)
    for chunk in (1, 3, 8):
        state = attn.init_state(2, 14, num_kv_heads=1)
        rows, parts = torch.tensor([0, 1]), []
        for start in range(0, 14, chunk):
            part = slice(start, start + chunk)
            new = [x[rows][:, :, part] for x in (q, k, v)]
            out, state = attn.step(*new, state, Mask(key_keep=keep[rows][:, part]))
            parts.append(out[rows.argsort()])
            rows, state = rows.flip(0), reorder(state, torch.tensor([1, 0]))
        close(torch.cat(parts, 2), whole)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attn", SMALL, ids=str)
def test_packed_sequences_have_blocks_of_their_own(attn: Mechanism, causal: bool, random_qkv: Draw) -> None:
    """A row of sequences in any order of ids, padding among them, gives what each sequence gives alone."""
    q, k, v = random_qkv(23, 23, batch=1)
    segments = torch.tensor([[7] * 9 + [0] * 1 + [3] * 13])
    keep = torch.ones(1, 23, dtype=torch.bool)
    keep[0, [0, 1, 5, 12, 22]] = False
    mask = Mask(causal=causal, segments=segments, key_keep=keep)
    out = attn(q, k, v, mask)
    for segment in (7, 0, 3):
        own = (keep & (segments == segment))[0].nonzero()[:, 0]
        close(out[:, :, own], attn(*(x[:, :, own] for x in (q, k, v)), Mask(causal=causal)))


def test_the_diagonal_block_hides_the_future(random_qkv: Draw) -> None:
    """Causality holds inside the block of the query's own, which a layout of blocks shows whole."""
    attn = BlockSparse(2, 4, block_size=8, layout=[[1, 1], [1, 1]])
    q, k, v = (x.detach() for x in random_qkv(16, 16))
    before = attn(q, k, v, Mask(causal=True))
    close(before, Softmax(2, 4)(q, k, v, Mask(causal=True)))
    for j in range(16):
        other = v.clone()
        other[:, :, j] += 1
        moved = (attn(q, k, other, Mask(causal=True)) != before).any(-1)[0, 0]
        assert moved.tolist() == [p >= j for p in range(16)]


def test_random_blocks_are_saved_and_depend_on_nothing_else() -> None:
    """Not on the global generator, not on the length; on the seed, the layer, the head; and they travel along."""

    def made(**options: Any) -> BlockSparse:
        return BlockSparse(2, 4, block_size=2, layout="random", **options)

    def pattern(attn: BlockSparse, length: int = 80) -> Tensor:
        return attn.pattern(length, length, False)

    torch.manual_seed(1)
    first = made(seed=3, layer=1)
    torch.manual_seed(2)
    assert torch.equal(pattern(first), pattern(made(seed=3, layer=1)))
    for other in (made(seed=4, layer=1), made(seed=3, layer=2)):
        assert not torch.equal(pattern(first), pattern(other))
        other.load_state_dict(first.state_dict())
        assert torch.equal(pattern(first), pattern(other))
    assert not torch.equal(pattern(first)[0], pattern(first)[1])
    assert torch.equal(pattern(first)[:, :31, :31], pattern(first, 31))
    before = torch.get_rng_state()
    made()
    assert torch.equal(before, torch.get_rng_state())


def test_two_layouts_of_one_length_do_not_mix(random_qkv: Draw) -> None:
    """K1 of DeepSpeed: nothing is kept from call to call that only the length would tell apart."""
    q, k, v = random_qkv(8, 8)
    for layout in ([[1, 0], [0, 1]], [[1, 1], [1, 1]], [[0, 1], [1, 0]]):
        pattern = torch.tensor(layout).bool().repeat_interleave(4, 0).repeat_interleave(4, 1)
        attn = BlockSparse(2, 4, block_size=4, layout=layout)
        close(attn(q, k, v), Softmax(2, 4)(q, k, v, Mask(pair_keep=pattern)))


@pytest.mark.parametrize("layout", [[[1, 0], [0, 0]], [[0, 0], [0, 0]]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_a_block_give_nothing(layout: list[list[int]], dtype: torch.dtype, random_qkv: Draw) -> None:
    """A1: output 0, finite gradients; a layout may even be empty."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in random_qkv(8, 8))
    out = BlockSparse(2, 4, block_size=4, layout=layout)(q, k, v)
    assert (out[:, :, 4:] == 0).all()
    assert out[:, :, :4].any() == bool(layout[0][0])
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad is not None
    assert not q.grad[:, :, 4:].any()


@pytest.mark.parametrize("cls", [BlockSparse, Strided])
def test_defaults_leave_out_half_of_the_pairs(cls: type[Mechanism]) -> None:
    """At T = 64 a default sees half of the pairs at most, and at least itself."""
    for causal in (False, True):
        pattern = cls(1, 4).pattern(64, 64, causal)
        assert pattern is not None
        assert pattern.float().mean() <= 0.5
        assert pattern.diagonal().all()


@pytest.mark.parametrize("extra", ["nothing", "padding", "segments", "offset bias"])
@pytest.mark.parametrize(
    "attn",
    [BlockSparse(1, 4), BlockSparse(1, 4, layout="random"), Strided(1, 4), Strided(1, 4, kind="fixed")],
    ids=str,
)
def test_e08_lists_that_grow_with_the_length_cost_no_memory(attn: Mechanism, extra: str, random_qkv: Draw) -> None:
    """E08: 2^18 numbers or 128 a query, forward and back, where all pairs would be 16 times as many."""
    length = 2048
    q, k, v = random_qkv(length, length, batch=1, heads=1, groups=1)
    mask = Mask(
        key_keep=torch.arange(length)[None] > 5 if extra == "padding" else None,
        segments=torch.arange(length)[None] // 700 if extra == "segments" else None,
    )
    bias = OffsetBias(torch.zeros(1, 2 * length - 1, requires_grad=True)) if extra == "offset bias" else None
    with Made() as seen:
        attn(q, k, v, mask, bias).sum().backward()
    assert seen.elements <= 1 << 18


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("cls", [Strided, BlockSparse])
def test_work_in_parts_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, cls: type[Mechanism], dropout: float, random_qkv: Draw
) -> None:
    """Values and gradients of one part and of many agree; dropout is drawn again alike for the gradients."""
    q, k, v = random_qkv(40, 40)
    mask = Mask(key_keep=torch.rand(2, 40) < 0.8)
    values = torch.randn(2, 79, requires_grad=True)
    bias = OffsetBias(values)
    attn = cls(2, 4, dropout=dropout).train()
    results = []
    for limit in (1 << 18, 1):
        monkeypatch.setattr("attnzoo.kernels.gathered.LEAST_ROOM", limit)
        monkeypatch.setattr("attnzoo.kernels.gathered.ROOM", 1)
        torch.manual_seed(0)
        with Made() as seen:
            out = attn(q, k, v, mask, bias)
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v, values))
        results.append((out, gradients, seen.elements))
    (whole, expected, many), (out, gradients, few) = results
    assert few <= many / 2
    if dropout == 0:
        close(out, whole)
        for a, b in zip(gradients, expected, strict=True):
            close(a, b)
    # The output is linear in v, so <dL/dv, v> = sum of out * dL/dout, whatever was dropped.
    close((gradients[2] * v).sum(), 2 * out.square().sum(), 1e-3)
    with torch.no_grad():
        assert attn(q, k, v, mask, bias).isfinite().all()


def test_a_written_layout_refuses_what_it_does_not_cover(random_qkv: Draw) -> None:
    """With both numbers: in a call, in a step, in the pattern, and at construction where the site knows its length."""
    attn = BlockSparse(2, 4, block_size=4, layout=[[1, 0], [1, 1]])
    attn(*random_qkv(8, 8))
    state = attn.init_state(2, 9)
    _, state = attn.step(*random_qkv(8, 8), state)
    for call in (
        lambda: attn(*random_qkv(9, 9)),
        lambda: attn.step(*random_qkv(1, 1), state),
        lambda: attn.pattern(9, 9, False),
        lambda: BlockSparse(2, 4, block_size=4, layout=[[1, 0], [1, 1]], max_len=9),
    ):
        with pytest.raises(ValueError, match=r"BlockSparse: a layout of 2 blocks of 4 covers 8 tokens, 9 came"):
            call()


def test_options_that_make_no_sense_are_refused() -> None:
    """By class, option, what came and what is allowed; an option that would not be read is refused too."""
    wrong: list[tuple[type[Mechanism], dict[str, Any], str]] = [
        (BlockSparse, {"block_size": 0}, r"BlockSparse: block_size must be at least 1, got 0"),
        (BlockSparse, {"layout": "diagonal"}, r"BlockSparse: layout .*\('fixed', 'random'\), got 'diagonal'"),
        (BlockSparse, {"layout": [[1, 0]]}, r"BlockSparse: layout .*\[N\]\[N\] or \[2\]\[N\]\[N\].*list \(1, 1, 2\)"),
        (BlockSparse, {"layout": [[1, 0], [1]]}, r"BlockSparse: layout must be nested lists of 0 and 1"),
        (BlockSparse, {"layout": [[1, 2], [1, 1]]}, r"BlockSparse: layout must be nested lists of 0 and 1"),
        (BlockSparse, {"layout": [[[1]]] * 3}, r"BlockSparse: layout .*\[2\]\[N\]\[N\].*\(3, 1, 1\)"),
        (BlockSparse, {"layout": torch.ones(2, 2)}, r"got Tensor.*x\.int\(\)\.tolist\(\)"),
        (BlockSparse, {"local_blocks": 0}, r"BlockSparse: local_blocks must be at least 1, got 0"),
        (BlockSparse, {"global_blocks": 4}, r"BlockSparse: global_blocks=4 .*local_blocks=3"),
        (BlockSparse, {"random_blocks": 2}, r"BlockSparse: random_blocks=2 is not read by this layout"),
        (BlockSparse, {"layout": [[1]], "local_blocks": 2}, r"BlockSparse: local_blocks=2 is not read"),
        (BlockSparse, {"layout": "random", "local_blocks": 2}, r"BlockSparse: local_blocks must be odd.*got 2"),
        (BlockSparse, {"backend": "cuda"}, r"BlockSparse: backend must be one of \('blocks', 'flex'\), got 'cuda'"),
        (Strided, {"stride": 0}, r"Strided: stride must be at least 1, got 0"),
        (Strided, {"kind": "random"}, r"Strided: kind must be one of \('strided', 'fixed'\), got 'random'"),
        (Strided, {"kind": "fixed", "summary": 9}, r"Strided: summary must lie in 1\.\.stride=8, got 9"),
        (Strided, {"summary": 2}, r"Strided: summary=2 is not read by kind='strided'"),
    ]
    for kind, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            kind(2, 4, **options)


def test_a_layout_is_a_plain_value() -> None:
    """A written layout goes through the form that checkpoints hold, and is told by its size."""
    plain = spec(functools.partial(BlockSparse, block_size=4, layout=[[1, 0], [1, 1]]))
    attn = from_spec(plain)(2, 4)
    assert torch.equal(attn.pattern(8, 8, True), torch.ones(8, 8, dtype=torch.bool).tril())  # type: ignore[arg-type]
    assert "layout=(1, 2, 2)" in repr(attn)
