"""Decoding by steps: with and without the cache, in a batch and alone, in beams, behind prefixes."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from networks import KINDS, bahdanau, network, sources, steps, trained, transformer, translate, translate_anew
from torch import Tensor

from attnzoo import CATALOGUE
from attnzoo.positions import PositionName
from experiments.translation.beam import Hypothesis
from experiments.translation.sites import NEEDS
from experiments.translation.tokens import BOS, EOS

STREAMING = [n for n, c in CATALOGUE.items() if all(getattr(c.traits, trait) for trait in NEEDS["decoder"])]
CROSSING = [n for n, c in CATALOGUE.items() if all(getattr(c.traits, trait) for trait in NEEDS["cross"])]


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert [h.score for h in row] == pytest.approx([h.score for h in other], abs=1e-4)


def greedy_both_ways(model: torch.nn.Module, source: Tensor) -> None:
    """20 tokens each by argmax, from the cache and from a full forward over the prefix; logits within 1e-4."""
    prefix = torch.full((len(source), 1), BOS)
    with torch.no_grad():
        state = model.start(source, 20)
        for _ in range(20):
            cached, state = model(prefix[:, -1:], state=state)
            anew = model(prefix, source)[0][:, -1:]
            torch.testing.assert_close(cached, anew, atol=1e-4, rtol=0)
            assert torch.equal(cached.argmax(-1), anew.argmax(-1))
            prefix = torch.cat([prefix, cached.argmax(-1)], dim=1)


@pytest.mark.parametrize("position", get_args(PositionName))
@pytest.mark.parametrize("norm_first", [True, False])
def test_k01_the_cache_changes_nothing_with_any_position(position: PositionName, norm_first: bool) -> None:
    greedy_both_ways(transformer(position=position, norm_first=norm_first), sources(7, 3, 5))


@pytest.mark.parametrize("name", STREAMING)
def test_k01_the_cache_changes_nothing_in_any_decoder(name: str) -> None:
    greedy_both_ways(transformer(decoder_attention=CATALOGUE[name]), sources(7, 3, 5))


@pytest.mark.parametrize("name", CROSSING)
def test_k01_the_cache_changes_nothing_between_decoder_and_encoder(name: str) -> None:
    greedy_both_ways(transformer(cross_attention=CATALOGUE[name]), sources(7, 3, 5))
    greedy_both_ways(bahdanau(attention=CATALOGUE[name], num_heads=2), sources(7, 3, 5))


def test_k01_the_cache_changes_nothing_with_grouped_heads() -> None:
    greedy_both_ways(transformer(num_heads=4, num_kv_heads=2), sources(7, 3, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_may_come_in_any_pieces(kind: str) -> None:
    model, source, target = network(kind), sources(6, 2), torch.randint(4, 24, (2, 9))
    whole = model(target, source)[0]
    for chunks in ((9,), (1,) * 9, (4, 1, 3, 1)):
        torch.testing.assert_close(steps(model, target, source, *chunks), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope"])
def test_k02_places_go_on_behind_a_prompt(position: PositionName) -> None:
    """A prompt of 6, then 4 steps: they stand at 6, 7, 8 and 9."""
    model = transformer(position=position)
    places: list[Tensor] = []
    acts = model.decoder[0].attention.position if position == "rope" else model.decoder_position
    acts.register_forward_pre_hook(lambda _, given: places.append(given[-2] if position == "rope" else given[0]))
    with torch.no_grad():
        state = model.start(sources(4, 3), 10)
        for count in (6, 1, 1, 1, 1):
            _, state = model(torch.randint(4, 24, (2, count)), state=state)
    seen = [place.tolist() for place in (places[::2] if position == "rope" else places)]
    assert seen == [[list(range(6))] * 2, *[[[place]] * 2 for place in (6, 7, 8, 9)]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beam", [1, 3])
def test_k03_three_sentences_in_one_batch_and_one_by_one(kind: str, beam: int) -> None:
    model, source = trained(kind), sources(8, 3, 5)
    together = translate(model, source, 12, beam=beam, n_best=beam)
    rows = [row[None, :length] for row, length in zip(source, (8, 3, 5), strict=True)]
    alone = [translate(model, row, 12, beam=beam, n_best=beam)[0] for row in rows]
    same(together, alone)
    assert len({tuple(row[0].tokens) for row in together}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_k04_the_cache_is_ordered_as_the_beams_are(kind: str) -> None:
    """Beam 4, 15 steps, with the cache and without."""
    model, source = trained(kind), sources(8, 3, 5, 6)
    found = translate(model, source, 15, beam=4, n_best=4)
    same(found, translate_anew(model, source, 15, beam=4, n_best=4))
    lengths = {len(h.tokens) for row in found for h in row}
    assert len(lengths) > 2, "hypotheses that end at several lengths, so that rows leave the batch"


@pytest.mark.parametrize("name", STREAMING)
def test_k04_every_kind_of_state_can_be_reordered(name: str) -> None:
    model, source = transformer(attention_at={"decoder.1": CATALOGUE[name]}), sources(8, 3, 5)
    same(translate(model, source, 8, beam=3), translate_anew(model, source, 8, beam=3))


@pytest.mark.parametrize("kind", KINDS)
def test_k09_prefixes_of_length_3_and_12_in_one_batch_and_one_by_one(kind: str) -> None:
    """Greedy, 15 tokens behind them."""
    model, source = network(kind), sources(6, 6)
    prefixes = [torch.randint(4, 24, (length,)).tolist() for length in (3, 12)]
    options = {"beam": 1, "max_len": 27}
    together = translate(model, source, prefixes=prefixes, **options)
    for number, prefix in enumerate(prefixes):
        row = source[number : number + 1]
        same([together[number]], translate(model, row, prefixes=[prefix], **options))
        tokens = [BOS, *prefix]
        with torch.no_grad():
            while len(tokens) < 28 and tokens[-1] != EOS:
                tokens.append(int(model(torch.tensor([tokens]), row)[0][0, -1].argmax()))
        assert together[number][0].tokens == [token for token in tokens[1:] if token != EOS]


@pytest.mark.parametrize("kind", KINDS)
def test_k10_the_padding_of_a_source_changes_nothing(kind: str) -> None:
    """Padded to 10, 20 and 50: what the encoder says of real tokens, the logits, and the translation."""
    model, source, target = trained(kind), sources(7), torch.randint(4, 24, (1, 6))
    with torch.no_grad():
        encoded, logits = model.encode(source)[0], model(target, source)[0]
        expected = translate(model, source, 10, beam=3)
        for size in (10, 20, 50):
            padded = torch.nn.functional.pad(source, (0, size - 7))
            torch.testing.assert_close(model.encode(padded)[0][:, :7], encoded, atol=1e-4, rtol=0)
            torch.testing.assert_close(model(target, padded)[0], logits, atol=1e-4, rtol=0)
            same(translate(model, padded, 10, beam=3), expected)


@pytest.mark.parametrize("name", CATALOGUE)
def test_k10_the_padding_of_a_source_changes_nothing_in_any_encoder(name: str) -> None:
    model, source, target = transformer(encoder_attention=CATALOGUE[name]), sources(7), torch.randint(4, 24, (1, 6))
    with torch.no_grad():
        logits = model(target, source)[0]
        for size in (10, 50):
            padded = torch.nn.functional.pad(source, (0, size - 7))
            torch.testing.assert_close(model(target, padded)[0], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_share_the_source_of_their_sentence(kind: str) -> None:
    """However rows are permuted, doubled or dropped, each reads its own source, of which there is one copy."""
    model, source = network(kind), sources(6, 3, 5, 4)
    with torch.no_grad():
        state = model.start(source, 9)
        origin = torch.arange(4)
        for rows in ([0, 0, 0, 1, 2, 2, 3], [0, 4, 3, 1, 5, 2, 5, 6], [7, 3, 0, 2, 1], [4, 2], [1, 1, 0]):
            state, origin = model.reorder(state, torch.tensor(rows)), origin[rows]
            assert all(memory.length.shape[0] <= 4 for memory in state.sources.memories)
            copy = model.reorder(state, torch.arange(len(rows)))  # a step uses its state up
            target = torch.randint(4, 24, (len(rows), 3))
            torch.testing.assert_close(
                model(target, state=copy)[0], model(target, source[origin])[0], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_copied_only_when_half_of_the_sentences_are_done(kind: str) -> None:
    model = network(kind)
    with torch.no_grad():
        state = model.start(sources(6, 3, 5, 4), 9)
    memory = state.sources.memories[0]
    state = model.reorder(state, torch.arange(4).repeat_interleave(5))
    state = model.reorder(state, torch.arange(20).flip(0))
    state = model.reorder(state, torch.tensor([0, 3, 3, 9, 14]))
    assert state.sources.memories[0] is memory
    state = model.reorder(state, torch.tensor([3, 4]))
    assert (
        state.sources.memories[0].length.tolist() == memory.length[state.sources.sentence.new_tensor([1, 2])].tolist()
    )
