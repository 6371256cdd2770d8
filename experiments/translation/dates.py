"""Dates as people write them in eight languages, and the same dates in ISO 8601 form.

They are written by babel from the patterns and names of CLDR, in its full, long, medium and short styles. Left out
are forms that leave a doubt: years of two digits, and a numeric day and month between strokes or dashes, which
English and other languages read in different order. With dots the day comes first; a year in front comes before
the month.
"""

from __future__ import annotations

import functools
import random
import re
from datetime import date, timedelta

from babel import Locale
from babel.dates import format_date, get_date_format

LANGUAGES = ("mul", "iso8601")
SIZES = {"train": 20_000, "val": 500, "test": 1_000}
"""Pairs in each set; no day is in two of them."""

WRITTEN_IN = ("de", "en", "es", "fr", "it", "nl", "pt", "sv")
FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
_STYLES = ("full", "long", "medium", "short")
_SEED = 0


def styles(language: str) -> list[str]:
    """The styles of a language that leave no doubt about the day.

    Example:
        >>> styles("en"), styles("sv")
        (['full', 'long', 'medium'], ['full', 'long', 'medium', 'short'])
    """
    locale = Locale.parse(language)
    return [style for style in _STYLES if _leaves_no_doubt(get_date_format(style, locale).pattern)]


def written(day: date, language: str, style: str) -> str:
    """A date in words.

    Example:
        >>> written(date(1990, 4, 3), "de", "full")
        'Dienstag, 3. April 1990'
    """
    return str(format_date(day, style, locale=language))


def texts(name: str) -> tuple[list[str], list[str]]:
    """Written dates of a set, and each in ISO form: the same ones every time, for one version of CLDR."""
    pairs = _drawn()[name]
    return [source for source, _ in pairs], [target for _, target in pairs]


@functools.cache
def _drawn() -> dict[str, list[tuple[str, str]]]:
    drawn = random.Random(_SEED)
    days = drawn.sample(range((LAST - FIRST).days + 1), sum(SIZES.values()))
    ways = {language: styles(language) for language in WRITTEN_IN}
    pairs = []
    for number in days:
        day, language = FIRST + timedelta(number), drawn.choice(WRITTEN_IN)
        pairs.append((written(day, language, drawn.choice(ways[language])), day.isoformat()))
    found, start = {}, 0
    for name, size in SIZES.items():
        found[name] = pairs[start : start + size]
        start += size
    return found


def _leaves_no_doubt(pattern: str) -> bool:
    numeric_with_dots = re.fullmatch(r"d+\. ?M+\. ?y+", pattern)
    return "yy" not in pattern.replace("yyyy", "y") and bool(
        "MMM" in pattern or pattern.startswith("y") or numeric_with_dots
    )
