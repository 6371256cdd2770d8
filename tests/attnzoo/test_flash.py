"""Flash: the numbers of Softmax, and never a tensor of T x S elements."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Local, Mask, OffsetBias, Softmax
from attnzoo.bias import Bias
from attnzoo.mechanisms.flash import Flash

Draw = Callable[..., tuple[Tensor, ...]]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 queries, so that small inputs have many."""
    monkeypatch.setattr("attnzoo.kernels.tiled.CHUNK", 4)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Softmax in float64, over all pairs at once; 0 for a row without a key."""
    q, k, v = q.double(), k.double(), v.double()
    queries, keys = q.shape[2], k.shape[2]
    seen = torch.ones(q.shape[0], 1, queries, keys, dtype=torch.bool)
    if mask.causal:
        seen &= torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    if mask.key_keep is not None:
        seen &= mask.key_keep[:, None, None]
    weights = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, -math.inf).softmax(-1)
    return torch.where(seen, weights, 0.0) @ v


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("options", [{}, {"scale": 1.0}, {"softcap": 0.8}], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(14, 14), (3, 14), (14, 9), (13, 3), (1, 6), (4, 5)])
def test_equals_softmax(options: dict[str, float], queries: int, keys: int, random_qkv: Draw) -> None:
    """A1, A3, B4, G1, G4: output and gradients under each mask and bias, empty rows and whole empty chunks included."""
    flash, softmax = Flash(4, 4, **options), Softmax(4, 4, **options)
    keep = torch.rand(2, keys) < 0.7
    keep[0, 0] = False
    pairs = torch.rand(2, 4, queries, keys) < 0.7
    pairs[0, 0, 0] = False
    masks = [{}, {"key_keep": keep}, {"pair_keep": pairs}, {"pair_keep": pairs[1, 1], "key_keep": keep}]
    if queries == keys:
        segments = torch.arange(keys).expand(2, -1) // 5
        masks += [{"segments": segments}, {"segments": segments, "key_keep": keep, "pair_keep": pairs[:1, :1]}]
    for causal in (False, True):
        for parts in masks:
            for shape in (None, (2, 4, queries, keys), (queries, keys), (4, queries + keys - 1)):
                leaves = [*random_qkv(queries, keys, heads=4, groups=2, value=4 if shape is None else 3)]
                bias: Bias | None = None
                if shape is not None:
                    leaves.append(torch.randn(shape, requires_grad=True))
                    bias = OffsetBias(leaves[3]) if shape == (4, queries + keys - 1) else leaves[3]
                results = []
                for attn in (flash, softmax):
                    out = attn(*leaves[:3], Mask(causal, **parts), bias)
                    down = torch.linspace(-1, 1, out.numel()).view_as(out)
                    results.append((out, *torch.autograd.grad(out, leaves, down)))
                for a, b in zip(*results, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 7, 127, 129, 1025])
@pytest.mark.parametrize("causal", [False, True])
def test_a11_odd_lengths(length: int, causal: bool, random_qkv: Draw) -> None:
    """A11: finite gradients, equal to float64, padded or not."""
    keep = torch.rand(1, length) < 0.8
    keep[0, 0] = False
    for mask in (Mask(causal), Mask(causal, key_keep=keep)):
        q, k, v = random_qkv(length, length, batch=1, heads=1, width=8, value=8)
        found = []
        for call in (Flash(1, 8), exact):
            out = call(q, k, v, mask)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for a, b in zip(*found, strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["offset", "of each head", "of each sample and head"])
def test_a12_gradient_of_a_learned_bias(causal: bool, form: str, random_qkv: Draw) -> None:
    """A12: the same through Flash, Softmax by the math kernel, and a window over everything."""
    length = 13
    shapes = {"offset": (2, 2 * length - 1), "of each head": (1, 2, length, length)}
    learned = torch.randn(shapes.get(form, (2, 2, length, length)), requires_grad=True)
    bias: Bias = OffsetBias(learned) if form == "offset" else learned
    q, k, v = random_qkv(length, length)
    keep = torch.rand(2, length) < 0.8
    found = []
    for attn in (Flash(2, 4), Softmax(2, 4, backend="math"), Local(2, 4, window=(length, length))):
        for mask in (Mask(causal), Mask(causal, key_keep=keep)):
            found.append(torch.autograd.grad(attn(q, k, v, mask, bias).square().sum(), learned)[0])
    for other in (found[2:4], found[4:]):
        for a, b in zip(found[:2], other, strict=True):
            assert a.count_nonzero()
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


EVERYTHING = ["nothing", "key_keep", "segments", "offset bias", "pair_keep", "bias of each head", "softcap"]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", EVERYTHING)
def test_e08_no_tensor_of_t_times_s(what: str, causal: bool, dropout: float, random_qkv: Draw) -> None:
    """E08: learned biases, dropout, dense masks, values of another width: nothing of T x S is made or kept."""
    length = 1024
    q, k, v = random_qkv(length, length, batch=1, heads=2, groups=1, value=3)
    attn = Flash(2, 4, dropout=dropout, softcap=3.0 if what == "softcap" else None)
    bias: Bias | None = None
    mask = Mask(causal)
    if what == "key_keep":
        mask = mask._replace(key_keep=torch.rand(1, length) < 0.9)
    elif what == "segments":
        mask = mask._replace(segments=torch.arange(length)[None] // 300)
    elif what == "pair_keep":
        mask = mask._replace(pair_keep=torch.rand(length, length) < 0.9)
    elif what == "offset bias":
        bias = OffsetBias(torch.zeros(2, 2 * length - 1, requires_grad=True))
    elif what == "bias of each head":
        bias = torch.zeros(2, 1, 1).expand(2, length, length)[None]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    # The base class reads a mask of pairs for rows without a key, at the size that it came in.
    given = length * length * (what == "pair_keep")
    with Made() as seen, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attn(q, k, v, mask, bias)
        out.sum().backward()
    assert seen.elements <= max(given, length * length // 3)
    assert sum(kept.values()) < length * length // 3 + given


def test_e08_the_probes_see_what_softmax_makes(random_qkv: Draw) -> None:
    """They bite: Softmax with dropout makes and keeps T x S numbers."""
    length = 256
    q, k, v = random_qkv(length, length, batch=1, heads=1)
    kept = []
    with Made() as seen, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        Softmax(1, 4, dropout=0.3)(q, k, v)
    assert seen.elements >= length * length
    assert max(kept) >= length * length


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_dropout_is_right_on_average(softcap: float | None, random_qkv: Draw) -> None:
    """Mean over many draws near the output without dropout; chunks draw for themselves; none in evaluation."""
    q, k, v = (x.detach() for x in random_qkv(4, 6, batch=1))
    q = q[:, :, :1].expand(-1, -1, 12, -1)
    attn = Flash(2, 4, dropout=0.4, softcap=softcap)
    mask = Mask(key_keep=torch.tensor([[1, 1, 0, 1, 1, 1]]).bool())
    draws = torch.stack([attn(q, k, v, mask) for _ in range(1500)])
    assert torch.equal(attn.eval()(q, k, v, mask), attn(q, k, v, mask))
    exact = attn(q, k, v, mask)
    assert (draws.mean(0) - exact).abs().max() < 0.1
    # All queries are the same, so rows differ by what was dropped alone.
    assert not torch.equal(draws[:, :, :, 0:4], draws[:, :, :, 4:8])
    row, other = (draws[:, 0, 0, i] - exact[0, 0, i] for i in (0, 4))
    assert (row * other).mean(0).abs().max() < 0.1 * row.square().mean(0).max()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_dropout_is_drawn_again_for_the_gradients(softcap: float | None, random_qkv: Draw) -> None:
    """gradcheck by finite differences under one seed: chunks made again drop what they dropped before."""
    attn = Flash(2, 4, dropout=0.5, softcap=softcap).double()
    leaves = [x.detach().double().requires_grad_() for x in random_qkv(10, 10, batch=1)]
    learned = torch.randn(2, 19, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(1, 10) < 0.8

    def call(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attn(q, k, v, Mask(True, key_keep=keep), OffsetBias(values))

    assert torch.autograd.gradcheck(call, (*leaves, learned), fast_mode=True)


def test_explain_says_which_path_runs(random_qkv: Draw) -> None:
    """H1, A14: a fused kernel for all queries at once where it can, by the profiler too; else chunks, and why."""
    q, k, v = (x.detach() for x in random_qkv(300, 300, width=8, value=8))
    keep = torch.ones(2, 300, dtype=torch.bool)
    bias = torch.zeros(300, 300)
    cases: list[tuple[Flash, Mask, Bias | None, str, int]] = [
        (Flash(2, 8), Mask(), None, "SDPA flash kernel on cpu, all queries at once", 1),
        (Flash(2, 8), Mask(True), None, "all queries at once", 1),
        (Flash(2, 8), Mask(key_keep=keep), None, "all queries at once", 1),
        (Flash(2, 8), Mask(True, key_keep=keep), None, "chunks of 128 queries.*causal", 3),
        (Flash(2, 8), Mask(pair_keep=keep[0].expand(300, -1)), None, "chunks of 128 queries.*pairs", 3),
        (Flash(2, 8), Mask(segments=keep.long()), None, "chunks of 128 queries.*segments", 3),
        (Flash(2, 8), Mask(), bias, "chunks of 128 queries.*bias", 3),
        (Flash(2, 8), Mask(), OffsetBias(torch.zeros(2, 599)), "chunks of 128 queries.*bias", 3),
        (Flash(2, 8, softcap=1.0), Mask(), None, "chunks of 128 queries.*softcap", 0),
        (Flash(2, 8, dropout=0.1), Mask(), None, "chunks of 128 queries.*dropout", 0),
    ]
    for attn, mask, terms, said, calls in cases:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            attn(q, k, v, mask, terms)
        ran = [event.count for event in profile.key_averages() if event.key.endswith("flash_attention_for_cpu")]
        assert sum(ran) == calls
        assert re.search(said, attn.explain(q, k, v, mask, terms))
    assert Flash(2, 8).explain(q[:, :, :9], k[:, :, :9], v[:, :, :9], Mask(), bias[:9, :9]).startswith("one chunk of 9")


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a15_chunks_compile_into_one_graph(dropout: float, random_qkv: Draw) -> None:
    """A15: with padding, segments and an offset bias; the gradients too. With dropout it runs and drops."""
    attn = Flash(2, 4, dropout=dropout)
    q, k, v = random_qkv(10, 10, groups=1)
    mask = Mask(True, key_keep=torch.rand(2, 10) < 0.8, segments=torch.arange(10).expand(2, -1) // 6)
    bias = OffsetBias(torch.randn(2, 19, requires_grad=True))
    torch._dynamo.reset()
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    found = []
    for call in (compiled, attn):
        out = call(q, k, v, mask, bias)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias.values))))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        if dropout == 0:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    # The output is linear in v, so <dL/dv, v> = 2 <out, out>, whatever was dropped.
    out, _, _, of_v, _ = found[0]
    torch.testing.assert_close((of_v * v).sum(), 2 * out.square().sum(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_scale_that_is_no_number_is_refused(scale: float) -> None:
    """By name, at construction."""
    with pytest.raises(ValueError, match="Flash: scale must be a finite number, got"):
        Flash(2, 4, scale=scale)


def test_an_exported_program_takes_any_length(random_qkv: Draw) -> None:
    """It has no fixed number of chunks, so there it makes one: right at lengths on both sides of a chunk."""

    class Site(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Flash(2, 4)

        def forward(self, q: Tensor, keep: Tensor) -> Tensor:
            return self.attend(q, q, q, Mask(True, key_keep=keep))

    site = Site().eval()
    length = torch.export.Dim("length", min=2, max=4096)
    x, keep = random_qkv(300, 300)[0].detach(), torch.rand(2, 300) < 0.8
    program = torch.export.export(site, (x, keep), dynamic_shapes=({2: length}, {1: length}))
    for end in (5, 128, 300):
        given = x[:, :, :end], keep[:, :end]
        torch.testing.assert_close(program.module()(*given), site(*given), atol=1e-5, rtol=1e-5)
