"""What acts inside the attention: encodings that turn q and k, and those that add terms to the scores.

Letters: B batch, H query heads, T queries, S keys, D head width, Dv value width.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias, OffsetBias, check_bias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism

Places = tuple[Tensor, Tensor]
"""Where the queries stand and where the keys do: int [T] or [B, T] and [S] or [B, S]; 2-D: a last axis of 2."""


class Turning(nn.Module):
    """Base of the encodings that turn q and k, each at its own place.

    A subclass sets ``head_dim`` and writes ``turn``.

    Attributes:
        multiple: what must divide the width that is turned.
    """

    multiple: ClassVar[int] = 2
    head_dim: int

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turns x [B, H, T, width] of any width that ``multiple`` divides."""
        raise NotImplementedError(f"{type(self).__name__} must define turn()")

    def forward(self, x: Tensor, positions: Tensor, parts: int = 1) -> Tensor:
        """Turns x [B, H, T, D].

        Args:
            x: queries or keys.
            positions: their places, int [T] or [B, T]; 2-D: (row, column) [T, 2] or [B, T, 2].
            parts: x falls into so many equal parts, each of which is turned as if it were a head by itself.

        Raises:
            ValueError: if x has another width, or there is not one place for each token.
        """
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"{type(self).__name__} is for head_dim={self.head_dim}, got a width of {x.shape[-1]}")
        if parts == 1:
            return self.turn(x, positions)
        return torch.cat([self.turn(part, positions) for part in x.chunk(parts, dim=-1)], dim=-1)

    def fit(self, mechanism: Mechanism, value_dim: int) -> None:
        """Raises ``ValueError`` unless it can act on what goes into ``mechanism``."""
        width, parts = mechanism.head_dim, mechanism.qk_parts
        if self.head_dim != width:
            raise ValueError(f"the position is for head_dim={self.head_dim}, the attention has {width}")
        if width % parts or (width // parts) % self.multiple:
            raise ValueError(
                f"{type(mechanism).__name__} has {parts} parts in head_dim={width}, each turned by itself: "
                f"{type(self).__name__} needs head_dim to be a multiple of {parts} x {self.multiple}"
            )


class ScoreTerms(nn.Module):
    """Base of the encodings that add terms to the scores: ``Relative``, ``SwinBias``, ``Shaw``.

    Attributes:
        reads_places: whether explicit places act; otherwise only the slots do.
        needs: traits that a mechanism must have for it.
        num_heads: H, where each head has terms of its own; None where all share them.
    """

    reads_places: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("bias",)
    num_heads: int | None = None

    def terms(self, q: Tensor, keys: int, places: Places | None) -> Bias:
        """What is added to the scores of q [B, H, T, D] and ``keys`` keys.

        Args:
            q: the queries.
            keys: S.
            places: of queries and keys; if None the last query stands at the last key.
        """
        raise NotImplementedError(f"{type(self).__name__} must define terms()")

    def fit(self, mechanism: Mechanism, value_dim: int) -> None:
        """Raises ``ValueError`` unless it can act beside ``mechanism``."""
        for trait in self.needs:
            mechanism.require(trait, "a relative bias" if trait == "bias" else f"position={type(self).__name__}")
        if self.num_heads not in (None, mechanism.num_heads):
            raise ValueError(
                f"the relative bias is for {self.num_heads} heads, the attention has {mechanism.num_heads}"
            )


def offsets(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """j - p_i for each offset of key and query that occurs: int64 [T + S - 1], as ``OffsetBias`` orders them.

    Example:
        >>> offsets(queries=1, keys=3)
        tensor([-2, -1,  0])
    """
    # Entry n stands for j - i = n - (T - 1), and the place of query i is i + S - T.
    return torch.arange(max(0, queries + keys - 1), device=device) - (keys - 1)


def pair_offsets(q: Tensor, keys: int, places: Places | None) -> Tensor:
    """p_j - p_i of each pair: int64 [T, S] or [B, T, S]; by slots, the last query at the last key, without places."""
    if places is None:
        queries = q.shape[2]
        own = torch.arange(queries, device=q.device) + keys - queries
        return torch.arange(keys, device=q.device) - own[:, None]
    return places[1][..., None, :] - places[0][..., :, None]


def check_places(positions: Tensor, x: Tensor, pair: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless ``positions`` are [T] or [B, T] (with a last axis of 2 on a grid) for x."""
    if not isinstance(positions, Tensor):
        raise ValueError(f"positions must be a tensor of numbers, got {type(positions).__name__}")
    batch, length = x.shape[0], x.shape[2]
    fits = [(length, *pair), (1, length, *pair), (batch, length, *pair)]
    if tuple(positions.shape) not in fits:
        raise ValueError(f"positions must be {fits[0]} or {fits[2]} for {length} tokens, got {tuple(positions.shape)}")


def check_position(position: Turning | ScoreTerms | None, mechanism: Mechanism, value_dim: int) -> None:
    """Raises ``ValueError`` unless ``position`` acts inside the attention and fits ``mechanism``."""
    if position is None:
        return
    if not isinstance(position, (Turning, ScoreTerms)):
        raise ValueError(
            f"position must be one of attnzoo.positions that acts inside the attention (Rotary, Rotary2D, "
            f"RelativeBias, ...), got {position!r}; other encodings are added to the embeddings"
        )
    position.fit(mechanism, value_dim)


def places_of(
    position: Turning | ScoreTerms | None,
    x: Tensor,
    mask: Mask,
    positions: Tensor | None,
    context_positions: Tensor | None,
    *,
    cross: bool,
) -> Places | None:
    """The places that ``position`` will read in a call on x [B, T, E], or None where it goes by slots or rests.

    Raises:
        ValueError: for places that nothing would read, and for an encoding that would have none to read.
    """
    own = "None" if position is None else type(position).__name__
    by_slots = isinstance(position, ScoreTerms) and not position.reads_places
    for name, given in (("positions", positions), ("context_positions", context_positions)):
        if given is not None and (position is None or by_slots):
            raise ValueError(f"{name} were given, but position={own} does not read them; a Rotary does")
    if by_slots and mask.segments is not None:
        raise ValueError(f"position={own} goes by the slots of one grid and cannot tell segments apart; Rotary2D can")
    if not cross:
        if context_positions is not None:
            raise ValueError("context_positions were given without a context")
        if positions is None and isinstance(position, Turning):
            positions = mask.positions(x.shape[1], x.device)
        return None if positions is None else (positions, positions)
    if positions is None and context_positions is None and isinstance(position, ScoreTerms):
        hint = "" if by_slots else "give positions and context_positions, or "
        raise ValueError(f"position={own} has no meaning between two sequences; {hint}build cross-attention without it")
    if positions is None or context_positions is None:
        if positions is not None or context_positions is not None:
            raise ValueError("cross-attention takes positions and context_positions together, or neither of them")
        return None
    return positions, context_positions


def act(
    position: Turning | ScoreTerms | None,
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    bias: Bias | None,
    places: Places | None,
    keys: int,
) -> tuple[Tensor, Tensor, Bias | None]:
    """q, k and bias as the mechanism takes them: turned, or with the terms of the encoding added.

    Args:
        position: what acts; None for nothing.
        mechanism: what it acts beside; says into how many parts q and k fall.
        q: [B, H, T, D].
        k: the keys that are new [B, G, s, D].
        bias: of the call, for all keys.
        places: from ``places_of``.
        keys: S, how many keys there are in all.
    """
    if isinstance(position, Turning) and places is not None:
        parts = mechanism.qk_parts
        return position(q, places[0], parts), position(k, places[1], parts), bias
    if not isinstance(position, ScoreTerms):
        return q, k, bias
    if places is not None:
        check_places(places[0], q, ())
        check_places(places[1], k, ())
    terms = position.terms(q, keys, places)
    terms = OffsetBias(terms.values.to(q.dtype)) if isinstance(terms, OffsetBias) else terms.to(q.dtype)
    if bias is None:
        return q, k, terms
    # Checked before the sum, in which broadcasting would hide what does not fit.
    check_bias(bias, q.shape[1], q.shape[0], q.shape[2], keys)
    if isinstance(terms, OffsetBias):
        return q, k, terms.plus(bias, q.shape[2])
    return q, k, bias.plus(terms, q.shape[2]) if isinstance(bias, OffsetBias) else terms + bias
