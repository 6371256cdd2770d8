"""One thread, no W&B network, and the toys importable by their module name."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, toys on the path, offline, and signals as they were."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("WANDB_MODE", "offline")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    torch.set_num_threads(threads)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A preset of the toy, called `toy`."""
    path = tmp_path / "toy.yaml"
    path.write_text((HERE / "toy.yaml").read_text())
    return path
