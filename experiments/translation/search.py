"""From source rows to translations: how far and how wide to search, and the loop over a network's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.translation.bahdanau import Bahdanau
from experiments.translation.beam import Hypothesis, beam_search
from experiments.translation.tokens import BOS, EOS, PAD, UNK
from experiments.translation.transformer import Transformer

MOST_BEAM = 1000
"""Hypotheses followed at once, at most; what is gained ends far below."""


@dataclass(frozen=True)
class Decoding:
    """How translations are searched for.

    Args:
        beam: hypotheses followed at once, up to 1000; 1 is greedy. Validation in training is greedy.
        length_penalty: p in score = log probability / length ** p; 0 favours short translations, more favours long
            ones.
        max_ratio: a translation has at most max_ratio times the tokens of its source, and max_extra more.
        max_extra: see max_ratio.
        batch_tokens: at most so many source tokens, padding included, are translated at once.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_ratio: float = 2.0
    max_extra: int = 10
    batch_tokens: int = 4096

    def __post_init__(self) -> None:
        for name, least in (("max_ratio", 0), ("max_extra", 1), ("batch_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--model.decoding.{name} is {getattr(self, name)}; it must be at least {least}")
        check_beam("--model.decoding.beam", self.beam)

    def longest(self, source_lengths: Sequence[int]) -> list[int]:
        """The most tokens that a translation may have, by the number of tokens of its source."""
        return [int(self.max_ratio * length) + self.max_extra for length in source_lengths]


def check_beam(name: str, beam: int) -> None:
    """Raises ``ValueError`` unless so many hypotheses can be followed at once."""
    if not 1 <= beam <= MOST_BEAM:
        raise ValueError(f"{name} is {beam}; 1 to {MOST_BEAM} hypotheses can be followed at once")


@dataclass(frozen=True)
class Translation:
    """One translation of one line.

    Attributes:
        text: plain text.
        tokens: numbers in the target vocabulary, without BOS and EOS.
        score: log probability in nats / length ** length_penalty, what the search has ranked by.
        finished: False where it was cut at the greatest length.
    """

    text: str
    tokens: list[int]
    score: float
    finished: bool


@torch.no_grad()
def search(
    network: Transformer | Bahdanau, source: Tensor, decoding: Decoding, beam: int, n_best: int = 1
) -> list[list[Hypothesis]]:
    """The best hypotheses of each source row, by a network in evaluation.

    Args:
        network: left in training or evaluation as it was.
        source: int64 [B, S], tokens and EOS, padded right.
        decoding: lengths and penalty.
        beam: hypotheses followed at once.
        n_best: how many of them to give.
    """
    longest = decoding.longest((source != PAD).sum(1).tolist())

    # No words: a network that was trained little may give them all the same.
    never = torch.tensor([PAD, BOS, UNK], device=source.device)

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = network(tokens[:, None], state=state)
        return logits[:, -1].float().index_fill(1, never, -torch.inf), state

    training = network.training
    network.eval()
    try:
        return beam_search(
            step,
            network.start(source, max(longest)),
            batch_size=len(source),
            bos=BOS,
            eos=EOS,
            max_len=longest,
            beam=beam,
            n_best=n_best,
            length_penalty=decoding.length_penalty,
            reorder=network.reorder,
            device=source.device,
        )
    finally:
        network.train(training)
