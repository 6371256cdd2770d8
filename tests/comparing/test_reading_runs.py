"""`make compare`: which folders are runs, and what becomes of one that is damaged or of a stranger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run

from experiments.comparing import page
from experiments.comparing.compare import notes
from experiments.comparing.grouping import groups
from experiments.comparing.reading import find


@pytest.mark.parametrize("pattern", ["{}", "{}/vit", "{}/vit/*", "{}/*/*"])
def test_runs_are_found_by_folder_or_pattern(tmp_path: Path, pattern: str) -> None:
    make_run(tmp_path)
    make_run(tmp_path, "Local")
    assert len(find(pattern.format(tmp_path))) == 2


def test_no_runs_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No runs at .*make sweep EXP=vit"):
        find(str(tmp_path / "*"))


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({"preset": None}, "preset should be a word, got None"),
        ({"seed": "abc"}, "seed should be a whole number, got 'abc'"),
        ({"seed": None}, "seed should be a whole number, got None"),
        ({"step_ms": [1]}, "step_ms should be a number, got [1]"),
        ({"flops_per_sample": "many"}, "flops_per_sample should be a number, got 'many'"),
        ({"metrics": {"test/primary": "good"}}, "test/primary should be a number, got 'good'"),
        ({"metrics": []}, "results.json has no metrics"),
        ({"mechanism": "\ud800"}, "surrogates not allowed"),
        ({"parameters": 10**400}, "parameters is too large for a number, it has 401 digits"),
    ],
)
def test_a_foreign_run_is_left_out_and_the_others_stay(tmp_path: Path, results: dict[str, Any], said: str) -> None:
    make_run(tmp_path)
    foreign = make_run(tmp_path, "Local", results=results)
    lines: list[str] = []
    assert [run.path.name for run in find(str(tmp_path), lines.append)] == ["0001-softmax-seed0"]
    (line,) = lines
    assert str(foreign) in line and said in line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("results.json", b"", "Expecting value"),
        ("results.json", b"[]", "no metrics"),
        ("results.json", b"[" * 100_000, "recursion"),
        ("config.yaml", b"- 1", "has no model"),
        ("config.yaml", b"model: {}\nday: 2026-01-01", "not JSON serializable"),
        ("metrics.csv", b"step,train/loss\n1,\x99\n", "decode"),
        ("metrics.csv", b"step,train/loss\n1,0.5\n2,abc\n", "metrics.csv, line 3, train/loss: 'abc' is no number"),
        ("metrics.csv", b"step,train/loss\n1,0.5\n,0.4\n", "metrics.csv, line 3, step: '' is no number"),
        ("metrics.csv", b"epoch,train/loss\n1,0.5\n", "metrics.csv has no column step"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    make_run(tmp_path)
    (make_run(tmp_path, "Local") / name).write_bytes(content)
    lines: list[str] = []
    assert len(find(str(tmp_path), lines.append)) == 1
    assert said in lines[0]


@pytest.mark.parametrize("half", ["41,0,2.5e-", "41,0,2.", "4"])
def test_half_a_line_at_the_end_of_the_metrics_is_left_out(tmp_path: Path, half: str) -> None:
    """It may be no number, or, which is worse, another one."""
    with (make_run(tmp_path) / "metrics.csv").open("a") as file:
        file.write(half)
    (run,) = find(str(tmp_path))
    assert [row["step"] for row in run.rows] == [str(step) for step in range(1, 41)]


def test_a_folder_whose_name_is_no_unicode_costs_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    strange = make_run(tmp_path, "Local")
    strange.rename(strange.with_name(os.fsdecode(b"0002-\xff")))
    page.write(groups(find(str(tmp_path))), tmp_path / "page.html")
    assert "left out, for it cannot be read" in capsys.readouterr().out


def test_figures_that_are_not_finite_are_none(tmp_path: Path) -> None:
    make_run(tmp_path, results={"metrics": {"test/primary": float("nan")}, "step_ms": float("inf")})
    (run,) = find(str(tmp_path))
    assert run.score is None and run.results["step_ms"] is None


def test_a_run_that_was_killed_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path)
    (make_run(tmp_path, "Local") / "results.json").unlink()
    (group,) = groups(find(str(tmp_path)))
    assert notes(group) == ["1 without an end (killed, or running): vit/0002-local-seed0"]
