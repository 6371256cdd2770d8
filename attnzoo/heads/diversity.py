"""How alike the heads of an attention are, as a term of the loss that keeps them different.

    Y_h = O_h W_h      what head h adds to the stream: its output O_h [T, Dv] times its slice W_h [Dv, E] of the
                       output projection
    projected          mean over tokens and pairs i < j of  (Y_i . Y_j)^2 / (|Y_i|^2 |Y_j|^2)
                       by Gram blocks, Y_i . Y_j = O_i (W_i W_j') O_j', so that no Y is ever made
    cka                mean over pairs of  HSIC(O_i, O_j) / sqrt(HSIC(O_i, O_i) HSIC(O_j, O_j)), linear kernels
    overlap            mean over pairs of  |<P_i . P_j>| / sqrt(<P_i^2> <P_j^2>),  P_h = A_h R, <> over queries;
                       R [S, 16] of random signs, so that the mean of P_i . P_j is that of sum_k A_i A_j

    li_subspace        (1 / H^2) sum_ij cos(V_i, V_j)           of the projected values, mean over tokens
    li_position        (1 / H^2) sum_ij sum_k |A_i A_j|         of the weights, mean over queries
    li_output          (1 / H^2) sum_ij cos(O_i, O_j)           of the outputs, mean over tokens

The last three are minus the terms of Li et al. 2018, "Multi-Head Attention with Disagreement Regularization",
arXiv:1810.10183, which maximises its own: pairs i = j are in, and anti-parallel heads count as different. The paper
does not say over what |A_i A_j| and the cosines are summed; here it is a mean over tokens, so that length does not
matter. CKA: Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", arXiv:1905.00414, with
the estimate of HSIC that has no bias (Song et al. 2012, "Feature Selection via Dependence Maximization"): the plain one
takes heads that have nothing in common for alike when tokens are few; pairs that come out below 0 count as 0.

All are 0 (different) to 1 (the same), in float32 whatever autocast says, on real tokens alone. Squares make heads that
differ in sign alone the same, for they are the same up to the output projection. Only ``li_position`` needs weights.

Shapes: B batch, H query heads, G key/value heads, T queries, S keys, Dv value width, E width of the model.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from attnzoo.kernels.precision import full_precision
from attnzoo.mask import as_mask, hide

DiversityKind = Literal["projected", "cka", "overlap", "li_subspace", "li_position", "li_output"]

PROJECTED_TOKENS, CKA_TOKENS = 128, 512
"""How many tokens of a call are looked at. A cosine is one for each token; CKA is nothing without many."""
COLUMNS = 16
"""Columns of random signs of ``overlap``."""
EPS = 1e-6
"""Added to squared norms: a dead head gives 0, and the gradient of a squared cosine stays below 1 / sqrt(EPS)."""


def projected(heads: Tensor, weight: Tensor, keep: Tensor | None = None, *, tokens: int = PROJECTED_TOKENS) -> Tensor:
    """Mean squared cosine between what two heads add to the stream.

    Args:
        heads: the outputs of the heads, [B, H, T, Dv].
        weight: of the output projection, [E, H Dv].
        keep: bool [B, T], False at padding; all are real if None.
        tokens: at most so many are looked at, drawn by torch's generator.

    Returns:
        A scalar; 0 for a single head.

    Example:
        >>> heads = torch.randn(2, 1, 5, 4).repeat(1, 2, 1, 1)
        >>> same, apart = torch.eye(4).repeat(1, 2), torch.eye(8)
        >>> round(projected(heads, same).item(), 3), projected(heads, apart).item()
        (1.0, 0.0)
    """
    count, width = heads.shape[1], heads.shape[3]
    rows, real = _sample(heads, keep, tokens)
    with full_precision(rows):
        rows, weight = _wide(rows), _wide(weight)
        blocks = (weight.T @ weight).unflatten(0, (count, width))  # [H, Dv, H Dv]
        products = (rows.transpose(0, 1) @ blocks).unflatten(-1, (count, width))  # [H, N, H, Dv]
        inner = (products * rows).sum(-1)  # [H, N, H]
        norms = inner.diagonal(dim1=0, dim2=2).clamp(min=0) + EPS  # [N, H]
        alike = inner.square() / (norms.T[:, :, None] * norms)
        return _mean_of_pairs(alike.sum(1) / real.sum().clamp(min=1))


def cka(heads: Tensor, keep: Tensor | None = None, *, tokens: int = CKA_TOKENS) -> Tensor:
    """Mean linear CKA of two heads' outputs; turning or scaling a head by itself changes nothing.

    Args:
        heads: as ``projected``; so are ``keep`` and ``tokens``.
        keep: bool [B, T].
        tokens: more of them make a surer estimate.

    Returns:
        A scalar; 0 for a single head, and for fewer than 4 tokens, of which nothing can be said.
    """
    rows, real = _sample(heads, keep, tokens)
    with full_precision(rows):
        rows = _wide(rows)
        count = real.sum().clamp(min=4)
        rows = (rows - rows.sum(0) / count).masked_fill(~real[:, None, None], 0)
        squares = rows.square().sum(-1)  # [N, H]
        scale = (squares.sum(0) / count + EPS).rsqrt()
        rows, squares = rows * scale[:, None], squares * scale.square()
        flat = rows.flatten(1)
        cross = (flat.T @ flat).unflatten(0, rows.shape[1:]).unflatten(2, rows.shape[1:]).square().sum((1, 3))
        # Of centred rows the sums over a row of the kernel are 0, and its diagonal is all that is left to take out.
        total = squares.sum(0)
        hsic = cross - squares.T @ squares * count / (count - 2)
        hsic = (hsic + total[:, None] * total / ((count - 1) * (count - 2))) / (count * (count - 3))
        own = hsic.diagonal().clamp(min=EPS).rsqrt()
        alike = (hsic * own[:, None] * own).clamp(0, 1)
        return torch.where(real.sum() >= 4, _mean_of_pairs(alike), 0.0)


def overlap(probe: Tensor, keep: Tensor | None = None) -> Tensor:
    """How much two heads look at the same keys, from what they make of random signs.

    Args:
        probe: A_h R, [B, H, T, m], with the same R for all heads.
        keep: bool [B, T], which queries are real; all if None.
    """
    real = _real(probe, keep)
    with full_precision(probe):
        rows = _only(probe, real).transpose(0, 1).flatten(1)
        inner = rows @ rows.T / (real.sum().clamp(min=1) * probe.shape[3])
        own = (inner.diagonal() + EPS).rsqrt()
        return _mean_of_pairs((inner * own[:, None] * own).abs())


def li_cosine(vectors: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean cosine over all pairs of heads, each with itself too: ``li_subspace`` of values, ``li_output`` of outputs.

    Args:
        vectors: [B, H, T, Dv].
        keep: bool [B, T], which tokens are real; all if None.
    """
    real = _real(vectors, keep)
    with full_precision(vectors):
        wide = _only(vectors, real)
        units = wide * (wide.square().sum(-1, keepdim=True) + EPS).rsqrt()
        return units.mean(1).square().sum() / real.sum().clamp(min=1)


def li_position(weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean overlap of the weights over all pairs of heads, each with itself too.

    Args:
        weights: [B, H, T, S].
        keep: bool [B, T], which queries are real; all if None.
    """
    real = _real(weights, keep)
    with full_precision(weights):
        both = _only(weights, real).abs().mean(1).square().sum(-1)
        # Above 1 only where rows are no shares: with dropout, or with weights below 0.
        return (both.sum() / real.sum().clamp(min=1)).clamp(max=1)


class HeadDiversity(nn.Module):
    """The term of the loss, at a weight that a run may move; one for all blocks of a model.

    Blocks that are given it call it in training, and add what it says, times ``strength``, to their aux. ``strength``
    is share x weight / (attentions that it watches), so that aux of a model has the mean over its attentions. Its
    output is not weighed: to read it, register a forward hook. In evaluation, and at weight 0, nothing is computed.

    Several processes each take the mean over their own tokens; the mean of these is what is minimised.

    Args:
        weight: of the term: 0.01 to 0.1 is usual.
        kind: see ``attnzoo.heads.diversity``.

    Raises:
        ValueError: for a negative weight or another kind.

    Example:
        >>> from attnzoo import EncoderBlock
        >>> diversity = HeadDiversity(0.1)
        >>> block = EncoderBlock(16, 4, head_diversity=diversity)
        >>> y, aux = block(torch.randn(2, 6, 16))
        >>> 0 < aux.item() < 0.1, block.eval()(y)[1].item()
        (True, 0.0)
    """

    strength: Tensor

    def __init__(self, weight: float, kind: DiversityKind = "projected") -> None:
        super().__init__()
        if not 0 <= weight < float("inf"):
            raise ValueError(f"head_diversity: the weight must be a number from 0 up, got {weight}")
        if kind not in get_args(DiversityKind):
            raise ValueError(f"head_diversity_kind must be one of {', '.join(get_args(DiversityKind))}; got {kind!r}")
        self.weight, self.kind = weight, kind
        self.sites, self.share = 0, 1.0
        # A tensor, so that a compiled graph need not be made anew when a run moves it; no part of a checkpoint.
        self.register_buffer("strength", torch.tensor(float(weight)), persistent=False)
        self.active = weight > 0

    def extra_repr(self) -> str:
        """Weight and kind."""
        return f"{self.weight}, kind={self.kind!r}"

    def watch(self, attention: Any) -> None:
        """Counts an attention in whose heads will come.

        Raises:
            ValueError: if its mechanism is nothing that this kind can read.
        """
        if self.kind in ("overlap", "li_position"):
            attention.mechanism.require("linear_in_v", f"head_diversity_kind={self.kind}, where projected serves")
        self.sites += 1
        self.move(self.share)

    def move(self, share: float) -> None:
        """Sets the share of the weight, 0 to 1, that counts from now on; at 0 nothing is computed."""
        if not 0 <= share <= 1:
            raise ValueError(f"head_diversity: the share of the weight must lie in [0, 1], got {share}")
        self.share, self.active = share, share * self.weight > 0
        self.strength.fill_(share * self.weight / max(1, self.sites))

    @property
    def on(self) -> bool:
        """Whether it has anything to say now."""
        return self.training and self.active

    def forward(
        self,
        attention: Any,
        heads: Tensor,
        x: Tensor,
        context: Tensor | None = None,
        *,
        real: Tensor | None = None,
        **site: Any,
    ) -> Tensor:
        """How alike the heads of a call of ``attention`` are, 0 to 1, not weighed.

        Args:
            attention: the shell, ``MultiheadAttention`` or ``MultiheadLatentAttention``.
            heads: what its ``attend`` gave, [B, H, T, Dv].
            x: what it was given, [B, T, E]; read by the kinds of weights and values alone.
            context: as x.
            real: bool [B, T], which tokens of x are real; all if None.
            site: further keywords that ``attend`` was given, such as the mask.
        """
        inputs = (x,) if context is None else (x, context)
        if self.kind == "projected":
            return projected(heads, attention.out_proj.weight, real)
        if self.kind == "cka":
            return cka(heads, real)
        if self.kind == "li_output":
            return li_cosine(heads, real)
        source, mask = inputs[-1], as_mask(site.get("mask"))
        if self.kind == "li_subspace":
            keep = real if context is None else mask.key_keep
            return li_cosine(attention.project_values(hide(source, mask.key_keep)), keep)
        keys = source.shape[1]
        if self.kind == "li_position":
            columns = torch.eye(keys, dtype=heads.dtype, device=heads.device)
            return li_position(attention.attend(*inputs, **site, values=columns), real)
        signs = torch.randint(0, 2, (keys, COLUMNS), device=heads.device).to(heads.dtype) * 2 - 1
        return overlap(attention.attend(*inputs, **site, values=signs), real)


def _sample(heads: Tensor, keep: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """At most ``tokens`` of [B, H, T, Dv], real ones first: [N, H, Dv] with 0 at padding, and which are real, [N].

    N is known from the shapes alone, so that a compiled graph serves every mask.
    """
    real, length = _real(heads, keep).flatten(), heads.shape[2]
    if real.shape[0] > tokens:
        chance = torch.rand(real.shape[0], device=heads.device).masked_fill(~real, -1)
        chosen = chance.topk(tokens, sorted=False).indices
        # Straight from [B, H, T, Dv]: to lay all tokens out first costs more than all that follows.
        rows, real = heads[chosen // length, :, chosen % length], real.index_select(0, chosen)
    else:
        rows = heads.transpose(1, 2).flatten(0, 1)
    return rows.masked_fill(~real[:, None, None], 0), real


def _real(x: Tensor, keep: Tensor | None) -> Tensor:
    """Bool [B, T] for x [B, H, T, ...]."""
    return torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if keep is None else keep


def _only(x: Tensor, real: Tensor) -> Tensor:
    """x [B, H, T, n] in full precision, 0 at padding."""
    return _wide(x).masked_fill(~real[:, None, :, None], 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _mean_of_pairs(alike: Tensor) -> Tensor:
    """Mean of [H, H] over the pairs i < j, at most 1; 0 for a single head."""
    heads = alike.shape[0]
    return (alike.triu(1).sum() / max(1, heads * (heads - 1) / 2)).clamp(max=1)
