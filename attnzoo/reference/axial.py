"""Attention along the axes of a grid, cell by cell."""

import math

import torch
from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.axial import Axial

Cell = tuple[int, ...]
Values = dict[int, Tensor]
"""What stands at each token, by its place among the real tokens."""


def axial(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """The definition in the header of ``attnzoo.mechanisms.axial``; 0 at tokens hidden by ``key_keep``."""
    assert isinstance(mechanism, Axial)
    batch, heads, length, _ = q.shape
    share = heads // k.shape[1]
    rows = []
    for b in range(batch):
        real = [t for t in range(length) if mask.key_keep is None or mask.key_keep[b, t]]
        for h in range(heads):
            found = _tokens(mechanism, q[b, h, real], k[b, h // share, real], v[b, h // share, real], mask.causal)
            for t in range(length):
                rows.append(found[real.index(t)] if t in real else v.new_zeros(v.shape[-1]))
    return torch.stack(rows).view(batch, heads, length, v.shape[-1])


def _tokens(mechanism: Axial, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Values:
    """One sample and head, real tokens only: q [n, D], k [n, D], v [n, Dv]."""
    prefix = list(range(min(mechanism.prefix_tokens, len(q))))
    places = {t: _cell(t - len(prefix), mechanism.grid) for t in range(len(prefix), len(q))}
    values = {t: v[t] for t in range(len(q))}
    axes = range(len(mechanism.grid))

    def attend(t: int, sources: list[tuple[int, Tensor]]) -> Tensor:
        scores = torch.stack([k[j] @ q[t] / math.sqrt(q.shape[-1]) for j, _ in sources])
        return scores.softmax(0) @ torch.stack([x for _, x in sources])

    lines: dict[tuple[int, Cell], list[int]] = {}
    for axis in axes:
        for t, cell in places.items():
            lines.setdefault((axis, cell[:axis] + cell[axis + 1 :]), []).append(t)

    def on_axis(axis: int, t: int) -> list[int]:
        """Tokens whose cells agree with that of t in everything but one coordinate."""
        return lines[axis, places[t][:axis] + places[t][axis + 1 :]]

    def along(axis: int, x: Values) -> Values:
        gathered = {t: attend(t, [(j, x[j]) for j in prefix + on_axis(axis, t)]) for t in places}
        return {t: v[t] for t in prefix} | gathered

    behind = [values]  # behind[0] is the last axis' own: v; each axis before it reads one more of them
    for axis in reversed(axes):
        behind.append(along(axis, behind[-1]))
    out: Values = {}
    for t in prefix:
        out[t] = attend(t, [(j, v[j]) for j in range(t + 1 if causal else len(q))])
    for t in places:
        always = [(j, v[j]) for j in prefix]
        if causal:
            earlier = [
                [(j, behind[len(axes) - 1 - axis][j]) for j in on_axis(axis, t) if places[j][axis] < places[t][axis]]
                for axis in axes
            ]
            groups = [[pair for part in earlier for pair in part]] if mechanism.combine == "sequence" else earlier
            sums = [attend(t, [*always, (t, v[t]), *group]) for group in groups]
        elif mechanism.combine == "sequence":
            sums = [behind[-1][t]]
        else:
            sums = [attend(t, [*always, *((j, v[j]) for j in on_axis(axis, t))]) for axis in axes]
        out[t] = torch.stack(sums).mean(0)
    return out


def _cell(number: int, grid: tuple[int, ...]) -> Cell:
    """The coordinates of the cell with this number in raster order."""
    coordinates = []
    for length in reversed(grid):
        number, rest = divmod(number, length)
        coordinates.append(rest)
    return tuple(reversed(coordinates))
