"""How much of a branch is kept beside its base, by the validation part, which may also say: nothing.

    error of base + a branch = R - 2 a P + a^2 S        R, P, S: means of residual^2, residual branch, branch^2

The best a is P / S, cut to 0 .. 1. It is kept where it lowers the error by more than one standard error, and is 0
otherwise: of two forecasts that the validation part cannot tell apart, the simpler one (Breiman et al. 1984,
"Classification and Regression Trees", 3.4.3). Windows overlap, so the standard error is that of the mean over stretches
of time as long as the horizon.

Shapes: B windows, K targets, H horizon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

FEWEST_STRETCHES = 3
"""In few windows stretches are shorter than the horizon; fewer than so many windows cannot speak for a branch."""


class BranchShare(Metric):
    """The share of a branch that is kept, and the errors with it and without.

    Args:
        horizon: H, how many windows make a stretch.
    """

    full_state_update = False

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon = horizon
        self.sums: list[Tensor]
        self.windows: list[Tensor]
        for name in ("sums", "windows"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, base: Tensor, branch: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Scaled base and branch [B, K, H], and a batch as of `Store.batch`."""
        known = batch["known"]
        residual = torch.where(known, batch["future"] - base, 0.0)
        branch = torch.where(known, branch, 0.0)
        parts = (residual.square(), residual * branch, branch.square(), known)
        self.sums.append(torch.stack([part.sum((1, 2)).float() for part in parts], dim=1))
        self.windows.append(batch["window"])

    def compute(self) -> dict[str, Tensor]:
        """The "share" that is kept, and its gain in standard errors; "mse" with it, "mse_base", "mse_whole" without."""
        sums, windows = (
            parts if isinstance(parts, Tensor) else torch.cat(parts) for parts in (self.sums, self.windows)
        )
        # Several processes have them in another order.
        sums = sums.cpu().double()[windows.cpu().argsort()]
        squares, product, branch, count = sums.sum(0).tolist()
        best = min(1.0, max(0.0, product / branch)) if branch > 0 else 0.0
        gain = self._gain(sums, best)
        share = best if gain > 1 else 0.0
        found = {
            "share": share,
            "gain_in_errors": gain,
            "mse": (squares - 2 * share * product + share**2 * branch) / count,
            "mse_base": squares / count,
            "mse_whole": (squares - 2 * product + branch) / count,
        }
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}

    def _gain(self, sums: Tensor, share: float) -> float:
        """What the share gains, in standard errors of the mean over stretches."""
        sums = sums[sums[:, 3] > 0]  # windows of which something is known
        if share == 0 or len(sums) < FEWEST_STRETCHES:
            return 0.0
        count = max(FEWEST_STRETCHES, len(sums) // self.horizon)
        stretches = torch.stack([part.sum(0) for part in sums.tensor_split(count)])
        _, product, branch, known = stretches.T
        gains = (2 * share * product - share**2 * branch) / known
        error = float(gains.std()) / math.sqrt(len(gains))
        return float(gains.mean()) / error if error > 0 else math.inf
