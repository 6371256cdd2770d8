"""Expressions of ListOps, worked out by Python itself."""

from __future__ import annotations

import random
import statistics

import pytest

from experiments.listops.expressions import OPERATORS, SYMBOLS, encode, grow, value

BY_PYTHON = {"[MAX": "max(", "[MIN": "min(", "[MED": "med(", "[SM": "mod("}


def by_python(symbols: list[str]) -> int:
    """The same expression as one of Python's."""
    words = [BY_PYTHON.get(symbol, "), " if symbol == "]" else f"{symbol}, ") for symbol in symbols]
    names = {
        "max": lambda *v: max(v), "min": lambda *v: min(v), "mod": lambda *v: sum(v) % 10,
        "med": lambda *v: int(statistics.median(v)),
    }  # fmt: skip
    return int(eval("".join(words).rstrip(", "), names))


def test_values_are_those_of_python() -> None:
    draw = random.Random(0)
    for length in (4, 5, 7, 16, 40, 60) * 20:
        symbols = grow(length, draw)
        assert value(symbols) == by_python(symbols), " ".join(symbols)


def test_an_expression_by_hand() -> None:
    assert value(["[SM", "5", "8", "[MIN", "4", "[MAX", "1", "9", "]", "]", "]"]) == 7  # 5 + 8 + 4 = 17


@pytest.mark.parametrize("length", [4, 16, 100, 512])
def test_lengths_are_kept_and_used(length: int) -> None:
    """Never longer; shorter by fewer than the symbols of one more operation."""
    draw = random.Random(1)
    sizes = [len(grow(length, draw)) for _ in range(50)]
    assert max(sizes) <= length
    assert min(sizes) >= length - 3
    assert all(2 <= count <= 5 for count in arguments(grow(length, draw)))


def arguments(symbols: list[str]) -> list[int]:
    """How many arguments each operation has."""
    counts: list[int] = []
    stack = [0]
    for symbol in symbols:
        if symbol in OPERATORS:
            stack[-1] += 1
            stack.append(0)
        elif symbol == "]":
            counts.append(stack.pop())
        else:
            stack[-1] += 1
    return counts


@pytest.mark.parametrize("text", ["", "[MAX 1 2", "[MAX ]", "1 2", "[MAX 1 2 ] ]", "[ADD 1 2 ]", "]"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="symbol|expression"):
        value(text.split())


def test_symbols_have_numbers_from_one() -> None:
    assert encode(list(SYMBOLS[1:])) == list(range(1, 16))
    with pytest.raises(ValueError, match="'<pad>' is no symbol"):
        encode(["<pad>"])
