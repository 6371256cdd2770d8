"""A patch Transformer over any mechanism, on what a closed-form baseline leaves.

    forecast = base(past) + share * s * head(blocks(patches of (past - m) / s))

m and s are mean and deviation of each window (Kim et al. 2022, "Reversible Instance Normalization", ICLR, without its
affine part). The head starts at zero, so that training starts at the base; `share` is set on the validation part.

Shapes: B windows, C columns of which K are targets, L lookback, H horizon, F calendar features, Q quantiles, P patch,
N tokens, E width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo import DiversityKind, HeadDiversity, Softmax
from attnzoo.positions import PositionName
from experiments.forecasting.baselines import Baselines, DLinear
from experiments.forecasting.patches import Attention, PatchTransformer, Tokens

InstanceNorm = Literal["mean_std", "mean", "last", "none"]
Base = Literal["ridge", "seasonal", "last", "none"]
Branch = Literal["transformer", "dlinear"]


class Forecast(NamedTuple):
    """A scaled forecast [B, K, H], quantiles [B, K, H, Q] in rising order, base and branch [B, K, H], and aux."""

    point: Tensor
    quantiles: Tensor | None
    base: Tensor
    branch: Tensor
    aux: Tensor


class ForecastNetwork(nn.Module):
    """A base, and a branch of attention (or DLinear) on what it leaves.

    Args:
        lookback: L.
        horizon: H.
        columns: C.
        targets: K; they are the first columns.
        features: F.
        season: rows of the cycle.
        quantiles: levels of the quantiles, rising; none if empty.
        base: the baseline that the branch is added to; "none" for the branch alone.
        branch: "transformer" or "dlinear".
        attention: factory of the mechanism in every block.
        attention_at: other factories for single blocks, by number from 0.
        position: name of the position encoding of the tokens.
        tokens: "patch": patches of each target by itself; "mixed": patches of all columns together; "channel": each
            column as a whole.
        patch_size: P; the oldest value is repeated where the last patch would not end at the last value.
        stride: from patch to patch; P if None.
        dim: E.
        depth: blocks.
        num_heads: H of the attention.
        head_diversity: weight of the term that keeps the heads different; 0 for none.
        head_diversity_kind: see ``attnzoo.HeadDiversity``.
        hidden_dim: width of the feed-forward; 2 E if None.
        dropout: of the branches of a block and before the head.
        instance_norm: how each window is normalised before the tokens are cut.

    Raises:
        ValueError: for sizes that do not divide, an unknown name, or a block that does not exist.
    """

    def __init__(
        self,
        *,
        lookback: int,
        horizon: int,
        columns: int = 1,
        targets: int = 1,
        features: int = 0,
        season: int = 1,
        quantiles: Sequence[float] = (),
        base: Base = "ridge",
        branch: Branch = "transformer",
        attention: Attention = Softmax,
        attention_at: Mapping[str, Attention] | None = None,
        position: PositionName = "learned",
        tokens: Tokens = "patch",
        patch_size: int = 16,
        stride: int | None = None,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        instance_norm: InstanceNorm = "mean_std",
    ) -> None:
        super().__init__()
        self.targets, self.horizon, self.levels = targets, horizon, len(quantiles)
        self.base, self.instance_norm = base, instance_norm
        self.baselines = Baselines(lookback, horizon, season)
        self.share: Tensor
        self.register_buffer("share", torch.ones(()))
        if head_diversity and branch == "dlinear":
            raise ValueError(f"--model.head_diversity is {head_diversity}, but --model.branch=dlinear has no heads")
        diversity = HeadDiversity(head_diversity, head_diversity_kind) if head_diversity else None
        self.branch: nn.Module = (
            DLinear(lookback, horizon, from_zero=base != "none")
            if branch == "dlinear"
            else PatchTransformer(
                lookback=lookback, horizon=horizon, columns=columns, targets=targets, features=features,
                attention=attention, attention_at=attention_at, position=position, tokens=tokens,
                patch_size=patch_size, stride=stride, dim=dim, depth=depth, num_heads=num_heads,
                hidden_dim=hidden_dim, dropout=dropout, head_diversity=diversity,
            )
        )  # fmt: skip
        # Of the window's deviation, the same for all targets: levels differ little from series to series by then.
        self.spread = nn.Parameter(torch.zeros(horizon, self.levels)) if self.levels else None

    def no_weight_decay(self) -> set[str]:
        """What the optimiser shall not shrink: narrow bands are not simpler than wide ones."""
        return {"spread"}

    def forward(self, past: Tensor, calendar: Tensor) -> Forecast:
        """Scaled past [B, C, L], calendar [B, H, F] -> the forecast and its parts."""
        # Rows come in float32, whatever the precision of the weights.
        past, calendar = past.to(self.share.dtype), calendar.to(self.share.dtype)
        mean, std = normaliser(past, self.instance_norm)
        normal = (past - mean) / std
        if isinstance(self.branch, DLinear):
            branch, aux = self.branch(normal[:, : self.targets]), past.new_zeros(())
        else:
            branch, aux = self.branch(normal, calendar)
        own = past[:, : self.targets]
        base, branch = self.base_of(own), branch * std[:, : self.targets]
        whole = self.training or self.base == "none"
        point = base + (branch if whole else self.share * branch)
        if self.spread is None:
            return Forecast(point, None, base, branch, aux)
        # The quantiles follow the forecast, and do not pull at it.
        quantiles = point.detach()[..., None] + self.spread * self.width_of(own)[..., None]
        return Forecast(point, quantiles if self.training else quantiles.sort(-1).values, base, branch, aux)

    def base_of(self, past: Tensor) -> Tensor:
        """Scaled targets [B, K, L] -> the forecast without the branch, [B, K, H]."""
        if self.base == "none":
            return normaliser(past, self.instance_norm)[0].expand(*past.shape[:2], self.horizon)
        forecast: Tensor = getattr(self.baselines, self.base)(past.to(self.share.dtype))
        return forecast

    def width_of(self, past: Tensor) -> Tensor:
        """Scaled targets [B, K, L] -> what the spread of the quantiles is in units of, [B, K, 1]."""
        return normaliser(past, "mean_std")[1]


def normaliser(past: Tensor, kind: InstanceNorm) -> tuple[Tensor, Tensor]:
    """What is subtracted from a window and what it is divided by, [..., L] -> [..., 1] each; 1 for a flat window."""
    ones = torch.ones_like(past[..., :1])
    if kind == "none":
        return torch.zeros_like(ones), ones
    if kind == "last":
        return past[..., -1:], ones
    mean = past.mean(-1, keepdim=True)
    if kind == "mean":
        return mean, ones
    std = (past - mean).square().mean(-1, keepdim=True).sqrt()
    # What is left of a flat window is rounding, and would be blown up.
    return mean, torch.where(std > 1e-5 * (1 + mean.abs()), std, ones)
