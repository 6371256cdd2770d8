"""The study of which attention to take: how long the fast ones may train, and what its tables say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import make_run

from benchmarks import which_attention
from benchmarks.__main__ import main
from benchmarks.steps import step_times
from benchmarks.which_attention import budgets, markdown, progress, report, rows_of, trial_words
from experiments.__main__ import main as fit

PAGE = Path(__file__).parents[2] / "docs" / "studies" / "which-attention.md"


def test_equal_time_is_that_of_the_steps_of_plain_softmax() -> None:
    """By hand: 100 steps of 30 ms are 3 s; the baseline itself needs no second run, and the sixth is not asked."""
    times = {"A": 10.0, "B": 20.0, "Softmax": 30.0, "C": 40.0, "D": 60.0, "E": 100.0}
    assert budgets(100, times) == {"A": 300, "B": 150, "C": 75, "D": 50}
    assert budgets(100, times | {"Softmax": 200.0}) == {"A": 2000, "B": 1000, "C": 500, "D": 333, "E": 200}


def test_steps_are_timed_in_turn_and_kept(tmp_path: Path) -> None:
    words = ["--model.dim=16", "--model.depth=1", "--run.wandb=false", "--run.samples=0", f"--run.root={tmp_path}"]
    assert fit(["fit", "--config=vit", *words, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]) == 0
    (run,) = which_attention.finished(tmp_path)
    file = tmp_path / "timed" / "vit.json"
    best = run.path / "checkpoints" / "best.ckpt"
    times = step_times({"Softmax": best, "Local": best}, file)
    assert times.keys() == {"Softmax", "Local"} and min(times.values()) > 0
    assert step_times({"Softmax": best, "Local": Path("gone")}, file) == times
    assert step_times({"Softmax": best}, file).keys() == {"Softmax"}


def studied(folder: Path) -> None:
    """Softmax and Local in two seeds, Linear in one that finished and one that failed; Local longer in one."""
    steps = folder / "steps"
    for seed, softmax, local in ((0, 0.90, 0.94), (1, 0.92, 0.95)):
        make_run(steps, "Softmax", softmax, seed=seed, results={"commit": "abc"})
        make_run(steps, "Local", local, seed=seed, results={"commit": "def"})
    make_run(steps, "Linear", 0.97, results={"commit": "abc"})
    make_run(steps, "Linear", None, seed=1, status="failed")
    make_run(folder / "equal-time" / "vit-Local-0", "Local", 0.96, steps=60, results={"commit": "abc"})
    (folder / "timed").mkdir()
    (folder / "timed" / "vit.json").write_text('{"ms": {"Softmax": 20.0, "Local": 13.25}}')
    # The name of one task begins another's.
    make_run(folder / "equal-time" / "translator-bahdanau-Local-0", "Local", 0.5, results={"commit": "abc"})
    notes = steps / "sweeps" / "vit-attention"
    notes.mkdir(parents=True)
    trials = [
        {"label": name, "seed": seed, "name": f"{name}-{seed}",
         "words": ["--config=vit", f"--seed_everything={seed}", f"--model.attention={name}", "--run.root=x"]}
        for name in ("Softmax", "Local", "Linear") for seed in range(2)
    ]  # fmt: skip
    (notes / "plan.json").write_text(json.dumps({"trials": trials, "left_out": {}}))


def test_a_row_is_the_mean_over_seeds_beside_the_baseline_of_the_same_seeds(tmp_path: Path) -> None:
    studied(tmp_path)
    tables = rows_of("vit", tmp_path)
    assert [(row["mechanism"], row["seeds"]) for row in tables["steps"]] == [
        ("Linear", 1),
        ("Local", 2),
        ("Softmax", 2),
    ]
    linear, local, softmax = tables["steps"]
    assert local["score"] == pytest.approx(0.945)
    assert local["difference"]["mean"] == pytest.approx(0.035)
    assert linear["difference"]["mean"] == pytest.approx(0.07)
    assert linear["half_width"] is None and softmax["difference"] is None
    assert [(row["mechanism"], row["steps"]) for row in tables["seconds"]] == [("Local", 60), ("Softmax", 40)]
    assert rows_of("translator", tmp_path) == {"steps": [], "seconds": []}


def test_the_page_says_how_much_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    studied(tmp_path)
    assert report(tmp_path) == 0
    assert "vit 5 of 9 runs of equal steps, 1 of equal time; translator not begun" in capsys.readouterr().out
    text = (tmp_path / "tables.md").read_text()
    assert "`vit`, equal steps, commit abc, def:" in text
    row = next(line for line in text.splitlines() if line.startswith("| Local | 30% |"))
    assert "| 2 | 0.9450 ±0.0635 | +0.0350 | 0.090 |" in row and row.endswith("| 40 | 13.2 |")
    assert text.count("| 40 |  |") == 2  # steps that were not timed: of Linear, and of the other task
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    empty = tmp_path / "none"
    tables = {task: rows_of(task, empty) for task in which_attention.TASKS}
    assert "not begun; translator-bahdanau not begun" in progress(tables, empty)
    assert markdown(tables, empty).count("|") == 0
    begins = PAGE.read_text(encoding="utf-8").split("\n\n")[1]
    assert begins.startswith("Done: ") and all(f"`{task}`" in begins for task in which_attention.TASKS)


def test_a_longer_run_has_the_options_of_the_sweep(tmp_path: Path) -> None:
    studied(tmp_path)
    notes = tmp_path / "steps" / "sweeps" / "vit-attention"
    assert trial_words(notes, "Local", 1) == ["--seed_everything=1", "--model.attention=Local"]


def test_a_task_that_is_none_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("which-attention", ["--only=vti"])
    assert "there is no vti" in capsys.readouterr().err
