"""What the benchmark of the translator compares: the same work on both sides."""

from __future__ import annotations

import pytest
import torch

from benchmarks import translation
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.tokens import BOS, EOS, PAD
from experiments.translation.transformer import Transformer


def test_batches_are_those_of_training() -> None:
    made = translation.batches(5)
    assert len(made) == 5
    for source, target in made:
        assert len(source) * max(source.shape[1], target.shape[1]) <= 4096
        assert (target[:, 0] == BOS).all()
        assert ((source == EOS).sum(1) == 1).all()
        assert ((target == EOS).sum(1) == 1).all()
        assert (source != PAD).sum() > 0.5 * source.numel()


def test_torchs_network_has_the_same_size() -> None:
    """But for the biases of the 12 key projections, which do nothing."""
    sizes = {"dim": 128, "hidden_dim": 256, "encoder_depth": 4, "decoder_depth": 4}
    ours = sum(p.numel() for p in Transformer(translation.WORDS, **sizes).parameters())
    assert sum(p.numel() for p in translation.PlainTransformer().parameters()) == ours + 12 * 128


def test_one_step_of_each_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "TOKENS", 64)
    calls, tokens = translation.training_calls(2)
    assert 30 < tokens <= 128
    for call in calls.values():
        call()


@pytest.mark.parametrize("kind", [Transformer, Bahdanau])
def test_both_ways_to_search_find_the_same(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "SENTENCES", 2)
    monkeypatch.setattr(translation, "LENGTH", 6)
    torch.manual_seed(0)
    ours, theirs = (call() for call in translation.decoding_calls(kind(translation.WORDS, dim=32)).values())
    assert translation.differs(ours, theirs) == 0
    assert [len(h.tokens) for row in ours for h in row] == [6] * 10
    ours[0][0] = ours[0][0]._replace(tokens=[5] * 6)
    assert translation.differs(ours, theirs) == 1
