"""Text turned into numbers, and what is said of a cell that is none, or one that cannot be reckoned with."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from experiments.forecasting.cells import MISSING, Cells, is_number

LARGEST, SMALLEST = 1e15, 1e-15
"""Sizes whose squares, summed over many windows, float32 still holds."""


def numbers(cells: Cells, column: str, *, decimal: str, missing_marks: tuple[str, ...]) -> np.ndarray:
    """A column as float64 [rows], NaN where a value is missing.

    Args:
        cells: the table.
        column: its name.
        decimal: the sign before the fraction.
        missing_marks: what else stands for a missing value, beside an empty cell, NA, NaN and the like.

    Raises:
        ValueError: a cell that is no number, or one that is too large, with its place; a column of such small numbers
            that their squares would be lost.
    """
    found = cells.frame[column]
    if pd.api.types.is_numeric_dtype(found) and not pd.api.types.is_bool_dtype(found):
        values = found.to_numpy(dtype=np.float64, na_value=np.nan)
        marks = [float(mark) for mark in missing_marks if is_number(mark)]
        values = np.where(np.isin(values, marks), np.nan, values) if marks else values
        text = found.astype(str)
    else:
        text = found.astype(str).str.strip()
        missing = text.str.lower().isin(MISSING) | text.isin(missing_marks)
        other = "." if decimal == "," else ","
        plain = text.str.replace(decimal, ".") if decimal != "." else text
        values = pd.to_numeric(plain, errors="coerce").to_numpy(dtype=np.float64)
        values = np.where(text.str.contains(other, regex=False), np.nan, values)
        values = np.where(missing, np.nan, values)
        wrong = np.flatnonzero(np.isnan(values) & ~missing.to_numpy())
        if len(wrong):
            raise ValueError(_no_number(cells, column, text, int(wrong[0]), decimal))
    infinite = np.flatnonzero(np.isinf(values))
    if len(infinite):
        raise ValueError(_no_number(cells, column, text, int(infinite[0]), decimal))
    _check_size(cells, column, text, values)
    return values


def _check_size(cells: Cells, column: str, text: pd.Series, values: np.ndarray) -> None:
    size = np.nan_to_num(np.abs(values))
    large = np.flatnonzero(size > LARGEST)
    if len(large):
        row = int(large[0])
        raise ValueError(
            f"{cells.title}, {cells.at(row)}, column {column!r}: {text.iloc[row]} is far too large; numbers up to "
            f"{LARGEST:g} were expected.\nGive the column in a larger unit, name the sign of a missing value by "
            "--data.table.missing_marks, or the columns to be read by --data.table.targets and --data.table.inputs."
        )
    if 0 < size.max(initial=0) < SMALLEST:
        row = int(np.flatnonzero(size)[0])
        raise ValueError(
            f"{cells.title}, {cells.at(row)}, column {column!r}: {text.iloc[row]} is far too small, and no number of "
            f"the column reaches {SMALLEST:g}.\nGive the column in a smaller unit, or name the columns to be read by "
            "--data.table.targets and --data.table.inputs."
        )


def _no_number(cells: Cells, column: str, text: pd.Series, row: int, decimal: str) -> str:
    found = text.iloc[row]
    return (
        f"{cells.title}, {cells.at(row)}, column {column!r}: {found!r} where a number was expected.\n"
        f"{_advice(found, decimal, cells.separator)}"
    )


def _advice(found: str, decimal: str, separator: str | None) -> str:
    other = "," if decimal == "." else "."
    swapped = other in found and is_number(found.replace(decimal, "").replace(other, "."))
    groups = rf"[+-]?[1-9]\d{{0,2}}([{other}'\u2019_ \u00a0\u202f])\d{{3}}(\1\d{{3}})*({re.escape(decimal)}\d+)?"
    parted = re.fullmatch(groups, found)
    plain = parted and found.replace(parted[1], "")
    if parted and (parted[1] != other or decimal in found or found.count(other) > 1):
        return f"{parted[1]!r} parts thousands in it: write the numbers of the file without such signs, here {plain}."
    if swapped:
        cure = f"write {decimal!r} there" if other == separator else f"give --data.table.decimal={other!r}"
        thousands = f"; if it parts thousands, write the numbers without it, here {plain}" if parted else ""
        return f"If {other!r} stands before the fraction, {cure}{thousands}."
    return (
        "Mend it, or name a sign for a missing value by --data.table.missing_marks, the column that names the "
        "series by --data.table.series_column, or the columns to be read by --data.table.targets and "
        "--data.table.inputs."
    )
