"""The default compiler gives the same numbers, forward and backward; slow, since it builds code."""

import pytest
import torch

from attnzoo import CATALOGUE, Mask
from attnzoo.catalogue import construct
from attnzoo.laws import SITE


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_inductor_gives_the_same_numbers(name: str) -> None:
    mechanism = construct(CATALOGUE[name], 4, 8, **SITE)
    keep = torch.ones(2, 17, dtype=torch.bool)
    keep[1, 12:] = False
    mask = Mask(causal=mechanism.traits.causal, key_keep=keep)
    torch._dynamo.reset()
    compiled = torch.compile(mechanism, fullgraph=True)
    results = []
    for call in (mechanism, compiled):
        leaves = [torch.randn(2, 4, 17, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        out = call(*(x.requires_grad_() for x in leaves), mask)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for eager, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, eager, atol=1e-5, rtol=1e-5)
