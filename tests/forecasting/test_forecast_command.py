"""The command that forecasts: stamps, columns by name, nothing of the future, scores."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from quick_forecaster import QUICK

from experiments.__main__ import main


def forecast(csv: Path, checkpoint: Path, out: Path, *options: str) -> pd.DataFrame:
    assert main(["forecast", f"--csv={csv}", f"--ckpt={checkpoint}", f"--out={out}", *options]) == 0
    return pd.read_csv(out)


def refused(csv: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["forecast", f"--csv={csv}", f"--ckpt={checkpoint}", *options]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 3
    return error


def test_a_forecast_has_stamps_quantiles_and_a_picture(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    found = forecast(cases / "base_hourly.csv", checkpoint, tmp_path / "next.csv")
    assert list(found) == ["timestamp", "load", "load_q0.1", "load_q0.5", "load_q0.9"]
    assert found["timestamp"].tolist() == [f"2024-01-11 0{hour}:00:00" for hour in range(6)]
    assert (found["load_q0.1"] <= found["load_q0.9"]).all()
    with Image.open(tmp_path / "next.png") as picture:
        assert picture.size[0] > 500


def test_the_table_is_never_written_over(
    checkpoint: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mine.csv"
    content = (cases / "base_hourly.csv").read_bytes()
    table.write_bytes(content)
    assert "would be lost" in refused(table, checkpoint, capsys, f"--out={table}")
    assert table.read_bytes() == content


def test_a_place_that_cannot_be_written_is_refused_by_its_option(
    checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--csv={cases / 'base_hourly.csv'}", f"--ckpt={checkpoint}", "--out=/proc/next.csv"]
    assert main(["forecast", *words]) == 1
    error = capsys.readouterr().err
    assert "/proc/next.csv" in error and "--out" in error


def test_the_forecast_is_near_to_what_came(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    found = forecast(cases / "base_hourly.csv", checkpoint, tmp_path / "past.csv", "--start=2024-01-10 12:00")
    came = pd.read_csv(cases / "base_hourly.csv").set_index("timestamp").loc[found["timestamp"], "load"]
    assert np.abs(found["load"].to_numpy() - came.to_numpy()).max() < 2


@pytest.mark.filterwarnings("error")
def test_f07_stamps_over_the_change_of_the_clock(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    options = ["--time_zone=Europe/Berlin", "--start=2024-03-31"]
    found = forecast(cases / "dst_spring_local.csv", checkpoint, tmp_path / "spring.csv", *options)
    assert [stamp[11:16] for stamp in found["timestamp"]] == ["00:00", "01:00", "03:00", "04:00", "05:00", "06:00"]
    instants = pd.to_datetime(found["timestamp"], utc=True)
    assert (instants.diff().dropna() == pd.Timedelta(hours=1)).all()


def test_f08_without_a_zone_the_gap_and_the_option_are_named(
    checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(cases / "dst_spring_local.csv", checkpoint, capsys)
    assert "2024-03-31 02:00:00" in error
    assert " --time_zone=" in error
    assert "--data.table" not in error


def test_f13_the_forecast_does_not_see_what_came(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(cases / "base_hourly.csv")
    start = frame["timestamp"][200]
    right = forecast(cases / "base_hourly.csv", checkpoint, tmp_path / "right.csv", f"--start={start}")
    frame.loc[200:, ["load", "temp"]] = 1e6
    frame.to_csv(tmp_path / "huge.csv", index=False)
    found = forecast(tmp_path / "huge.csv", checkpoint, tmp_path / "found.csv", f"--start={start}")
    pd.testing.assert_frame_equal(found, right, check_exact=True)


def test_f13_a_gap_before_the_start_is_not_filled_from_behind_it(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    found = []
    for value in (50.0, 1e6):
        frame = pd.read_csv(cases / "base_hourly.csv")
        frame.loc[197:199, "load"] = np.nan
        frame.loc[200:, "load"] = value
        frame.to_csv(tmp_path / "gap.csv", index=False)
        options = ["--start=2024-01-09 08:00", "--missing=fill"]
        found.append(forecast(tmp_path / "gap.csv", checkpoint, tmp_path / "out.csv", *options))
    pd.testing.assert_frame_equal(found[0], found[1], check_exact=True)


def test_f15_columns_in_another_order_give_the_same_forecast(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    one = forecast(cases / "base_hourly.csv", checkpoint, tmp_path / "one.csv")
    other = forecast(cases / "column_order.csv", checkpoint, tmp_path / "other.csv")
    pd.testing.assert_frame_equal(one, other, rtol=1e-6)


def test_f15_several_targets_keep_their_names(cases: Path, tmp_path: Path) -> None:
    table = [f"--data.path={cases / 'base_hourly.csv'}", "--trainer.max_epochs=1"]
    assert main(["fit", "--config=forecaster-csv", f"--run.root={tmp_path}", *QUICK, *table]) == 0
    (checkpoint,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    one = forecast(cases / "base_hourly.csv", checkpoint, tmp_path / "one.csv")
    other = forecast(cases / "column_order.csv", checkpoint, tmp_path / "other.csv")
    pd.testing.assert_frame_equal(one, other, rtol=1e-6)
    assert (one["load"] > 50).all() and (one["temp"] < 50).all()


def test_f16_a_missing_column_is_named(checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(cases / "missing_target.csv", checkpoint, capsys)
    assert "column 'load' was not found; found: timestamp, temp, demand" in error


def test_a_warning_names_the_option_of_this_command(
    checkpoint: Path, tmp_path: Path, report: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counted.csv").write_text("load,temp\n" + "1,2\n2,3\n" * 20)
    refused(tmp_path / "counted.csv", checkpoint, capsys)
    assert "--time_column names it" in report.text
    assert "--data.table" not in report.text


def test_an_option_of_training_alone_is_called_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.csv").write_text("2024-01-01,1\n2024-01-02,2\n")
    assert "--data.table.header=false in training" in refused(tmp_path / "bare.csv", checkpoint, capsys)


def test_f02_too_few_rows_for_the_lookback(checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "20 rows before the first to be forecast, 24 needed" in refused(cases / "too_short.csv", checkpoint, capsys)


def test_f01_what_is_missing_in_the_lookback_is_named(
    checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(cases / "nan_gaps.csv", checkpoint, capsys, "--missing=drop", "--start=2024-01-09 12:00")
    assert re.search(r"'load' is missing in the last 24 rows, first in line 202\. +--missing=fill", error)


def test_another_step_is_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamps = pd.date_range("2024-01-01", periods=40, freq="15min")
    pd.DataFrame({"timestamp": stamps, "load": 1.0, "temp": 2.0}).to_csv(tmp_path / "quick.csv", index=False)
    error = refused(tmp_path / "quick.csv", checkpoint, capsys)
    assert "the step is 15 minutes, and the model was trained on 1 hour" in error


@pytest.mark.parametrize(("start", "message"), [("2024-02-01", "no row at 2024-02-01"), ("soon", "a moment such as")])
def test_a_start_that_is_no_row(
    start: str, message: str, checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(cases / "base_hourly.csv", checkpoint, capsys, f"--start={start}")


def test_backtest_scores_the_test_part_by_step(
    checkpoint: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same figures as the test of the run, for it is the same table."""
    forecast(cases / "base_hourly.csv", checkpoint, tmp_path / "next.csv", "--backtest")
    printed = capsys.readouterr().out
    assert "43 windows of the test part" in printed
    steps = pd.read_csv(tmp_path / "next-scores.csv")
    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    row = next(line for line in printed.splitlines() if line.split()[:1] == ["model"]).split()
    assert float(row[3]) == pytest.approx(steps["model_mae_raw"].mean(), abs=1e-4)
    assert {name.split("_", 1)[0] for name in steps.columns} == {"step", "model", "ridge", "seasonal", "last"}


def test_the_newest_run_is_taken_and_the_forecast_lies_in_it(
    checkpoint: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint.parents[3], tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["forecast", f"--csv={cases / 'base_hourly.csv'}"]) == 0
    names = {path.name for path in tmp_path.glob("runs/*/*/forecasts/*")}
    assert names == {"base_hourly.csv", "base_hourly.png"}


def test_another_ending_is_refused(checkpoint: Path, cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "forecasts are written as .csv" in refused(cases / "base_hourly.csv", checkpoint, capsys, "--out=x.txt")


def test_f14_each_series_is_forecast_by_itself(cases: Path, tmp_path: Path) -> None:
    """Long form, with a scale for each series: the forecasts keep the sign of their series."""
    options = [
        f"--data.path={cases / 'two_series.csv'}", "--data.table.series_column=series_id", "--data.scaling=series",
        "--data.horizon=3", "--data.lookback=5", "--data.season=1", "--model.patch_size=5", "--trainer.max_epochs=1",
    ]  # fmt: skip
    assert main(["fit", "--config=forecaster-csv", f"--run.root={tmp_path}", *QUICK, *options]) == 0
    (checkpoint,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    found = forecast(cases / "two_series.csv", checkpoint, tmp_path / "out.csv").set_index("series_id")
    assert found.index.tolist() == ["A"] * 3 + ["B"] * 3
    assert (found.loc["A", "load"] > 900).all() and (found.loc["B", "load"] < -900).all()
    assert found.loc["A", "timestamp"].iloc[0] == "2024-01-02 16:00:00"
    assert found.loc["B", "timestamp"].iloc[0] == "2024-01-02 11:00:00"


def test_series_in_rows_are_forecast_by_number(tmp_path: Path) -> None:
    rows = [f"H{k}," + ",".join(str(k * 10 + n % 4) for n in range(60)) for k in range(1, 4)]
    (tmp_path / "rows.csv").write_text("id," + ",".join(f"V{n}" for n in range(60)) + "\n" + "\n".join(rows))
    options = [
        f"--data.path={tmp_path / 'rows.csv'}", "--data.table.series_in_rows=true", "--data.scaling=series",
        "--data.lookback=12", "--data.horizon=4", "--data.season=4", "--trainer.max_epochs=1",
    ]  # fmt: skip
    assert main(["fit", "--config=forecaster-csv", f"--run.root={tmp_path}", *QUICK, *options]) == 0
    (checkpoint,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    found = forecast(tmp_path / "rows.csv", checkpoint, tmp_path / "out.csv", "--backtest=true")
    assert found["row"].tolist() == [60, 61, 62, 63] * 3
    right = [k * 10 + n for k in range(1, 4) for n in range(4)]
    assert np.abs(found["value"] - right).max() < 1


def test_the_autumn_hour_comes_twice(checkpoint: Path, tmp_path: Path) -> None:
    stamps = pd.date_range("2024-10-26 01:00", periods=24, freq="h", tz="Europe/Berlin").tz_localize(None)
    frame = pd.DataFrame({"timestamp": stamps, "load": 100 + 20 * np.sin(np.arange(24) / 4), "temp": 9.0})
    frame.to_csv(tmp_path / "autumn.csv", index=False)
    found = forecast(tmp_path / "autumn.csv", checkpoint, tmp_path / "out.csv", "--time_zone=Europe/Berlin")
    assert [stamp[11:13] for stamp in found["timestamp"]] == ["01", "02", "02", "03", "04", "05"]
