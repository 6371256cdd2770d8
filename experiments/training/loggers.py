"""`metrics.csv`: one row for each optimiser step at which something was measured."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from experiments.training.runs import whole_lines
from experiments.training.writing import write_whole


class CsvRows(Logger):
    """Writes a table: `step`, `epoch`, and then whatever was measured, in order of appearance.

    All figures of a step stand in one row, so steps rise strictly. A resumed run goes on in the same file:
    rows after the step of its checkpoint, which a killed process may have left behind, are cut off, for they
    come again.

    Args:
        path: the file.
        steps_done: optimiser steps of the checkpoint that the run goes on from.
    """

    def __init__(self, path: Path, steps_done: int = 0) -> None:
        super().__init__()
        self.path = path
        self._columns = ["step", "epoch"]
        self._row: dict[str, Any] = {}
        self._unsaved = False
        rows = [row for row in read_rows(path) if int(row["step"]) <= steps_done]
        if rows:
            self._columns = list(rows[0])
        end = self._rewrite(rows)
        self._start = end
        if rows and int(rows[-1]["step"]) == steps_done:
            # More figures of this step may come, such as those of the test, and belong into its row. It stays
            # in the file meanwhile: a process that is killed now must not take it along.
            self._row = {name: value for name, value in rows[-1].items() if value} | {"step": steps_done}
            self._start = len(self._text(rows[:-1]))

    @property
    def name(self) -> str:
        """Kind of logger."""
        return "csv"

    @property
    def version(self) -> str:
        """Nothing: the folder has the number."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Not written here; all options are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add figures to the row of `step`, after writing the row before."""
        if self._row and self._row["step"] != step:
            self.save()
            self._row, self._start = {}, self.path.stat().st_size
        self._row = {**self._row, **metrics, "step": step}
        self._unsaved = True

    @rank_zero_only
    def save(self) -> None:
        """Write the row that is being collected; it may grow afterwards, until a later step begins."""
        if not self._unsaved:
            return
        new = [name for name in self._row if name not in self._columns]
        if new:
            rows = [row for row in read_rows(self.path) if int(row["step"]) != self._row["step"]]
            self._columns += new
            self._start = self._rewrite(rows)
        with self.path.open("r+", newline="", encoding="utf-8") as file:
            file.seek(self._start)
            file.truncate()
            csv.DictWriter(file, self._columns).writerow(self._row)
        self._unsaved = False

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.save()

    @rank_zero_only
    def _rewrite(self, rows: list[dict[str, Any]]) -> int:
        content = self._text(rows)
        write_whole(self.path, content, "--run.root")
        return len(content)

    def _text(self, rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.csv` as text, none where there is no file; half a line at the end is left out."""
    if not path.is_file():
        return []
    rows = csv.DictReader(io.StringIO(whole_lines(path), newline=""))
    return [row for row in rows if row["step"] and None not in row.values()]
