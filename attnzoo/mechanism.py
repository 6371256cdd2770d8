"""The contract of an attention mechanism: what happens between heads, after the projections.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias, check_bias
from attnzoo.checks import at_least, check_grid, number, one_kind, whole, yes_or_no
from attnzoo.mask import Mask, as_mask, hide_keys
from attnzoo.state import KVState, State, real_tokens
from attnzoo.traits import Traits

__all__ = ["Mechanism", "at_least", "check_grid", "number", "whole", "yes_or_no"]


class Mechanism(nn.Module):
    """Base class: one file, one ``attend``; checks, empty rows, maps and decoding come from here.

    Args:
        num_heads: H.
        head_dim: D.
        dropout: share of the attention weights dropped in training.

    A subclass takes ``(num_heads, head_dim, *, own options with defaults, dropout=0.0, facts=None)``. A
    *fact of the site* - ``causal, max_len, grid, prefix_tokens, layer, num_kv_heads`` - is filled in by the
    shell where the signature names it and the user left it None.

    ``traits`` say what a class can do; ``reasons``, for a trait that is denied, why, and what could serve instead.

    Attributes:
        qk_parts: into how many equal parts q and k fall, each of which a rotary position turns by itself.
        norm_gain: the gain of the per-head norm that the paper puts behind the mechanism, which is the shell's to
            apply; None where there is no such norm.

    Raises:
        ValueError: if ``dropout`` is outside [0, 1).
    """

    traits: Traits = Traits()
    reasons: ClassVar[dict[str, str]] = {}
    qk_parts: ClassVar[int] = 1
    norm_gain: float | None = None

    def __init__(self, num_heads: int, head_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        at_least(1, type(self).__name__, num_heads=num_heads, head_dim=head_dim)
        number(type(self).__name__, dropout=dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"{type(self).__name__}: dropout must lie in [0, 1), got {dropout}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.dropout = dropout

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        """The one method that a mechanism must write: [B, H, T, D] and so on -> [B, H, T, Dv].

        Everything is checked already, hidden rows of k and v are zero where ``key_keep`` is given, and
        rows without a visible key are set to 0 afterwards. ``keys`` is what ``prepare_keys`` returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must define attend()")

    def prepare_keys(self, k: Tensor) -> Tensor:
        """What is made of the keys once, before any query comes, and kept in a state. By default k itself."""
        return k

    def pattern(self, queries: int, keys: int, causal: bool) -> Tensor | None:
        """Pairs that the mechanism itself lets through: bool [T, S] or [H, T, S]; None for all of them."""
        return None

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says in one line which code will run for these inputs, and why."""
        return "plain torch operations"

    def extra_repr(self) -> str:
        """Sizes, and the options that are set."""
        options = (name for name in inspect.signature(type(self)).parameters if name not in ("num_heads", "head_dim"))
        shown = [f"{name}={getattr(self, name)}" for name in options if getattr(self, name, None) not in (None, 0.0)]
        return ", ".join([f"{self.num_heads} x {self.head_dim}", *shown])

    def after_step(self, step: int) -> None:
        """What has to follow an optimiser step (clamp a parameter, redraw a projection). By default nothing."""

    def penalty(self) -> Tensor | None:
        """What the paper adds to the loss for the mechanism's own parameters: a scalar, which blocks add to aux."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> Tensor:
        """Attends.

        Args:
            q: queries [B, H, T, D].
            k: keys [B, G, S, D]; G divides H, query head h uses key/value head h div (H / G).
            v: values [B, G, S, Dv].
            mask: what may be attended; everything if None.
            bias: terms to be added to the scores, [T, S], [B or 1, H or 1, T, S] or an ``OffsetBias``.

        Returns:
            [B, H, T, Dv]; 0 for a query that sees no key.

        Raises:
            ValueError: for shapes that do not fit, and for what the mechanism cannot honour.
        """
        mask = as_mask(mask)
        self.check_call(q, k, v, mask, bias)
        return self._attend(q, self.prepare_keys(hide_keys(k, mask.key_keep)), hide_keys(v, mask.key_keep), mask, bias)

    def init_state(
        self,
        batch_size: int,
        max_len: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> State:
        """An empty state for causal self-attention over at most ``max_len`` tokens.

        Raises:
            ValueError: if the mechanism cannot work token by token, or a size is no such number.
        """
        self.require("streaming", "step")
        at_least(0, type(self).__name__, batch_size=batch_size, max_len=max_len)
        at_least(1, type(self).__name__, num_kv_heads=num_kv_heads, value_dim=value_dim)
        groups = self.num_heads if num_kv_heads is None else num_kv_heads
        own = next(self.parameters(), None)
        if own is not None:
            dtype, device = dtype or own.dtype, device or own.device
        width = self.head_dim if value_dim is None else value_dim
        with torch.no_grad():
            k = self.prepare_keys(torch.zeros(batch_size, groups, 0, self.head_dim, dtype=dtype, device=device))
        return self.start(k, k.new_zeros(batch_size, groups, 0, width), max_len)

    def memory(self, k: Tensor, v: Tensor, mask: Mask | None = None) -> State:
        """Fixed keys for cross-attention: what can be made of them is made here, once.

        Args:
            k: [B, G, S, D].
            v: [B, G, S, Dv].
            mask: its ``key_keep`` is stored; ``pair_keep`` belongs to each ``step``.

        Raises:
            ValueError: if the mechanism cannot cross, or the mask holds more than ``key_keep``.
        """
        mask = as_mask(mask)
        self.require("cross", "memory")
        if mask.causal or mask.pair_keep is not None or mask.segments is not None:
            raise ValueError(f"{type(self).__name__}.memory takes key_keep only; give pair_keep to step")
        one_kind(f"{type(self).__name__}.memory", "k and v", k, v)
        mask.check(k.shape[0], self.num_heads, 1, k.shape[2])
        keys, values = self.prepare_keys(hide_keys(k, mask.key_keep)), hide_keys(v, mask.key_keep)
        return self.remember(keys, values, mask.key_keep)

    def step(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        state: State,
        mask: Mask | None = None,
        bias: Bias | None = None,
    ) -> tuple[Tensor, State]:
        """Attends from t new tokens: self-attention with k and v given, cross-attention without.

        Self-attention by steps is causal by nature, with or without ``mask.causal``. Prefixes are padded
        on the left.

        Args:
            q: [B, H, t, D].
            k: the new keys [B, G, t, D], or None on a ``memory``.
            v: the new values [B, G, t, Dv], or None on a ``memory``.
            state: from ``init_state``, ``memory`` or the last ``step``; used up by the call.
            mask: ``key_keep`` [B, t] covers the new keys; ``pair_keep`` covers all so far.
            bias: covers all keys so far.

        Returns:
            [B, H, t, Dv] and the next state.

        Raises:
            ValueError: when the state is full, or the arguments do not fit it.
        """
        mask = as_mask(mask)
        if mask.segments is not None:
            raise ValueError(f"{type(self).__name__}.step takes no mask.segments: a state is one sequence a row")
        if (k is None) != (v is None):
            raise ValueError("step takes k and v together, or neither of them on a memory")
        if (k is None) != state.fixed:
            raise ValueError(
                "new keys were given on a memory; a memory takes queries alone"
                if state.fixed
                else "step on a state of self-attention needs k and v; only a memory takes queries alone"
            )
        if k is None or v is None:
            if mask.causal or mask.key_keep is not None:
                raise ValueError("step on a memory takes neither causal nor key_keep: the memory holds its key_keep")
            self._check_queries(q)
            self.check_terms(mask, bias, state.length.shape[0], q.shape[2], state.used)
            return self.recall(q, state, mask, bias), state
        self.check_call(q, k, v, Mask(causal=True, key_keep=mask.key_keep), None)
        self.check_terms(mask._replace(key_keep=None), bias, q.shape[0], q.shape[2], state.used + q.shape[2])
        keys, values = self.prepare_keys(hide_keys(k, mask.key_keep)), hide_keys(v, mask.key_keep)
        return self.advance(q, keys, values, state, mask, bias)

    def start(self, keys: Tensor, v: Tensor, max_len: int) -> State:
        """An empty state with room for ``max_len`` tokens, of the kinds and widths of keys and v [B, G, 0, ...]."""
        (batch, groups, _, width), value_dim = keys.shape, v.shape[3]
        room = keys.new_zeros(batch, groups, max_len, width)
        return KVState(room, v.new_zeros(batch, v.shape[1], max_len, value_dim), None, real_tokens(keys, None), 0)

    def remember(self, keys: Tensor, v: Tensor, key_keep: Tensor | None) -> State:
        """The state that ``memory`` gives, from prepared keys and values with hidden rows at 0."""
        return KVState(keys, v, key_keep, real_tokens(keys, key_keep), keys.shape[2], fixed=True)

    def advance(
        self, q: Tensor, keys: Tensor, v: Tensor, state: Any, mask: Mask, bias: Bias | None
    ) -> tuple[Tensor, State]:
        """``step`` with new keys: prepared, checked, hidden rows at 0; ``mask`` and ``bias`` as there."""
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (q, keys, v, state.k, state.v))
        state = state.append(keys, v, mask.key_keep, copy=tracked)
        mask = Mask(causal=True, key_keep=state.kept(), pair_keep=mask.pair_keep)
        keys, v = state.filled()
        return self._attend(q, keys, v, mask, bias), state

    def recall(self, q: Tensor, state: Any, mask: Mask, bias: Bias | None) -> Tensor:
        """``step`` on a memory."""
        keys, v = state.filled()
        return self._attend(q, keys, v, Mask(key_keep=state.kept(), pair_keep=mask.pair_keep), bias)

    def _attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        # The one place that every call passes, whole or by steps: record() listens here.
        if q.shape[2] == 0 or v.shape[2] == 0:
            # Hangs on its inputs, so that the gradients of a batch that happens to be empty are 0, not missing.
            nothing = q[:0].sum() + keys[:0].sum() + v[:0].sum()
            return v.new_zeros(*q.shape[:3], v.shape[3]) + nothing
        out = self.attend(q, keys, v, mask, bias)
        rows = mask.rows_with_keys(q.shape[2], v.shape[2], q.device)
        return out if rows is None else out.masked_fill(~rows[..., None], 0)

    def require(self, trait: str, argument: str) -> None:
        """Raises ``ValueError``, with the reason, if a trait that ``argument`` needs is denied."""
        if not getattr(self.traits, trait):
            reason = self.reasons.get(trait, f"it is not {trait}")
            raise ValueError(f"{type(self).__name__} does not take {argument}: {reason}")

    def check_call(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> None:
        """Raises ``ValueError`` unless shapes fit and everything given can be honoured."""
        name = type(self).__name__
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            raise ValueError(
                f"{name} takes q [B, H, T, D], k [B, G, S, D], v [B, G, S, Dv]; "
                f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        one_kind(name, "q, k and v", q, k, v)
        batch, heads, queries, width = q.shape
        groups, keys = v.shape[1:3]
        self._check_queries(q)
        if tuple(k.shape) != (batch, groups, keys, width):
            raise ValueError(f"{name}: k {tuple(k.shape)} does not fit q {tuple(q.shape)} and v {tuple(v.shape)}")
        if groups < 1 or heads % groups:
            raise ValueError(
                f"{name}: the number of query heads, {heads}, is no multiple of the key/value heads, {groups}"
            )
        if groups != heads:
            self.require("grouped", f"{groups} key/value heads for {heads} query heads")
        self.require("causal" if mask.causal else "bidirectional", f"mask.causal={mask.causal}")
        if not self.traits.rectangular and queries != keys:  # a text of sizes would fix them for compile
            self.require("rectangular", f"{queries} queries for {keys} keys")
        self.check_terms(mask, bias, batch, queries, keys)

    def check_terms(self, mask: Mask, bias: Bias | None, batch: int, queries: int, keys: int) -> None:
        """Raises ``ValueError`` unless mask and bias fit B, T and S, and can be honoured."""
        mask.check(batch, self.num_heads, queries, keys)
        for trait, part in (("key_keep", "key_keep"), ("pair_keep", "pair_keep"), ("pair_keep", "segments")):
            if getattr(mask, part) is not None:
                self.require(trait, f"mask.{part}")
        if bias is not None:
            self.require("bias", "bias")
            check_bias(bias, self.num_heads, batch, queries, keys)

    def _check_queries(self, q: Tensor) -> None:
        if q.dim() != 4 or q.shape[1] != self.num_heads or q.shape[3] != self.head_dim:
            raise ValueError(
                f"{type(self).__name__} was built for num_heads={self.num_heads}, head_dim={self.head_dim}: "
                f"q must be [B, {self.num_heads}, T, {self.head_dim}], got {tuple(q.shape)}"
            )
