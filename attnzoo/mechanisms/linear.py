"""Kernel linear attention.

Katharopoulos, Vyas, Pappas, Fleuret 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", arXiv:2006.16236, sections 3.2 and 3.3.

    o_i = phi(q_i) M / (phi(q_i) . z),    M = sum_j phi(k_j) v_j^T,    z = sum_j phi(k_j)

    sums over all visible keys; causal over those with j <= i + S - T.  No 1/sqrt(D).  phi(x), number by number:
    elu     elu(x) + 1            the paper's
    relu    max(x, 0) + 0.001     Choromanski et al. 2020, arXiv:2009.14794, without their random projection
    exp     exp(x)                Shen et al. 2018, arXiv:1812.01243, without their softmax over the sequence

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   M [B, G, D, Dv]   z [B, G, D]   o [B, H, T, Dv]

Left out: Shen's softmax of k over the sequence, since its sum contains the future, so it has no causal form (their
softmax of q over the features cancels here); learned maps; weights by position, as in cosFormer.

Deviation: the authors add an eps to the denominator. Here phi is carried as its logarithm under a running maximum
(kernels/prefix.py): the denominator is never below 1, however small the features, and exp never overflows, however
large. M and z are held in float32 or more. Dropout acts on o, there being no weights that it could act on.

Use it when sequences are long, from one or two thousand tokens on, or are generated token by token: time and memory
are linear in the length, and what a step carries has a constant size.

Not when a query has to single out a few keys: the weights have rank D and come out much flatter than a softmax, and
a trained softmax model does not survive the exchange. On short sequences the fused softmax is faster, too.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import threshold

from attnzoo.running_sums import FeatureAttention

FeatureMap = Literal["elu", "relu", "exp"]

RELU_FLOOR = 1e-3
"""Keeps a query all of whose numbers are negative from seeing nothing; the value in the authors' code."""


class Linear(FeatureAttention):
    """Dot products of positive features in place of exponentials of dot products: linear in T and S.

    Args:
        num_heads: H.
        head_dim: D.
        feature_map: phi: "elu", "relu" or "exp".
        dropout: share of the output dropped in training.

    Raises:
        ValueError: for an unknown feature map.

    Example:
        >>> attention = Linear(4, 8)
        >>> q = k = v = torch.randn(2, 4, 100, 8)
        >>> out, state = attention.step(q, k, v, attention.init_state(2, max_len=1000))
        >>> state.sums.total.shape                     # M, and z as its last column
        torch.Size([2, 4, 8, 9])
    """

    def __init__(self, num_heads: int, head_dim: int, *, feature_map: FeatureMap = "elu", dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        if feature_map not in get_args(FeatureMap):
            known = ", ".join(get_args(FeatureMap))
            raise ValueError(f"Linear: feature_map must be one of {known}; got {feature_map!r}")
        self.feature_map = feature_map

    def query_features(self, q: Tensor) -> Tensor:
        return self._log_phi(q)

    def key_features(self, k: Tensor) -> Tensor:
        """log phi(k), [B, G, S, D]."""
        return self._log_phi(k)

    def _log_phi(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.feature_map == "elu":
            # At 0 itself the slope is the second part's, which ends just above; clamp is six times as slow backward.
            return (x.relu() + 1).log() - threshold(-x, -torch.finfo(x.dtype).tiny, 0.0)
        if self.feature_map == "relu":
            return (x.relu() + RELU_FLOOR).log()
        return x
