"""Full precision where autocast would take it away."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Keeps autocast away: sums over thousands of keys leave the range and the precision of half a float.

    The device "meta" has no autocast, and no numbers either.
    """
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
