"""What others wrote, imported where it is installed (the extra `bench`); tests skip by name where it is not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Peer = Callable[[str], Any]


@pytest.fixture
def peer() -> Peer:
    """``peer("package")``: the module, or a skip that names it."""

    def imported(name: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a peer's own imports complain about is not ours to mend
            return pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[bench]'")

    return imported


@pytest.fixture
def close() -> Callable[..., None]:
    """``close(ours, theirs)``: equal to 1e-5 in float32."""

    def check(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)

    return check


@pytest.fixture
def load() -> Callable[..., None]:
    """``load(ours.q_proj, weight, bias)``: the same numbers in one of our layers."""

    def into(layer: nn.Linear, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.no_grad():
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)

    return into
