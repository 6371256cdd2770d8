"""Scores of translations against references, all on plain text, by sacreBLEU.

Papineni et al. 2002, "BLEU: a Method for Automatic Evaluation of Machine Translation"; Post 2018, "A Call for Clarity
in Reporting BLEU Scores", arXiv:1804.08771; Popovic 2015, "chrF: character n-gram F-score for automatic MT evaluation".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from torch import Tensor
from torchmetrics import Metric

from experiments.training.losses import LossMean

BleuTokenizer = Literal["13a", "none", "intl", "zh", "char"]
"""How sacreBLEU cuts text into words: 13a is the usual one; none where references are in tokens already."""


class TranslationScores(Metric):
    """Corpus scores of plain lines of text, exact for any batches and over processes.

    bleu          BLEU, cased, words cut by ``tokenizer``
    bleu_lc_tok   BLEU of lower-cased text cut by the Moses tokenizer, as in the Multi30k literature
    chrf          chrF2
    exact_match   share of lines that equal their reference, from 0 to 1

    The first three go from 0 to 100. The lines themselves are kept, as bytes, and go to all processes before they are
    scored, so that a score is that of the whole corpus and never a mean of scores.

    Args:
        tokenizer: of ``bleu``.
        language: of the references, for the Moses tokenizer; one that it does not know is cut as English.

    Example:
        >>> scores = TranslationScores()
        >>> scores.update(["ein Hund läuft ."], ["ein Hund läuft ."])
        >>> round(float(scores.compute()["exact_match"]))
        1
    """

    full_state_update = False

    def __init__(self, tokenizer: BleuTokenizer = "13a", language: str = "en") -> None:
        super().__init__()
        if tokenizer not in get_args(BleuTokenizer):
            raise ValueError(f"--model.bleu_tokenizer is {tokenizer!r}; it must be one of {get_args(BleuTokenizer)}")
        self.bleu = BLEU(tokenize=tokenizer, force=True)
        self.chrf = CHRF()
        self.language = language
        for name in ("hypotheses", "references"):
            self.add_state(name, [], dist_reduce_fx="cat")
            self.add_state(f"{name}_lengths", [], dist_reduce_fx="cat")

    def update(self, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        """Count lines in; each reference belongs to the hypothesis in its place.

        Raises:
            ValueError: for different numbers of lines.
        """
        if len(hypotheses) != len(references):
            raise ValueError(f"{len(hypotheses)} translations and {len(references)} references: they must be as many")
        for name, lines in (("hypotheses", hypotheses), ("references", references)):
            coded = [line.encode() for line in lines]
            getattr(self, name).append(torch.tensor(list(b"".join(coded)), dtype=torch.uint8, device=self.device))
            lengths = torch.tensor([len(line) for line in coded], dtype=torch.long, device=self.device)
            getattr(self, f"{name}_lengths").append(lengths)

    def compute(self) -> dict[str, Tensor]:
        """The scores by name."""
        hypotheses, references = self._lines("hypotheses"), self._lines("references")
        found = {
            "bleu": self.bleu.corpus_score(hypotheses, [references]).score,
            "bleu_lc_tok": bleu_lc_tok(hypotheses, references, self.language),
            "chrf": self.chrf.corpus_score(hypotheses, [references]).score,
            "exact_match": sum(map(str.__eq__, hypotheses, references)) / len(references),
        }
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}

    def signatures(self) -> dict[str, str]:
        """What a score was computed by, to be quoted beside it; once something was scored."""
        return {
            "bleu": str(self.bleu.get_signature()),
            "bleu_lc_tok": f"Moses punctuation and tokens ({self.language}), lower case, BLEU4 without smoothing",
            "chrf": str(self.chrf.get_signature()),
        }

    def _lines(self, name: str) -> list[str]:
        # After a synchronisation a state is one tensor.
        text, lengths = (
            torch.cat(state) if isinstance(state, list) else state
            for state in (getattr(self, name), getattr(self, f"{name}_lengths"))
        )
        coded = bytes(text.tolist())
        ends = list(itertools.accumulate(lengths.tolist(), initial=0))
        return [coded[start:end].decode() for start, end in itertools.pairwise(ends)]


def bleu_lc_tok(hypotheses: Sequence[str], references: Sequence[str], language: str = "en") -> float:
    """BLEU from 0 to 100 as multi-bleu gives it on text that was normalised, cut by Moses and lower-cased.

    Args:
        hypotheses: plain lines.
        references: plain lines, as many.
        language: whose abbreviations and quotes the Moses tools shall know.
    """
    normalise, cut = MosesPunctNormalizer(language).normalize, MosesTokenizer(language)

    def words(lines: Sequence[str]) -> list[str]:
        return [cut.tokenize(normalise(line).lower(), return_str=True, escape=False) for line in lines]

    scorer = BLEU(tokenize="none", smooth_method="none", force=True)
    return float(scorer.corpus_score(words(hypotheses), [words(references)]).score)


class TokenLoss(LossMean):
    """Mean of -log p(token) in nats over all tokens, end symbols included, and the exponential of that mean."""

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        """nll and perplexity."""
        mean = super().compute()
        return {"nll": mean, "perplexity": mean.exp()}
