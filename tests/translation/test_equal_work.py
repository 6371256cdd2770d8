"""What two networks know after the same steps and after the same seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.number_words import Learned, equal_work, learned


def test_time_adds_up_from_validation_to_validation(tmp_path: Path) -> None:
    """By hand: 10 steps of 100 ms, then 20 of 50 ms."""
    (tmp_path / "metrics.csv").write_text(
        "step,throughput/step_ms,val/exact_match\n1,,\n10,100.0,0.5\n11,,\n30,50.0,0.75\n"
    )
    (first, second) = learned(tmp_path)
    assert first == (10, pytest.approx(1.0), 0.5)
    assert second == (30, pytest.approx(2.0), 0.75)


def test_the_best_so_far_counts_at_equal_work() -> None:
    """Bahdanau's steps take twice as long: alike by steps, behind by seconds. Two seeds, the mean."""
    fast = [[Learned(10, 10.0, 0.5), Learned(20, 20.0, share)] for share in (0.8, 1.0)]
    slow = [[Learned(10, 20.0, 0.5), Learned(20, 40.0, 0.9)]]
    rows = [{"preset": "translator", "learned": each} for each in fast]
    rows += [{"preset": "translator-bahdanau", "learned": each} for each in slow]
    console = Console(width=100, record=True)
    console.print(equal_work(rows))
    lines = [line.split("│")[1:4] for line in console.export_text().splitlines() if line.startswith("│")]
    found = {work.strip(): (one.strip(), two.strip()) for work, one, two in lines}
    assert found == {
        "10 steps": ("0.500", "0.500"), "20 steps": ("0.900", "0.900"),
        "10 s": ("0.500", "0.000"), "20 s": ("0.900", "0.500"),
        "30 s": ("0.900", "0.500"), "40 s": ("0.900", "0.900"),
    }  # fmt: skip
