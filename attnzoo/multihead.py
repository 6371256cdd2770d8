"""The projection shell around a mechanism: written once, for self-attention and cross-attention.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width, E width.
"""

from torch import Tensor, nn

from attnzoo.catalogue import Factory, construct
from attnzoo.mask import Mask, as_mask, hide
from attnzoo.mechanism import Bias, OffsetBias
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.positions import RelativeBias, Rotary, Rotary2D
from attnzoo.state import State

Position = Rotary | Rotary2D | RelativeBias


class MultiheadAttention(nn.Module):
    """Multi-head attention with any mechanism between the heads.

    Args:
        dim: E, the width of the input.
        num_heads: H.
        mechanism: a factory ``(num_heads, head_dim) -> Mechanism``: a class, or a partial with options.
        num_kv_heads: G, a divisor of H; H if None. 1 is multi-query, in between is grouped-query attention.
        head_dim: D; E / H if None.
        value_dim: Dv; D if None.
        context_dim: width of the context in cross-attention; E if None.
        out_dim: width of the output; E if None.
        position: what turns q and k (``Rotary``) or is added to the scores (``RelativeBias``); None for nothing.
        bias: whether the q, v and output projections have a bias. The key projection never has one: softmax
            does not see it.
        causal: a fact of the site: True makes every call causal, False refuses causal masks, None leaves it to
            each call.
        max_len: a fact of the site: the longest sequence that will come.
        grid: a fact of the site: the shape that the tokens have, row by row.
        prefix_tokens: a fact of the site: how many tokens stand before the grid.
        layer: a fact of the site: depth from 0.

    Raises:
        ValueError: for sizes that do not divide, and for facts that the mechanism cannot serve.

    Example:
        >>> import functools, torch
        >>> from attnzoo import Local
        >>> attn = MultiheadAttention(64, 4, functools.partial(Local, window=9))
        >>> attn(torch.randn(2, 50, 64), mask=Mask(causal=True)).shape
        torch.Size([2, 50, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: Factory = Softmax,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        out_dim: int | None = None,
        position: Position | None = None,
        bias: bool = True,
        causal: bool | None = None,
        max_len: int | None = None,
        grid: tuple[int, ...] | None = None,
        prefix_tokens: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        groups = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads}")
        if head_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} is no multiple of num_heads={num_heads}; give head_dim")
        if groups < 1 or num_heads % groups:
            raise ValueError(f"num_heads={num_heads} is no multiple of num_kv_heads={groups}")
        width = dim // num_heads if head_dim is None else head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, groups, width
        self.value_dim = width if value_dim is None else value_dim
        self.causal = causal
        self.mechanism = construct(
            mechanism,
            num_heads,
            width,
            causal=causal,
            max_len=max_len,
            grid=grid,
            prefix_tokens=prefix_tokens,
            layer=layer,
            num_kv_heads=groups,
        )
        if groups != num_heads:
            self.mechanism.require("grouped", f"num_kv_heads={groups} with num_heads={num_heads}")
        if causal:
            self.mechanism.require("causal", "causal=True")
        if isinstance(position, RelativeBias):
            self.mechanism.require("bias", "a relative bias")
            if position.num_heads != num_heads:
                raise ValueError(f"the relative bias is for {position.num_heads} heads, the attention has {num_heads}")
        elif position is not None and position.head_dim != width:
            raise ValueError(f"the position is for head_dim={position.head_dim}, the attention has {width}")
        self.position = position
        source = dim if context_dim is None else context_dim
        self.q_proj = nn.Linear(dim, num_heads * width, bias=bias)
        self.k_proj = None if self.mechanism.traits.shared_qk else nn.Linear(source, groups * width, bias=False)
        self.v_proj = nn.Linear(source, groups * self.value_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.value_dim, dim if out_dim is None else out_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform weights, zero biases."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """``merge(attend(...))``: [B, T, E] -> [B, T, out_dim].

        Args:
            x: [B, T, E], the queries.
            context: [B, S, context_dim], where keys and values come from; x itself if None.
            mask: what may be attended; everything if None.
            bias: terms to be added to the scores.
            positions: int [T] or [B, T] (2-D: [T, 2]); counted among real tokens if None.
            context_positions: the same for the context. In cross-attention positions act only if these are
                given, since the two sequences count their places apart.
        """
        heads = self.attend(x, context, mask=mask, bias=bias, positions=positions, context_positions=context_positions)
        return self.merge(heads)

    def attend(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
    ) -> Tensor:
        """The output of each head before the output projection, [B, H, T, Dv]. Arguments as ``forward``."""
        mask = self._site_mask(mask)
        for name, places in (("positions", positions), ("context_positions", context_positions)):
            if places is not None and not isinstance(self.position, Rotary | Rotary2D):
                own = "None" if self.position is None else type(self.position).__name__
                raise ValueError(f"{name} were given, but position={own} does not read them; a Rotary does")
        if context is None:
            x = source = hide(x, mask.key_keep)
            if positions is None and self.position is not None:
                positions = mask.positions(x.shape[1], x.device)
            context_positions = positions
        else:
            self.mechanism.require("cross", "a context")
            if (positions is None) != (context_positions is None):
                raise ValueError("cross-attention takes positions and context_positions together, or neither of them")
            source = hide(context, mask.key_keep)
        q, k, v = self._project(x, source)
        if context_positions is not None:
            q, k, bias = self._place(q, k, bias, positions, context_positions)
        return self.mechanism(q, k, v, mask, bias)

    def merge(self, heads: Tensor) -> Tensor:
        """Output projection: [B, H, T, Dv] -> [B, T, out_dim]."""
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def init_state(self, batch_size: int, max_len: int) -> State:
        """An empty state for causal self-attention over at most ``max_len`` tokens."""
        weight = self.v_proj.weight
        return self.mechanism.init_state(
            batch_size,
            max_len,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def memory(self, context: Tensor, *, mask: Mask | None = None) -> State:
        """Projects a context [B, S, context_dim] once, for cross-attention by ``step``."""
        mask = as_mask(mask)
        source = hide(context, mask.key_keep)
        return self.mechanism.memory(self._keys(source), self._values(source), mask)

    def step(
        self,
        x: Tensor,
        state: State,
        *,
        on_memory: bool = False,
        mask: Mask | None = None,
        bias: Bias | None = None,
    ) -> tuple[Tensor, State]:
        """Attends from t new tokens [B, t, E]; places go on from the real tokens that the state counts.

        Args:
            x: the new tokens.
            state: from ``init_state``, ``memory`` or the last ``step``; used up by the call.
            on_memory: True for cross-attention on a ``memory``, where x gives queries only.
            mask: ``key_keep`` [B, t] covers the new tokens; ``pair_keep`` all keys so far.
            bias: covers all keys so far.

        Returns:
            [B, t, out_dim] and the next state.
        """
        mask = as_mask(mask)
        if on_memory:
            q = _split(self.q_proj(x), self.num_heads)
            heads, state = self.mechanism.step(q, None, None, state, mask, bias)
            return self.merge(heads), state
        x = hide(x, mask.key_keep)
        q, k, v = self._project(x, x)
        positions = state.length[:, None] + mask.positions(x.shape[1], x.device)
        keys = state.used + x.shape[1]
        q, k, bias = self._place(q, k, bias, positions, positions, keys)
        heads, state = self.mechanism.step(q, k, v, state, mask, bias)
        return self.merge(heads), state

    def _site_mask(self, mask: Mask | None) -> Mask:
        mask = as_mask(mask)
        if self.causal is False and mask.causal:
            raise ValueError("this attention was built with causal=False; leave causal out to decide it in each call")
        return mask._replace(causal=True) if self.causal else mask

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = _split(self.q_proj(x), self.num_heads)
        return q, q if self.k_proj is None else self._keys(source), self._values(source)

    def _keys(self, source: Tensor) -> Tensor:
        assert self.k_proj is not None
        return _split(self.k_proj(source), self.num_kv_heads)

    def _values(self, source: Tensor) -> Tensor:
        return _split(self.v_proj(source), self.num_kv_heads)

    def _place(
        self,
        q: Tensor,
        k: Tensor,
        bias: Bias | None,
        positions: Tensor | None,
        context_positions: Tensor,
        keys: int | None = None,
    ) -> tuple[Tensor, Tensor, Bias | None]:
        if self.position is None:
            return q, k, bias
        if isinstance(self.position, RelativeBias):
            return q, k, _add(self.position(q.shape[2], keys or k.shape[2]), bias, q.shape[2])
        assert positions is not None
        return self.position(q, positions), self.position(k, context_positions), bias


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _add(own: OffsetBias, given: Bias | None, queries: int) -> Bias:
    if given is None:
        return own
    if isinstance(given, OffsetBias):
        return OffsetBias(own.values + given.values)
    return own.dense(queries) + given
