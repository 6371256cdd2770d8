"""Tables of words that are shared, and the loss behind them."""

from __future__ import annotations

import io

import pytest
import torch
from networks import KINDS, WORDS, gradients, loss_of, network, sources
from torch import nn
from torch.nn import functional as F

from experiments.translation.embedding import WordEmbedding, Words
from experiments.translation.output_loss import output_loss
from experiments.translation.tokens import BOS, EOS, PAD

APART = Words(24, 19, joint=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_the_logits(kind: str, smoothing: float) -> None:
    """Against torch's own, in pieces of a few rows, with every gradient."""
    model, source = network(kind), sources(6, 4, 5)
    target = torch.tensor([[BOS, 5, 6, EOS, PAD], [BOS, 7, EOS, PAD, PAD], [BOS, 8, 9, 5, EOS]])
    given, labels = target[:, :-1], target[:, 1:]
    logits = model(given, source)[0]
    flat = logits.flatten(0, 1), labels.flatten()
    expected = F.cross_entropy(*flat, label_smoothing=smoothing, ignore_index=PAD, reduction="sum")
    loss, aux = model(given, source, labels=labels, smoothing=smoothing)
    assert int(loss.count) == 9
    assert aux.item() == 0
    torch.testing.assert_close(loss.smoothed, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.plain, F.cross_entropy(*flat, ignore_index=PAD, reduction="sum"))
    for found, right in zip(gradients(model, loss.smoothed), gradients(model, expected), strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_pieces_is_that_in_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge logits too, in which exp alone would overflow."""
    x, weight = (torch.randn(size, 8).mul(30).to(dtype).requires_grad_() for size in (11, 13))
    targets = torch.randint(0, 13, (11,))
    expected = F.cross_entropy((x.float() @ weight.float().T), targets, label_smoothing=0.2, reduction="sum")
    monkeypatch.setattr("experiments.translation.output_loss.PIECE_ELEMENTS", 4 * 13)
    loss = output_loss(x, weight, targets, smoothing=0.2)
    loose = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-5}
    torch.testing.assert_close(loss.smoothed, expected, **loose)
    found, right = (torch.autograd.grad(each * 3, (x, weight)) for each in (loss.smoothed, expected))
    for one, other in zip(found, right, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, atol=20 * loose["atol"], rtol=loose["rtol"])
    with torch.no_grad():
        torch.testing.assert_close(output_loss(x, weight, targets, smoothing=0.2).smoothed, loss.smoothed)


def storages(model: nn.Module) -> set[int]:
    """Addresses of all tables of words."""
    return {p.data_ptr() for n, p in model.named_parameters(remove_duplicate=False) if "table" in n}


@pytest.mark.parametrize("kind", KINDS)
def test_t10_tied_words_stay_one_storage_through_save_and_load(kind: str) -> None:
    """One step, save, load, one step: as two steps at once; as many parameters as before."""
    source, target = sources(5, 3), torch.tensor([[BOS, 5, EOS, PAD], [BOS, 6, 7, EOS]])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss_of(model, source, target[:, :-1], target[:, 1:]).backward()
        optimizer.step()

    model = network(kind, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded, other = torch.load(file, weights_only=True), network(kind, dropout=0.0)
    other.load_state_dict(loaded["model"])
    second = torch.optim.AdamW(other.parameters(), 1e-2)
    second.load_state_dict(loaded["optimizer"])
    step(model, optimizer)
    step(other, second)
    assert len(storages(model)) == len(storages(other)) == 1
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in model.parameters())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("words", "tied", "rows"),
    [(WORDS, True, [24]), (WORDS, False, [24] * 3), (APART, True, [19, 24]), (APART, False, [19, 19, 24])],
)
def test_which_words_share_a_table(words: Words, tied: bool, rows: list[int]) -> None:
    embedding = WordEmbedding(words, 8, tied=tied)
    assert sorted(len(p) for p in embedding.parameters()) == rows
    tokens = torch.tensor([[3, 9]])
    assert torch.equal(embedding.source(tokens), embedding.target(tokens)) == (words.joint and tied)
    states = torch.randn(5, 8)
    assert torch.equal(embedding.logits(states), states @ embedding.target_table.weight.T) == tied


def test_words_come_in_at_size_1_and_give_logits_of_size_1() -> None:
    embedding = WordEmbedding(Words(2000, 2000, joint=True), 64)
    x = embedding.target(torch.arange(2000)).detach()
    assert float(x.std()) == pytest.approx(1, abs=0.02)
    assert float(embedding.logits(torch.randn(50, 64)).detach().std()) == pytest.approx(1, abs=0.05)


def test_a_joint_vocabulary_has_one_size() -> None:
    with pytest.raises(ValueError, match="24 source and 19 target words"):
        WordEmbedding(Words(24, 19, joint=True), 8)
