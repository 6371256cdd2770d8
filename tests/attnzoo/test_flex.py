"""FlexAttention as a back end: the same numbers, and a clear word where it cannot serve."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, Mechanism, OffsetBias
from attnzoo.kernels import flex
from attnzoo.mechanisms.block_sparse import BlockSparse
from attnzoo.mechanisms.global_local import GlobalLocal
from attnzoo.mechanisms.strided import Strided

Draw = Callable[..., tuple[Tensor, ...]]

KINDS: list[tuple[type[Mechanism], dict[str, object]]] = [
    (BlockSparse, {}),
    (BlockSparse, {"block_size": 4, "layout": "random"}),
    (BlockSparse, {"block_size": 64, "layout": [[[1, 0, 1], [0, 0, 0], [1, 1, 0]], [[1, 1, 1], [0, 1, 0], [0, 0, 1]]]}),
    (Strided, {"stride": 5}),
    (Strided, {"kind": "fixed", "summary": 2}),
    (GlobalLocal, {"window": 5, "num_global": 2, "num_random": 2}),
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as plain operations: the C++ compiler would take half a minute for each pattern."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention.flex_attention)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("cls", "options"), KINDS, ids=str)
def test_a10_every_path_gives_the_same_numbers(
    cls: type[Mechanism], options: dict[str, object], causal: bool, random_qkv: Draw
) -> None:
    """A10: with every part of a mask, empty rows among them, and every form of bias, T below and above S."""
    blocks, flexible = cls(2, 4, **options), cls(2, 4, backend="flex", **options)
    for queries, keys in ((140, 140), (3, 140), (20, 9)):
        q, k, v = (x.detach() for x in random_qkv(queries, keys, groups=1))
        keep = torch.rand(2, keys) < 0.7
        keep[0, :3] = False
        pairs = torch.rand(1, 2, queries, keys) < 0.7
        cases: list[tuple[Mask, Tensor | OffsetBias | None]] = [
            (Mask(causal), None),
            (Mask(causal, key_keep=keep), torch.randn(2, 1, queries, keys)),
            (Mask(causal, pair_keep=pairs), OffsetBias(torch.randn(2, queries + keys - 1))),
        ]
        if queries == keys:
            segments = torch.arange(keys).expand(2, keys) // 50
            cases.append((Mask(causal, keep, pairs[0, 0], segments), torch.randn(queries, keys)))
        for mask, bias in cases:
            expected = blocks(q, k, v, mask, bias)
            torch.testing.assert_close(flexible(q, k, v, mask, bias), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("eager")
def test_b1_steps_through_flex(random_qkv: Draw) -> None:
    """B1: decoding without gradients goes through the same back end."""
    q, k, v = (x.detach() for x in random_qkv(20, 20))
    attn = GlobalLocal(2, 4, window=5, backend="flex")
    state, parts = attn.init_state(2, 20), []
    for part in torch.arange(20).split(6):
        out, state = attn.step(q[:, :, part], k[:, :, part], v[:, :, part], state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), attn(q, k, v, Mask(causal=True)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("cls", "options"), KINDS[2:], ids=str)
def test_a10_gradients_on_the_cpu_are_refused(
    cls: type[Mechanism], options: dict[str, object], random_qkv: Draw
) -> None:
    """A10: flex asked for on the CPU with gradients raises and says why, whichever input asks for them."""
    attn = cls(2, 4, backend="flex", **options)
    q, k, v = (x.detach() for x in random_qkv(6, 6))
    for inputs, bias in (
        ((q.clone().requires_grad_(), k, v), None),
        ((q, k, v.clone().requires_grad_()), None),
        ((q, k, v), OffsetBias(torch.zeros(2, 11, requires_grad=True))),
    ):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: backend='flex' has no gradients on cpu.*'blocks'"):
            attn(*inputs, None, bias)


def test_dropout_is_refused(random_qkv: Draw) -> None:
    """At construction, and in a call where it was set later; in evaluation it is nobody's business."""
    for cls in (BlockSparse, Strided, GlobalLocal):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: backend='flex' has no dropout, got 0.1"):
            cls(2, 4, backend="flex", dropout=0.1)
        attn = cls(2, 4, backend="flex").train()
        attn.dropout = 0.5
        with pytest.raises(ValueError, match=r"backend='flex' has no dropout, got 0.5"), torch.no_grad():
            attn(*random_qkv(6, 6))


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a15_one_graph_with_the_back_end_named(random_qkv: Draw) -> None:
    """A15: full-graph compile with backend='flex'."""
    q, k, v = (x.detach() for x in random_qkv(20, 20))
    attn = BlockSparse(2, 4, backend="flex")
    torch._dynamo.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    mask = Mask(causal=True, key_keep=torch.arange(20).expand(2, 20) > 2)
    torch.testing.assert_close(compiled(q, k, v, mask), attn(q, k, v, mask), atol=1e-5, rtol=1e-5)


def test_the_mask_is_built_without_all_pairs(monkeypatch: pytest.MonkeyPatch, random_qkv: Draw) -> None:
    """Which blocks are empty is found 128 queries at a time; of a window few are left."""
    kept = []
    monkeypatch.setattr(flex, "_compiled", lambda: lambda q, k, v, score_mod, mask, **_: kept.append(mask) or q)
    q, k, v = (x.detach() for x in random_qkv(1000, 1000, batch=1))
    with Made() as seen:
        GlobalLocal(2, 4, window=9, backend="flex")(q, k, v)
    assert seen.elements <= 2 * 128 * 1024
    assert kept[0].to_dense()[0, 0].int().tolist() == [
        [int(abs(r - c) <= 1 or 0 in (r, c)) for c in range(8)] for r in range(8)
    ]


def test_f2_importing_needs_neither_flex_nor_triton() -> None:
    """F2: what is heavy is imported by the first call that needs it."""
    code = (
        "import sys, attnzoo.mechanisms.block_sparse, attnzoo.mechanisms.global_local, attnzoo.mechanisms.strided\n"
        "print([name for name in ('triton', 'torch.nn.attention.flex_attention') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_explain_tells_the_back_end(random_qkv: Draw) -> None:
    """One line on which code runs."""
    for cls in (BlockSparse, Strided, GlobalLocal):
        assert "FlexAttention" in cls(2, 4, backend="flex").explain(*random_qkv(6, 6))
        assert "FlexAttention" not in cls(2, 4).explain(*random_qkv(6, 6))
