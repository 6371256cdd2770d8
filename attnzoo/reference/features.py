"""Linear attention with features: every weight by itself, no sums kept, no maximum taken out."""

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.linear import Linear
from attnzoo.mechanisms.performer import Performer
from attnzoo.reference.rows import visible_pairs


def linear(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Weights phi(q) . phi(k), divided by their sum."""
    assert isinstance(mechanism, Linear)

    def elu(x: Tensor) -> Tensor:
        # elu(x) is exp(x) - 1 below 0; to take 1 away and add it again would leave 0 where exp(x) is small.
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))

    def relu(x: Tensor) -> Tensor:
        return torch.maximum(x, torch.zeros_like(x)) + 0.001

    maps: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu, "relu": relu, "exp": torch.exp}
    return _rows(maps[mechanism.feature_map], q, k, v, mask)


def performer(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """As ``linear``, with phi(x) = exp(w . x' - |x'|^2 / 2) / sqrt(R) for each row w of the projection."""
    assert isinstance(mechanism, Performer)
    vectors = mechanism.projection.to(q.dtype)

    def phi(x: Tensor) -> Tensor:
        x = x / x.shape[0] ** 0.25
        return torch.exp(vectors @ x - x.dot(x) / 2) / len(vectors) ** 0.5

    return _rows(phi, q, k, v, mask)


def _rows(phi: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    batch, heads, queries, _ = q.shape
    keys, share = k.shape[2], heads // k.shape[1]
    seen = visible_pairs(mask, batch, heads, queries, keys, q.device)
    rows = []
    for b in range(batch):
        for h in range(heads):
            features = torch.stack([phi(key) for key in k[b, h // share]]) if keys else k.new_empty(0, 0)
            for i in range(queries):
                sees = seen[b, h, i].nonzero()[:, 0]
                if len(sees) == 0:
                    rows.append(v.new_zeros(v.shape[-1]))
                    continue
                weights = features[sees] @ phi(q[b, h, i])
                rows.append(weights @ v[b, h // share, sees] / weights.sum())
    return torch.stack(rows).view(batch, heads, queries, v.shape[-1])
