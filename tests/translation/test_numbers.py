"""Number words: right, distinct, well drawn, and aligned as the languages are."""

from __future__ import annotations

from collections import Counter

import pytest

from experiments.translation.numbers import LIMIT, SIZES, alignment, number_of, sets, texts

# By hand: source words, target words, source place of each target word.
KNOWN = {
    0: ("zero", "null", [0]),
    1: ("one", "eins", [0]),
    7: ("seven", "sieben", [0]),
    12: ("twelve", "zwölf", [0]),
    16: ("sixteen", "sechzehn", [0]),
    20: ("twenty", "zwanzig", [0]),
    21: ("twenty one", "ein und zwanzig", [1, None, 0]),
    38: ("thirty eight", "acht und dreissig", [1, None, 0]),
    100: ("one hundred", "ein hundert", [0, 1]),
    101: ("one hundred one", "ein hundert eins", [0, 1, 2]),
    117: ("one hundred seventeen", "ein hundert siebzehn", [0, 1, 2]),
    240: ("two hundred forty", "zwei hundert vierzig", [0, 1, 2]),
    999: ("nine hundred ninety nine", "neun hundert neun und neunzig", [0, 1, 3, None, 2]),
    1_000: ("one thousand", "ein tausend", [0, 1]),
    1_001: ("one thousand one", "ein tausend eins", [0, 1, 2]),
    21_000: ("twenty one thousand", "ein und zwanzig tausend", [1, None, 0, 2]),
    101_001: ("one hundred one thousand one", "ein hundert ein tausend eins", [0, 1, 2, 3, 4]),
    306_011: ("three hundred six thousand eleven", "drei hundert sechs tausend elf", [0, 1, 2, 3, 4]),
    999_999: (
        "nine hundred ninety nine thousand nine hundred ninety nine",
        "neun hundert neun und neunzig tausend neun hundert neun und neunzig",
        [0, 1, 3, None, 2, 4, 5, 6, 8, None, 7],
    ),
}

# Values, written down a second time.
ENGLISH = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90, "hundred": 100, "thousand": 1000,
}  # fmt: skip
GERMAN = {
    "null": 0, "ein": 1, "eins": 1, "zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7, "acht": 8,
    "neun": 9, "zehn": 10, "elf": 11, "zwölf": 12, "dreizehn": 13, "vierzehn": 14, "fünfzehn": 15, "sechzehn": 16,
    "siebzehn": 17, "achtzehn": 18, "neunzehn": 19, "zwanzig": 20, "dreissig": 30, "vierzig": 40, "fünfzig": 50,
    "sechzig": 60, "siebzig": 70, "achtzig": 80, "neunzig": 90, "hundert": 100, "tausend": 1000,
}  # fmt: skip

SOME = [*range(3_000), *range(99_900, 100_100), *range(3_000, LIMIT, 997), LIMIT - 1]


def value(words: list[str], values: dict[str, int]) -> int:
    """The sum of the parts: hundred and thousand multiply what stands before them."""
    total = group = 0
    for word in words:
        if word == "und":
            continue
        size = values[word]
        if size == 1000:
            total, group = 1000 * group, 0
        elif size == 100:
            group *= 100
        else:
            group += size
    return total + group


@pytest.mark.parametrize("number", KNOWN)
def test_numbers_by_hand(number: int) -> None:
    english, german, source = KNOWN[number]
    found = alignment(number)
    assert (" ".join(found.english), " ".join(found.german), found.source) == (english, german, source)


def test_words_mean_their_number_in_both_languages() -> None:
    for number in SOME:
        found = alignment(number)
        assert value(found.english, ENGLISH) == value(found.german, GERMAN) == number
        assert number_of(" ".join(found.english)) == number


def test_a_target_word_stands_for_the_source_word_of_its_value() -> None:
    for number in SOME:
        english, german, source = alignment(number)
        assert len(source) == len(german)
        assert sorted(place for place in source if place is not None) == list(range(len(english)))
        for word, place in zip(german, source, strict=True):
            assert (place is None) == (word == "und")
            assert place is None or GERMAN[word] == ENGLISH[english[place]]


def test_no_two_numbers_read_the_same() -> None:
    for side in (0, 1):
        assert len({tuple(alignment(number)[side]) for number in SOME}) == len(set(SOME))


def test_numbers_beyond_are_refused() -> None:
    for number in (-1, LIMIT):
        with pytest.raises(ValueError, match=f"{number} has no number words"):
            alignment(number)
    with pytest.raises(ValueError, match="'million' is no word"):
        number_of("one million")


def test_sets_are_disjoint_and_of_their_sizes() -> None:
    found = sets()
    assert {name: len(numbers) for name, numbers in found.items()} == SIZES
    assert (SIZES["train"], SIZES["test"]) == (12_000, 1_000)
    every = [number for numbers in found.values() for number in numbers]
    assert len(set(every)) == len(every)


def test_sets_are_even_over_lengths_and_the_longest_are_apart() -> None:
    """From four words on there are numbers enough; nine words are in `long` alone."""
    counts = {name: Counter(len(text.split()) for text in texts(name)[0]) for name in SIZES}
    assert set(counts["long"]) == {9}
    assert set(counts["train"]) == set(range(1, 9))
    for name in ("train", "val", "test"):
        many = [counts[name][length] for length in range(4, 9)]
        assert max(many) - min(many) <= 1
        assert counts[name][2] < counts[name][3] < many[0]
    assert counts["train"][1] == 28


def test_every_word_is_seen_in_training() -> None:
    sources, targets = texts("train")
    assert {word for text in sources for word in text.split()} == set(ENGLISH)
    assert {word for text in targets for word in text.split()} == {*GERMAN, "und"}
