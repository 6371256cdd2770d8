"""Additive attention.

Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and Translate",
arXiv:1409.0473, appendix A.1.2.

    e_ij = w . tanh(W_q q_i + W_k k_j) + bias_ij      no 1/sqrt(D)
    a_ij = softmax over the visible keys of e_ij
    o_i  = sum_j a_ij v_j

    per head: W_q [D, A]   W_k [D, A]   w [A];   A = hidden_dim

W_k k_j is made once per source and kept in the state. Left out: biases inside the tanh.

Use it when queries and keys come from different networks and a dot product between them means little, as in a
recurrent translator: one query a step, a short source, and the score has weights of its own.

Not when both sequences are long: A numbers for each pair make it A times dearer than a dot product, and no fused
kernel knows it.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism, at_least
from attnzoo.traits import Traits

CHUNK_ELEMENTS = 1 << 22
"""How large the tanh tensor of one chunk of queries, [B, H, chunk, S, A], may grow."""


class Additive(Mechanism):
    """Bahdanau's attention: a small network scores each pair of query and key.

    The tanh makes A numbers for each pair, so queries are taken in chunks and recomputed for gradients.

    Args:
        num_heads: H.
        head_dim: D.
        hidden_dim: A, the width inside the tanh; D if None.
        dropout: share of the attention weights dropped in training.

    Raises:
        ValueError: if ``hidden_dim`` is below 1.

    Example:
        >>> attention = Additive(1, 8, hidden_dim=16)
        >>> source = torch.randn(2, 1, 7, 8)
        >>> memory = attention.memory(source, source)           # W_k k, once
        >>> out, memory = attention.step(torch.randn(2, 1, 1, 8), None, None, memory)
        >>> out.shape
        torch.Size([2, 1, 1, 8])
    """

    traits = Traits(complexity="T S A")

    def __init__(self, num_heads: int, head_dim: int, *, hidden_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        width = head_dim if hidden_dim is None else hidden_dim
        at_least(1, "Additive", hidden_dim=hidden_dim)
        self.hidden_dim = width
        self.query_weight = nn.Parameter(torch.empty(num_heads, head_dim, width))
        self.key_weight = nn.Parameter(torch.empty(num_heads, head_dim, width))
        self.score_weight = nn.Parameter(torch.empty(num_heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform for each head by itself."""
        for head in range(self.num_heads):
            nn.init.xavier_uniform_(self.query_weight[head])
            nn.init.xavier_uniform_(self.key_weight[head])
            nn.init.xavier_uniform_(self.score_weight[head][None])

    def prepare_keys(self, k: Tensor) -> Tensor:
        """W_k k for each query head: [B, G, S, D] -> [B, H, S, A]."""
        return _by_head(k.repeat_interleave(self.num_heads // k.shape[1], dim=1), self.key_weight)

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        batch, heads, queries, _ = q.shape
        length = keys.shape[2]
        projected = _by_head(q, self.query_weight)
        v = v.repeat_interleave(heads // v.shape[1], dim=1)
        visible = mask.visible(queries, length, q.device)
        terms = bias.dense(queries) if isinstance(bias, OffsetBias) else bias
        visible, terms = _four(visible), _four(terms)

        chunk = self._chunk(batch, length)
        # An exported program has no fixed batch, so nothing may be decided by its size.
        if torch.compiler.is_exporting() or chunk >= queries:
            return self._rows(projected, keys, v, visible, terms)
        parts = []
        for start in range(0, queries, chunk):
            part = slice(start, start + chunk)
            args = projected[:, :, part], keys, v, _part(visible, part), _part(terms, part)
            parts.append(checkpoint(self._rows, *args, use_reentrant=False))
        return torch.cat(parts, dim=2)

    def _rows(self, query: Tensor, keys: Tensor, v: Tensor, keep: Tensor | None, terms: Tensor | None) -> Tensor:
        pairs = torch.tanh(query[:, :, :, None] + keys[:, :, None])
        scores = (pairs @ self.score_weight[:, None, :, None])[..., 0]
        if terms is not None:
            scores = scores + terms.to(scores.dtype)
            keep = terms > -torch.inf if keep is None else keep & (terms > -torch.inf)
        return nn.functional.dropout(masked_softmax(scores, keep), self.dropout, self.training) @ v

    def _chunk(self, batch: int, keys: int) -> int:
        """How many queries are taken at once."""
        return max(1, CHUNK_ELEMENTS // max(1, batch * self.num_heads * keys * self.hidden_dim))

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says in how many chunks the queries are taken."""
        chunk = self._chunk(q.shape[0], k.shape[2])
        return f"plain torch operations, {-(-q.shape[2] // chunk)} chunk(s) of queries"


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, H, T, D] times the matrix of each head [H, D, A]: [B, H, T, A].

    The batch goes into the rows: broadcast over it the matrices would be copied, and their gradients made, B times.
    """
    rows = x.transpose(0, 1).flatten(1, 2) @ weight
    return rows.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _four(x: Tensor | None) -> Tensor | None:
    return x[None, None] if x is not None and x.dim() == 2 else x


def _part(x: Tensor | None, part: slice) -> Tensor | None:
    # A mask of padding alone has one row that serves all queries.
    return x if x is None or x.shape[2] == 1 else x[:, :, part]
