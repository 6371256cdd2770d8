"""Number words from 0 to 999,999: English as source, German in morphemes as target, and which word stands for which.

The embedded data set of the translator. It is small and exact, and its alignment is known and crosses: of "thirty
eight", "acht und dreissig", the first German word stands for the last English one. Soft attention can so be judged
word by word.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

LANGUAGES = ("en", "de")
LIMIT = 1_000_000
SIZES = {"train": 12_000, "val": 500, "test": 1_000, "long": 1_000}
"""Pairs in each set; `long` alone has the longest English forms, nine words."""

# English and German of 0 to 19, and of 20, 30, ... 90.
_UNITS = (
    ("zero", "null"), ("one", "ein"), ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf"),
    ("six", "sechs"), ("seven", "sieben"), ("eight", "acht"), ("nine", "neun"), ("ten", "zehn"), ("eleven", "elf"),
    ("twelve", "zwölf"), ("thirteen", "dreizehn"), ("fourteen", "vierzehn"), ("fifteen", "fünfzehn"),
    ("sixteen", "sechzehn"), ("seventeen", "siebzehn"), ("eighteen", "achtzehn"), ("nineteen", "neunzehn"),
)  # fmt: skip
_TENS = (
    ("twenty", "zwanzig"), ("thirty", "dreissig"), ("forty", "vierzig"), ("fifty", "fünfzig"),
    ("sixty", "sechzig"), ("seventy", "siebzig"), ("eighty", "achtzig"), ("ninety", "neunzig"),
)  # fmt: skip
_VALUES = {english: value for value, (english, _) in enumerate(_UNITS)} | {
    english: 10 * tens for tens, (english, _) in enumerate(_TENS, 2)
}
_LONGEST = 9
_SEED = 0


class Alignment(NamedTuple):
    """A number in words.

    Attributes:
        english: source words.
        german: target words.
        source: for each target word the place of the source word that it stands for; None for "und".
    """

    english: list[str]
    german: list[str]
    source: list[int | None]


def alignment(number: int) -> Alignment:
    """A number from 0 to 999,999 in both languages.

    Example:
        >>> alignment(38)
        Alignment(english=['thirty', 'eight'], german=['acht', 'und', 'dreissig'], source=[1, None, 0])
        >>> " ".join(alignment(201_001).german)
        'zwei hundert ein tausend eins'
    """
    if not 0 <= number < LIMIT:
        raise ValueError(f"{number} has no number words here; expected 0 to {LIMIT - 1:,}")
    words = Alignment([], [], [])
    thousands, rest = divmod(number, 1_000)
    if thousands:
        _add_below_thousand(thousands, words)
        _add("thousand", "tausend", words)
    if rest or not thousands:
        _add_below_thousand(rest, words)
    if words.german[-1] == "ein":
        words.german[-1] = "eins"
    return words


def number_of(english: str) -> int:
    """The number that English words stand for, as `alignment` writes them.

    Raises:
        ValueError: another word.

    Example:
        >>> number_of("two hundred one thousand one")
        201001
    """
    total, below = 0, 0
    for word in english.split():
        if word == "thousand":
            total, below = below * 1_000, 0
        elif word == "hundred":
            below *= 100
        elif word in _VALUES:
            below += _VALUES[word]
        else:
            raise ValueError(f"{word!r} is no word of an English number below a million")
    return total + below


@functools.cache
def sets() -> dict[str, list[int]]:
    """The numbers of each set, the same ones every time; none is in two sets.

    `train`, `val` and `test` are drawn evenly over the lengths of their English forms, one to eight words, as far
    as there are numbers of a length. All of one word are in `train`, so every word is seen there.
    """
    below = [len(alignment(number).english) for number in range(1_000)]
    by_length: list[list[int]] = [[] for _ in range(_LONGEST)]
    for number in range(LIMIT):
        thousands, rest = divmod(number, 1_000)
        high, low = below[thousands] + 1 if thousands else 0, below[rest] if rest or not thousands else 0
        by_length[high + low - 1].append(number)
    drawn = random.Random(_SEED)
    found = {"long": drawn.sample(by_length.pop(), SIZES["long"])}
    for numbers in by_length:
        drawn.shuffle(numbers)
    # Of the few short numbers most are for training.
    few = [0, *(len(numbers) // 20 for numbers in by_length[1:])]
    for name in ("test", "val", "train"):
        limits = [len(numbers) for numbers in by_length] if name == "train" else few
        shares = _evenly(SIZES[name], limits)
        found[name] = [numbers.pop() for numbers, share in zip(by_length, shares, strict=True) for _ in range(share)]
    return found


def texts(name: str) -> tuple[list[str], list[str]]:
    """English and German of the numbers of a set."""
    pairs = [alignment(number) for number in sets()[name]]
    return [" ".join(pair.english) for pair in pairs], [" ".join(pair.german) for pair in pairs]


def _add_below_thousand(number: int, words: Alignment) -> None:
    hundreds, rest = divmod(number, 100)
    if hundreds:
        _add(*_UNITS[hundreds], words)
        _add("hundred", "hundert", words)
    tens, unit = divmod(rest, 10)
    if tens < 2 and (rest or not hundreds):
        _add(*_UNITS[rest], words)
    elif tens >= 2 and not unit:
        _add(*_TENS[tens - 2], words)
    elif tens >= 2:
        place = len(words.english)
        (english_tens, german_tens), (english_unit, german_unit) = _TENS[tens - 2], _UNITS[unit]
        words.english.extend((english_tens, english_unit))
        words.german.extend((german_unit, "und", german_tens))
        words.source.extend((place + 1, None, place))


def _add(english: str, german: str, words: Alignment) -> None:
    words.source.append(len(words.english))
    words.english.append(english)
    words.german.append(german)


def _evenly(total: int, limits: Sequence[int]) -> list[int]:
    """`total` over classes, as equal as their sizes allow; the first ones take what does not divide."""
    shares = [0] * len(limits)
    while total:
        open_classes = [k for k, limit in enumerate(limits) if shares[k] < limit]
        each = max(total // len(open_classes), 1)
        for k in open_classes:
            more = min(each, limits[k] - shares[k], total)
            shares[k] += more
            total -= more
    return shares
