"""Cross entropy behind an output layer, made in pieces: the logits of all places never exist at once.

The gradient is made together with the loss, as in Hsu et al. 2024, "Liger Kernel", arXiv:2410.10989, section 3.3, so a
piece of the logits is used up while it is still in the cache. Over a vocabulary that is a third of the time of a loss,
and most of the memory of a training step.

Shapes: N places, E width, V words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE_ELEMENTS = 1 << 21
"""How many logits there are at once."""


class Loss(NamedTuple):
    """Sums of cross entropies, in nats.

    Attributes:
        smoothed: scalar, what is trained on.
        plain: scalar without smoothing and without a gradient.
        count: int64 scalar, over how many words.
    """

    smoothed: Tensor
    plain: Tensor
    count: Tensor


def output_loss(x: Tensor, weight: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Loss:
    """Cross entropy of softmax(x weight^T), smoothed and plain, summed in float32 or better.

    With smoothing s over V words the target distribution is (1 - s) * target + s / V, as in torch.

    Args:
        x: [N, E].
        weight: [V, E].
        targets: int64 [N], the right words.
        smoothing: s, from 0 to 1.

    Example:
        >>> loss = output_loss(torch.zeros(3, 4), torch.randn(8, 4), torch.tensor([1, 2, 3]))
        >>> round(float(loss.plain / loss.count), 4)  # log 8
        2.0794
    """
    sums = _OutputLoss.apply(x, weight, targets, smoothing, torch.is_grad_enabled())
    return Loss(*sums, torch.tensor(len(targets), device=x.device))


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, smoothing: float, tracked: bool
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, PIECE_ELEMENTS // len(weight))
        exact = torch.promote_types(weight.dtype, torch.float32)
        plain, spread = (torch.zeros((), device=x.device, dtype=exact) for _ in range(2))
        grads = (torch.empty_like(x), torch.zeros_like(weight)) if tracked else ()
        for place in range(0, len(x), rows):
            piece, target = x[place : place + rows].to(weight.dtype), targets[place : place + rows, None]
            logits = (piece @ weight.T).to(exact)
            right, mean, most = logits.gather(1, target), logits.mean(1, keepdim=True), logits.amax(1, keepdim=True)
            odds = logits.sub_(most).exp_()
            total = odds.sum(1, keepdim=True)
            norm = total.log() + most
            plain += (norm - right).sum()
            spread += (norm - mean).sum()
            if tracked:
                # The softmax minus the target distribution.
                grad = odds.mul_(total.reciprocal()).sub_(smoothing / len(weight))
                grad.scatter_add_(1, target, grad.new_full((), smoothing - 1).expand(target.shape))
                grad = grad.to(weight.dtype)
                grads[0][place : place + rows] = grad @ weight
                grads[1].addmm_(grad.T, piece)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(plain)
        return (1 - smoothing) * plain + smoothing * spread, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * factor.to(x_grad.dtype), weight_grad * factor.to(weight_grad.dtype), None, None, None
