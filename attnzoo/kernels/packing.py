"""Real keys to the front: for mechanisms that pick keys by slot, so that padding on either side is exact."""

from torch import Tensor


def front(key_keep: Tensor) -> Tensor:
    """Where the keys of the packed row come from: int64 [B, S], real ones first, each kind in its own order.

    Args:
        key_keep: bool [B, S].

    Example:
        >>> import torch
        >>> front(torch.tensor([[False, True, False, True]]))
        tensor([[1, 3, 0, 2]])
    """
    return (~key_keep).byte().argsort(dim=1, stable=True)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, G, S, width] in the order [B, n] of slots."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
