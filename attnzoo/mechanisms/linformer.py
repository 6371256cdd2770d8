"""Linformer: keys and values projected along the sequence to a fixed number of slots.

Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768.

    K' = E K,   V' = F V,   E and F [R, S]
    o_i = softmax over the R slots of (q_i . K'_r / sqrt(D))  times V'_r

    q [B, H, T, D]   k [B, G, S, D]   v [B, G, S, Dv]   ->   out [B, H, T, Dv];   R = rank, S <= max_len

E and F are as long as the longest sequence; a shorter one takes their first S columns. Real keys are moved to
the front before, so that padding, wherever it stands, picks no other columns. Each slot mixes all places, the
future among them: there is no causal form.

Sharing: "headwise" is one E and one F for all heads, "none" a pair for each query head (with grouped heads each
query head projects the keys of its group), "key_value" one matrix that is both E and F.

Deviations: E and F start as N(0, 1/max_len), the usual 1/sqrt(inputs) of a linear layer: at full length a slot then
has the scale of a key. The paper's analysis has N(0, 1/R), which keeps lengths along the sequence but makes scores and
values sqrt(S / R) times larger. Left out: sharing between layers, and a rank of its own for each layer or head.

Use it when the length is fixed or bounded and whole sequences are read at once (pictures cut into patches, windows
of a series): time and memory grow with T R, and a place always means the same thing to E and F.

Not when anything is generated token by token, when lengths vary much (the last columns of E and F are seldom
trained), or when single keys must be found exactly: R slots hold R mixtures, not S keys.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias
from attnzoo.kernels.packing import front, take
from attnzoo.kernels.sdpa import fused
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least
from attnzoo.traits import Traits

Sharing = Literal["headwise", "none", "key_value"]


class LinformerMemory(NamedTuple):
    """Fixed keys of cross-attention, projected once.

    Attributes:
        keys: E K, [B, G or H, R, D].
        values: F V, [B, G or H, R, Dv].
        length: real tokens, int64 [B].
        used: S, padding included.
    """

    keys: Tensor
    values: Tensor
    length: Tensor
    used: int

    @property
    def fixed(self) -> bool:
        """All keys came at once."""
        return True


class Linformer(Mechanism):
    """Each query attends to R learned mixtures of the keys: time and memory O((T + S) R).

    Args:
        num_heads: H.
        head_dim: D.
        rank: R, the number of slots that keys and values are projected to.
        sharing: who shares E and F: "headwise" (all heads), "none", or "key_value" (all heads, and E = F).
        dropout: share of the attention weights, over the slots, dropped in training.
        max_len: a fact of the site: the longest sequence of keys, which E and F are built for.

    Raises:
        ValueError: for a rank below 1, an unknown sharing, or without ``max_len``; in a call, for more keys than
            ``max_len``.

    Example:
        >>> q = k = v = torch.randn(1, 2, 50, 8)
        >>> Linformer(2, 8, rank=4, max_len=64)(q, k, v).shape
        torch.Size([1, 2, 50, 8])
    """

    traits = Traits(
        causal=False,
        pair_keep=False,
        bias=False,
        streaming=False,
        normalised=False,
        exact=False,
        linear_memory=True,
        complexity="(T + S) R D",
    )
    reasons = {
        "causal": "each slot of its projection mixes all places, the future too; Local and MemoryCompressed are causal",
        "streaming": "steps are causal, and each slot of its projection mixes all places; MemoryCompressed has steps",
        "pair_keep": "a slot mixes all keys, so none can be hidden from one query alone; Softmax and Local can hide it",
        "bias": "the scores belong to slots that mix all keys, not to keys; Softmax and Local take a bias",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        rank: int = 16,
        sharing: Sharing = "headwise",
        dropout: float = 0.0,
        max_len: int | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "Linformer", rank=rank, max_len=max_len)
        if sharing not in get_args(Sharing):
            raise ValueError(f"Linformer: sharing must be one of {', '.join(get_args(Sharing))}; got {sharing!r}")
        if max_len is None:
            raise ValueError(
                "Linformer: max_len is missing, the longest sequence that will come, which its projections are built "
                "for: give Linformer(..., max_len=512), or max_len to the MultiheadAttention that holds it"
            )
        self.rank = rank
        self.sharing = sharing
        self.max_len = max_len
        shape = (num_heads, rank, max_len) if sharing == "none" else (rank, max_len)
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = self.key_projection if sharing == "key_value" else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1 / max_len)."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=self.max_len**-0.5)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        return self._over_slots(q, *self._to_slots(keys, v, mask.key_keep))

    def remember(self, keys: Tensor, v: Tensor, key_keep: Tensor | None) -> LinformerMemory:
        real = torch.full(v.shape[:1], v.shape[2], device=v.device) if key_keep is None else key_keep.sum(1)
        return LinformerMemory(*self._to_slots(keys, v, key_keep), real, v.shape[2])

    def recall(self, q: Tensor, state: LinformerMemory, mask: Mask, bias: Bias | None) -> Tensor:
        return self._over_slots(q, state.keys, state.values)

    def _over_slots(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return fused(q, keys, values, None, dropout=self.dropout if self.training else 0.0)

    def _to_slots(self, keys: Tensor, v: Tensor, key_keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """E K and F V, with real keys at the front; hidden ones, zero already, meet the columns behind."""
        length = keys.shape[2]
        if length > self.max_len:
            raise ValueError(
                f"Linformer: {length} keys came, its projections are built for max_len={self.max_len}; "
                f"cut the sequence or build it with max_len={length}"
            )
        if key_keep is not None:
            order = front(key_keep)
            keys, v = take(keys, order), take(v, order)
        return _project(self.key_projection[..., :length], keys), _project(self.value_projection[..., :length], v)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how many slots stand for how many keys."""
        return f"SDPA over {self.rank} slots that stand for {k.shape[2]} keys"


def _project(projection: Tensor, x: Tensor) -> Tensor:
    """[R, S] or [H, R, S] along the sequence of x [B, G, S, width] -> [B, G, R, width] or [B, H, R, width]."""
    if projection.dim() == 2:
        return torch.einsum("rs,bgsd->bgrd", projection, x)
    groups = x.shape[1]
    by_group = projection.unflatten(0, (groups, projection.shape[0] // groups))
    return torch.einsum("ghrs,bgsd->bghrd", by_group, x).flatten(1, 2)
