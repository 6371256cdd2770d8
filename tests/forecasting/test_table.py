"""Tables in every form, and what is said where one cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.forecasting.table import Table, TableOptions, read_table


def read(path: Path, **options: Any) -> Table:
    return read_table(str(path), TableOptions(**options))


def column(table: Table, name: str) -> np.ndarray:
    return table.rows[0].values[:, [*table.targets, *table.inputs].index(name)]


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def hours(count: int, value: str = "1") -> list[str]:
    return [f"{stamp},{value}" for stamp in pd.date_range("2024-01-01", periods=count, freq="h")]


def test_f01_stop_names_columns_counts_and_first_lines(cases: Path) -> None:
    with pytest.raises(
        ValueError, match=r"nan_gaps\.csv: values are missing: load 7 \(first in line 52\), temp 1 "
    ) as e:
        read(cases / "nan_gaps.csv", targets=["load"])
    assert "temp 1 (first in line 12)" in str(e.value)
    assert "--data.table.missing=drop" in str(e.value)
    assert len(str(e.value).splitlines()) <= 3


def test_f01_fill_draws_straight_lines_and_says_so(cases: Path, report: pytest.LogCaptureFixture) -> None:
    table = read(cases / "nan_gaps.csv", targets=["load"], missing="fill")
    load = dict(zip(table.rows[0].lines.tolist(), column(table, "load"), strict=True))
    expected = {52: 113.4998, 53: 116.4756, 54: 119.4514, 55: 122.4272, 122: 102.962, 123: 108.048, 202: 129.521}
    for line, value in expected.items():
        assert load[line] == pytest.approx(value, abs=5e-5)
    assert column(table, "temp")[10] == pytest.approx(11.35)
    assert "load 7" in report.text and "missing=fill" in report.text
    assert (~table.rows[0].known).sum() == 8


def test_f03_stop_counts_stamps_and_extra_rows(cases: Path) -> None:
    found = r"3 time stamps occur more than once \(4 extra rows\), first 2024-01-02 06:00:00"
    with pytest.raises(ValueError, match=found) as caught:
        read(cases / "duplicate_timestamps.csv")
    assert "--data.table.duplicates" in str(caught.value)


def test_f03_first_equals_the_clean_file(cases: Path) -> None:
    table, clean = read(cases / "duplicate_timestamps.csv", duplicates="first"), read(cases / "base_hourly.csv")
    np.testing.assert_array_equal(table.rows[0].values, clean.rows[0].values)
    assert table.rows[0].times.equals(clean.rows[0].times)


def test_f03_mean_of_the_double_ones(cases: Path) -> None:
    table = read(cases / "duplicate_timestamps.csv", duplicates="mean")
    load = pd.Series(column(table, "load"), table.rows[0].times)
    assert load["2024-01-03 12:00"] == pytest.approx(130.345)
    assert load["2024-01-04 18:00"] == pytest.approx(84.832)
    assert len(load) == 240


def test_f03_last_takes_the_last(tmp_path: Path) -> None:
    lines = hours(8)
    path = write(tmp_path, "time,v\n" + "\n".join([*lines[:4], lines[3].replace(",1", ",5"), *lines[4:]]) + "\n")
    assert read(path, duplicates="last").rows[0].values[3, 0] == 5


@pytest.fixture
def with_gap(cases: Path, tmp_path: Path) -> Path:
    """The clean file without its line 100."""
    lines = (cases / "base_hourly.csv").read_text().splitlines(keepends=True)
    return write(tmp_path, "".join(lines[:99] + lines[100:]), "gap.csv")


def test_f04_a_gap_is_named_with_the_step(with_gap: Path) -> None:
    found = r"the step is 1 hour and there is 1 gap, 1 row is missing: first 2024-01-05 02:00:00.*before line 100"
    with pytest.raises(ValueError, match=found) as caught:
        read(with_gap)
    assert "--data.table.gaps=fill" in str(caught.value)


def test_f04_gaps_are_counted(tmp_path: Path) -> None:
    lines = hours(12)
    path = write(tmp_path, "\n".join(["time,v", *lines[:3], *lines[4:7], *lines[9:]]) + "\n")
    with pytest.raises(ValueError, match="and there are 2 gaps, 3 rows are missing"):
        read(path)


def test_f04_policies_of_a_gap(with_gap: Path, cases: Path) -> None:
    clean = column(read(cases / "base_hourly.csv"), "load")
    filled = column(read(with_gap, gaps="fill"), "load")
    assert len(filled) == 240
    assert filled[98] == pytest.approx((clean[97] + clean[99]) / 2)
    np.testing.assert_array_equal(np.delete(filled, 98), np.delete(clean, 98))
    dropped = column(read(with_gap, gaps="drop"), "load")
    assert np.flatnonzero(np.isnan(dropped)).tolist() == [98]
    assert len(column(read(with_gap, gaps="keep"), "load")) == 239


def test_f05_with_the_format_forty_days_in_a_row(cases: Path) -> None:
    days = pd.date_range("2024-02-01", "2024-03-11")
    table = read(cases / "day_first_dates.csv", date_format="%d/%m/%Y")
    assert table.rows[0].times.equals(days.as_unit(table.rows[0].times.unit))
    assert str(table.step) == "1 day"


def test_f05_without_it_one_reading_that_fits_all_rows(cases: Path) -> None:
    times = read(cases / "day_first_dates.csv").rows[0].times
    assert (times[0], times[-1], len(times)) == (pd.Timestamp("2024-02-01"), pd.Timestamp("2024-03-11"), 40)


def test_f05_two_readings_in_one_file_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "date,v\n13/02/2024,1\n02/14/2024,2\n03/01/2024,3\n")
    with pytest.raises(ValueError, match=r"'13/02/2024' in line 2 .* '02/14/2024' in line 3") as caught:
        read(path)
    assert "--data.table.date_format" in str(caught.value)


def test_f05_what_may_be_either_is_no_guess(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the day or the month first.*--data\.table\.date_format"):
        read(write(tmp_path, "date,v\n01/02/2024,1\n02/02/2024,2\n"))


def test_f05_a_form_that_does_not_hold_is_named_with_its_line(cases: Path) -> None:
    with pytest.raises(ValueError, match=r"line 14.*'13/02/2024' is no stamp of the form '%m/%d/%Y'"):
        read(cases / "day_first_dates.csv", date_format="%m/%d/%Y")


def test_f06_with_the_options_equal_to_the_clean_rows(cases: Path) -> None:
    options = {"separator": ";", "decimal": ",", "date_format": "%d.%m.%Y %H:%M"}
    table, clean = read(cases / "semicolon_decimal_comma.csv", **options), read(cases / "base_hourly.csv")
    np.testing.assert_array_equal(table.rows[0].values, clean.rows[0].values[:72])
    assert table.rows[0].times.equals(clean.rows[0].times[:72])


def test_f06_without_them_the_option_is_named(cases: Path) -> None:
    path = cases / "semicolon_decimal_comma.csv"
    with pytest.raises(
        ValueError, match=r"(?s)semicolon_decimal_comma\.csv, line 2.*--data\.table\.separator"
    ) as caught:
        read(path)
    assert "--data.table.decimal" in str(caught.value)
    with pytest.raises(ValueError, match=r"(?s)line 2, column 'load': '100,000'.*--data\.table\.decimal=','"):
        read(path, separator=";")


def test_f06_one_column_with_another_sign_in_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one column, 'time;v'.*--data\.table\.separator=';'"):
        read(write(tmp_path, "time;v\n2024-01-01;1\n2024-01-02;2\n"))


def test_a_thousands_sign_is_no_decimal_sign(tmp_path: Path) -> None:
    path = write(tmp_path, "time;v\n2024-01-01;1.234\n2024-01-02;2,5\n")
    with pytest.raises(ValueError, match=r"line 2, column 'v': '1\.234' where a number was expected"):
        read(path, separator=";", decimal=",")


def test_f07_with_the_zone_there_is_no_gap(cases: Path) -> None:
    table = read(cases / "dst_spring_local.csv", time_zone="Europe/Berlin")
    assert (len(table.rows[0].times), str(table.step), table.zone) == (71, "1 hour", "Europe/Berlin")


def test_f08_without_a_zone_one_gap_is_named(cases: Path) -> None:
    with pytest.raises(ValueError, match=r"1 gap, 1 row is missing: first 2024-03-31 02:00:00") as caught:
        read(cases / "dst_spring_local.csv")
    assert "--data.table.time_zone" in str(caught.value)


def test_f08_a_time_that_the_zone_does_not_have_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "time,v\n2024-03-31 01:30,1\n2024-03-31 02:30,1\n")
    with pytest.raises(ValueError, match=r"line 3, column 'time': 2024-03-31 02:30:00 does not exist in Europe/Berlin"):
        read(path, time_zone="Europe/Berlin")


def test_f08_the_hour_that_comes_twice_is_read_twice(tmp_path: Path) -> None:
    local = pd.date_range("2024-10-27", periods=6, freq="h", tz="Europe/Berlin").tz_localize(None)
    assert local[2] == local[3], "02:00 comes twice"
    path = write(tmp_path, "time,v\n" + "".join(f"{stamp},{n}\n" for n, stamp in enumerate(local)))
    table = read(path, time_zone="Europe/Berlin")
    assert (np.diff(table.rows[0].times.as_unit("ns").asi8) == 3600 * 10**9).all()


def test_f08_each_series_has_its_own_hour_that_comes_twice(tmp_path: Path) -> None:
    local = pd.date_range("2024-10-27", periods=6, freq="h", tz="Europe/Berlin").tz_localize(None)
    rows = "".join(f"{name},{stamp},{n}\n" for n, stamp in enumerate(local) for name in "AB")
    table = read(write(tmp_path, "id,time,v\n" + rows), time_zone="Europe/Berlin", series_column="id")
    assert [row.times.hour.tolist() for row in table.rows] == [[0, 1, 2, 2, 3, 4]] * 2
    assert str(table.step) == "1 hour"


def test_offsets_in_the_stamps_are_instants(tmp_path: Path) -> None:
    path = write(
        tmp_path, "time,v\n2024-03-31T01:00:00+01:00,1\n2024-03-31T03:00:00+02:00,2\n2024-03-31T04:00:00+02:00,3\n"
    )
    table = read(path, time_zone="Europe/Berlin")
    assert table.rows[0].times.hour.tolist() == [1, 3, 4]
    assert str(table.step) == "1 hour"


def test_f14_two_series_are_two(cases: Path) -> None:
    table = read(cases / "two_series.csv", series_column="series_id")
    assert [(row.name, len(row.values)) for row in table.rows] == [("A", 40), ("B", 35)]
    assert (table.rows[0].values > 0).all() and (table.rows[1].values < 0).all()


def test_f16_a_missing_column_is_named_with_those_found(cases: Path) -> None:
    with pytest.raises(ValueError, match="column 'load' was not found; found: timestamp, temp, demand"):
        read(cases / "missing_target.csv", targets=["load"])


def test_f15_columns_are_found_by_name(cases: Path) -> None:
    one, other = (read(cases / name, targets=["load"]) for name in ("base_hourly.csv", "column_order.csv"))
    np.testing.assert_array_equal(one.rows[0].values, other.rows[0].values)


def test_rows_out_of_order_are_sorted_and_reported(tmp_path: Path, report: pytest.LogCaptureFixture) -> None:
    lines = [f"{stamp},{n}" for n, stamp in enumerate(pd.date_range("2024-01-01", periods=6, freq="D"))]
    table = read(write(tmp_path, "date,v\n" + "\n".join([lines[3], *lines[:3], *lines[4:]])))
    assert table.rows[0].values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert "not in the order of time" in report.text


def test_stamps_between_two_steps_are_named(tmp_path: Path) -> None:
    lines = [*hours(6), "2024-01-01 06:20,1", "2024-01-01 07:00,1"]
    path = write(tmp_path, "time,v\n" + "\n".join(lines))
    with pytest.raises(
        ValueError, match=r"(?s)most rows are 1 hour apart, but 1 stamp lies.*06:20:00 in line 8.*gaps=keep"
    ) as e:
        read(path)
    assert "\n" in str(e.value)
    assert len(read(path, gaps="keep").rows[0].values) == 8


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "is empty"),
        ("time,v\n", {}, "a header and no rows"),
        ("time,v,v\n2024-01-01,1,2\n", {}, "two columns are named 'v'"),
        ("1,2\n3,4\n", {}, r"numbers where the names.*--data\.table\.header=false"),
        ("time,v\n2024-01-01,1\n2024-01-02,1,2\n", {}, r"line 3: 3 cells where the lines before have 2"),
        ("time,v\n2024-01-01,1\n2024-01-02,x7\n", {}, r"line 3, column 'v': 'x7' where a number was expected"),
        ("time,v\n2024-01-01,1\n2024-01-02,inf\n", {}, r"line 3, column 'v': 'inf' where a number"),
        ("time,v\n2024-01-01,1\nyesterday,2\n", {}, r"line 3, column 'time': 'yesterday'.*date_format"),
        ("time,v\n2024-01-01,1\n,2\n", {"date_format": "%Y-%m-%d"}, r"line 3, column 'time'"),
        ("time,v\n2024-01-01,1\n2024-01-02,2\n", {"time_zone": "Europe/Berln"}, "Europe/Berln: there is no such zone"),
        ("time,v\n2024-01-01,1\n2024-01-02,2\n", {"targets": ["w"]}, "column 'w' was not found; found: time, v"),
        ("time,v,w\n2024-01-01,1,\n2024-01-02,2,\n", {"missing": "fill"}, "column 'w' has no value at all"),
        ("time,v\n2024-01-01,1\n2024-01-02,2\n", {"targets": ["v"], "inputs": ["v"]}, "'v' is asked for twice"),
        ("time,v\n2024-01-01,1\n2024-01-02,1e20\n", {}, "line 3, column 'v': 1e20 is far too large"),
        ("time,v\n2024-01-01,1\n2024-01-02,-1e301\n", {}, "line 3, column 'v': -1e301 is far too large"),
        ("time,v\n2024-01-01,0\n2024-01-02,1e-40\n", {}, "line 3, column 'v': 1e-40 is far too small"),
        ("2024-01-01,10.844\n2024-01-02,11\n", {}, r"line 1: 2024-01-01, 10\.844: .*--data\.table\.header=false"),
        ("10,844\n11,2\n", {"separator": ";", "decimal": ","}, "line 1: 10,844: numbers where the names"),
        ("A,2024-01-01 00:00,1.5\nA,2024-01-01 01:00,2\n", {}, "numbers or stamps where the names"),
        (
            "time,v\n2024-01-01T00:00Z,1\n2024-01-01T01:00,2\n",
            {},
            "line 3, column 'time': stamps with and without a zone are mixed",
        ),
        ("time;v\n2024-01-01;1 100.5\n", {"separator": ";"}, "' ' parts thousands in it.*here 1100.5"),
        ("time;v\n2024-01-01;1,100\n", {"separator": ";"}, "decimal=',';.* parts thousands.* here 1100"),
        ('time,v\n2024-01-01,"1,100.5"\n', {}, "',' parts thousands in it.*here 1100.5"),
        ('time,v\n2024-01-01,"2,5"\n', {}, "If ',' stands before the fraction, write '.' there"),
    ],
)
def test_what_is_wrong_is_named(text: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        read(write(tmp_path, text), **options)
    assert len(str(caught.value).splitlines()) <= 3


def test_bytes_of_another_encoding_are_named_with_the_option(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("time,Wärme\n2024-01-01,1\n2024-01-02,2\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"0xE4.*--data\.table\.encoding"):
        read(path)
    assert read(path, encoding="latin-1").targets == ["Wärme"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("time,v\n2024-01-01,1\n".encode("utf-16"), r"text in utf-16.*--data\.table\.encoding=utf-16"),
        ("time,v\n2024-01-01,1\n".encode("utf-16-le"), r"zero bytes.*--data\.table\.encoding=utf-16-le"),
        (b"PK\x03\x04\x14\x00", r"an Excel workbook \(\.xlsx\) or another zip archive; save the sheet as CSV"),
        (b"PAR1\x15", "a parquet file; name it .parquet"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_file_that_is_no_such_text_is_called_what_it_is(
    content: bytes, message: str, encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path, encoding=encoding)


def test_text_in_utf_16_is_read_where_its_encoding_is_given(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("time,v\n2024-01-01,1\n2024-01-02,2\n".encode("utf-16"))
    assert read(path, encoding="utf-16").rows[0].values.ravel().tolist() == [1, 2]
    with pytest.raises(ValueError, match="is not utf-16"):
        read(write(tmp_path, "time,v\n2024-01-01,1\n"), encoding="utf-16")


def test_numbered_columns_are_names_beside_an_index_without_one(tmp_path: Path) -> None:
    """So pandas writes a frame without names."""
    assert read(write(tmp_path, ",0,1\n2024-01-01,1,2\n2024-01-02,1,2\n")).targets == ["0", "1"]


def test_a_year_behind_a_sign_is_no_zone(tmp_path: Path) -> None:
    path = write(tmp_path, "time,v\n31-01-2024,1\n01-02-2024,2\n")
    assert read(path, date_format="%d-%m-%Y").zone is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read(tmp_path / "none.csv")


def test_the_same_table_in_other_forms(cases: Path, tmp_path: Path) -> None:
    """CSV, gzip, Windows line ends with a blank line at the end, and parquet are one table."""
    source = cases / "base_hourly.csv"
    right = read(source).rows[0]
    (tmp_path / "zipped.csv.gz").write_bytes(gzip.compress(source.read_bytes()))
    (tmp_path / "windows.csv").write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    pd.read_csv(source, parse_dates=["timestamp"]).to_parquet(tmp_path / "table.parquet")
    for name in ("zipped.csv.gz", "windows.csv", "table.parquet"):
        found = read(tmp_path / name)
        np.testing.assert_array_equal(found.rows[0].values, right.values)
        assert (found.rows[0].times == right.times).all(), name


def test_signs_for_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path, "time,v\n2024-01-01,1\n2024-01-02,-9999\n2024-01-03,3\n2024-01-04,null\n")
    table = read(path, missing_marks=("-9999",), missing="drop")
    assert np.isnan(table.rows[0].values[:, 0]).tolist() == [False, True, False, True]


def test_one_series_a_row(tmp_path: Path) -> None:
    """Empty cells at the end fill up a shorter series; inside they are missing values."""
    path = write(tmp_path, '"V1","V2","V3","V4"\n"H1",1,2,3\n"H2",4,5,\n')
    table = read(path, series_in_rows=True)
    assert [(row.name, row.values[:, 0].tolist()) for row in table.rows] == [("H1", [1, 2, 3]), ("H2", [4, 5])]
    inside = write(tmp_path, "id,a,b,c\nH1,1,,3\n", "inside.csv")
    with pytest.raises(ValueError, match="value 1 .first in line 2"):
        read(inside, series_in_rows=True)


@pytest.mark.parametrize("name", ["", "week_ending"])
def test_dates_in_the_first_column_are_stamps_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    """pandas writes an index without a name."""
    path = tmp_path / "index.csv"
    path.write_text(f"{name},load\n2024-01-07,1.5\n2024-01-14,2.5\n2024-01-21,4\n")
    table = read(path)
    assert table.time_column == name
    assert table.targets == ["load"]
    assert str(table.rows[0].times[-1]).startswith("2024-01-21")


def test_a_table_without_stamps_is_counted(tmp_path: Path, report: pytest.LogCaptureFixture) -> None:
    table = read(write(tmp_path, "1,2\n3,4\n5,6\n"), header=False)
    assert (table.step, table.targets, len(table.rows[0].values)) == (None, ["0", "1"], 3)
    assert "no column of time stamps" in report.text


@pytest.mark.parametrize(
    "options",
    [
        {"decimal": "x"},
        {"separator": ",", "decimal": ","},
        {"separator": ";;"},
        {"targets": []},
        {"targets": ["load", "load"]},
        {"inputs": ["temp", "load", "temp"]},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--data.table"):
        TableOptions(**options)


def test_columns_may_be_set_apart_by_any_white_space(tmp_path: Path) -> None:
    table = read(write(tmp_path, "time  load\n2024-01-01   1.5\n2024-01-02\t2.5\n"), separator=r"\s+")
    assert table.rows[0].values.ravel().tolist() == [1.5, 2.5]


def test_a_data_set_of_a_hub(cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(name: str) -> datasets.DatasetDict:
        asked.append(name)
        if name != "owner/hourly":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub.")
        return datasets.DatasetDict(train=datasets.Dataset.from_pandas(pd.read_csv(cases / "base_hourly.csv")))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read_table("hub:owner/hourly", TableOptions())
    right = read(cases / "base_hourly.csv")
    assert (found.title, found.targets, str(found.step)) == ("hub:owner/hourly", ["load", "temp"], "1 hour")
    np.testing.assert_array_equal(found.rows[0].values, right.rows[0].values)
    with pytest.raises(ValueError, match=r"--data\.path=hub:owner/none: .*doesn't exist"):
        read_table("hub:owner/none", TableOptions())
    assert asked == ["owner/hourly", "owner/none"]
