"""Windows, parts, scaling and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.forecasting.data import SeriesData
from experiments.forecasting.policies import Rows
from experiments.forecasting.table import TableOptions, read_table
from experiments.forecasting.windows import Scaler, borders, naive_error, origins


def ready(path: Path | None = None, **options: Any) -> SeriesData:
    data = SeriesData(None if path is None else str(path), **{"lookback": 24, "horizon": 6, **options})
    data.setup("fit")
    return data


def counted(values: np.ndarray) -> Rows:
    return Rows("", None, values, ~np.isnan(values), np.arange(len(values)))


def save(folder: Path, columns: dict[str, Any]) -> Path:
    count = len(next(iter(columns.values())))
    stamps = pd.date_range("2024-01-01", periods=count, freq="h")
    pd.DataFrame({"time": stamps, **columns}).to_csv(folder / "table.csv", index=False)
    return folder / "table.csv"


@pytest.mark.parametrize(("policy", "count"), [("drop", 106), ("fill", 211)])
def test_f01_windows_that_stay(cases: Path, policy: Any, count: int) -> None:
    table = read_table(str(cases / "nan_gaps.csv"), TableOptions(targets=["load"], missing=policy))
    found = origins(table.rows[0], (0, 240), lookback=24, horizon=6, targets=1)
    assert len(found) == count


def test_f01_dropping_is_reported_and_leaves_finite_windows(cases: Path, report: pytest.LogCaptureFixture) -> None:
    data = ready(cases / "nan_gaps.csv", table=TableOptions(targets=["load"], missing="drop"))
    assert "windows stay, without those that need a missing value" in report.text
    known = data.read().rows[0].known
    for part in ("train", "val", "test"):
        for start in data.windows(part):
            assert known[start - 24 : start].all()
            assert known[start : start + 6, 0].all()


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_f02_too_short_is_said_with_both_numbers(cases: Path, stage: str) -> None:
    data = SeriesData(str(cases / "too_short.csv"), lookback=24, horizon=6)
    with pytest.raises(ValueError, match=r"20 rows, 30 needed \(24 \+ 6, --data\.lookback and --data\.horizon\)"):
        data.setup(stage)


def test_f02_a_part_that_is_too_short_is_named(cases: Path) -> None:
    with pytest.raises(ValueError, match=r"the train part has 24 rows, 30 needed.*\n.*--data\.split"):
        ready(cases / "base_hourly.csv", split=(0.1, None, 0.2))
    with pytest.raises(ValueError, match=r"the val part has 4 rows, 6 needed"):
        ready(cases / "base_hourly.csv", split=(None, 4, 48))


def test_f04_windows_over_a_gap_are_dropped(cases: Path, tmp_path: Path) -> None:
    lines = (cases / "base_hourly.csv").read_text().splitlines(keepends=True)
    (tmp_path / "gap.csv").write_text("".join(lines[:99] + lines[100:]))
    table = read_table(str(tmp_path / "gap.csv"), TableOptions(gaps="drop"))
    assert len(origins(table.rows[0], (0, 240), lookback=24, horizon=6, targets=2)) == 211 - 30


def test_f09_the_scaler_knows_the_training_rows_only(tmp_path: Path) -> None:
    facts = ready(save(tmp_path, {"v": np.arange(100.0)})).facts
    assert facts["mean"] == pytest.approx([34.5])
    assert facts["std"] == pytest.approx([20.2052], abs=5e-5)
    changed = np.arange(100.0)
    changed[80] = 1e6
    other = ready(save(tmp_path, {"v": changed})).facts
    assert (other["mean"], other["std"]) == (facts["mean"], facts["std"])
    assert all(type(value) is float for value in facts["mean"] + facts["std"])


@pytest.mark.parametrize("scaling", ["column", "series", "none"])
def test_f10_a_flat_series_goes_there_and_back(scaling: Any) -> None:
    scaler = Scaler.fit([np.full((70, 1), 42.0)], scaling)
    scaled = scaler.apply(np.full((5, 1), 42.0))
    assert np.isfinite(scaled).all()
    np.testing.assert_allclose(scaler.undo(scaled), 42.0, atol=1e-6)
    if scaling != "none":
        np.testing.assert_array_equal(scaled, 0.0)
        np.testing.assert_allclose(scaler.undo(np.array([[0.5]])), 42.5)


def test_f10_what_rounding_leaves_is_flat_too() -> None:
    values = np.full((70, 1), 0.1)
    assert Scaler.fit([values, values * 3 / 3], "column").std.item() == 1.0


def test_each_column_and_series_has_its_own_scale() -> None:
    generator = np.random.default_rng(0)
    series = [generator.normal(5, 2, (50, 2)), generator.normal(-300, 40, (60, 2))]
    scaler = Scaler.fit(series, "series")
    for number, values in enumerate(series):
        scaled = scaler.apply(values, number)
        np.testing.assert_allclose([scaled.mean(0), scaled.std(0)], [[0, 0], [1, 1]], atol=1e-12)
        np.testing.assert_allclose(scaler.undo(scaled[:, :1], number), values[:, :1])


@pytest.mark.parametrize(("before", "count"), [(0, 65), (300, 89)])
def test_f11_windows_of_a_part(before: int, count: int) -> None:
    """100 rows, with nothing before them and as the last part of a longer series."""
    rows = counted(np.zeros((before + 100, 1)))
    assert len(origins(rows, (before, before + 100), lookback=24, horizon=12, targets=1)) == count


@pytest.mark.parametrize("batch_size", [1, 16, 64, 89])
def test_f11_every_window_is_there_once_whatever_the_batch(tmp_path: Path, batch_size: int) -> None:
    path = save(tmp_path, {"v": np.arange(500.0)})
    data = ready(path, horizon=12, split=(300, 100, 100), batch_size=batch_size)
    first = torch.cat([batch["future"][:, 0, 0] for batch in data.test_dataloader()])
    facts = data.facts
    numbers = first * facts["std"][0] + facts["mean"][0]
    torch.testing.assert_close(numbers, torch.arange(400.0, 489.0), atol=1e-3, rtol=0)


def test_the_published_borders() -> None:
    assert borders(17420, (8640, 2880, 2880)) == {"train": (0, 8640), "val": (8640, 11520), "test": (11520, 14400)}
    assert borders(52696, (0.7, None, 0.2)) == {"train": (0, 36887), "val": (36887, 42157), "test": (42157, 52696)}
    assert borders(700, (None, 48, 48)) == {"train": (0, 604), "val": (604, 652), "test": (652, 700)}
    rows = counted(np.zeros((17420, 1)))
    for horizon, count in ((96, 2785), (720, 2161)):
        assert len(origins(rows, (11520, 14400), lookback=512, horizon=horizon, targets=1)) == count


@pytest.mark.parametrize("split", [(None, None, 0.2), (0.7, -1, 0.2)])
def test_splits_that_cannot_be(split: Any) -> None:
    with pytest.raises(ValueError, match="--data.split"):
        borders(100, split)
    with pytest.raises(ValueError, match="asks for 150 rows, and there are 100"):
        borders(100, (50, 50, 50))


def test_f13_what_is_filled_towards_the_future_is_not_seen(tmp_path: Path) -> None:
    """The last rows of a lookback were missing: what stands there does not depend on what came."""
    batches = []
    for after in (5.0, 1e6):
        values = np.sin(np.arange(200.0))
        values[147:150] = np.nan
        values[150:] = after
        data = ready(save(tmp_path, {"v": values}), split=(100, 50, 50), table=TableOptions(missing="fill"))
        batches.append(data.store.batch([150]))
        last = batches[-1]["past"][0, 0]
        assert (last[-3:] == last[-4]).all()
    assert torch.equal(batches[0]["past"], batches[1]["past"])
    inner = data.store.batch([155])["past"][0, 0]
    assert not torch.equal(inner[16:19], inner[15].expand(3)), "what is known by then is filled in straight lines"


def test_f14_no_window_spans_two_series(cases: Path) -> None:
    table = read_table(str(cases / "two_series.csv"), TableOptions(series_column="series_id"))
    counts = [len(origins(row, (0, len(row.values)), lookback=24, horizon=6, targets=1)) for row in table.rows]
    assert counts == [11, 6]


def test_f14_batches_have_one_sign(cases: Path) -> None:
    data = ready(
        cases / "two_series.csv", lookback=5, horizon=2, scaling="none", table=TableOptions(series_column="series_id")
    )
    seen = 0
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for batch in loader:
            whole = torch.cat([batch["past"], batch["future"]], dim=-1)
            assert ((whole > 0).all(-1) | (whole < 0).all(-1)).all()
            seen += len(whole)
    assert seen == sum(len(data.windows(part)) for part in ("train", "val", "test"))


def test_a_batch_is_what_slicing_gives(cases: Path) -> None:
    """Rows, calendar and scale of windows, cut by hand."""
    data = ready(cases / "base_hourly.csv", table=TableOptions(targets=["load"]))
    table, facts = data.read(), data.facts
    values = (table.rows[0].values - facts["mean"]) / facts["std"]
    numbers = [30, 24, 100]
    batch = data.store.batch(numbers)
    for place, start in enumerate(numbers):
        np.testing.assert_allclose(batch["past"][place].T, values[start - 24 : start], atol=1e-6)
        np.testing.assert_allclose(batch["future"][place, 0], values[start : start + 6, 0], atol=1e-6)
        hours = table.rows[0].times[start : start + 6].hour
        np.testing.assert_allclose(batch["calendar"][place, :, 0], np.sin(2 * np.pi * hours / 24), atol=1e-6)
    assert batch["known"].all()
    torch.testing.assert_close(batch["std"], torch.full((3, 1), facts["std"][0]))


def test_series_that_are_too_short_are_left_out_and_counted(tmp_path: Path, report: pytest.LogCaptureFixture) -> None:
    rows = [f"{name},{stamp},1.{n}" for name, count in (("A", 60), ("B", 20))
            for n, stamp in enumerate(pd.date_range("2024-01-01", periods=count, freq="D"))]  # fmt: skip
    (tmp_path / "long.csv").write_text("id,date,v\n" + "\n".join(rows))
    data = ready(tmp_path / "long.csv", horizon=3, table=TableOptions(series_column="id"))
    assert "1 of 2 series are left out" in report.text
    assert all(len(data.windows(part)) for part in ("train", "val", "test"))


def test_a_second_file_continues_the_series(tmp_path: Path) -> None:
    """As in the M4 competition: one test window a series, of the second file."""
    (tmp_path / "train.csv").write_text("id,a,b,c,d,e,f,g\nH1,1,2,3,4,5,6,7\nH2,8,9,10,11,12,13,\n")
    (tmp_path / "test.csv").write_text("id,x,y\nH1,70,80\nH2,90,91\n")
    data = SeriesData(
        str(tmp_path / "train.csv"), str(tmp_path / "test.csv"), lookback=2, horizon=2, split=(None, 2, 2),
        scaling="none", table=TableOptions(series_in_rows=True),
    )  # fmt: skip
    data.setup("test")
    (batch,) = data.test_dataloader()
    assert batch["past"][:, 0].tolist() == [[6, 7], [12, 13]]
    assert batch["future"][:, 0].tolist() == [[70, 80], [90, 91]]
    (tmp_path / "test.csv").write_text("id,x,y\nH1,70,80\nH3,90,91\n")
    data = SeriesData(str(tmp_path / "train.csv"), str(tmp_path / "test.csv"), table=TableOptions(series_in_rows=True))
    with pytest.raises(ValueError, match="does not continue train.csv: series 'H2' is in one of them only"):
        data.setup("test")


def test_the_divisor_of_mase() -> None:
    assert naive_error(np.array([[1.0], [2.0], [4.0], [8.0]]), 2).tolist() == [(3 + 6) / 2]
    assert np.isnan(naive_error(np.ones((9, 1)), 2)).all(), "a flat series has none"


def test_the_embedded_series() -> None:
    data = SeriesData(lookback=104, horizon=26, table=TableOptions(missing="fill"))
    data.setup("fit")
    (rows,) = data.read().rows
    assert (len(rows.values), int((~rows.known).sum()), str(data.read().step)) == (2284, 59, "7 days")
    assert (data.facts["season"], data.facts["calendar"]) == (52, ["yearday"])


def test_a_season_longer_than_the_lookback(cases: Path, report: pytest.LogCaptureFixture) -> None:
    assert ready(cases / "base_hourly.csv", lookback=12).facts["season"] == 1
    assert "--data.season" in report.text
    with pytest.raises(ValueError, match=r"--data\.season is 30; expected 1 to --data\.lookback=24"):
        ready(cases / "base_hourly.csv", season=30)


def test_every_nth_training_window(cases: Path) -> None:
    data = ready(cases / "base_hourly.csv", train_stride=4, batch_size=1000)
    (batch,) = data.train_dataloader()
    assert len(batch["past"]) == -(-len(data.windows("train")) // 4)


def test_a_file_of_the_folder_of_data_sets(cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNZOO_DATA", str(cases.parent))
    assert ready(Path("base_hourly.csv")).read().title == "base_hourly.csv"


def test_a_value_that_scaling_makes_too_large_is_named(tmp_path: Path) -> None:
    values = np.sin(np.arange(100)) * 1e-3
    values[95] = 1e14
    with pytest.raises(ValueError, match=r"line 97, column 'load': 1e\+14 is more than 1e\+15 deviations"):
        ready(save(tmp_path, {"load": values})).store  # noqa: B018


def test_rows_that_go_on_in_another_zone_are_refused(tmp_path: Path) -> None:
    first, rest = tmp_path / "first.csv", tmp_path / "rest.csv"
    for path, start, zone in ((first, "2024-01-01", None), (rest, "2024-01-03", "UTC")):
        pd.DataFrame({"time": pd.date_range(start, periods=48, freq="h", tz=zone), "v": 1.0}).to_csv(path, index=False)
    with pytest.raises(ValueError, match="the zones of their stamps are UTC and none"):
        ready(first, test_path=str(rest))
