"""What a call makes on the way, tensor by tensor: how tests see whether memory is what was promised."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Sees the result of each operation inside it, forward and backward.

    Attributes:
        elements: the most elements that one storage has.
        largest_bytes: the most bytes that one storage has.
        total: elements of all results together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.largest_bytes = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                size = leaf.untyped_storage().nbytes()
                self.largest_bytes = max(self.largest_bytes, size)
                self.elements = max(self.elements, size // leaf.element_size())
                self.total += leaf.numel()
        return result
