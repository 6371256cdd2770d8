"""Cross entropy with label smoothing, and the mean of a loss over an epoch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, *, smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Sum of the smoothed cross entropy over the targets that count, and how many these are.

    The formula is torch's: with smoothing s over C classes the target distribution is (1 - s) * target + s /
    C, so a perfect model does not reach 0. Targets that are `ignore_index` add nothing, to the smoothing
    share neither.

    Args:
        logits: [N, C], any float type.
        targets: [N] class numbers, or [N, C] distributions that sum to 1 (mixed pictures).
        smoothing: s, from 0 to 1.
        ignore_index: class number that stands for "no target".

    Returns:
        The sum in nats, and the number of targets, both scalars. Their quotient is the mean.

    Raises:
        ValueError: shapes that do not go together.

    Example:
        >>> total, count = cross_entropy_sum(torch.tensor([[2.0, 0, 0, 0]]), torch.tensor([0]), smoothing=0.1)
        >>> round(float(total / count), 4)
        0.4908
    """
    if logits.ndim != 2 or targets.shape not in (logits.shape[:1], logits.shape):
        raise ValueError(
            f"Logits must be [N, C] and targets [N] or [N, C]; "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}. "
            "Flatten batch and time first."
        )
    soft = targets.ndim == 2
    # Half precision is enough for logits, not for a sum over thousands of tokens.
    exact = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(
        logits.to(exact),
        targets.to(exact) if soft else targets,
        label_smoothing=smoothing,
        ignore_index=-100 if soft else ignore_index,
        reduction="sum",
    )
    count = torch.tensor(len(targets), device=targets.device) if soft else (targets != ignore_index).sum()
    return total, count


class LossMean(Metric):
    """Sum of losses divided by the sum of counts, exact for unequal batches and over processes."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        self.total += total.detach()
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count
