"""Steps of stamps, the stamps to come, and features of the calendar."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments.forecasting.clock import Step, calendar_features, calendar_values, find_step, usual_calendar


@pytest.mark.parametrize(
    ("start", "freq", "zone", "words", "season"),
    [
        ("2024-01-01", "h", None, "1 hour", 24),
        ("2024-01-01", "15min", None, "15 minutes", 96),
        ("2024-01-01", "D", None, "1 day", 7),
        ("2024-03-25", "D", "Europe/Berlin", "1 day", 7),
        ("2024-01-06", "7D", None, "7 days", 52),
        ("2024-01-01", "B", None, "1 business day", 5),
        ("2024-01-31", "ME", None, "1 month", 12),
        ("2024-01-15", "MS", None, "1 month", 12),
        ("2024-01-01", "QS", None, "3 months", 4),
    ],
)
def test_a_step_is_found_and_gives_the_stamps_to_come(
    start: str, freq: str, zone: str | None, words: str, season: int
) -> None:
    """The first twenty stamps tell the step, and it gives the next ten."""
    stamps = pd.date_range(start, periods=30, freq=freq, tz=zone)
    step = find_step(stamps[:20])
    assert step is not None
    assert (str(step), step.season()) == (words, season)
    numbers, whole = step.numbers(stamps, stamps[0])
    assert whole.all()
    assert numbers.tolist() == list(range(30))
    assert (step.stamps(stamps[0], np.arange(20, 30)) == stamps[20:]).all()


def test_months_that_begin_late_end_early() -> None:
    """From 31 January on, each month's last day; from the 30th on, February has none."""
    stamps = Step("months", 1).stamps(pd.Timestamp("2024-01-31"), np.arange(4))
    assert stamps.day.tolist() == [31, 29, 31, 30]


def test_f07_stamps_over_the_change_are_real_hours() -> None:
    first = pd.Timestamp("2024-03-31 00:00", tz="Europe/Berlin")
    stamps = Step("time", 3600 * 10**9).stamps(first, np.arange(6))
    assert stamps.hour.tolist() == [0, 1, 3, 4, 5, 6]


def test_f08_the_hour_follows_the_wall_clock() -> None:
    stamps = pd.date_range("2024-03-31", periods=6, freq="h", tz="Europe/Berlin")
    assert calendar_values(stamps, "hour").tolist() == [0, 1, 3, 4, 5, 6]
    assert calendar_features(stamps, ["hour", "weekday"]).shape == (6, 4)


def test_features_go_round_their_cycle() -> None:
    stamps = pd.date_range("2024-01-01", periods=24, freq="h")
    sine, cosine = calendar_features(stamps, ["hour"]).T
    np.testing.assert_allclose(sine[6], 1)
    np.testing.assert_allclose(cosine[[0, 12]], [1, -1])
    np.testing.assert_allclose(sine**2 + cosine**2, 1)


def test_usual_features_vary_at_the_step() -> None:
    assert usual_calendar(Step("time", 3600 * 10**9)) == ["hour", "weekday", "yearday"]
    assert usual_calendar(Step("days", 7)) == ["yearday"]
    assert usual_calendar(Step("months", 1)) == ["month"]
    assert usual_calendar(None) == []


def test_a_cycle_that_was_seen_once_is_no_feature() -> None:
    """Of one year a date is known by its rows alone."""
    hours, days = Step("time", 3600 * 10**9), Step("days", 1)
    assert usual_calendar(hours, pd.Timedelta(days=729)) == ["hour", "weekday"]
    assert usual_calendar(hours, pd.Timedelta(days=730)) == ["hour", "weekday", "yearday"]
    assert usual_calendar(hours, pd.Timedelta(days=10)) == ["hour"]
    assert usual_calendar(days, pd.Timedelta(days=360)) == ["weekday"]
    assert usual_calendar(Step("months", 1), pd.Timedelta(days=365)) == []
