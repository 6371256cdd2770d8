"""Softmax over the visible keys, for mechanisms that make their scores themselves."""

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, visible: Tensor | None) -> Tensor:
    """Weights over the last axis: exactly 0 at hidden keys, a whole row of 0 where none is visible.

    Args:
        scores: [..., T, S]; half precision is summed in float32.
        visible: bool, broadcast to ``scores``; everything if None.
    """
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    if visible is None:
        return wide.softmax(-1).to(scores.dtype)
    # A row without a visible key is NaN for a moment; both fills keep that from the result and the gradients.
    weights = wide.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible, 0).to(scores.dtype)
