"""Work in parts on a CPU, heads after heads or groups after groups: the same numbers as all at once."""

from collections.abc import Callable

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import LSH, AdaptiveSpan, Axial, BlockSparse, Local, Mask, Mechanism, MoBA, OffsetBias

Draw = Callable[..., tuple[Tensor, ...]]

BY_HEADS: dict[str, Callable[[int], Mechanism]] = {
    "Local": lambda width: Local(4, width, window=5),
    "AdaptiveSpan": lambda width: AdaptiveSpan(4, width, max_span=12, ramp=4),
    "LSH": lambda width: LSH(4, width, bucket_size=4),
    "MoBA": lambda width: MoBA(4, width, block_size=4),
    "Axial": lambda width: Axial(4, width, grid=(6, 7), prefix_tokens=1),
}

GIVEN = {
    "nothing": None,
    "padding": None,
    "pairs": "pair_keep",
    "bias": "bias",
    "bias of all heads": "bias",
    "offset bias": "bias",
}
"""What is given beside q, k and v, and the trait that takes it."""

CALLS = [
    (name, given)
    for name, made in BY_HEADS.items()
    for given, trait in GIVEN.items()
    if trait is None or getattr(made(8).traits, trait)
]


def close(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("name", "given"), CALLS)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_after_heads(
    name: str, given: str, causal: bool, monkeypatch: pytest.MonkeyPatch, random_qkv: Draw
) -> None:
    """Each head has its own part of masks, biases, hashes and groups: outputs and every gradient."""
    module = BY_HEADS[name](8)
    traits = module.traits
    q, k, v = random_qkv(40, 40, heads=4, groups=2 if traits.grouped else 4, width=8)
    bias: Tensor | OffsetBias | None = None
    leaves = [q, v] if traits.shared_qk else [q, k, v]
    if "bias" in given:
        shape = {"bias": (2, 4, 40, 40), "bias of all heads": (40, 40), "offset bias": (4, 79)}[given]
        leaves.append(torch.randn(shape, requires_grad=True))
        bias = OffsetBias(leaves[-1]) if given == "offset bias" else leaves[-1]
    mask = Mask(
        causal=causal,
        key_keep=torch.rand(2, 40) < 0.8 if given == "padding" else None,
        pair_keep=torch.rand(2, 4, 40, 40) < 0.8 if given == "pairs" else None,
    )
    results = []
    for numbers in (1 << 18, 1):
        monkeypatch.setattr("attnzoo.kernels.heads.NUMBERS", numbers)
        out = module(q, q if traits.shared_qk else k, v, mask, bias)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*leaves, *module.parameters()])))
    for whole, parts in zip(*results, strict=True):
        close(parts, whole)


@pytest.mark.parametrize("name", ["LSH", "MoBA"])
def test_what_a_head_needs_is_what_a_part_makes(name: str, monkeypatch: pytest.MonkeyPatch, random_qkv: Draw) -> None:
    """One head of four at a time: the largest tensor on the way is half of what it was, or less."""
    module, seen = BY_HEADS[name](64), {}
    q, k, v = random_qkv(400, 400, batch=1, heads=4, width=64)
    for numbers in (1 << 18, 1):
        monkeypatch.setattr("attnzoo.kernels.heads.NUMBERS", numbers)
        with Made() as seen[numbers]:
            module(q, q if module.traits.shared_qk else k, v)
    assert seen[1].elements <= seen[1 << 18].elements / 2


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups one by one."""
    monkeypatch.setattr("attnzoo.kernels.gathered.LEAST_ROOM", 1)
    monkeypatch.setattr("attnzoo.kernels.gathered.ROOM", 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_under_autocast(dtype: torch.dtype, request: pytest.FixtureRequest, random_qkv: Draw) -> None:
    """What is made again for the gradients is made in the precision of the first time, wherever they are asked for."""
    module, leaves = BlockSparse(2, 8), random_qkv(80, 80, width=8)
    results = []
    for small in (False, True):
        if small:
            request.getfixturevalue("small_parts")
        with torch.autocast("cpu", dtype):
            out = module(*leaves)
        assert out.dtype == dtype
        plain = module(*leaves).square().sum()
        with torch.autocast("cpu", dtype):
            results.append((*torch.autograd.grad(plain, leaves), *torch.autograd.grad(out.float().sum(), leaves)))
    for number, (whole, parts) in enumerate(zip(*results, strict=True)):
        close(parts, whole, 1e-5 if number < 3 else 1e-2)
    # Each query is in one part alone, so no sum is rounded elsewhere.
    assert torch.equal(results[0][3], results[1][3])


@pytest.mark.usefixtures("small_parts")
def test_parts_add_up_in_float32(random_qkv: Draw) -> None:
    """128 parts give to the values that all of them see; in bfloat16 each sum would lose what is added to it."""
    _, _, v = random_qkv(1024, 1024, batch=1, heads=1)
    q = torch.zeros(1, 1, 1024, 4)
    module = BlockSparse(1, 4)
    (right,) = torch.autograd.grad(module(q, q, v).sum(), v)
    half = v.detach().bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(module(q.bfloat16(), q.bfloat16(), half).sum(), half)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), right, atol=0, rtol=1e-2)


@pytest.mark.usefixtures("small_parts")
def test_gradients_of_gradients_through_parts(random_qkv: Draw) -> None:
    """Where torch has them, as behind dropout, they are right; where its fused kernel has none, it says so."""
    q, k, v = (x.detach().double().requires_grad_() for x in random_qkv(24, 24))
    module = BlockSparse(2, 4, dropout=0.5).double()

    def call(*inputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return module(*inputs)

    assert torch.autograd.gradgradcheck(call, (q, k, v), fast_mode=True)
    (grad,) = torch.autograd.grad(module.eval()(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative.*not implemented"):
        grad.sum().backward()
