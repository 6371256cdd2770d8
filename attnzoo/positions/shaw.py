"""Relative positions as vectors: how far apart query and key stand is added to the keys and to the values.

Shaw, Uszkoreit, Vaswani 2018, "Self-Attention with Relative Position Representations", arXiv:1803.02155.

    s_ij = q_i . (k_j + rK_c) / sqrt(D)        c = clip(p_j - p_i, -C, C)
    a_ij = softmax over the visible keys of s_ij
    o_i  = sum_j a_ij (v_j + rV_c)

    rK [2C + 1, D]   rV [2C + 1, Dv]   shared by all heads, as in the paper
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias
from attnzoo.checks import at_least
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.positions.inside import Places, ScoreTerms, pair_offsets
from attnzoo.state import State, check_room


class Shaw(ScoreTerms):
    """Learned vectors of the clipped offset, added to keys and values (arXiv:1803.02155).

    The part of the keys is a bias, q_i . rK_c / sqrt(D), of T x S numbers a head. The part of the values needs the
    weights that the mechanism really applied, dropout and all: each value carries a column more for every key, 1 at
    its own, and what comes out there are the weights. So it needs a mechanism that takes a bias and is linear in v,
    and values of S more numbers; a record of such a call shows them with these columns. A decoding state keeps
    ``max_len`` more numbers for each token.

    Args:
        head_dim: D.
        value_dim: Dv; D if None.
        max_distance: C, from where on all offsets share a vector.

    Raises:
        ValueError: for a negative ``max_distance``.

    Example:
        >>> from attnzoo import MultiheadAttention
        >>> MultiheadAttention(16, 2, position=Shaw(8))(torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 16])
    """

    needs: ClassVar[tuple[str, ...]] = ("bias", "linear_in_v")

    def __init__(self, head_dim: int, value_dim: int | None = None, max_distance: int = 16) -> None:
        super().__init__()
        at_least(1, "Shaw", head_dim=head_dim, value_dim=value_dim)
        at_least(0, "Shaw", max_distance=max_distance)
        self.head_dim, self.value_dim = head_dim, head_dim if value_dim is None else value_dim
        self.max_distance = max_distance
        self.key_table = nn.Parameter(torch.zeros(2 * max_distance + 1, self.head_dim))
        self.value_table = nn.Parameter(torch.zeros(2 * max_distance + 1, self.value_dim))

    def fit(self, mechanism: Mechanism, value_dim: int) -> None:
        """Raises ``ValueError`` unless it can act beside ``mechanism`` with values of that width."""
        super().fit(mechanism, value_dim)
        if (self.head_dim, self.value_dim) != (mechanism.head_dim, value_dim):
            raise ValueError(
                f"the position is for head_dim={self.head_dim}, value_dim={self.value_dim}, "
                f"the attention has {mechanism.head_dim}, {value_dim}"
            )
        if mechanism.qk_parts > 1:
            raise ValueError(
                f"Shaw adds one vector to a key, {type(mechanism).__name__} has {mechanism.qk_parts} parts in each; "
                f"RelativeBias serves all parts alike"
            )
        for option in ("scale", "softcap"):
            if getattr(mechanism, option, None) is not None:
                raise ValueError(
                    f"Shaw adds to scores of q . k / sqrt(D), {type(mechanism).__name__} has a {option} of its own; "
                    f"leave it out"
                )

    def terms(self, q: Tensor, keys: int, places: Places | None) -> Tensor:
        by_bucket = q @ self.key_table.T * self.head_dim**-0.5
        return by_bucket.gather(-1, self._buckets(q, keys, places))

    def attend(
        self,
        mechanism: Mechanism,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        bias: Bias | None,
        places: Places | None,
    ) -> Tensor:
        """Calls the mechanism and adds the part of the values; ``bias`` holds ``terms`` already."""
        keys = v.shape[2]
        return self._read(mechanism(q, k, _with_columns(v, 0, keys), mask, bias), keys, places)

    def step(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, state: State, mask: Mask, bias: Bias | None
    ) -> tuple[Tensor, "ShawState"]:
        """The same for a step of self-attention.

        Raises:
            ValueError: when the state is full, or has no columns.
        """
        if not isinstance(state, ShawState):
            raise ValueError("position=Shaw needs wider values in the state; make it by init_state of the attention")
        check_room(state.used, v.shape[2], state.max_len)
        heads, inner = mechanism.step(q, k, _with_columns(v, state.used, state.max_len), state.inner, mask, bias)
        return self._read(heads, inner.used, None), state._replace(inner=inner)

    def _read(self, heads: Tensor, keys: int, places: Places | None) -> Tensor:
        out, weights = heads[..., : self.value_dim], heads[..., self.value_dim : self.value_dim + keys]
        # Far keys all fall into one bucket: half precision would lose the small ones of a long sum.
        wide = torch.float32 if weights.dtype in (torch.float16, torch.bfloat16) else weights.dtype
        sums = weights.new_zeros(*weights.shape[:3], len(self.value_table), dtype=wide)
        sums = sums.scatter_add(-1, self._buckets(heads, keys, places), weights.to(wide))
        return out + sums.to(out.dtype) @ self.value_table

    def _buckets(self, rows: Tensor, keys: int, places: Places | None) -> Tensor:
        offset = pair_offsets(rows, keys, places).clamp(-self.max_distance, self.max_distance) + self.max_distance
        return (offset if offset.dim() == 2 else offset[:, None]).expand(*rows.shape[:3], keys)


def _with_columns(v: Tensor, first: int, slots: int) -> Tensor:
    """v [B, G, n, Dv], which fills the slots from ``first`` on, with a column more for each slot: 1 at its own."""
    own = torch.arange(first, first + v.shape[2], device=v.device)
    columns = (own[:, None] == torch.arange(slots, device=v.device)).to(v.dtype)
    return torch.cat([v, columns.expand(*v.shape[:2], -1, -1)], dim=-1)


class ShawState(NamedTuple):
    """The state of a mechanism whose values carry a column for each key.

    Attributes:
        inner: the mechanism's own state.
        max_len: how many columns there are.
    """

    inner: Any
    max_len: int

    @property
    def used(self) -> int:
        """How many tokens came so far, padding included, the same for each row."""
        return self.inner.used

    @property
    def fixed(self) -> bool:
        """Whether this is a memory."""
        return self.inner.fixed

    @property
    def length(self) -> Tensor:
        """Real tokens so far, int64 [B]: the position of the next one."""
        return self.inner.length
