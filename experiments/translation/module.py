"""The two experiments of this task: a Transformer and Bahdanau's recurrent network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnzoo import Additive, DiversityKind, Mechanism, Softmax
from attnzoo.positions import PositionName
from experiments.training.module import Stage
from experiments.training.optim import Optim
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.scores import BleuTokenizer
from experiments.translation.search import Decoding
from experiments.translation.transformer import Transformer
from experiments.translation.translator import Primary, Translator


class TransformerTranslator(Translator):
    """A Transformer that translates.

    Args:
        attention: mechanism of self-attention in encoder and decoder: a class name, with its options behind a dot
            (--model.attention=Local --model.attention.window=9). In the decoder it must be causal.
        encoder_attention: another mechanism for the encoder.
        decoder_attention: another mechanism for the decoder's self-attention.
        cross_attention: mechanism between decoder and encoder.
        attention_at: other mechanisms for single layers: encoder.0, decoder.1, cross.0, ...
        position: none; added to the embeddings: sinusoidal, learned; inside self-attention: rope, rope_halves,
            alibi, t5, offset, shaw.
        dim: width of the model.
        encoder_depth: blocks of the encoder.
        decoder_depth: blocks of the decoder.
        num_heads: heads of each attention; must divide dim.
        num_kv_heads: key/value heads, a divisor of num_heads (grouped queries); null for as many.
        hidden_dim: width of the feed-forward; null for 4 dim.
        dropout: in the branches of the blocks and after the embedding. Dropout of attention weights is the
            mechanism's own option.
        norm_first: normalise what goes into a branch (pre-norm) rather than the sum (post-norm, the paper).
        tied: one matrix for embedding and output (and for both languages, where they share a vocabulary).
        head_diversity: weight of the term that keeps heads different, such as 0.03; 0 for none. It rises over the first
            tenth of the run and is off in its last fifth.
        head_diversity_kind: how alike is measured: projected, cka, overlap, li_subspace, li_position or li_output.
        label_smoothing: share of the target spread evenly over the vocabulary, from 0 to 1.
        decoding: how translations are searched for.
        primary: the score that chooses the best checkpoint.
        bleu_tokenizer: how BLEU cuts text into words; none where references are in tokens already.
        optim: optimiser and schedule.
    """

    def __init__(
        self,
        attention: Callable[[int, int], Mechanism] = Softmax,
        encoder_attention: Callable[[int, int], Mechanism] | None = None,
        decoder_attention: Callable[[int, int], Mechanism] | None = None,
        cross_attention: Callable[[int, int], Mechanism] = Softmax,
        attention_at: dict[str, Callable[[int, int], Mechanism]] | None = None,
        position: PositionName = "sinusoidal",
        dim: int = 128,
        encoder_depth: int = 4,
        decoder_depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        hidden_dim: int | None = None,
        dropout: float = 0.1,
        norm_first: bool = True,
        tied: bool = True,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        label_smoothing: float = 0.1,
        decoding: Decoding = Decoding(),  # noqa: B008 - frozen
        primary: Primary = "bleu",
        bleu_tokenizer: BleuTokenizer = "13a",
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(label_smoothing, decoding, primary, bleu_tokenizer, optim)

    def build_network(self, facts: dict[str, Any]) -> Transformer:
        """The Transformer for these vocabularies."""
        # BOS stands before the tokens of a target, EOS behind those of a source; translations may be longer still.
        longest = max(facts["max_length"] + 1, *self.decoding.longest([facts["max_length"] + 1])) + 1
        return Transformer(**self.options(Transformer, facts), max_len=longest)


class BahdanauTranslator(Translator):
    """Bahdanau's recurrent network that translates.

    Args:
        attention: mechanism between decoder and encoder: Additive is Bahdanau's; Softmax with scale 1.0 is Luong's.
        num_heads: heads of the attention.
        dim: width of the embeddings.
        hidden_dim: width of the recurrent states.
        dropout: of embeddings, encoder states and readout.
        tied: one matrix for embedding and output (and for both languages, where they share a vocabulary).
        teacher_forcing: share of the steps that are given the right previous word rather than the predicted one, as
            it stands at the end of teacher_forcing_steps.
        teacher_forcing_steps: optimiser steps over which that share falls from 1.
        head_diversity: weight of the term that keeps heads different, such as 0.03; 0 for none. It rises over the first
            tenth of the run and is off in its last fifth.
        head_diversity_kind: how alike is measured: projected, cka, overlap, li_subspace, li_position or li_output.
        label_smoothing: share of the target spread evenly over the vocabulary, from 0 to 1.
        decoding: how translations are searched for.
        primary: the score that chooses the best checkpoint.
        bleu_tokenizer: how BLEU cuts text into words; none where references are in tokens already.
        optim: optimiser and schedule.
    """

    def __init__(
        self,
        attention: Callable[[int, int], Mechanism] = Additive,
        num_heads: int = 1,
        dim: int = 128,
        hidden_dim: int = 256,
        dropout: float = 0.1,
        tied: bool = True,
        teacher_forcing: float = 1.0,
        teacher_forcing_steps: int = 0,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        label_smoothing: float = 0.1,
        decoding: Decoding = Decoding(),  # noqa: B008 - frozen
        primary: Primary = "bleu",
        bleu_tokenizer: BleuTokenizer = "13a",
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(label_smoothing, decoding, primary, bleu_tokenizer, optim)
        if not 0 <= teacher_forcing <= 1:
            raise ValueError(f"--model.teacher_forcing is {teacher_forcing}; it must lie in [0, 1]")
        if teacher_forcing_steps < 0:
            raise ValueError(f"--model.teacher_forcing_steps is {teacher_forcing_steps}; it must be at least 0")
        self.teacher_forcing, self.teacher_forcing_steps = teacher_forcing, teacher_forcing_steps

    def build_network(self, facts: dict[str, Any]) -> Bahdanau:
        """Bahdanau's network for these vocabularies."""
        return Bahdanau(**self.options(Bahdanau, facts), max_len=facts["max_length"] + 1)

    def forcing(self, stage: Stage) -> dict[str, float]:
        """Scheduled sampling (Bengio et al. 2015, arXiv:1506.03099), linear; evaluation is given every right word."""
        if stage != "train":
            return {}
        done = min(1.0, self.global_step / self.teacher_forcing_steps) if self.teacher_forcing_steps else 1.0
        return {"teacher_forcing": 1 - done * (1 - self.teacher_forcing)}
