"""What functions share that make their intermediate numbers anew for the gradients.

Letters: none; any tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def eager_on_cpu(x: Tensor) -> bool:
    """Whether a ``torch.autograd.Function`` of our own may take x: not in a graph, nor under torch.func.

    Elsewhere many small steps cost more than the memory that they save.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not under_torch_func()


def under_torch_func() -> bool:
    """Whether vmap, grad and the like are at work, which take neither functions of our own nor checkpoints."""
    return torch._C._are_functorch_transforms_active()


def again(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], upstream: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients that have gradients themselves, of outputs made again from the saved inputs by ordinary operations."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
