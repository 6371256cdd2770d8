"""What a mechanism carries from step to step while decoding.

Letters: B batch, G key/value heads, Dv value width.
"""

from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor


class KVState(NamedTuple):
    """Keys and values so far, in buffers with room for ``max_len`` of them.

    ``step`` writes into the buffers in place, so a state that went into ``step`` is used up: to branch,
    copy first (``reorder`` does).

    Attributes:
        k: prepared keys [B, G, max_len, width].
        v: values [B, G, max_len, Dv].
        keep: bool [B, max_len], False at padding; None while nothing was padded.
        length: real tokens so far, int64 [B]: the position of the next one.
        used: how many slots are filled, the same for each row.
        fixed: whether this is a memory, whose keys all came at once.
    """

    k: Tensor
    v: Tensor
    keep: Tensor | None
    length: Tensor
    used: int
    fixed: bool = False

    def filled(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far."""
        return self.k[:, :, : self.used], self.v[:, :, : self.used]

    def kept(self) -> Tensor | None:
        """``keep`` of the slots that are filled."""
        return None if self.keep is None else self.keep[:, : self.used]

    def pick(self, rows: Tensor) -> "KVState":
        """These rows, for ``reorder``: copies what is filled, and leaves the room behind it as it comes."""
        keep = None if self.keep is None else self.keep.index_select(0, rows)
        if torch.is_grad_enabled() and (self.k.requires_grad or self.v.requires_grad):
            k, v = self.k.index_select(0, rows), self.v.index_select(0, rows)
        else:
            k, v = (x.new_empty(len(rows), *x.shape[1:]) for x in (self.k, self.v))
            for new, old in ((k, self.k), (v, self.v)):
                torch.index_select(old[:, :, : self.used], 0, rows, out=new[:, :, : self.used])
        return KVState(k, v, keep, self.length.index_select(0, rows), self.used, self.fixed)

    def append(self, k: Tensor, v: Tensor, key_keep: Tensor | None, *, copy: bool = False) -> "KVState":
        """Writes t new keys and values.

        Args:
            k: prepared keys [B, G, t, width].
            v: [B, G, t, Dv].
            key_keep: bool [B, t], False at padding; None if all are real.
            copy: write into a copy of the buffers, which autograd needs: it keeps the old ones as they were.

        Raises:
            ValueError: when they do not fit.
        """
        end, capacity = self.used + k.shape[2], self.k.shape[2]
        check_new(k, v, tuple(self.k.shape), tuple(self.v.shape))
        check_room(self.used, k.shape[2], capacity)
        length = self.length + real_tokens(k, key_keep)
        keep = self.keep
        if keep is None and key_keep is not None:
            keep = torch.ones(k.shape[0], capacity, dtype=torch.bool, device=k.device)
        elif keep is not None and key_keep is None:
            key_keep = keep.new_ones(k.shape[0], k.shape[2])
        buffers = [self.k.clone(), self.v.clone()] if copy else [self.k, self.v]
        buffers[0][:, :, self.used : end] = k
        buffers[1][:, :, self.used : end] = v
        if keep is not None and key_keep is not None:
            keep[:, self.used : end] = key_keep
        return KVState(buffers[0], buffers[1], keep, length, end)


class WindowState(NamedTuple):
    """The last keys and values alone, for a window: its size does not grow with what came before.

    Attributes:
        k: prepared keys [B, G, n, width], the last n that came.
        v: values [B, G, n, Dv].
        keep: bool [B, n], False at padding; None while nothing was padded.
        length: real tokens so far, those that left the window too, int64 [B]: the position of the next one.
        used: how many tokens came so far, padding included, the same for each row.
        max_len: how many may come.
        fixed: a window is no memory.
    """

    k: Tensor
    v: Tensor
    keep: Tensor | None
    length: Tensor
    used: int
    max_len: int
    fixed: bool = False

    def append(self, k: Tensor, v: Tensor, key_keep: Tensor | None) -> "WindowState":
        """The state with t new keys [B, G, t, width] and values behind the old ones, of which none leaves yet.

        Raises:
            ValueError: when they do not fit.
        """
        (batch, _, new, _), old = k.shape, self.k.shape[2]
        check_new(k, v, tuple(self.k.shape), tuple(self.v.shape))
        check_room(self.used, new, self.max_len)
        keep = None
        if self.keep is not None or key_keep is not None:
            parts = ((self.keep, old), (key_keep, new))
            keep = torch.cat([self.length.new_ones(batch, n).bool() if x is None else x for x, n in parts], dim=1)
        length = self.length + real_tokens(k, key_keep)
        k, v = (torch.cat([a, b.to(a.dtype)], dim=2) for a, b in ((self.k, k), (self.v, v)))
        return WindowState(k, v, keep, length, self.used + new, self.max_len)

    def last(self, number: int) -> "WindowState":
        """The state with the last ``number`` keys only."""
        first = max(0, self.k.shape[2] - number)
        # Views would hold on to the memory of all the keys of a long prefix.
        k, v = self.k[:, :, first:].clone(), self.v[:, :, first:].clone()
        return self._replace(k=k, v=v, keep=None if self.keep is None else self.keep[:, first:].clone())


def real_tokens(keys: Tensor, key_keep: Tensor | None) -> Tensor:
    """How many of the keys [B, G, S, any] of each row are real, int64 [B]."""
    if key_keep is None:
        return torch.full((keys.shape[0],), keys.shape[2], device=keys.device)
    return key_keep.sum(1)


def check_new(k: Tensor, v: Tensor, k_shape: tuple[int, ...], v_shape: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless new keys and values have the rows, heads and widths of the stored ones."""
    if k.shape[0] != k_shape[0]:
        raise ValueError(f"the state holds {k_shape[0]} rows, {k.shape[0]} came; reorder() picks rows of a state")
    for name, new, stored in (("keys", k, k_shape), ("values", v, v_shape)):
        if new.shape[1] != stored[1] or new.shape[3] != stored[3]:
            raise ValueError(
                f"the state was made for {stored[1]} heads of {stored[3]} {name}, "
                f"{new.shape[1]} of {new.shape[3]} came; see num_kv_heads and value_dim of init_state"
            )


def check_room(used: int, more: int, max_len: int) -> None:
    """Raises ``ValueError`` when a state is full."""
    if used + more > max_len:
        raise ValueError(
            f"the state is full: it holds {used} of max_len={max_len} tokens and {more} more came; "
            f"make it with a larger max_len"
        )


class State(Protocol):
    """What ``step`` carries from call to call: a named tuple whose tensors have the batch first."""

    @property
    def used(self) -> int:
        """How many tokens came so far, padding included, the same for each row."""

    @property
    def fixed(self) -> bool:
        """Whether this is a memory, whose keys all came at once."""

    @property
    def length(self) -> Tensor:
        """Real tokens so far, int64 [B]: the position of the next one."""


S = TypeVar("S")


def reorder(state: S, rows: Tensor) -> S:
    """Picks rows of a state, for beam search: row ``b`` of the result is row ``rows[b]`` of ``state``.

    Args:
        state: any mechanism's state, or a named tuple of states.
        rows: int64 [B'], indices into the batch; one row may be picked many times.

    Example:
        >>> from attnzoo import Softmax
        >>> x = torch.randn(2, 1, 3, 4)
        >>> _, state = Softmax(1, 4).step(x, x, x, Softmax(1, 4).init_state(2, max_len=5))
        >>> reorder(state, torch.tensor([1, 1, 0])).length
        tensor([3, 3, 3])
    """

    def pick(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.index_select(0, rows)
        return reorder(part, rows) if isinstance(part, tuple) else part

    if isinstance(state, KVState):
        return cast(S, state.pick(rows))
    return cast(S, type(state)._make(map(pick, cast(Any, state))))  # type: ignore[attr-defined]
