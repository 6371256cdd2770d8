"""Bytes that are alive at the worst moment of a call, seen tensor by tensor, the same on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Keeps count of the storages that operations inside it made and that are still alive.

    Attributes:
        peak: the most bytes that were alive at once. What was there before does not count, nor does what a fused
            kernel takes and gives back inside one operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given:
                    self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return result


def live_bytes(call: Callable[[], object]) -> int:
    """The peak of ``LiveBytes`` over one call; on a GPU the peak of torch's own allocator."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as seen:
        call()
    return seen.peak
