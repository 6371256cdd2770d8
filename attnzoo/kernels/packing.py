"""Real keys to the front: for mechanisms that pick keys by slot, so that padding on either side is exact."""

import torch
from torch import Tensor


def front(key_keep: Tensor) -> Tensor:
    """Where the keys of the packed row come from: int64 [B, S], real ones first, each kind in its own order.

    Args:
        key_keep: bool [B, S].

    Example:
        >>> front(torch.tensor([[False, True, False, True]]))
        tensor([[1, 3, 0, 2]])
    """
    slots = torch.arange(key_keep.shape[1], device=key_keep.device)
    # No two values are equal, so the order is the same from every sort; ONNX has none that is stable.
    return (slots + key_keep.shape[1] * ~key_keep).argsort(dim=1)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, G, S, width] in the order [B, n] of slots."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
