"""The back ends of Softmax, what explain() says of them, and parity with torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnzoo import Local, Mask, Softmax, build

Brute = Callable[..., Tensor]
Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_is_sdpa(causal: bool, random_qkv: Draw) -> None:
    """The same numbers, and the same gradients, as the function of torch."""
    q, k, v = random_qkv(9, 9)
    keep = torch.rand(2, 2, 9, 9) < 0.8
    visible = keep & torch.ones(9, 9, dtype=torch.bool).tril() if causal else keep
    ours = Softmax(2, 4)(q, k, v, Mask(causal=causal, pair_keep=keep))
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=visible)
    close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), (q, k, v)),
        torch.autograd.grad(theirs.square().sum(), (q, k, v)),
        strict=True,
    ):
        close(a, b)


def test_an_all_wide_window_is_softmax(random_qkv: Draw) -> None:
    """Local with a window over everything, both ways, is dense attention, gradients too."""
    q, k, v = random_qkv(17, 17)
    for mask in (Mask(), Mask(causal=True)):
        a, b = Local(2, 4, window=(16, 16))(q, k, v, mask), Softmax(2, 4)(q, k, v, mask)
        close(a, b)
        for x, y in zip(
            torch.autograd.grad(a.square().sum(), (q, k, v)),
            torch.autograd.grad(b.square().sum(), (q, k, v)),
            strict=True,
        ):
            close(x, y)


@pytest.mark.parametrize("backend", ["auto", "flash", "math", "plain"])
def test_back_ends_of_softmax_agree(brute: Brute, backend: Any, random_qkv: Draw) -> None:
    """A9, B4: by every back end of this machine, with masks and with a bias, and repeatable."""
    attn = Softmax(2, 8, backend=backend, dropout=0.9).eval()
    q, k, v = random_qkv(7, 9, width=8, value=8)
    for mask in (Mask(), Mask(causal=True), Mask(pair_keep=torch.rand(1, 2, 7, 9) < 0.8)):
        for bias in (None, torch.randn(1, 2, 7, 9), torch.randn(2, 2, 7, 9)):
            out = attn(q, k, v, mask, bias)
            close(out, brute(attn, q, k, v, mask, bias))
            assert torch.equal(out, attn(q, k, v, mask, bias))


def test_a_back_end_that_cannot_serve_says_so(random_qkv: Draw) -> None:
    """An explicit back end never falls back: it raises, names itself, and explain() tells beforehand."""
    q, k, v = random_qkv(5, 5, width=8, value=8)
    for attn in (Softmax(2, 8, backend="efficient"), Softmax(2, 8, backend="flash", dropout=0.5).train()):
        with pytest.raises(ValueError, match=f"back end '{attn.backend}' cannot serve"):
            attn(q, k, v)
        assert "refuses" in attn.explain(q, k, v)
    with pytest.raises(ValueError, match=r"backend must be one of auto.*got 'flsh'"):
        build("Softmax", 2, 8, backend="flsh")


def test_explain_names_the_kernel_that_runs(random_qkv: Draw) -> None:
    """What is said before is what the profiler sees."""
    q, k, v = (x.detach() for x in random_qkv(5, 5, width=8, value=8))
    for attn in (Softmax(2, 8), Softmax(2, 8, backend="math"), Softmax(2, 8, dropout=0.5).train()):
        said = "flash" if "flash kernel" in attn.explain(q, k, v) else "math"
        assert f"{said} kernel" in attn.explain(q, k, v)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            attn(q, k, v)
        ran = any("flash_attention_for_cpu" in event.key for event in profile.key_averages())
        assert ran == (said == "flash")
    plain = Softmax(2, 8, backend="plain")
    assert plain.explain(q, k, v) == "plain torch operations on T x S numbers (asked for)"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain(q, k, v)
    assert not any("scaled_dot_product" in event.key for event in profile.key_averages())
