"""Transformer blocks over any mechanism.

A block returns ``(y, aux)``. ``aux`` is a scalar tensor, what its parts ask to be added to the loss; the
caller adds up those of all blocks. Nothing is left on attributes for someone else to find.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from attnzoo.catalogue import Factory
from attnzoo.checks import at_least, check_tokens
from attnzoo.heads.diversity import HeadDiversity
from attnzoo.kernels.dropout import Dropout
from attnzoo.mask import Mask, as_mask, hide
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.multihead import MultiheadAttention
from attnzoo.state import State

FeedForwardFactory = Callable[[int, int | None, float], nn.Module]
"""Called with dim, hidden_dim and dropout; makes a module that takes x [B, T, E] and a ``Mask``, or None, and returns
[B, T, E] and aux: ``FeedForward``, ``MixtureOfExperts`` or ``functools.partial(MixtureOfExperts, num_experts=8)``."""


class Shell(Protocol):
    """What a block asks of the self-attention in it: ``MultiheadAttention``, ``MultiheadLatentAttention``."""

    mechanism: Mechanism

    def __call__(self, x: Tensor, *, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        """[B, T, E] -> [B, T, E]: ``merge(attend(...))``."""

    def attend(self, x: Tensor, *, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        """[B, T, E] -> the outputs of the heads [B, H, T, Dv]."""

    def merge(self, heads: Tensor) -> Tensor:
        """[B, H, T, Dv] -> [B, T, E]."""

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """An empty state."""

    def step(self, x: Tensor, state: Any, *, mask: Mask | None = None) -> tuple[Tensor, Any]:
        """t new tokens [B, t, E] -> [B, t, E] and the next state."""


ShellFactory = Callable[..., Shell]
"""Called with dim, num_heads, a mechanism and the keywords of the site: ``MultiheadAttention``, or a partial such as
``functools.partial(MultiheadLatentAttention, kv_rank=64)``."""


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, on each token by itself.

    Args:
        dim: E.
        hidden_dim: width in the middle; 4 E if None.
        dropout: after the GELU.

    Example:
        >>> import torch
        >>> y, aux = FeedForward(8)(torch.randn(2, 5, 8))
        >>> y.shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        at_least(1, "FeedForward", dim=dim, hidden_dim=hidden_dim)
        width = 4 * dim if hidden_dim is None else hidden_dim
        self.layers = nn.Sequential(nn.Linear(dim, width), nn.GELU(), Dropout(dropout), nn.Linear(width, dim))

    def forward(self, x: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
        """[B, T, E] -> [B, T, E] and aux, which is 0. No mask changes what becomes of a token by itself."""
        return self.layers(x), x.new_zeros(())


class _Residual(nn.Module):
    """What blocks share: how a branch goes in and comes out - pre-norm or post-norm, dropout, sum - and one of them."""

    norm_first: bool
    dropout: Dropout
    feed_forward: nn.Module
    feed_forward_norm: nn.LayerNorm
    head_diversity: HeadDiversity | None

    def enter(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """What the branch sees."""
        if not self.norm_first:
            return x
        if type(norm) is nn.LayerNorm:  # another one, put in its place, takes what it takes
            check_tokens("x", x, norm)
        return norm(x)

    def leave(self, x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Tensor:
        """The sum of x and what the branch made of it."""
        x = x + self.dropout(y)
        return x if self.norm_first else norm(x)

    def attend(self, attention: Any, *inputs: Tensor, real: Tensor | None, **site: Any) -> tuple[Tensor, Tensor | None]:
        """The branch of an attention, and its share of the loss: for its parameters, and for heads that are alike.

        Args:
            attention: the shell.
            inputs: x, and the context of cross-attention.
            real: bool [B, T], which tokens of x are real; all if None.
            site: further keywords of the shell.
        """
        penalty, diversity = attention.mechanism.penalty(), self.head_diversity
        if diversity is None or not diversity.on:
            return attention(*inputs, **site), penalty
        heads = attention.attend(*inputs, **site)
        alike = diversity.strength * diversity(attention, heads, *inputs, real=real, **site)
        return attention.merge(heads), alike if penalty is None else penalty + alike

    def feed(self, x: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """The branch of the feed-forward, and its aux."""
        y, aux = self.feed_forward(self.enter(x, self.feed_forward_norm), mask)
        return self.leave(x, y, self.feed_forward_norm), aux


class EncoderBlock(_Residual):
    """Self-attention and a feed-forward, each inside a residual (He et al. 2016; Vaswani et al. 2017).

    Args:
        dim: E.
        num_heads: H.
        mechanism: a factory of the attention between heads.
        feed_forward: a factory of the feed-forward, such as ``MixtureOfExperts`` or a partial of it.
        hidden_dim: width of the feed-forward; 4 E if None.
        dropout: of both branches. Dropout of the attention weights is the mechanism's own.
        norm_first: normalise what goes into a branch (pre-norm) rather than the sum (post-norm, the paper).
        head_diversity: what asks the heads to differ, one for all blocks of a model; None for nothing.
        shell: a factory of the projections around the mechanism.
        site: further keywords of the shell: position, num_kv_heads, and facts of the site.

    Example:
        >>> import torch
        >>> y, aux = EncoderBlock(32, 4)(torch.randn(2, 6, 32))
        >>> y.shape, aux.item()
        (torch.Size([2, 6, 32]), 0.0)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: Factory = Softmax,
        *,
        feed_forward: FeedForwardFactory = FeedForward,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        head_diversity: HeadDiversity | None = None,
        shell: ShellFactory = MultiheadAttention,
        **site: Any,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = shell(dim, num_heads, mechanism, **site)
        self.head_diversity = _watching(head_diversity, self.attention)
        self.feed_forward = feed_forward(dim, hidden_dim, dropout)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, *, mask: Mask | None = None, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, T, E] -> [B, T, E] and aux. Padding comes out finite, whatever went in."""
        x = hide(x, as_mask(mask).key_keep)
        real = as_mask(mask).key_keep
        site = {"mask": mask, "positions": positions}
        y, penalty = self.attend(self.attention, self.enter(x, self.attention_norm), real=real, **site)
        x, aux = self.feed(self.leave(x, y, self.attention_norm), mask)
        return x, _sum(aux, penalty)


class DecoderState(NamedTuple):
    """What a decoder block carries from step to step: its own past, and the encoder's memory."""

    past: State
    memory: State


class DecoderBlock(_Residual):
    """Causal self-attention, cross-attention to an encoder, and a feed-forward.

    Args:
        dim: E.
        num_heads: H.
        mechanism: a factory for the self-attention; must take causal masks.
        cross_mechanism: a factory for the cross-attention.
        context_dim: width of the encoder's output; E if None.
        feed_forward: a factory of the feed-forward, see ``EncoderBlock``.
        hidden_dim: width of the feed-forward; 4 E if None.
        dropout: of each branch.
        norm_first: pre-norm rather than post-norm.
        head_diversity: what asks the heads of either attention to differ, see ``EncoderBlock``.
        shell: a factory of the projections around the self-attention's mechanism, see ``EncoderBlock``.
        site: further keywords of that shell: position, num_kv_heads, and facts of the site.

    Raises:
        ValueError: for a ``mechanism`` that cannot be causal, or a ``cross_mechanism`` that cannot cross.

    Example:
        >>> import torch
        >>> block, source = DecoderBlock(16, 2).eval(), torch.randn(2, 7, 16)
        >>> target = torch.randn(2, 5, 16)
        >>> whole, aux = block(target, source)
        >>> first, state = block.step(target[:, :3], block.init_state(source, max_len=5))
        >>> rest, state = block.step(target[:, 3:], state)
        >>> torch.allclose(torch.cat([first, rest], dim=1), whole, atol=1e-5)
        True
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: Factory = Softmax,
        cross_mechanism: Factory = Softmax,
        *,
        context_dim: int | None = None,
        feed_forward: FeedForwardFactory = FeedForward,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        norm_first: bool = True,
        head_diversity: HeadDiversity | None = None,
        shell: ShellFactory = MultiheadAttention,
        **site: Any,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = shell(dim, num_heads, mechanism, causal=True, **site)
        self.cross_attention = MultiheadAttention(
            dim, num_heads, cross_mechanism, context_dim=context_dim, layer=site.get("layer")
        )
        self.cross_attention.mechanism.require("cross", "a context")
        self.head_diversity = _watching(head_diversity, self.attention, self.cross_attention)
        self.feed_forward = feed_forward(dim, hidden_dim, dropout)
        self.attention_norm, self.cross_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
        positions: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[B, T, E] and the encoder's [B, S, context_dim] -> [B, T, E] and aux.

        ``real``, bool [B, T], tells ``head_diversity`` what is padding where causality alone keeps it out; it is the
        mask's ``key_keep`` if None.
        """
        x = hide(x, as_mask(mask).key_keep)
        real = as_mask(mask).key_keep if real is None else real
        site = {"mask": mask, "positions": positions}
        y, own = self.attend(self.attention, self.enter(x, self.attention_norm), real=real, **site)
        x = self.leave(x, y, self.attention_norm)
        y, cross = self.attend(
            self.cross_attention, self.enter(x, self.cross_norm), context, real=real, mask=context_mask
        )
        x, aux = self.feed(self.leave(x, y, self.cross_norm), mask)
        return x, _sum(aux, own, cross)

    def init_state(self, context: Tensor, max_len: int, *, context_mask: Mask | None = None) -> DecoderState:
        """The state before the first token: room for ``max_len`` of them, and the projected context."""
        past = self.attention.init_state(context.shape[0], max_len)
        return DecoderState(past, self.cross_attention.memory(context, mask=context_mask))

    def step(self, x: Tensor, state: DecoderState, *, mask: Mask | None = None) -> tuple[Tensor, DecoderState]:
        """t new tokens [B, t, E] -> [B, t, E] and the next state; equals the rows of one whole pass."""
        x = hide(x, as_mask(mask).key_keep)
        y, past = self.attention.step(self.enter(x, self.attention_norm), state.past, mask=mask)
        x = self.leave(x, y, self.attention_norm)
        y, memory = self.cross_attention.step(self.enter(x, self.cross_norm), state.memory, on_memory=True)
        x = self.leave(x, y, self.cross_norm)
        return self.feed(x, mask)[0], DecoderState(past, memory)


def _watching(diversity: HeadDiversity | None, *attentions: Shell) -> HeadDiversity | None:
    if diversity is not None:
        for attention in attentions:
            diversity.watch(attention)
    return diversity


def _sum(aux: Tensor, *penalties: Tensor | None) -> Tensor:
    for penalty in penalties:
        aux = aux if penalty is None else aux + penalty
    return aux
