"""A Transformer that translates, over any mechanism at each of its three sites.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762; norms in front of the branches after
Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", arXiv:2002.04745.

Shapes: B sentences, S source tokens, T target tokens, N rows while decoding, t new tokens, E width, V target words.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from attnzoo import DecoderBlock, DiversityKind, EncoderBlock, HeadDiversity, Mask, Softmax, positions, reorder
from attnzoo.positions import PositionName
from experiments.translation import sites
from experiments.translation.embedding import WordEmbedding, Words, real
from experiments.translation.output_loss import Loss
from experiments.translation.sharing import Sources
from experiments.translation.sites import Attention


class TransformerState(NamedTuple):
    """What decoding carries from token to token.

    Attributes:
        pasts: the state of each decoder block's self-attention, of N rows.
        sources: what each block's cross-attention reads.
    """

    pasts: tuple[Any, ...]
    sources: Sources


class Transformer(nn.Module):
    """Encoder and decoder.

    Args:
        words: sizes of the vocabularies.
        attention: factory of the mechanism of all self-attention.
        encoder_attention: another one for the encoder.
        decoder_attention: another one for the decoder's self-attention; must be causal and able to go by steps.
        cross_attention: factory of the mechanism from decoder to encoder.
        attention_at: other factories for single sites, "encoder.0", "decoder.1" or "cross.0".
        position: name of the position encoding, of self-attention in encoder and decoder; see ``attnzoo.positions``.
            What goes by offset (alibi, t5, offset, shaw) has a table of its own in each block.
        dim: E.
        encoder_depth: blocks of the encoder.
        decoder_depth: blocks of the decoder.
        num_heads: heads of each attention.
        num_kv_heads: key/value heads of self-attention, a divisor of ``num_heads``; as many if None.
        head_diversity: weight of the term that keeps the heads different; 0 for none.
        head_diversity_kind: see ``attnzoo.HeadDiversity``.
        hidden_dim: width of the feed-forward; 4 E if None.
        dropout: of the branches of a block, and of the embeddings.
        norm_first: pre-norm, with one norm more behind the last block; False is the paper's post-norm.
        tied: see ``WordEmbedding``.
        max_len: the longest sequence of either side, BOS and EOS included.

    Raises:
        ValueError: for sizes that do not divide, an unknown position, a site that does not exist, and a mechanism
            that cannot serve at its site.

    Example:
        >>> network = Transformer(Words(20, 20, joint=True), dim=8, num_heads=2, encoder_depth=1, decoder_depth=1)
        >>> source, target = torch.tensor([[4, 5, 2], [6, 2, 0]]), torch.tensor([[1, 7, 8], [1, 9, 2]])
        >>> logits, aux = network(target, source)
        >>> logits.shape
        torch.Size([2, 3, 20])
        >>> logits, state = network.eval()(target[:, :1], state=network.start(source, max_len=10))
        >>> logits.shape
        torch.Size([2, 1, 20])
    """

    def __init__(
        self,
        words: Words,
        *,
        attention: Attention = Softmax,
        encoder_attention: Attention | None = None,
        decoder_attention: Attention | None = None,
        cross_attention: Attention = Softmax,
        attention_at: Mapping[str, Attention] | None = None,
        position: PositionName = "sinusoidal",
        dim: int = 128,
        encoder_depth: int = 4,
        decoder_depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        hidden_dim: int | None = None,
        dropout: float = 0.1,
        norm_first: bool = True,
        tied: bool = True,
        max_len: int = 256,
    ) -> None:
        super().__init__()
        for name, value in (
            ("dim", dim), ("encoder_depth", encoder_depth), ("decoder_depth", decoder_depth), ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads), ("hidden_dim", hidden_dim),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"--model.{name} is {value}; it must be at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"--model.dropout is {dropout}; it must lie in [0, 1)")
        if dim % num_heads:
            raise ValueError(f"--model.dim={dim} is no multiple of --model.num_heads={num_heads}")
        if position not in get_args(PositionName):
            raise ValueError(f"--model.position is {position!r}; it must be one of {', '.join(get_args(PositionName))}")
        chosen = sites.choose(
            {
                "encoder": (attention if encoder_attention is None else encoder_attention, encoder_depth),
                "decoder": (attention if decoder_attention is None else decoder_attention, decoder_depth),
                "cross": (cross_attention, decoder_depth),
            },
            attention_at,
        )
        self.max_len = max_len
        self.words = WordEmbedding(words, dim, tied=tied)
        self.encoder_position, self.decoder_position = (positions.added(position, dim, max_len) for _ in range(2))
        self.turns = position in ("rope", "rope_halves")
        self.dropout = nn.Dropout(dropout)
        inside = {"num_heads": num_heads, "head_dim": dim // num_heads}
        block: dict[str, Any] = {
            "hidden_dim": hidden_dim,
            "dropout": dropout,
            "norm_first": norm_first,
            "num_kv_heads": num_kv_heads,
            "head_diversity": HeadDiversity(head_diversity, head_diversity_kind) if head_diversity else None,
            "max_len": max_len,
        }
        # A mechanism that wants a grid has the words on a square, row by row.
        columns = math.isqrt(max_len - 1) + 1
        self.encoder = nn.ModuleList(
            sites.build(
                f"encoder.{layer}",
                functools.partial(
                    EncoderBlock,
                    dim,
                    num_heads,
                    chosen["encoder"][layer],
                    causal=False,
                    position=positions.inside(position, **inside),
                    grid=(-(-max_len // columns), columns),
                    layer=layer,
                    **block,
                ),
            )
            for layer in range(encoder_depth)
        )
        self.decoder = nn.ModuleList(
            sites.build(
                f"decoder.{layer} or cross.{layer}",
                functools.partial(
                    DecoderBlock,
                    dim,
                    num_heads,
                    chosen["decoder"][layer],
                    sites.with_length(chosen["cross"][layer], max_len),
                    position=positions.inside(position, **inside, causal=True),
                    layer=layer,
                    **block,
                ),
            )
            for layer in range(decoder_depth)
        )
        for layer, made in enumerate(self.decoder):
            # What a factory does not show is known by now.
            sites.check(f"decoder.{layer}", made.attention.mechanism)
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(dim) if norm_first else nn.Identity() for _ in range(2))

    def forward(
        self,
        target: Tensor,
        source: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        smoothing: float = 0.0,
        state: Any = None,
    ) -> tuple[Tensor | Loss, Any]:
        """Logits of the next word at each place of whole targets, or the loss there; or logits behind a state.

        Args:
            target: int64 [B, T], BOS first, padded on the right; with a state the new tokens, int64 [N, t].
            source: int64 [B, S], padded on the right; left out with a state.
            labels: int64 [B, T], the words that should come, padded on the right: asks for the loss at all that are
                real, for which the logits of all places are never made.
            smoothing: share of the target distribution that is spread over all words, for ``labels``.
            state: from ``start`` or the last call.

        Returns:
            [B, T, V], or a ``Loss`` with ``labels``; and aux, a scalar. With a state [N, t, V] and the next state.
        """
        if state is not None:
            return self._step(target, state)
        assert source is not None
        context, mask, aux = self.encode(source)
        x, more = self.decode(target, context, mask, real(target if labels is None else labels))
        aux = aux + more
        if labels is None:
            return self.words.logits(self.decoder_norm(x)), aux
        keep = real(labels)
        return self.words.loss(self.decoder_norm(x[keep]), labels[keep], smoothing), aux

    def encode(self, source: Tensor) -> tuple[Tensor, Mask, Tensor]:
        """int64 [B, S] -> the encoder's output [B, S, E], which of it is real, and aux."""
        places = torch.arange(source.shape[1], device=source.device)
        # Made for every batch: to see whether it has padding at all an accelerator would have to be waited for.
        mask = Mask(key_keep=real(source))
        x = self._embed(self.words.source(source), self.encoder_position, places)
        aux = x.new_zeros(())
        for block in self.encoder:
            x, more = block(x, mask=mask, positions=places if self.turns else None)
            aux = aux + more
        return self.encoder_norm(x), mask, aux

    def decode(self, target: Tensor, context: Tensor, mask: Mask, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """int64 [B, T] behind what ``encode`` gave -> the last block's output [B, T, E], before its norm, and aux.

        Only aux asks for ``keep``, bool [B, T]: which places are real; all if None.
        """
        places = torch.arange(target.shape[1], device=target.device)
        x = self._embed(self.words.target(target), self.decoder_position, places)
        aux = x.new_zeros(())
        for block in self.decoder:
            # Padding on the right needs no mask of its own: it comes after all that is real, so causality hides it.
            x, more = block(x, context, context_mask=mask, positions=places if self.turns else None, real=keep)
            aux = aux + more
        return x, aux

    def start(self, source: Tensor, max_len: int) -> TransformerState:
        """The state before BOS: sources int64 [B, S], read, and room for ``max_len`` tokens of each target."""
        context, mask, _ = self.encode(source)
        batch = source.shape[0]
        pasts = tuple(block.attention.init_state(batch, max_len) for block in self.decoder)
        memories = tuple(block.cross_attention.memory(context, mask=mask) for block in self.decoder)
        return TransformerState(pasts, Sources.of(memories, batch, source.device))

    def reorder(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """Row ``n`` of the result is row ``rows[n]`` of ``state``; int64 [N']."""
        return TransformerState(tuple(reorder(past, rows) for past in state.pasts), state.sources.reorder(rows))

    def _step(self, target: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        places = state.pasts[0].length[:, None] + torch.arange(target.shape[1], device=target.device)
        x = self._embed(self.words.target(target), self.decoder_position, places)
        pasts = []
        for number, (block, past) in enumerate(zip(self.decoder, state.pasts, strict=True)):
            # As DecoderBlock.step, but for rows that share a source.
            y, past = block.attention.step(block.enter(x, block.attention_norm), past)
            x = block.leave(x, y, block.attention_norm)
            y = state.sources.attend(block.cross_attention, number, block.enter(x, block.cross_norm))
            x, _ = block.feed(block.leave(x, y, block.cross_norm), None)
            pasts.append(past)
        return self.words.logits(self.decoder_norm(x)), TransformerState(tuple(pasts), state.sources)

    def _embed(self, x: Tensor, position: nn.Module | None, places: Tensor) -> Tensor:
        return self.dropout(x if position is None else x + position(places).to(x.dtype))
