"""`make compare`: what belongs together, and figures by hand and by tables of Student's t."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from made_runs import make_run

from experiments.comparing import page
from experiments.comparing.compare import MAJORITY, MARK, cells, notes, rows, table
from experiments.comparing.grouping import Group, groups
from experiments.comparing.judging import difference, half_width
from experiments.comparing.reading import find

T_975_2 = 4.302653
"""Student's t with two degrees of freedom, 97.5 %, from a table."""


def only_group(root: Path) -> Group:
    (group,) = groups(find(str(root)))
    return group


def row(group: Group, label: str) -> dict[str, str]:
    from experiments.comparing.compare import HEADS

    (variant,) = [variant for variant in group.variants if variant.label == label]
    return dict(zip(HEADS, (cell.text for cell in cells(variant, group)), strict=True))


def test_the_interval_is_that_of_student() -> None:
    assert half_width([0.90, 0.92, 0.97]) == pytest.approx(T_975_2 * statistics.stdev([0.90, 0.92, 0.97]) / 3**0.5)
    assert half_width([0.9]) is None


def test_a_difference_is_paired_by_seed() -> None:
    """Differences 0.1, 0.2, 0.3: t = 0.2 / (0.1 / sqrt 3) = 3.4641, and p = 1 - t / sqrt(t^2 + 2) for two degrees."""
    found = difference({0: 0.6, 1: 0.4, 2: 0.9, 7: 5.0}, {2: 0.6, 1: 0.2, 0: 0.5})
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.seeds == 3
    t = 0.2 / (0.1 / 3**0.5)
    assert found.p == pytest.approx(1 - t / (t * t + 2) ** 0.5)


def test_what_cannot_be_judged_has_no_p() -> None:
    assert difference({0: 1.0}, {1: 1.0}) is None
    one, same = difference({0: 1.0}, {0: 0.5}), difference({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5})
    assert one is not None
    assert same is not None
    assert one.p is None
    assert same.p is None
    assert same.mean == 0.5


def test_a_row_has_mean_interval_difference_and_costs(tmp_path: Path) -> None:
    for seed, (softmax, local) in enumerate([(0.5, 0.6), (0.2, 0.4), (0.6, 0.9)]):
        make_run(tmp_path, "Softmax", softmax, seed=seed)
        make_run(tmp_path, "Local", local, seed=seed, attention={"window": 5})
    group = only_group(tmp_path)
    assert [variant.label for variant in group.variants] == ["Local window=5", "Softmax"]
    found = row(group, "Local window=5")
    width = T_975_2 * statistics.stdev([0.6, 0.4, 0.9]) / 3**0.5
    assert found["test/primary"] == f"{(0.6 + 0.4 + 0.9) / 3:.4f} ±{width:.4f}"
    assert found["difference"] == "+0.2000"
    assert found["p"] == "0.074"
    assert (found["seeds"], found["parameters"], found["MFLOPs"], found["pairs"]) == ("3", "119,178", "4", "30%")
    # Runs 2, 4 and 6.
    assert (found["ms a step"], found["MiB"], found["epochs"]) == ("24.0", "640", "2")
    assert MARK not in found["model"]
    assert row(group, "Softmax")["model"] == f"Softmax {MARK}"
    assert row(group, "Softmax")["difference"] == "baseline"


def test_the_majority_class_is_a_row_at_its_place(tmp_path: Path) -> None:
    for name, score in (("Softmax", 0.9), ("Local", 0.2), ("Linear", None)):
        make_run(tmp_path, name, score, results={"metrics": {"test/primary": score, "test/majority": 0.25}})
    group = only_group(tmp_path)
    found = {row[0].value: row for row in rows(group)}
    assert list(found) == ["Softmax", MAJORITY, "Local", "Linear"]
    assert found[MAJORITY][2] == ("0.2500", 0.25)
    first = [str(cell) for cell in table(group).columns[0].cells]
    assert first == [f"Softmax {MARK}", MAJORITY, "Local", f"Linear {MARK}"]
    page.write([group], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count(f'<tr data-label="{MAJORITY}">') == 1


def test_only_runs_of_one_setting_are_compared(tmp_path: Path) -> None:
    """Another number of epochs is another group, and its title says so; another seed, name or root is not."""
    make_run(tmp_path, seed=0, name="a")
    make_run(tmp_path, seed=1, name="b")
    make_run(tmp_path, seed=0, trainer={"max_epochs": 9})
    make_run(tmp_path, seed=0, preset="forecaster")
    found = groups(find(str(tmp_path)))
    assert [group.title for group in found] == ["forecaster", "vit, trainer.max_epochs=2", "vit, trainer.max_epochs=9"]
    assert [sum(len(variant.runs) for variant in group.variants) for group in found] == [1, 2, 1]


def test_of_two_runs_with_one_seed_the_newer_counts(tmp_path: Path) -> None:
    make_run(tmp_path, score=0.1)
    make_run(tmp_path, score=0.7)
    group = only_group(tmp_path)
    assert group.variants[0].scores == {0: 0.7}
    assert notes(group) == ["1 left out, for a newer one has the same options and seed: vit/0001-softmax-seed0"]


def test_models_that_differ_in_an_option_are_two_rows(tmp_path: Path) -> None:
    """The plain Softmax is what the others are compared with."""
    make_run(tmp_path, "Softmax", 0.5)
    make_run(tmp_path, "Softmax", 0.6, model={"head_diversity": 0.03})
    make_run(tmp_path, "Additive", 0.4, model={"hidden_dim": 131})
    group = only_group(tmp_path)
    labels = [variant.label for variant in group.variants]
    assert labels == ["Softmax head_diversity=0.03", "Softmax", "Additive hidden_dim=131"]
    assert group.baseline is group.variants[1]
    assert row(group, "Softmax head_diversity=0.03")["difference"] == "+0.1000"


def test_each_is_compared_with_the_softmax_that_differs_in_the_mechanism_alone(tmp_path: Path) -> None:
    """The preset has learned positions and pools the mean; a short name makes no baseline, nor does a term at 0.3."""
    learned = {"position": "learned", "pool": "mean", "head_diversity": 0.0}
    make_run(tmp_path, "Softmax", 0.5, model={**learned, "position": "rope"})
    make_run(tmp_path, "Softmax", 0.6, model=learned)
    make_run(tmp_path, "Softmax", 0.8, model={**learned, "head_diversity": 0.3})
    make_run(tmp_path, "Local", 0.65, model=learned)
    make_run(tmp_path, "Local", 0.75, model={**learned, "position": "rope"})
    make_run(tmp_path, "Local", 0.7, model={**learned, "position": "none"})
    group = only_group(tmp_path)
    found = {variant.label: row(group, variant.label)["difference"] for variant in group.variants}
    assert found == {
        "Softmax head_diversity=0.3 position=learned": "+0.2000",
        "Local head_diversity=0.0 position=rope": "+0.2500",
        "Local head_diversity=0.0 position=none": "+0.1000",
        "Local head_diversity=0.0 position=learned": "+0.0500",
        "Softmax head_diversity=0.0 position=learned": "baseline",
        "Softmax head_diversity=0.0 position=rope": "-0.1000",
    }


def test_a_softmax_with_options_of_its_own_is_no_baseline_beside_a_plain_one(tmp_path: Path) -> None:
    """Neither by a better score nor by more seeds."""
    for seed in range(2):
        make_run(tmp_path, "Softmax", 0.9, seed=seed, attention={"softcap": 30.0})
    make_run(tmp_path, "Softmax", 0.6)
    make_run(tmp_path, "Local", 0.7)
    group = only_group(tmp_path)
    found = {variant.label: row(group, variant.label)["difference"] for variant in group.variants}
    assert found == {"Softmax softcap=30.0": "+0.3000", "Local": "+0.1000", "Softmax": "baseline"}


def test_a_title_has_as_few_options_as_tell_its_group_from_the_others(tmp_path: Path) -> None:
    """Many options of one run alone do not hide what tells the other two apart."""
    many = {f"option_{number}": number for number in range(9)}
    make_run(tmp_path, trainer={"max_steps": 21})
    make_run(tmp_path, trainer={"max_steps": 42})
    make_run(tmp_path, trainer={"max_steps": 42, **many})
    titles = [group.title for group in groups(find(str(tmp_path)))]
    assert titles == [
        "vit, trainer.max_steps=21",
        "vit, trainer.max_steps=42, trainer.option_0=not set",
        "vit, trainer.option_0=0",
    ]


def test_runs_without_a_score_or_an_end_are_named(tmp_path: Path) -> None:
    make_run(tmp_path, "Local", None)
    make_run(tmp_path, "Softmax", None, status="stopped")
    make_run(tmp_path, "Softmax", None, status="failed")
    group = only_group(tmp_path)
    assert row(group, "Local")["test/primary"] == ""
    assert notes(group) == [
        "1 failed: vit/0003-softmax-seed0",
        "1 stopped: vit/0002-softmax-seed0",
        "1 without a score (no number), which no mean contains: vit/0001-local-seed0",
        "No run with Softmax to compare with.",
    ]


def test_a_seed_without_a_score_is_not_counted_and_named(tmp_path: Path) -> None:
    """A mean of those that went well would look like one of all."""
    for seed, score in enumerate([0.6, None, 0.4]):
        make_run(tmp_path, score=score, seed=seed)
    group = only_group(tmp_path)
    found = row(group, "Softmax")
    assert (found["seeds"], found["test/primary"][:6]) == ("2 of 3", "0.5000")
    assert notes(group) == ["1 without a score (no number), which no mean contains: vit/0002-softmax-seed1"]


def test_the_work_of_a_model_is_known_where_one_of_its_runs_has_measured_it(tmp_path: Path) -> None:
    """A run that is stopped after its test has no costs."""
    first = make_run(tmp_path) / "results.json"
    content = json.loads(first.read_text())
    del content["flops_per_sample"]
    first.write_text(json.dumps(content))
    make_run(tmp_path, seed=1)
    assert row(only_group(tmp_path), "Softmax")["MFLOPs"] == "4"


def test_a_softmax_with_options_of_its_own_is_compared_with_the_plain_one_beside_it(tmp_path: Path) -> None:
    learned, rope = ({"position": position} for position in ("learned", "rope"))
    make_run(tmp_path, "Softmax", 0.5, model=learned)
    make_run(tmp_path, "Softmax", 0.7, model=rope)
    make_run(tmp_path, "Softmax", 0.8, model=rope, attention={"softcap": 30.0})
    group = only_group(tmp_path)
    found = {variant.label: row(group, variant.label)["difference"] for variant in group.variants}
    assert found == {
        "Softmax softcap=30.0 position=rope": "+0.1000",
        "Softmax position=rope": "+0.2000",
        "Softmax position=learned": "baseline",
    }
