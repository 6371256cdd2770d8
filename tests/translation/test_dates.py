"""Written dates: what CLDR says, without doubt about the day."""

from __future__ import annotations

import re
from datetime import date

import pytest

from experiments.translation.dates import FIRST, LAST, SIZES, WRITTEN_IN, styles, texts, written

DAY = date(1990, 4, 3)


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("de", "Dienstag, 3. April 1990"),
        ("en", "Tuesday, April 3, 1990"),
        ("es", "martes, 3 de abril de 1990"),
        ("fr", "mardi 3 avril 1990"),
        ("it", "martedì 3 aprile 1990"),
        ("nl", "dinsdag 3 april 1990"),
        ("pt", "terça-feira, 3 de abril de 1990"),
        ("sv", "tisdag 3 april 1990"),
    ],
)
def test_dates_in_full(language: str, words: str) -> None:
    assert written(DAY, language, "full") == words


def test_forms_that_leave_a_doubt_are_left_out() -> None:
    """03.04.90 and 3/4/90 lack the century; 03/04/1990 is read in two ways; 03.04.1990 and 1990-04-03 in one."""
    found = {written(DAY, language, style) for language in WRITTEN_IN for style in styles(language)}
    assert {"03.04.1990", "1990-04-03"} <= found
    assert all("1990" in text for text in found)
    assert not any(re.fullmatch(r"\d+[/-]\d+[/-]\d+", text) for text in found - {"1990-04-03"})


def test_one_writing_means_one_day() -> None:
    """Over all languages and styles, on the days where day and month could be taken for each other."""
    days = [date(year, month, day) for year in (1901, 2024) for month in range(1, 13) for day in range(1, 13)]
    meant: dict[str, date] = {}
    for day in days:
        for language in WRITTEN_IN:
            for style in styles(language):
                assert meant.setdefault(written(day, language, style), day) == day


def test_targets_are_the_iso_form_of_the_day_that_is_written() -> None:
    for name, size in SIZES.items():
        sources, targets = texts(name)
        assert len(sources) == len(targets) == size
        for source, target in list(zip(sources, targets, strict=True))[:200]:
            day = date.fromisoformat(target)
            assert FIRST <= day <= LAST
            assert source in {written(day, language, style) for language in WRITTEN_IN for style in styles(language)}
            assert str(day.year) in source
            assert re.search(rf"(?<!\d)0?{day.day}(?!\d)", source)


def test_no_day_is_in_two_sets() -> None:
    days = [text for name in SIZES for text in texts(name)[1]]
    assert len(set(days)) == len(days)


def test_sets_hold_every_language_and_month() -> None:
    sources, targets = texts("test")
    assert {target[5:7] for target in targets} == {f"{month:02}" for month in range(1, 13)}
    assert all(any(word in source.lower() for source in sources) for word in ("dienstag", "august", "août", "ottobre"))
    assert all(
        any(word in source.lower() for source in sources) for word in ("maart", "março", "enero", "tisdag", "july")
    )
