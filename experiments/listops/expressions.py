"""Expressions of ListOps: made, written as tokens, and worked out.

Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", arXiv:1804.06028; long ones after Tay
et al. 2021, "Long Range Arena", arXiv:2011.04006.

    [MAX 4 [MIN 7 2 ] 1 [SM 5 8 ] ]  ->  4        MED is the median, SM the sum modulo 10; values are 0 to 9

Deviations: an expression grows by turning one of its values, drawn at random, into an operation until it has the
length that was drawn before, so lengths are spread evenly; there, trees are drawn whole and kept where their length
fits. The median of an even count is the mean of the middle two, rounded down.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

DIGITS = tuple("0123456789")
OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")
END = "]"
SYMBOLS = ("<pad>", *DIGITS, *OPERATORS, END)
"""By their numbers; 0 is padding."""

_NUMBER = {symbol: number for number, symbol in enumerate(SYMBOLS)}


def grow(length: int, random: random.Random, max_arguments: int = 5) -> list[str]:
    """An expression of at most `length` symbols, and of no more than `max_arguments` + 1 fewer.

    Args:
        length: symbols, at least 4.
        random: what is drawn from.
        max_arguments: of one operation; the least is 2.
    """
    root = _operation(random, min(max_arguments, length - 2))
    # Each value by the operation that it is in, and its place there.
    values = [(root, place) for place in range(1, len(root))]
    size = len(root) + 1
    while size + 3 <= length:
        chosen = random.randrange(len(values))
        parent, place = values[chosen]
        # One value goes; operator, arguments and bracket come.
        made = _operation(random, min(max_arguments, length - size - 1))
        parent[place] = made
        values[chosen] = (made, 1)
        values += [(made, other) for other in range(2, len(made))]
        size += len(made)
    return _write(root)


def value(symbols: Sequence[str]) -> int:
    """What an expression comes to.

    Raises:
        ValueError: it is none; says where it breaks off.

    Example:
        >>> value("[MAX 4 [MIN 7 2 ] 1 [SM 5 8 ] ]".split())
        4
        >>> value("[MED 9 1 4 2 ]".split())
        3
    """
    stack: list[tuple[str, list[int]]] = [("", [])]
    for place, symbol in enumerate(symbols):
        if symbol in OPERATORS:
            stack.append((symbol, []))
        elif symbol in DIGITS:
            stack[-1][1].append(int(symbol))
        elif symbol == END and len(stack) > 1 and stack[-1][1]:
            operator, arguments = stack.pop()
            stack[-1][1].append(_work_out(operator, arguments))
        else:
            raise ValueError(
                f"symbol {place + 1}, {symbol!r}, makes no sense there; symbols are {' '.join(SYMBOLS[1:])}"
            )
    if len(stack) > 1 or len(stack[0][1]) != 1:
        raise ValueError(f"an expression has one operation around it, and as many {END!r} as operators")
    return stack[0][1][0]


def encode(symbols: Sequence[str]) -> list[int]:
    """Numbers of symbols.

    Raises:
        ValueError: for one that is none.
    """
    unknown = [symbol for symbol in symbols if symbol not in _NUMBER or symbol == SYMBOLS[0]]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no symbol of ListOps; these are: {' '.join(SYMBOLS[1:])}")
    return [_NUMBER[symbol] for symbol in symbols]


Operation = list  # of an operator, then values and operations


def _operation(random: random.Random, most: int) -> Operation:
    count = random.randint(2, max(2, most))
    return [random.choice(OPERATORS), *(random.choice(DIGITS) for _ in range(count))]


def _write(root: Operation) -> list[str]:
    # Without recursion, for a tree of 512 symbols may be 170 deep.
    written: list[str] = []
    left: list[Operation | str] = [root]
    while left:
        part = left.pop()
        if isinstance(part, str):
            written.append(part)
        else:
            written.append(part[0])
            left += [END, *reversed(part[1:])]
    return written


def _work_out(operator: str, arguments: list[int]) -> int:
    if operator == "[MAX":
        return max(arguments)
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MED":
        return int(statistics.median(arguments))
    return sum(arguments) % 10
