"""Bahdanau's translator: a recurrent encoder, and a recurrent decoder that looks at it anew for each word.

Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and Translate",
arXiv:1409.0473, appendix A.

    h_j = [GRU forward; GRU backward]                 annotation of source word j
    c_i = attention(s_(i-1); h_1 .. h_S)              the shell, on keys that are projected once
    s_i = GRU(s_(i-1); E y_(i-1), c_i)                s_0 = tanh(W (backward GRU at the first word))
    logits_i = E maxout(U [s_i; E y_(i-1); c_i])      two pieces

Shapes: B sentences, S source tokens, T target tokens, N rows while decoding, t new tokens, E width of the words,
H width of the states, V target words.

Deviations: the readout sees s_i, which knows c_i, in the place of s_(i-1); the reset gate acts behind the matrix, as in
torch's GRU; and the shell projects values and output, where the paper's c_i is a sum of the h_j themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo import Additive, DiversityKind, HeadDiversity, Mask, MultiheadAttention
from experiments.translation import sites
from experiments.translation.embedding import WordEmbedding, Words, real
from experiments.translation.output_loss import Loss
from experiments.translation.sharing import Sources
from experiments.translation.sites import Attention


class BahdanauState(NamedTuple):
    """What decoding carries from token to token.

    Attributes:
        hidden: s, [N, H].
        sources: what the attention reads.
    """

    hidden: Tensor
    sources: Sources


class Bahdanau(nn.Module):
    """Bidirectional GRU encoder, attention, GRU decoder.

    Args:
        words: sizes of the vocabularies.
        attention: factory of the mechanism; ``functools.partial(Softmax, scale=1.0)`` is Luong's dot product.
        dim: E.
        hidden_dim: H, of each direction of the encoder and of the decoder.
        num_heads: heads of the attention.
        head_diversity: weight of the term that keeps the heads different; 0 for none.
        head_diversity_kind: see ``attnzoo.HeadDiversity``.
        dropout: of the embeddings, the annotations and the readout.
        tied: see ``WordEmbedding``.
        max_len: the longest source, EOS included, for mechanisms that must know.

    Raises:
        ValueError: for sizes that do not divide, or a mechanism that cannot cross.

    Example:
        >>> network = Bahdanau(Words(20, 20, joint=True), dim=8, hidden_dim=8)
        >>> source, target = torch.tensor([[4, 5, 2], [6, 2, 0]]), torch.tensor([[1, 7, 8], [1, 9, 2]])
        >>> logits, aux = network(target, source)
        >>> logits.shape
        torch.Size([2, 3, 20])
        >>> logits, state = network.eval()(target[:, :1], state=network.start(source, max_len=10))
        >>> logits.shape, state.hidden.shape
        (torch.Size([2, 1, 20]), torch.Size([2, 8]))
    """

    def __init__(
        self,
        words: Words,
        *,
        attention: Attention = Additive,
        dim: int = 128,
        hidden_dim: int = 256,
        num_heads: int = 1,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        dropout: float = 0.1,
        tied: bool = True,
        max_len: int = 256,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("hidden_dim", hidden_dim), ("num_heads", num_heads)):
            if value < 1:
                raise ValueError(f"--model.{name} is {value}; it must be at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"--model.dropout is {dropout}; it must lie in [0, 1)")
        if hidden_dim % num_heads:
            raise ValueError(f"--model.hidden_dim={hidden_dim} is no multiple of --model.num_heads={num_heads}")
        sites.choose({"cross": (attention, 1)}, option="attention")
        self.max_len = max_len
        self.words = WordEmbedding(words, dim, tied=tied)
        self.reader = nn.GRU(dim, hidden_dim, batch_first=True)
        self.backward_reader = nn.GRU(dim, hidden_dim, batch_first=True)
        self.initial = nn.Linear(hidden_dim, hidden_dim)
        self.attention = MultiheadAttention(
            hidden_dim, num_heads, attention, context_dim=2 * hidden_dim, max_len=max_len, layer=0
        )
        self.head_diversity = HeadDiversity(head_diversity, head_diversity_kind) if head_diversity else None
        if self.head_diversity is not None:
            self.head_diversity.watch(self.attention)
        # The three inputs of the gates (reset, update, candidate) apart: that of the words needs no recurrence.
        self.word_gates = nn.Linear(dim, 3 * hidden_dim)
        self.context_gates = nn.Linear(hidden_dim, 3 * hidden_dim, bias=False)
        self.state_gates = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.readout = nn.Linear(hidden_dim + dim + hidden_dim, 2 * dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        target: Tensor,
        source: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        smoothing: float = 0.0,
        state: Any = None,
        teacher_forcing: float = 1.0,
    ) -> tuple[Tensor | Loss, Any]:
        """Logits, a loss or a step: arguments and results as ``Transformer.forward``.

        Args:
            target: as there; so are ``source``, ``labels``, ``smoothing`` and ``state``.
            source: int64 [B, S].
            labels: int64 [B, T].
            smoothing: of the loss.
            state: from ``start`` or the last call.
            teacher_forcing: in training, how probable it is for each row and step that the previous word is that of
                ``target``, not the one that the network itself found most probable.
        """
        if state is not None:
            return self._step(target, state)
        assert source is not None
        annotations, mask, hidden = self.encode(source)
        annotations = self.dropout(annotations)
        memory = self.attention.memory(annotations, mask=mask)
        queries, heads = [], []
        sampled = None
        if self.training and teacher_forcing < 1:
            sampled = torch.rand(target.shape, device=target.device) >= teacher_forcing
        words = self.dropout(self.words.target(target))
        made: list[tuple[Tensor, Tensor, Tensor]] = []
        for place, (word, gates) in enumerate(zip(words.unbind(1), self.word_gates(words).unbind(1), strict=True)):
            if made and sampled is not None:
                rows = sampled[:, place].nonzero()[:, 0]
                with torch.no_grad():
                    found = self.words.logits(self._read_out(torch.cat(made[-1], dim=-1)[rows])).argmax(-1)
                own = self.dropout(self.words.target(found))
                word, gates = word.index_copy(0, rows, own), gates.index_copy(0, rows, self.word_gates(own))
            queries.append(hidden[:, None])
            heads.append(self.attention.recall(queries[-1], memory))
            context = self.attention.merge(heads[-1])[:, 0]
            hidden = self._gru(hidden, gates, context)
            made.append((hidden, word, context))
        x = torch.cat([torch.stack(part, dim=1) for part in zip(*made, strict=True)], dim=-1)
        penalty = self.attention.mechanism.penalty()
        aux = x.new_zeros(()) if penalty is None else penalty
        diversity = self.head_diversity
        if diversity is not None and diversity.on:
            given = torch.cat(heads, dim=2), torch.cat(queries, dim=1), annotations
            keep = real(target if labels is None else labels)
            aux = aux + diversity.strength * diversity(self.attention, *given, real=keep, mask=mask)
        if labels is None:
            return self.words.logits(self._read_out(x)), aux
        keep = real(labels)
        return self.words.loss(self._read_out(x[keep]), labels[keep], smoothing), aux

    def start(self, source: Tensor, max_len: int) -> BahdanauState:
        """The state before BOS: sources int64 [B, S], read. It has room for any number of tokens."""
        hidden, memory = self._read(source)
        return BahdanauState(hidden, Sources.of((memory,), source.shape[0], source.device))

    def reorder(self, state: BahdanauState, rows: Tensor) -> BahdanauState:
        """Row ``n`` of the result is row ``rows[n]`` of ``state``; int64 [N']."""
        return BahdanauState(state.hidden.index_select(0, rows), state.sources.reorder(rows))

    def encode(self, source: Tensor) -> tuple[Tensor, Mask, Tensor]:
        """int64 [B, S] -> annotations [B, S, 2 H], 0 at padding, which of them are real, and s_0 [B, H]."""
        keep = real(source)
        x = self.dropout(self.words.source(source))
        ahead, _ = self.reader(x)
        # Each row is turned round by its own length, so that padding stays behind the words and enters no state.
        length = keep.sum(1)
        turned = (length[:, None] - 1 - torch.arange(source.shape[1], device=source.device)) % source.shape[1]
        back, _ = self.backward_reader(_take(x, turned))
        annotations = torch.cat([ahead, _take(back, turned)], dim=-1).masked_fill(~keep[..., None], 0)
        return annotations, Mask(key_keep=keep), torch.tanh(self.initial(annotations[:, 0, ahead.shape[2] :]))

    def _read(self, source: Tensor) -> tuple[Tensor, Any]:
        annotations, mask, hidden = self.encode(source)
        return hidden, self.attention.memory(self.dropout(annotations), mask=mask)

    def _step(self, target: Tensor, state: BahdanauState) -> tuple[Tensor, BahdanauState]:
        hidden, sources = state
        words = self.dropout(self.words.target(target))
        rows = []
        for word, gates in zip(words.unbind(1), self.word_gates(words).unbind(1), strict=True):
            context = sources.attend(self.attention, 0, hidden[:, None])[:, 0]
            hidden = self._gru(hidden, gates, context)
            rows.append(torch.cat([hidden, word, context], dim=-1))
        return self.words.logits(self._read_out(torch.stack(rows, 1))), BahdanauState(hidden, sources)

    def _gru(self, hidden: Tensor, gates: Tensor, context: Tensor) -> Tensor:
        width = hidden.shape[1]
        new = torch.addmm(gates, context, self.context_gates.weight.T)
        old = self.state_gates(hidden)
        reset, update = torch.sigmoid(new[:, : 2 * width] + old[:, : 2 * width]).chunk(2, dim=1)
        candidate = torch.tanh(torch.addcmul(new[:, 2 * width :], reset, old[:, 2 * width :]))
        return torch.lerp(candidate, hidden, update)

    def _read_out(self, x: Tensor) -> Tensor:
        first, second = self.readout(x).chunk(2, dim=-1)
        return self.dropout(torch.maximum(first, second))


def _take(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
