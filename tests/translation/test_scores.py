"""Scores of translations: right on plain text, whole over batches, and signed."""

from __future__ import annotations

import math

import pytest
import torch
from torchmetrics import MetricCollection

from experiments.translation.scores import TokenLoss, TranslationScores, bleu_lc_tok

REFERENCES = ["Ein Hund läuft durch den Wald.", "Zwei Männer, die lachen.", "Das Kind schläft."]


def score(hypotheses: list[str], references: list[str] = REFERENCES) -> dict[str, float]:
    scores = TranslationScores(language="de")
    scores.update(hypotheses, references)
    return {name: float(value) for name, value in scores.compute().items()}


def test_t12_only_equal_lines_give_100() -> None:
    """T12: references nested the wrong way would give 100 here too."""
    all_equal = score(REFERENCES)
    assert all_equal == pytest.approx({"bleu": 100, "bleu_lc_tok": 100, "chrf": 100, "exact_match": 1})
    one_equal = score([REFERENCES[0], "Zwei Frauen, die lachen.", "Das Kind schläft nicht."])
    assert all(value < 99 for value in one_equal.values())
    assert one_equal["exact_match"] == pytest.approx(1 / 3)


def test_t12_text_that_is_still_in_tokens_scores_otherwise() -> None:
    """T12: on one side alone punctuation was split off."""
    split = [line.replace(".", " .").replace(",", " ,") for line in REFERENCES]
    scores = score(split)
    # 13a splits punctuation off by itself, so only what compares characters or whole lines can see it.
    assert scores["exact_match"] == 0
    plain, tokens = (TranslationScores(tokenizer="none") for _ in range(2))
    plain.update(REFERENCES, REFERENCES)
    tokens.update(split, REFERENCES)
    assert float(plain.compute()["bleu"]) == pytest.approx(100)
    assert float(tokens.compute()["bleu"]) < 60


def test_t12_numbers_of_lines_are_compared_and_the_score_is_signed() -> None:
    scores = TranslationScores()
    with pytest.raises(ValueError, match="2 translations and 3 references"):
        scores.update(REFERENCES[:2], REFERENCES)
    scores.update(REFERENCES, REFERENCES)
    scores.compute()
    assert "tok:13a" in scores.signatures()["bleu"]
    assert "case:mixed" in scores.signatures()["bleu"]


def test_bleu_by_hand() -> None:
    """Precisions 5/6, 3/5, 1/4 and, smoothed, 1/(2 * 3); 6 words against 6."""
    hypothesis, reference = "the cat sat on a mat", "the cat sat on the mat"
    precisions = [5 / 6, 3 / 5, 2 / 4, 1 / 3]
    by_hand = 100 * math.exp(sum(map(math.log, precisions)) / 4)
    assert score([hypothesis], [reference])["bleu"] == pytest.approx(by_hand)


def test_the_score_does_not_depend_on_the_batches() -> None:
    hypotheses = ["Ein Hund läuft.", "Zwei Männer lachen.", "Das Kind schläft."]
    whole, parts = TranslationScores(), TranslationScores()
    whole.update(hypotheses, REFERENCES)
    for hypothesis, reference in zip(hypotheses, REFERENCES, strict=True):
        parts.update([hypothesis], [reference])
    assert {k: float(v) for k, v in whole.compute().items()} == {k: float(v) for k, v in parts.compute().items()}


def test_lower_cased_tokens_of_the_literature() -> None:
    """Case does not count, nor how a quotation mark is written."""
    assert bleu_lc_tok(["EIN HUND läuft „schnell“ ."], ['Ein Hund läuft "schnell".'], "de") == pytest.approx(100)
    assert bleu_lc_tok(["Ein Hund läuft langsam weg."], ["Ein Hund läuft schnell weg."], "de") < 100


def test_t02_perplexity_is_that_of_all_tokens() -> None:
    """T02: exp of the sum over real tokens / number of real tokens of the epoch."""
    metrics = MetricCollection({"loss": TokenLoss()}, compute_groups=False)
    metrics["loss"].update(torch.tensor(2.0), torch.tensor(1))
    metrics["loss"].update(torch.tensor(3.0), torch.tensor(9))
    found = metrics.compute()
    assert float(found["nll"]) == pytest.approx(0.5)
    assert float(found["perplexity"]) == pytest.approx(math.exp(0.5))


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="bleu_tokenizer is '14a'"):
        TranslationScores(tokenizer="14a")  # type: ignore[arg-type]
