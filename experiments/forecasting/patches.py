"""The branch of attention of a forecaster: tokens, encoder blocks over any mechanism, and a head that starts at zero.

Nie et al. 2022, "A Time Series is Worth 64 Words", arXiv:2211.14730 (patches of each channel by itself); Liu et al.
2023, "iTransformer", arXiv:2310.06625 (a channel is a token).

Shapes: B windows, C columns of which K are targets, L lookback, H horizon, F calendar features, P patch, N tokens,
E width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnzoo import EncoderBlock, HeadDiversity, Mechanism
from attnzoo.positions import PositionName, added, inside

Attention = Callable[[int, int], Mechanism]
Tokens = Literal["patch", "mixed", "channel"]

CALENDAR_RANK = 16
"""How many ways of the calendar a forecast can depend on."""


class PatchTransformer(nn.Module):
    """Tokens, encoder blocks, and a head that starts at zero; arguments as of `ForecastNetwork`, diversity made."""

    def __init__(
        self,
        *,
        lookback: int,
        horizon: int,
        columns: int,
        targets: int,
        features: int,
        attention: Attention,
        attention_at: Mapping[str, Attention] | None,
        position: PositionName,
        tokens: Tokens,
        patch_size: int,
        stride: int | None,
        dim: int,
        depth: int,
        num_heads: int,
        hidden_dim: int | None,
        dropout: float,
        head_diversity: HeadDiversity | None,
    ) -> None:
        super().__init__()
        step = patch_size if stride is None else stride
        sizes = {"dim": dim, "depth": depth, "num_heads": num_heads, "patch_size": patch_size, "stride": step}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"--model.{name} is {value}; it must be at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"--model.dropout is {dropout}; it must lie in [0, 1)")
        if dim % num_heads:
            raise ValueError(f"--model.dim={dim} is no multiple of --model.num_heads={num_heads}")
        if position not in get_args(PositionName):
            raise ValueError(f"--model.position is {position!r}; it must be one of {', '.join(get_args(PositionName))}")
        if patch_size > lookback or step > patch_size:
            raise ValueError(
                f"--model.patch_size={patch_size} and --model.stride={step} do not fit: "
                f"expected stride <= patch_size <= --data.lookback={lookback}"
            )
        self.tokens, self.targets, self.horizon = tokens, targets, horizon
        self.patch_size, self.step = patch_size, step
        self.front = -(lookback - patch_size) % step
        patches = (lookback + self.front - patch_size) // step + 1
        count = columns if tokens == "channel" else patches
        width = {"patch": patch_size, "mixed": patch_size * columns, "channel": lookback}[tokens]
        self.embed = nn.Linear(width, dim)
        self.position = added(position, dim, count)
        self.turns = position in ("rope", "rope_halves")
        others = _by_layer(attention_at or {}, depth)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                dim, num_heads, others.get(layer, attention),
                hidden_dim=2 * dim if hidden_dim is None else hidden_dim, dropout=dropout, causal=False,
                position=inside(position, num_heads, dim // num_heads),
                max_len=count, grid=(count,), prefix_tokens=0, layer=layer, head_diversity=head_diversity,
            )
            for layer in range(depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        seen = dim if tokens == "channel" else dim * patches
        outputs = targets if tokens == "mixed" else 1
        self.head = nn.Linear(seen, outputs * horizon)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        # Each step of the horizon knows its place in the calendar: a product of what the tokens say and of that.
        self.reader = nn.Linear(seen, outputs * CALENDAR_RANK) if features else None
        self.dates = nn.Linear(features, CALENDAR_RANK) if features else None
        if self.reader is not None:
            nn.init.zeros_(self.reader.weight)
            nn.init.zeros_(self.reader.bias)

    def forward(self, past: Tensor, calendar: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised past [B, C, L], calendar [B, H, F] -> [B, K, H] and aux."""
        x = self.embed(self._cut(past))  # [B or B K, N, E]
        places = torch.arange(x.shape[1], device=x.device)
        if self.position is not None:
            x = x + self.position(places).to(x.dtype)
        aux = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x, positions=places if self.turns else None)
            aux = aux + more
        x = self.dropout(self.norm(x))
        x = x[:, : self.targets] if self.tokens == "channel" else x.flatten(1)
        shape = (past.shape[0], self.targets)
        forecast = self.head(x).reshape(*shape, self.horizon)
        if self.reader is not None and self.dates is not None:
            ways = self.reader(x).reshape(*shape, CALENDAR_RANK)
            forecast = forecast + ways @ self.dates(calendar).transpose(1, 2)
        return forecast, aux

    def _cut(self, past: Tensor) -> Tensor:
        """[B, C, L] -> values of the tokens: [B K, N, P], [B, N, C P] or [B, C, L]."""
        if self.tokens == "channel":
            return past
        past = past[:, : self.targets] if self.tokens == "patch" else past
        past = torch.cat([past[..., :1].expand(*past.shape[:2], self.front), past], dim=-1)
        patches = past.unfold(-1, self.patch_size, self.step)  # [B, C, N, P]
        return patches.flatten(0, 1) if self.tokens == "patch" else patches.transpose(1, 2).flatten(2)


def _by_layer(attention_at: Mapping[str, Attention], depth: int) -> dict[int, Attention]:
    for key in attention_at:
        if not str(key).isdigit() or int(key) >= depth:
            raise ValueError(f"--model.attention_at has block {key!r}; there are blocks 0 to {depth - 1}")
    return {int(key): factory for key, factory in attention_at.items()}
