"""What long figures have measured stands in git, and a job goes on from it where `runs/` is empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as commands
from benchmarks import records, which_attention
from benchmarks.steps import step_times

RECORDS = Path(records.__file__).parent / "records"


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        file = folder / name / "results.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))


def test_what_was_measured_elsewhere_is_there_again(tmp_path: Path) -> None:
    here, there, record = tmp_path / "here", tmp_path / "there", tmp_path / "a" / "figure.jsonl"
    write(here, b={"status": "finished", "n": 1}, a={"n": 2}, cut={"status": "interrupted"}, bad={"status": "failed"})
    records.keep(record, here, ["*/results.json"])
    assert [json.loads(line)["file"] for line in record.read_text().splitlines()] == [
        "a/results.json",
        "b/results.json",
    ]
    write(there, b={"status": "finished", "n": 3}, c={"n": 4})
    assert records.restore(record, there) == 1
    assert json.loads((there / "a" / "results.json").read_text()) == {"n": 2}
    assert json.loads((there / "b" / "results.json").read_text())["n"] == 3
    assert records.restore(record, there) == 0
    records.keep(record, there, ["*/results.json"])  # nothing that another machine measured goes away
    assert [json.loads(line)["content"].get("n") for line in record.read_text().splitlines()] == [2, 3, 4]
    records.keep(tmp_path / "none.jsonl", there, [])
    assert not (tmp_path / "none.jsonl").exists()


def test_a_figure_takes_over_its_record_and_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def measure(folder: Path, arguments: list[str]) -> int:
        for name in ("a", "b"):
            if not (folder / f"{name}.json").is_file():
                (folder / f"{name}.json").write_text('{"by": "this"}')
        return 0

    record = tmp_path / "benchmarks" / "records" / "ett.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text('{"file": "a.json", "content": {"by": "another"}}\n')
    monkeypatch.setitem(commands.FIGURES, "ett", commands.Figure(measure, "", ("*.json",)))
    assert commands.main("ett", []) == 0
    assert "taken over from benchmarks/records/ett.jsonl: 1 files" in capsys.readouterr().out
    assert [json.loads(line)["content"]["by"] for line in record.read_text().splitlines()] == ["another", "this"]


def test_steps_are_not_timed_beside_runs_that_lie_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Local cannot be timed beside the others"):
        step_times({"Local": tmp_path / "best.ckpt"}, tmp_path / "steps.json")


@pytest.mark.parametrize("record", sorted(RECORDS.glob("*.jsonl")), ids=lambda record: record.stem)
def test_a_record_in_git_is_of_a_figure_that_reads_it(record: Path, tmp_path: Path) -> None:
    asked = commands.FIGURES[record.stem]
    count = records.restore(record, tmp_path)
    assert count == len(record.read_text().splitlines())
    assert count == len({file for pattern in asked.recorded for file in tmp_path.glob(pattern)})


def test_the_tables_of_the_study_need_nothing_but_its_record(tmp_path: Path) -> None:
    results = {"mechanism": "Softmax", "seed": 0, "status": "finished", "metrics": {"test/primary": 0.5}}
    results |= {"visible_pairs": 1.0, "parameters": 10, "steps": 2, "commit": "abc"}
    lost = results | {"mechanism": "Local", "metrics": {"test/primary": float("nan")}}
    write(tmp_path / "steps" / "vit", a=results, b=lost)
    (row,) = which_attention.rows_of("vit", tmp_path)["steps"]
    assert (row["mechanism"], row["score"], row["commits"]) == ("Softmax", 0.5, ["abc"])
