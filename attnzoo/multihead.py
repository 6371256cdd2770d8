"""The projection shell around a mechanism: written once, for self-attention and cross-attention.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width, E width.
"""

from torch import Tensor, nn

from attnzoo.bias import Bias, check_bias
from attnzoo.catalogue import Factory, construct
from attnzoo.mask import Mask, as_mask, hide
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
        elif isinstance(position, (Rotary, Rotary2D)) and position.head_dim != width:
            raise ValueError(f"the position is for head_dim={position.head_dim}, the attention has {width}")
        elif position is not None and not isinstance(position, (Rotary, Rotary2D)):
            raise ValueError(
                f"position must be a Rotary, Rotary2D or RelativeBias of attnzoo.positions, got {position!r}; "
                f"other encodings are added to the embeddings"
            )
        self.position = position
        source = dim if context_dim is None else context_dim
        self.q_proj = nn.Linear(dim, num_heads * width, bias=bias)
        self.k_proj = None if self.mechanism.traits.shared_qk else nn.Linear(source, groups * width, bias=False)
        self.v_proj = nn.Linear(source, groups * self.value_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.value_dim, dim if out_dim is None else out_dim, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform weights, zero biases."""
        for projection in filter(None, (self.q_proj, self.k_proj, self.v_proj, self.out_proj)):
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
        """The output of each head before the output projection, [B, H, T, Dv].

        Arguments as ``forward``.

        Raises:
            ValueError: for shapes that do not fit, and for what the mechanism or the site cannot honour.
        """
        mask = self._site_mask(mask)
        for name, tensor, width in (("x", x, self.q_proj.in_features), ("context", context, self.v_proj.in_features)):
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[2] != width):
                raise ValueError(f"{name} must be [B, length, {width}], got {tuple(tensor.shape)}")
        for name, places in (("positions", positions), ("context_positions", context_positions)):
            if places is not None and not isinstance(self.position, (Rotary, Rotary2D)):
                own = "None" if self.position is None else type(self.position).__name__
                raise ValueError(f"{name} were given, but position={own} does not read them; a Rotary does")
        if context is None:
            if context_positions is not None:
                raise ValueError("context_positions were given without a context")
            x = source = hide(x, mask.key_keep)
            if positions is None and self.position is not None:
                positions = mask.positions(x.shape[1], x.device)
            context_positions = positions
        else:
            self.mechanism.require("cross", "a context")
            if mask.segments is not None:
                raise ValueError("mask.segments is for self-attention; a context takes pair_keep")
            if isinstance(self.position, RelativeBias):
                raise ValueError(
                    "position=RelativeBias has no meaning between two sequences; build cross-attention without it"
                )
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
        """An empty state for causal self-attention over at most ``max_len`` tokens.

        Raises:
            ValueError: if the site was built with causal=False, or the mechanism cannot work token by token.
        """
        if self.causal is False:
            raise ValueError("this attention was built with causal=False; decoding by steps is causal")
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
        self.mechanism.require("cross", "a memory")
        assert self.k_proj is not None
        k, v = (_split(projection(source), self.num_kv_heads) for projection in (self.k_proj, self.v_proj))
        return self.mechanism.memory(k, v, mask)

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

        Raises:
            ValueError: when the state is full, or the arguments do not fit it.
        """
        mask = as_mask(mask)
        if self.causal is False and not on_memory:
            raise ValueError("this attention was built with causal=False; decoding by steps is causal")
        if on_memory != state.fixed:
            raise ValueError(f"on_memory={on_memory}, but the state is {'a' if state.fixed else 'no'} memory")
        if on_memory:
            q = _split(self.q_proj(x), self.num_heads)
            heads, state = self.mechanism.step(q, None, None, state, mask, bias)
            return self.merge(heads), state
        x = hide(x, mask.key_keep)
        q, k, v = self._project(x, x)
        positions = x.new_zeros(0)
        if isinstance(self.position, (Rotary, Rotary2D)):
            positions = state.length[:, None] + mask.positions(x.shape[1], x.device)
        q, k, bias = self._place(q, k, bias, positions, positions, state.used + x.shape[1])
        heads, state = self.mechanism.step(q, k, v, state, mask, bias)
        return self.merge(heads), state

    def _site_mask(self, mask: Mask | None) -> Mask:
        mask = as_mask(mask)
        if self.causal is False and mask.causal:
            raise ValueError("this attention was built with causal=False; leave causal out to decide it in each call")
        return mask._replace(causal=True) if self.causal else mask

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = _split(self.q_proj(x), self.num_heads)
        k = q if self.k_proj is None else _split(self.k_proj(source), self.num_kv_heads)
        return q, k, _split(self.v_proj(source), self.num_kv_heads)

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
            length = k.shape[2] if keys is None else keys
            if bias is not None:  # before the sum, in which broadcasting would hide what does not fit
                check_bias(bias, self.num_heads, q.shape[0], q.shape[2], length)
            return q, k, self.position(q.shape[2], length).plus(bias, q.shape[2])
        assert positions is not None
        return self.position(q, positions), self.position(k, context_positions), bias


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
