"""Memory: where it is promised to be linear, no tensor of T x S elements is ever made."""

from collections.abc import Callable

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import CATALOGUE, Additive, Local, Mask, OffsetBias, Softmax
from attnzoo.catalogue import construct

Draw = Callable[..., tuple[Tensor, ...]]

LINEAR_MEMORY = [name for name, cls in CATALOGUE.items() if cls.traits.linear_memory]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=1e-5, rtol=1e-5)


EXTRAS = {
    "nothing": None,
    "padding": None,
    "offset bias": "bias",
    "segments": "pair_keep",
    "padding and segments": "pair_keep",
}
"""What is given beside q, k and v, and the trait that takes it; who denies it raises, which a law sees to."""

CALLS = [
    (name, extra, causal)
    for name in LINEAR_MEMORY
    for extra, needed in EXTRAS.items()
    for causal in (False, True)
    if getattr(CATALOGUE[name].traits, "causal" if causal else "bidirectional")
    and (needed is None or getattr(CATALOGUE[name].traits, needed))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extra", "causal"), CALLS)
def test_e08_linear_memory(name: str, extra: str, causal: bool, random_qkv: Draw) -> None:
    """E08: from T=2048 to T=4096 the largest tensor, forward and back, grows 2.5 times at most."""
    traits = CATALOGUE[name].traits
    peaks = []
    for length in (2048, 4096):
        attn = construct(CATALOGUE[name], 1, 4, max_len=4096)
        q, k, v = random_qkv(length, length, batch=1, heads=1, groups=1)
        keep = torch.ones(1, length, dtype=torch.bool) if "padding" in extra else None
        segments = torch.arange(length)[None] // 500 if "segments" in extra else None
        bias = OffsetBias(torch.zeros(1, 2 * length - 1, requires_grad=True)) if "bias" in extra else None
        with Made() as seen:
            attn(
                q, q if traits.shared_qk else k, v, Mask(causal=causal, key_keep=keep, segments=segments), bias
            ).sum().backward()
        assert seen.elements < length * length
        peaks.append(seen.elements)
    assert peaks[1] <= 2.5 * peaks[0]


def test_e08_the_probe_sees_what_dense_attention_makes(random_qkv: Draw) -> None:
    """The measure of E08 bites: a mask of T x S elements is seen by it."""
    q, k, v = random_qkv(256, 256, batch=1, heads=1, groups=1)
    with Made() as seen:
        Softmax(1, 4)(q, k, v, Mask(causal=True, key_keep=torch.ones(1, 256, dtype=torch.bool)))
    assert seen.elements >= 256 * 256


def test_a_window_wider_than_the_sequence_costs_the_sequence(random_qkv: Draw) -> None:
    """A window of ten million keys on eight tokens is full attention, at the price of eight tokens."""
    q, k, v = random_qkv(8, 8)
    with Made() as seen:
        out = Local(2, 4, window=10_000_001)(q, k, v, Mask(causal=True))
        both = Local(2, 4, window=10_000_001)(q, k, v)
    close(out, Softmax(2, 4)(q, k, v, Mask(causal=True)))
    close(both, Softmax(2, 4)(q, k, v))
    assert seen.elements < 10_000


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_additive_takes_its_queries_in_chunks(
    monkeypatch: pytest.MonkeyPatch, random_qkv: Draw, dropout: float
) -> None:
    """A width for each pair is never made for all pairs at once; numbers and gradients are the same."""
    q, k, v = random_qkv(24, 20)
    mask = Mask(key_keep=torch.rand(2, 20) < 0.8, pair_keep=torch.rand(2, 1, 24, 20) < 0.8)
    bias = torch.randn(2, 2, 24, 20, requires_grad=True)
    attn = Additive(2, 4, hidden_dim=8, dropout=dropout)
    results = []
    for limit in (1 << 22, 4 * 2 * 2 * 20 * 8):
        monkeypatch.setattr("attnzoo.mechanisms.additive.CHUNK_ELEMENTS", limit)
        torch.manual_seed(0)
        with Made() as seen:
            out = attn(q, k, v, mask, bias)
            gradients = torch.autograd.grad(out.square().sum(), (q, k, v, bias, *attn.parameters()))
        results.append((out, gradients, seen.elements, attn.explain(q, k, v, mask, bias)))
    (whole, expected, many, once), (out, gradients, few, chunked) = results
    assert many == 2 * 2 * 24 * 20 * 8
    assert few <= many / 4
    assert "1 chunk" in once
    assert "6 chunk" in chunked
    # With dropout the chunks draw other numbers, but must draw the same ones again for the gradients.
    if dropout == 0:
        torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-5)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    # The output is linear in v, so <dL/dv, v> = sum of out * dL/dout, whatever was dropped.
    torch.testing.assert_close((gradients[2] * v).sum(), 2 * out.square().sum(), atol=1e-3, rtol=1e-4)
