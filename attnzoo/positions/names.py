"""Position encodings of a sequence by their names, as the table of this package has them."""

from typing import Literal, get_args

from torch import nn

from attnzoo.positions.absolute import Learned, Sinusoidal
from attnzoo.positions.inside import ScoreTerms, Turning
from attnzoo.positions.relative import Alibi, RelativeBias, T5Bias
from attnzoo.positions.rotary import Rotary
from attnzoo.positions.shaw import Shaw

PositionName = Literal["none", "sinusoidal", "learned", "rope", "rope_halves", "alibi", "t5", "offset", "shaw"]


def added(name: str, dim: int, max_len: int) -> nn.Module | None:
    """The encoding that is added to the embeddings, None if this name acts elsewhere.

    Args:
        name: a ``PositionName``.
        dim: width of the embeddings.
        max_len: the longest sequence.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> added("sinusoidal", 8, 100), added("rope", 8, 100)
        (Sinusoidal(), None)
    """
    _check(name)
    if name == "learned":
        return Learned(dim, max_len)
    return Sinusoidal(dim) if name == "sinusoidal" else None


def inside(name: str, num_heads: int, head_dim: int, *, causal: bool = False) -> Turning | ScoreTerms | None:
    """The encoding that acts inside self-attention, None if this name acts elsewhere.

    Args:
        name: a ``PositionName``.
        num_heads: of the attention.
        head_dim: width of each.
        causal: whether the attention sees the past alone, so that t5 need not tell sides apart.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> inside("alibi", 4, 8), inside("learned", 4, 8)
        (Alibi(), None)
    """
    _check(name)
    if name in ("rope", "rope_halves"):
        return Rotary(head_dim, layout="neighbours" if name == "rope" else "halves")
    if name == "alibi":
        return Alibi(num_heads)
    if name == "t5":
        return T5Bias(num_heads, bidirectional=not causal)
    if name == "shaw":
        return Shaw(head_dim)
    return RelativeBias(num_heads) if name == "offset" else None


def _check(name: str) -> None:
    if name not in get_args(PositionName):
        raise ValueError(f"position is {name!r}; it must be one of {', '.join(get_args(PositionName))}")
