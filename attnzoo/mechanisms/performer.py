"""Performer: softmax attention from positive orthogonal random features (FAVOR+).

Choromanski et al. 2020, "Rethinking Attention with Performers", arXiv:2009.14794, sections 2.3 and 2.4.

    exp(q . k / sqrt(D)) = E_w [ phi_w(q) phi_w(k) ],   phi_w(x) = exp(w . x' - |x'|^2 / 2),   x' = x D^(-1/4)
    a_ij = 1/R sum_r phi_r(q_i) phi_r(k_j),             o_i = sum_j a_ij v_j / sum_j a_ij

    W [R, D]: its rows w_r are orthogonal, D at a time, and as long as vectors of D normal numbers
    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   o [B, H, T, Dv]

W is shared by the heads of a layer, so that grouped keys need their features once. Left out: trigonometric features,
which may turn negative; the pair of features exp(w . x'), exp(-w . x'); the ReLU kernel, which is Linear's.

Deviation: the authors' code takes a maximum over all keys out of the exponents and adds an eps to each feature. Here
the maximum is one for each feature, and runs along with the keys (kernels/prefix.py): keys of any length are right,
and no other row of the batch, no padding and no later key has a say. What is common to all features of a query
(1/R, |q'|^2) cancels. Sums are held in float32 or more. Dropout acts on o, there being no weights to act on.

Use it when sequences are long and a softmax over all of them is what you mean, say for a model trained with one: time
and memory are linear in the length, and more features come nearer to the softmax.

Not when attention is sharp: the variance of a weight, relative to its square, is exp(|q + k|^2 / sqrt(D)) / R, so
long queries and keys need more features than there are keys. At R = D ln D it pays from some thousand tokens on.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.kernels.precision import full_precision
from attnzoo.mechanism import at_least, whole
from attnzoo.running_sums import FeatureAttention


class Performer(FeatureAttention):
    """An unbiased estimate of the softmax's exponentials, linear in T and S.

    Args:
        num_heads: H.
        head_dim: D.
        num_features: R; if None D ln D, rounded, and at least 2, since with one feature the query cancels.
        redraw_every: new features after so many optimiser steps; the first ones for ever if None.
        seed: W follows from it, from ``layer`` and, with ``redraw_every``, from the number of the step.
        dropout: share of the output dropped in training.
        layer: a fact of the site, filled in by the shell; each layer draws features of its own.

    Raises:
        ValueError: if ``num_features`` or ``redraw_every`` is below 1.

    Example:
        >>> attention = Performer(4, 8)
        >>> q = k = v = torch.randn(2, 4, 100, 8)
        >>> attention(q, k, v).shape, attention.num_features
        (torch.Size([2, 4, 100, 8]), 17)
    """

    traits = replace(FeatureAttention.traits, budget="num_features", complexity="T R (D + Dv)")
    projection: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        redraw_every: int | None = None,
        seed: int = 0,
        dropout: float = 0.0,
        layer: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "Performer", num_features=num_features, redraw_every=redraw_every)
        at_least(0, "Performer", layer=layer)
        whole("Performer", seed=seed)
        self.num_features = max(2, round(head_dim * math.log(head_dim))) if num_features is None else num_features
        self.redraw_every = redraw_every
        self.seed = seed
        self.layer = layer
        self.register_buffer("projection", torch.empty(self.num_features, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the W of the first steps."""
        self._draw(0)

    def after_step(self, step: int) -> None:
        """Draws a new W after every ``redraw_every`` steps of training: a resumed run draws the same ones."""
        if self.training and self.redraw_every is not None and step % self.redraw_every == 0:
            self._draw(step)

    def query_features(self, q: Tensor) -> Tensor:
        return self._project(self._shrink(q))

    def key_features(self, k: Tensor) -> Tensor:
        """log phi(k), [B, G, S, R]."""
        x = self._shrink(k)
        return self._project(x) - x.square().sum(-1, keepdim=True) / 2

    def _shrink(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)) * self.head_dim**-0.25

    def _project(self, x: Tensor) -> Tensor:
        # In half precision a logarithm of 50 is off by a tenth, and so is its exponential, relative to itself.
        with full_precision(x):
            return x @ self.projection.to(x.dtype).T

    def _draw(self, step: int) -> None:
        number = (self.seed * 1_000_003 + (self.layer or 0)) * 1_000_003 + step
        draw = torch.Generator().manual_seed(number % (1 << 63))
        square = (self.head_dim, self.head_dim)
        blocks = []
        for _ in range(-(-self.num_features // self.head_dim)):
            normal, lengths = (torch.randn(square, generator=draw, dtype=torch.float64, device="cpu") for _ in range(2))
            rows, triangle = torch.linalg.qr(normal)
            # With the signs that Gram and Schmidt would leave, each direction is as likely as any other.
            rows = (rows * triangle.diagonal().sign()).T
            blocks.append(rows * lengths.norm(dim=1, keepdim=True))
        self.projection.copy_(torch.cat(blocks)[: self.num_features])
