"""Beam search, on networks that are tables: which hypothesis wins, how each ends, who depends on whom."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from experiments.translation.beam import Hypothesis, beam_search

END, A, B = 0, 1, 2
START = 9

Table = Callable[[tuple[int, ...]], Sequence[float]]
"""Prefix -> probabilities of END, A, B, ..."""


class Stub(NamedTuple):
    """A state that is what came so far: int64 [N, length], BOS first; and the sentence of each row."""

    prefix: Tensor
    sentence: Tensor


class Counted:
    """``step`` over tables, one for each sentence, that notes how many rows came at each step."""

    def __init__(self, *tables: Table) -> None:
        self.tables = tables
        self.rows: list[int] = []

    def __call__(self, tokens: Tensor, state: Stub) -> tuple[Tensor, Stub]:
        assert len(tokens) == len(state.prefix) == len(state.sentence)
        self.rows.append(len(tokens))
        prefix = torch.cat([state.prefix, tokens[:, None]], dim=1)
        assert (prefix[:, 0] == START).all()
        chosen = zip(prefix[:, 1:].tolist(), state.sentence.tolist(), strict=True)
        probabilities = [list(self.tables[sentence](tuple(before))) for before, sentence in chosen]
        # Logits are log probabilities up to a constant, which must not matter.
        return torch.tensor(probabilities).log() + 3.0, Stub(prefix, state.sentence)


def search(*tables: Table, **options: object) -> list[list[Hypothesis]]:
    return beam_search(**{**call(*tables), **options})  # type: ignore[arg-type]


def call(*tables: Table) -> dict[str, object]:
    count = len(tables)
    state = Stub(torch.zeros(count, 0, dtype=torch.int64), torch.arange(count))
    return {"step": Counted(*tables), "state": state, "batch_size": count, "bos": START, "eos": END, "max_len": 12}


def k05(prefix: tuple[int, ...]) -> Sequence[float]:
    known = {
        (): (0.0, 0.6, 0.4),
        (A,): (0.55, 0.25, 0.20),
        (B,): (0.1, 0.1, 0.8),
        (B, B): (0.9, 0.05, 0.05),
        (B, A): (0.9, 0.05, 0.05),
    }
    return known.get(prefix, (0.6, 0.2, 0.2))


def test_k05_the_search_goes_on_while_another_hypothesis_could_end_better() -> None:
    first, second = search(k05, beam=2, n_best=2)[0]
    assert first.tokens == [B, B]
    assert first.score == pytest.approx(-0.4149, abs=5e-5)
    assert first.log_probability == pytest.approx(-1.2448, abs=5e-5)
    assert second.tokens == [A]
    assert second.score == pytest.approx(-0.5543, abs=5e-5)
    assert first.finished
    assert second.finished
    assert search(k05, beam=2)[0] == [first]


def test_k05_without_normalisation_the_shorter_one_wins() -> None:
    first, second = search(k05, beam=2, n_best=2, length_penalty=0.0)[0]
    assert (first.tokens, second.tokens) == ([A], [B, B])
    assert first.score == pytest.approx(-1.1087, abs=5e-5)
    assert second.score == pytest.approx(-1.2448, abs=5e-5)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_k06_the_first_result_does_not_depend_on_how_many_are_asked_for(penalty: float) -> None:
    found = [search(k05, beam=4, n_best=count, length_penalty=penalty)[0] for count in (1, 2, 3, 4)]
    assert [len(results) for results in found] == [1, 2, 3, 4]
    for results in found:
        assert results == found[3][: len(results)]
        assert [h.score for h in results] == sorted((h.score for h in results), reverse=True)


def ends_at(step: int) -> Table:
    """A at each place until the end symbol comes as token ``step``."""
    return lambda prefix: (0.98, 0.01, 0.01) if len(prefix) == step - 1 else (0.001, 0.9, 0.099)


def test_k07_each_row_ends_on_its_own_and_the_search_with_the_last() -> None:
    """Row 0 is done after step 2 and leaves the batch; nothing goes on after step 5."""
    given, alone = call(ends_at(2), ends_at(5)), call(ends_at(2))
    found = beam_search(**given, beam=1)  # type: ignore[arg-type]
    assert [row[0].tokens for row in found] == [[A], [A] * 4]
    assert given["step"].rows == [2, 2, 1, 1, 1]  # type: ignore[attr-defined]
    assert found[0] == beam_search(**alone, beam=1)[0]  # type: ignore[arg-type]


def test_k07_a_sentence_that_is_decided_leaves_though_slots_are_open() -> None:
    """Three slots each; without normalisation nothing that is open after step 2 can pass what ended there."""
    given = call(ends_at(2), ends_at(5))
    found = beam_search(**given, beam=3, length_penalty=0.0)  # type: ignore[arg-type]
    assert [row[0].tokens for row in found] == [[A], [A] * 4]
    rows = given["step"].rows  # type: ignore[attr-defined]
    assert len(rows) == 5
    assert max(rows[2:]) <= 3


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_k08_what_never_ends_is_cut_at_the_limit_and_marked(penalty: float) -> None:
    found = search(lambda prefix: (0.0, 0.7, 0.3), beam=3, max_len=10, length_penalty=penalty)[0]
    assert len(found) == 1
    assert found[0].tokens == [A] * 10
    assert not found[0].finished
    assert found[0].log_probability == pytest.approx(10 * math.log(0.7), abs=1e-4)
    assert found[0].score == pytest.approx(10**-penalty * 10 * math.log(0.7), abs=1e-4)


def test_k08_what_ended_comes_before_what_was_cut() -> None:
    """A bad whole sentence before a good piece of one."""
    found = search(lambda prefix: (0.1, 0.9), beam=2, n_best=2, max_len=3)[0]
    assert [(h.tokens, h.finished) for h in found] == [([], True), ([A] * 3, False)]
    assert found[0].score < found[1].score


def test_k09_forced_prefixes_of_other_lengths_are_those_of_each_row_alone() -> None:
    prefixes = [[A, B, B], [B, A] * 6, []]
    options = {"max_len": 20, "beam": 2, "n_best": 2}
    together = search(k05, ends_at(15), k05, prefixes=prefixes, **options)
    alone = [search(t, prefixes=[p], **options)[0] for t, p in zip((k05, ends_at(15), k05), prefixes, strict=True)]
    assert together == alone
    for row, prefix in zip(together, prefixes, strict=True):
        assert all(h.tokens[: len(prefix)] == prefix for h in row)
    assert together[2] == search(k05, **options)[0]


def test_the_probability_of_a_prefix_counts() -> None:
    """A, B, B: .6 x .2 x .2, then the end: .6 - once for each step, whatever else was more probable."""
    found = search(k05, prefixes=[[A, B, B]], beam=1, length_penalty=0.0)[0][0]
    assert found.tokens == [A, B, B]
    assert found.log_probability == pytest.approx(math.log(0.6 * 0.2 * 0.2 * 0.6), abs=1e-5)


def drawn(seed: int, words: int) -> Table:
    """Probabilities of their own for each prefix, some of them 0."""

    def table(prefix: tuple[int, ...]) -> Sequence[float]:
        generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**31)
        weights = torch.rand(words, generator=generator) ** 3
        weights[torch.rand(words, generator=generator) < 0.15] = 0
        weights[0] += 0.01
        return (weights / weights.sum()).tolist()

    return table


def exhaustive(table: Table, words: int, max_len: int, penalty: float) -> list[Hypothesis]:
    """Every hypothesis that there is, by the definition of the score."""
    found = []
    for length in range(max_len + 1):
        for tokens in itertools.product(range(1, words), repeat=length):
            nats = [math.log(p) if (p := table(tokens[:n])[tokens[n]]) else -math.inf for n in range(length)]
            total, end = sum(nats), table(tokens)[END]
            if length < max_len and end and total > -math.inf:
                ended = total + math.log(end)
                found.append(Hypothesis(list(tokens), ended / (length + 1) ** penalty, ended, True))
            elif length == max_len and total > -math.inf:
                found.append(Hypothesis(list(tokens), total / length**penalty, total, False))
    return sorted(found, key=lambda h: (not h.finished, -h.score))


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("words", "max_len"), [(2, 5), (3, 4), (4, 3)])
def test_a_beam_of_everything_is_exhaustive_search(words: int, max_len: int, penalty: float) -> None:
    """All results in order, and with fewer asked for (so that the search may stop early) the first of them."""
    tables = [drawn(seed, words) for seed in range(3)]
    options = {"beam": words ** (max_len + 1), "max_len": max_len, "length_penalty": penalty}
    found = search(*tables, n_best=options["beam"], **options)
    for count in (1, 2, 3):
        assert search(*tables, n_best=count, **options) == [row[:count] for row in found]
    for table, row in zip(tables, found, strict=True):
        expected = exhaustive(table, words, max_len, penalty)
        assert [(h.tokens, h.finished) for h in row] == [(h.tokens, h.finished) for h in expected]
        assert [h.score for h in row] == pytest.approx([h.score for h in expected], abs=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_beam_of_one_is_greedy(penalty: float) -> None:
    for seed in range(20):
        table, tokens = drawn(seed, 5), list[int]()
        while len(tokens) < 12:
            probabilities = table(tuple(tokens))
            tokens.append(max(range(5), key=lambda word: probabilities[word]))
            if tokens[-1] == END:
                break
        found = search(table, beam=1, length_penalty=penalty)[0][0]
        assert found.tokens == [token for token in tokens if token != END]
        assert found.finished == (tokens[-1] == END)


def test_scores_do_not_take_the_default_dtype() -> None:
    """It is bfloat16 while a model of ``--trainer.precision=bf16-true`` is judged."""
    table, expected = call(drawn(3, 5)), search(drawn(3, 5), beam=4)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = beam_search(**table, beam=4)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[0][0].tokens == expected[0][0].tokens
    assert found[0][0].score == pytest.approx(expected[0][0].score, rel=2e-2)


def test_sentences_do_not_depend_on_each_other_and_have_limits_of_their_own() -> None:
    tables, limits = [drawn(seed, 6) for seed in range(7)], [1, 2, 3, 5, 8, 12, 4]
    options = {"beam": 4, "n_best": 4, "length_penalty": 0.8}
    together = search(*tables, max_len=limits, **options)
    assert together == [search(t, max_len=n, **options)[0] for t, n in zip(tables, limits, strict=True)]
    assert all(len(h.tokens) + h.finished <= n for row, n in zip(together, limits, strict=True) for h in row)


def test_words_of_probability_0_never_come_out() -> None:
    """Fewer results than were asked for, where there are no more."""
    found = search(lambda prefix: (0.5, 0.5, 0.0) if not prefix else (1.0, 0.0, 0.0), beam=8, n_best=8)[0]
    assert [(h.tokens, h.finished) for h in found] == [([A], True), ([], True)]
    assert [h.log_probability for h in found] == pytest.approx([math.log(0.5)] * 2, abs=1e-6)


def test_a_hypothesis_that_is_certain_is_not_given_up() -> None:
    """B and what follows has log probability 0 from there on, so it passes the first result late."""

    def table(prefix: tuple[int, ...]) -> Sequence[float]:
        if not prefix:
            return 0.6, 0.0, 0.4
        return (0.0, 0.0, 1.0) if len(prefix) < 7 else (1.0, 0.0, 0.0)

    found = search(table, beam=2)[0][0]
    assert found.tokens == [B] * 7
    assert found.score == pytest.approx(math.log(0.4) / 8, abs=1e-6)


def test_a_penalty_below_0_favours_what_ends_soon() -> None:
    """The end at once: ln 0.3 x 1 = -1.2. A and the end: ln 0.7 x 2 = -0.7, though at the limit it would be -4.3."""

    def table(prefix: tuple[int, ...]) -> Sequence[float]:
        return (1.0, 0.0) if prefix else (0.3, 0.7)

    first, second = search(table, beam=2, n_best=2, length_penalty=-1.0)[0]
    assert (first.tokens, second.tokens) == ([A], [])
    assert first.score == pytest.approx(2 * math.log(0.7), abs=1e-6)
    assert search(table, beam=2, length_penalty=-1.0)[0] == [first]


def test_the_state_is_picked_only_where_rows_move() -> None:
    """Greedy search in which no sentence ends copies nothing."""
    picked = []

    def reorder(state: Stub, rows: Tensor) -> Stub:
        picked.append(rows.tolist())
        return Stub(state.prefix[rows], state.sentence[rows])

    search(ends_at(4), ends_at(4), beam=1, reorder=reorder)
    assert picked == []
    search(ends_at(2), ends_at(4), beam=1, reorder=reorder)
    assert picked == [[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 2, "n_best": 3}, "n_best=3 and beam=2"),
        ({"beam": 0}, "beam=0"),
        ({"max_len": 0}, "sentence 0: max_len=0"),
        ({"max_len": [3, 4]}, "max_len must have one entry for each of the 1 sentences, got 2"),
        ({"prefixes": [[A], [B]]}, "prefixes must have one entry for each of the 1 sentences, got 2"),
        ({"prefixes": [[A, A, A]], "max_len": 3}, "max_len=3 leaves no token behind a prefix of 3"),
        ({"prefixes": [[A, END, A]]}, "holds the end symbol, 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(k05, **options)


def test_a_prefix_of_probability_0_is_refused() -> None:
    with pytest.raises(ValueError, match="token 2, whose probability is 0"):
        search(lambda prefix: (0.5, 0.5, 0.0), prefixes=[[A, B]])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_stop_the_search(bad: float) -> None:
    with pytest.raises(ValueError, match="logits of a step are NaN"):
        search(lambda prefix: (0.5, 0.5, bad) if len(prefix) == 2 else (0.1, 0.6, 0.3))


def test_no_sentence_gives_no_result() -> None:
    assert search() == []
