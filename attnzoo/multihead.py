"""The projection shell around a mechanism: written once, for self-attention and cross-attention.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width, E width.
"""

from torch import Tensor, nn

from attnzoo.bias import Bias
from attnzoo.catalogue import Factory, construct
from attnzoo.checks import at_least, check_tokens
from attnzoo.headwise import Gate, GateForm, QKNormForm, norm_of_heads, query_key_norms, split_heads
from attnzoo.mask import Mask, as_mask, hide, site_mask
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.positions import ScoreTerms, Shaw, Turning
from attnzoo.positions.inside import act, check_position, places_of
from attnzoo.positions.shaw import ShawState
from attnzoo.state import State


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
        position: what turns q and k (``Rotary``), is added to the scores (``T5Bias``, ``Alibi``, ...) or to keys and
            values (``Shaw``); see ``attnzoo.positions``. None for nothing.
        qk_norm: normalises q and k of each head before they are turned: "rms", "layer" or "l2"; see ``QKNorm``.
        gate: multiplies the output of the heads with sigmoid(W_g x): "elementwise", or one factor a "head".
        head_norm: RMSNorm of each head's output, before the gate; None for the mechanism's own wish, ``norm_gain``.
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
        position: Turning | ScoreTerms | None = None,
        qk_norm: QKNormForm | None = None,
        gate: GateForm | None = None,
        head_norm: bool | None = None,
        bias: bool = True,
        causal: bool | None = None,
        max_len: int | None = None,
        grid: tuple[int, ...] | None = None,
        prefix_tokens: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        at_least(1, "MultiheadAttention", **sizes, value_dim=value_dim, context_dim=context_dim, out_dim=out_dim)
        groups = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} is no multiple of num_heads={num_heads}; give head_dim")
        if num_heads % groups:
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
        check_position(position, self.mechanism, self.value_dim)
        self.position = position
        source = dim if context_dim is None else context_dim
        self.q_proj = nn.Linear(dim, num_heads * width, bias=bias)
        self.k_proj = None if self.mechanism.traits.shared_qk else nn.Linear(source, groups * width, bias=False)
        self.v_proj = nn.Linear(source, groups * self.value_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.value_dim, dim if out_dim is None else out_dim, bias=bias)
        self.q_norm, self.k_norm = query_key_norms(qk_norm, self.mechanism)
        self.head_norm = norm_of_heads(head_norm, self.mechanism, self.value_dim)
        self.gate = None if gate is None else Gate(dim, num_heads, self.value_dim, gate)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform weights, zero biases; gains of 1."""
        for projection in filter(None, (self.q_proj, self.k_proj, self.v_proj, self.out_proj)):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for own in (self.q_norm, self.k_norm, self.head_norm, self.gate):
            if own is not None:
                own.reset_parameters()

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
            positions: int [T] or [B, T] (2-D: [T, 2]). If None a rotary position counts real tokens; what acts by
                offset counts slots, and makes T x S numbers where places are given.
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
        values: Tensor | None = None,
    ) -> Tensor:
        """The output of each head before the output projection, [B, H, T, Dv].

        Arguments as ``forward``; ``values`` [S, m] take the place of every head's, and pass by norm and gate.

        Raises:
            ValueError: for shapes that do not fit, and for what the mechanism or the site cannot honour.
        """
        mask = site_mask(mask, self.causal)
        check_tokens("x", x, self.q_proj)
        if context is None:
            x = source = hide(x, mask.key_keep)
        else:
            check_tokens("context", context, self.v_proj)
            self.mechanism.require("cross", "a context")
            if mask.segments is not None:
                raise ValueError("mask.segments is for self-attention; a context takes pair_keep")
            source = hide(context, mask.key_keep)
        places = places_of(self.position, x, mask, positions, context_positions, cross=context is not None)
        q, k, v = self._project(x, source)
        q, k, bias = act(self.position, self.mechanism, q, k, bias, places, source.shape[1])
        if values is not None:
            return self.mechanism(q, k, values.expand(*v.shape[:2], -1, -1), mask, bias)
        if isinstance(self.position, Shaw):
            heads = self.position.attend(self.mechanism, q, k, v, mask, bias, places)
        else:
            heads = self.mechanism(q, k, v, mask, bias)
        return self._finish(heads, x)

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
        wide = isinstance(self.position, Shaw)
        state = self.mechanism.init_state(
            batch_size,
            max_len,
            num_kv_heads=self.num_kv_heads,
            value_dim=self.value_dim + max_len if wide else self.value_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        return ShawState(state, max_len) if wide else state

    def memory(self, context: Tensor, *, mask: Mask | None = None) -> State:
        """Projects a context [B, S, context_dim] once, for cross-attention by ``step``.

        Raises:
            ValueError: if the mechanism cannot cross, or a relative position would have no places to read.
        """
        mask = as_mask(mask)
        check_tokens("context", context, self.v_proj)
        source = hide(context, mask.key_keep)
        self.mechanism.require("cross", "a memory")
        if isinstance(self.position, ScoreTerms):
            raise ValueError(f"position={type(self.position).__name__} has no meaning on a memory; build it without")
        return self.mechanism.memory(self._keys(source), self.project_values(source), mask)

    def recall(self, x: Tensor, memory: State, mask: Mask | None = None, bias: Bias | None = None) -> Tensor:
        """Heads of the queries x [B, t, E] on a ``memory``, [B, H, t, Dv]; their ``merge`` is what ``step`` gives."""
        check_tokens("x", x, self.q_proj)
        return self._finish(self.mechanism.step(self._queries(x), None, None, memory, mask, bias)[0], x)

    def project_values(self, source: Tensor) -> Tensor:
        """The values of each key/value head: [B, S, context_dim] -> [B, G, S, Dv]."""
        return split_heads(self.v_proj(source), self.num_kv_heads)

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
            return self.merge(self.recall(x, state, mask, bias)), state
        check_tokens("x", x, self.q_proj)
        x = hide(x, mask.key_keep)
        q, k, v = self._project(x, x)
        places = None
        if isinstance(self.position, Turning):
            positions = state.length[:, None] + mask.positions(x.shape[1], x.device)
            places = positions, positions
        q, k, bias = act(self.position, self.mechanism, q, k, bias, places, state.used + x.shape[1])
        if isinstance(self.position, Shaw):
            heads, state = self.position.step(self.mechanism, q, k, v, state, mask, bias)
        else:
            heads, state = self.mechanism.step(q, k, v, state, mask, bias)
        return self.merge(self._finish(heads, x)), state

    def _queries(self, x: Tensor) -> Tensor:
        q = split_heads(self.q_proj(x), self.num_heads)
        return q if self.q_norm is None else self.q_norm(q)

    def _keys(self, source: Tensor) -> Tensor:
        assert self.k_proj is not None
        k = split_heads(self.k_proj(source), self.num_kv_heads)
        return k if self.k_norm is None else self.k_norm(k)

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self._queries(x)
        return q, q if self.k_proj is None else self._keys(source), self.project_values(source)

    def _finish(self, heads: Tensor, x: Tensor) -> Tensor:
        if self.head_norm is not None:
            heads = self.head_norm(heads)
        return heads if self.gate is None else heads * self.gate(x)
