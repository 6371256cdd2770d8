"""Bahdanau's network against its equations, written down once more with torch's own parts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from networks import bahdanau, sources
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo import CATALOGUE, Linformer, Local, Softmax
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.tokens import BOS, EOS, PAD

CROSSING = [name for name, cls in CATALOGUE.items() if cls.traits.cross]


def by_hand(model: Bahdanau, source: Tensor, target: Tensor) -> Tensor:
    """Logits [T, V] of one pair without padding."""
    size, table = model.attention.num_heads * model.attention.head_dim, model.words.target_table.weight
    reader = nn.GRU(table.shape[1], size, bidirectional=True, batch_first=True)
    given = model.reader.state_dict()
    reader.load_state_dict(
        {**given, **{f"{name}_reverse": value for name, value in model.backward_reader.state_dict().items()}}
    )
    scale = table.shape[1] ** 0.5
    annotations, _ = reader(table[source][None] * scale)
    hidden = torch.tanh(model.initial(annotations[:, 0, size:]))
    cell = nn.GRUCell(table.shape[1] + size, size)
    cell.load_state_dict(
        {
            "weight_ih": torch.cat([model.word_gates.weight, model.context_gates.weight], dim=1),
            "weight_hh": model.state_gates.weight,
            "bias_ih": model.word_gates.bias,
            "bias_hh": model.state_gates.bias,
        }
    )
    logits = []
    for word in target:
        context = attended(model, hidden, annotations[0])
        given = table[word][None] * scale
        hidden = cell(torch.cat([given, context], dim=1), hidden)
        pieces = model.readout(torch.cat([hidden, given, context], dim=1)).view(2, -1)
        logits.append(pieces.amax(0) @ table.T)
    return torch.stack(logits)


def attended(model: Bahdanau, hidden: Tensor, annotations: Tensor) -> Tensor:
    """Additive attention of one head, from s [1, H] over h [S, 2 H]."""
    shell = model.attention
    additive = shell.mechanism
    query = shell.q_proj(hidden) @ additive.query_weight[0]
    scores = torch.tanh(query + shell.k_proj(annotations) @ additive.key_weight[0]) @ additive.score_weight[0]
    return shell.out_proj(scores.softmax(0)[None] @ shell.v_proj(annotations))


def test_the_network_is_that_of_the_equations() -> None:
    """Rows of other lengths in one batch, each as by hand and without padding."""
    model, source = bahdanau(), sources(6, 2, 4)
    target = torch.randint(4, 24, (3, 5))
    with torch.no_grad():
        logits, aux = model(target, source)
        for row, length in enumerate((6, 2, 4)):
            expected = by_hand(model, source[row, :length], target[row])
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
    assert aux.item() == 0


@pytest.mark.parametrize("size", [5, 9])
def test_t14_a_source_without_a_word_is_read(size: int) -> None:
    """Lengths 0 and 5: no exception, row 2 as alone, gradients finite."""
    model, source, target = bahdanau(), sources(0, 5, size=size), torch.randint(4, 24, (2, 4))
    logits, _ = model(target, source)
    torch.testing.assert_close(logits[1:], model(target[1:], source[1:, :5])[0], atol=1e-5, rtol=0)
    assert logits.isfinite().all()
    for gradient in torch.autograd.grad(logits.sum(), list(model.parameters()), allow_unused=True):
        assert gradient is None or gradient.isfinite().all()
    # The first state knows of no word, and so does the sum over none.
    with torch.no_grad():
        annotations, mask, hidden = model.encode(source)
    assert not annotations[0].any()
    assert mask.key_keep.sum(1).tolist() == [0, 5]
    assert torch.equal(hidden[0], torch.tanh(model.initial.bias))


def test_the_backward_reader_sees_no_padding() -> None:
    """Whatever the padding's row of the table holds, huge numbers too."""
    model, source = bahdanau(), sources(6, 3)
    with torch.no_grad():
        before = model.encode(source)
        model.words.target_table.weight[PAD] = 1e4
        after = model.encode(source)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("name", CROSSING)
def test_every_mechanism_that_can_cross_serves(name: str) -> None:
    model = bahdanau(attention=CATALOGUE[name], num_heads=2).train()
    loss, _ = model(torch.randint(4, 24, (3, 5)), sources(7, 4, 0), labels=torch.randint(4, 24, (3, 5)))
    for gradient in torch.autograd.grad(loss.smoothed, list(model.parameters())):
        assert gradient.isfinite().all()


def test_luong_is_a_dot_product_without_a_scale() -> None:
    model = bahdanau(attention=functools.partial(Softmax, scale=1.0))
    source, target = sources(5), torch.tensor([[BOS]])
    with torch.no_grad():
        annotations, _, hidden = model.encode(source)
        shell = model.attention
        weights = (shell.k_proj(annotations[0]) @ shell.q_proj(hidden[0])).softmax(0)
        context = shell.out_proj(weights @ shell.v_proj(annotations[0]))[None]
        found = model.attention.step(hidden[:, None], model.start(source, 3).sources.memories[0], on_memory=True)[0]
        torch.testing.assert_close(found[:, 0], context, atol=1e-5, rtol=0)
        assert model(target, source)[0].shape == (1, 1, 24)


def test_a_mechanism_that_cannot_cross_is_refused_before_training() -> None:
    with pytest.raises(ValueError) as caught:
        bahdanau(attention=functools.partial(Local, window=5))
    text = str(caught.value)
    assert "Local cannot serve at cross.0: a window needs keys that stand at the places of the queries" in text
    assert all(name in text for name in CROSSING)
    assert "--model.attention=" in text
    assert len(text.splitlines()) == 3


def test_a_mechanism_that_must_know_the_length_is_told() -> None:
    assert bahdanau(attention=Linformer).attention.mechanism.max_len == 64


def own_words(model: Bahdanau, source: Tensor, count: int) -> Tensor:
    """Logits [B, count, V] where each previous word is the one found most probable."""
    words, logits, state = torch.full((len(source), 1), BOS), [], model.start(source, count)
    for _ in range(count):
        step, state = model(words[:, -1:], state=state)
        logits.append(step)
        words = torch.cat([words, step.argmax(-1)], dim=1)
    return torch.cat(logits, dim=1)


def test_without_teacher_forcing_the_network_goes_on_from_its_own_words() -> None:
    model, source, target = bahdanau(dropout=0.0), sources(6, 3), torch.randint(4, 24, (2, 7))
    target[:, 0] = BOS
    expected = own_words(model, source, 7)
    found, _ = model.train()(target, source, teacher_forcing=0.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(model(target, source)[0], expected, atol=1e-2)
    with torch.no_grad():
        assert torch.equal(model.eval()(target, source, teacher_forcing=0.0)[0], model(target, source)[0])


def test_teacher_forcing_is_drawn_for_each_row_and_step() -> None:
    """With 0.5 the first places, which follow BOS, are those of the target; later ones differ from row to row."""
    model = bahdanau(dropout=0.0).train()
    source, target = sources(6).expand(40, -1), torch.randint(4, 24, (1, 9))
    own = model(target, source[:1])[0][0, 0].argmax()
    target[0, 1] = own + 1 if own < 23 else own - 1
    target = target.expand(40, -1)
    forced = model(target[:1], source[:1])[0][0]
    found = model(target, source, teacher_forcing=0.5)[0]
    torch.testing.assert_close(found[:, 0], forced[:1].expand(40, -1), atol=1e-5, rtol=0)
    as_forced = (found[:, 1] - forced[1]).abs().amax(1) < 1e-5
    assert 8 <= int(as_forced.sum()) <= 32
    assert len({tuple(row.flatten().tolist()) for row in found[:, 1:4].round(decimals=3)}) >= 6


def test_a_gradient_reaches_every_parameter_where_words_are_its_own() -> None:
    model = bahdanau().train()
    labels = torch.randint(4, 24, (3, 6))
    loss, _ = model(torch.randint(4, 24, (3, 6)), sources(5, 4, 6), labels=labels, teacher_forcing=0.3)
    assert all(gradient.any() for gradient in torch.autograd.grad(loss.smoothed, list(model.parameters())))


def test_it_learns_to_say_a_source_backwards() -> None:
    """So gates, attention and the way of gradients through time are those of a network that can learn."""
    model = bahdanau(dim=24, hidden_dim=32, dropout=0.0).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        source = torch.randint(4, 14, (32, 4))
        source[:, 3] = EOS
        target = torch.cat([torch.full((32, 1), BOS), source[:, :3].flip(1), source[:, 3:]], dim=1)
        loss, _ = model(target[:, :-1], source, labels=target[:, 1:])
        optimizer.zero_grad()
        (loss.smoothed / loss.count).backward()
        optimizer.step()
    with torch.no_grad():
        right = model.eval()(target[:, :-1], source)[0].argmax(-1) == target[:, 1:]
    assert right.float().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, r"--model\.dim is 0; it must be at least 1"),
        ({"hidden_dim": 0}, r"--model\.hidden_dim is 0"),
        ({"num_heads": 0}, r"--model\.num_heads is 0"),
        ({"num_heads": 3}, r"--model\.hidden_dim=16 is no multiple of --model\.num_heads=3"),
        ({"dropout": -0.1}, r"--model\.dropout is -0\.1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bahdanau(**options)


def test_the_loss_of_the_whole_is_that_of_its_steps() -> None:
    """Cross entropy of logits made token by token."""
    model, source = bahdanau(), sources(6, 4)
    target = torch.tensor([[BOS, 5, 6, EOS], [BOS, 7, 8, EOS]])
    loss, _ = model(target[:, :-1], source, labels=target[:, 1:], smoothing=0.1)
    state, logits = model.start(source, 3), []
    for word in target[:, :-1].split(1, dim=1):
        step, state = model(word, state=state)
        logits.append(step)
    flat = torch.cat(logits, dim=1).flatten(0, 1)
    expected = F.cross_entropy(flat, target[:, 1:].flatten(), label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss.smoothed, expected, atol=1e-4, rtol=0)
