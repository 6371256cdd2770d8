"""Series as batches of windows: the weekly CO2 series of statsmodels, a table of one's own, or a data set of a hub."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import numpy as np
import pandas as pd
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.forecasting.cells import HUB
from experiments.forecasting.clock import CalendarName, usual_calendar
from experiments.forecasting.policies import Rows
from experiments.forecasting.table import Table, TableOptions, from_frame, read_table
from experiments.forecasting.windows import (
    PARTS,
    Scaler,
    Scaling,
    Split,
    Store,
    Windows,
    borders,
    check_scaled,
    features,
    learned_span,
    naive_error,
    origins,
)
from experiments.training.data_folder import locate
from experiments.training.sampling import ResumableBatches, ResumableLoader, in_turn, share_of

log = logging.getLogger("experiments")


class SeriesData(lightning.LightningDataModule):
    """Windows of series in batches, see `Store.batch`.

    Args:
        path: None takes the weekly CO2 series of statsmodels (Mauna Loa, 1958 to 2001). Otherwise a CSV or parquet
            file, or `hub:NAME`. A path that is not found from here is looked for in the folder that ATTNZOO_DATA names,
            and in its `forecasting`.
        test_path: a second file of the same form whose rows continue the series (the M4 competition).
        lookback: rows that the model sees.
        horizon: rows that it forecasts.
        split: for training, validation and test, in the order of time and for each series: a share of its rows, a
            number of rows, or null for the rest.
        season: rows of the cycle for the seasonal baseline and MASE; null takes the usual one of the step of the data.
        scaling: by the training rows, of each column, of each column and series, or none.
        calendar: features of the stamps to be forecast: hour, weekday, day, yearday, month; null takes those that
            vary and whose cycle the training part holds twice, [] none.
        batch_size: windows in a batch, of each process.
        train_stride: windows from one that the network is trained on to the next; the ridge takes all, validation and
            test too.
        table: how the file is written, and what is done about its faults.

    Raises:
        ValueError: an option out of range; from `setup`, whatever is wrong with the data.

    Example:
        >>> data = SeriesData(lookback=8, horizon=2, table=TableOptions(missing="fill"))
        >>> data.setup("fit")
        >>> next(iter(data.val_dataloader()))["past"].shape
        torch.Size([64, 1, 8])
    """

    def __init__(
        self,
        path: str | None = None,
        test_path: str | None = None,
        lookback: int = 96,
        horizon: int = 24,
        split: Split = (0.7, None, 0.2),
        season: int | None = None,
        scaling: Scaling = "column",
        calendar: list[CalendarName] | None = None,
        batch_size: int = 64,
        train_stride: int = 1,
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        counts = {"lookback": lookback, "horizon": horizon, "batch_size": batch_size, "train_stride": train_stride}
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"--data.{name} is {value}; it must be at least 1.")
        if season is not None and not 1 <= season <= lookback:
            raise ValueError(f"--data.season is {season}; expected 1 to --data.lookback={lookback}.")
        self.path, self.test_path = path, test_path
        self.lookback, self.horizon, self.split, self.season = lookback, horizon, split, season
        self.scaling, self.calendar = scaling, calendar
        self.batch_size, self.train_stride, self.table = batch_size, train_stride, table
        self.order_seed = 0
        self._table: Table | None = None
        self._scaler: Scaler | None = None
        self._store: Store | None = None
        self._origins: dict[str, np.ndarray] = {}

    def setup(self, stage: str) -> None:
        """Read the table and find the windows of all parts; a second call changes nothing."""
        if self._origins:
            return
        table = self.read()
        self._origins = self._find_windows(table)
        counts = ", ".join(f"{len(self._origins[part]):,} {part}" for part in PARTS)
        log.info(
            "Data: %s: %d series of %d target(s), step %s; windows: %s.",
            table.title, len(table.rows), len(table.targets), table.step or "not known", counts,
        )  # fmt: skip
        usual, used = usual_calendar(table.step), self._calendar(table)
        unseen = [name for name in usual if name not in used]
        if unseen and self.calendar is None:
            said = "Training holds less than two cycles of %s, which models are not told; --data.calendar=[%s] would."
            log.info(said, " and ".join(unseen), ",".join(usual))

    def read(self) -> Table:
        """The table, read once."""
        if self._table is None:
            table = _co2(self.table) if self.path is None else _read(self.path, "--data.path", self.table)
            if self.test_path is not None:
                table = _continued(table, _read(self.test_path, "--data.test_path", self.table))
            self._table = table
        return self._table

    @property
    def facts(self) -> dict[str, Any]:
        """What a model must know of the data, as plain values; the scaler as flat lists, series by series."""
        table, scaler = self.read(), self._fitted()
        return {
            "targets": list(table.targets),
            "inputs": list(table.inputs),
            "step": None if table.step is None else str(table.step),
            "zone": table.zone,
            "lookback": self.lookback,
            "horizon": self.horizon,
            "season": self._season(table),
            "calendar": self._calendar(table),
            "scaling": self.scaling,
            "series": [row.name for row in table.rows] if self.scaling == "series" else [],
            "mean": scaler.mean.ravel().tolist(),
            "std": scaler.std.ravel().tolist(),
        }

    def adopt(self, facts: dict[str, Any]) -> None:
        """Scale by the mean and deviation that a model was trained with, not by those of these rows."""
        columns = len(facts["targets"]) + len(facts["inputs"])
        mean, std = (np.array(facts[name]).reshape(-1, columns) for name in ("mean", "std"))
        self._scaler, self._store = Scaler(mean, std), None

    @property
    def store(self) -> Store:
        """All rows, scaled."""
        if self._store is None:
            table = self.read()
            names, targets = self._calendar(table), len(table.targets)
            season = self._season(table)
            check_scaled(table, self._fitted())
            past = [row.values[: borders(len(row.values), self.split)["test"][0], :targets] for row in table.rows]
            self._store = Store(
                table.rows,
                self._fitted(),
                [features(row, names) for row in table.rows],
                [naive_error(values, season) for values in past],
                targets=targets,
                lookback=self.lookback,
                horizon=self.horizon,
            )
        return self._store

    def windows(self, part: str) -> np.ndarray:
        """Numbers of the first target rows of all windows of a part, in the store."""
        self.setup("fit")
        return self._origins[part]

    def train_dataloader(self) -> ResumableLoader:
        windows = Windows(self.windows("train")[:: self.train_stride])
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        batches = ResumableBatches(len(windows), self.batch_size, seed=self.order_seed, rank=rank, world_size=world)
        return ResumableLoader(windows, batch_sampler=batches, collate_fn=self.store.batch)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order("val")

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._in_order("test")

    def _in_order(self, part: str) -> DataLoader[dict[str, Tensor]]:
        windows = Windows(self.windows(part))
        batches = in_turn(len(windows), self.batch_size, **share_of(self.trainer))
        return DataLoader(windows, batch_sampler=batches, collate_fn=self.store.batch)

    def _season(self, table: Table) -> int:
        usual = 1 if table.step is None else table.step.season()
        if self.season is not None:
            return self.season
        if usual > self.lookback:
            log.warning(
                "The season of such data is %d rows, more than --data.lookback=%d: the seasonal baseline repeats the "
                "last value. Raise the lookback, or choose a shorter --data.season.",
                usual, self.lookback,
            )  # fmt: skip
            return 1
        return usual

    def _calendar(self, table: Table) -> list[str]:
        if self.calendar is None:
            return usual_calendar(table.step, learned_span(table.rows, self.split))
        if self.calendar and table.step is None:
            raise ValueError(
                f"{table.title} has no time stamps, so --data.calendar={self.calendar} cannot be; leave it out, or "
                "name the column by --data.table.time_column."
            )
        return list(self.calendar)

    def _fitted(self) -> Scaler:
        if self._scaler is None:
            parts = [row.values[slice(*borders(len(row.values), self.split)["train"])] for row in self.read().rows]
            self._scaler = Scaler.fit(parts, self.scaling)
        return self._scaler

    def _find_windows(self, table: Table) -> dict[str, np.ndarray]:
        needed = self.lookback + self.horizon
        lengths = [len(row.values) for row in table.rows]
        short = [row.name for row in table.rows if len(row.values) < needed]
        sizes = f"{needed} needed ({self.lookback} + {self.horizon}, --data.lookback and --data.horizon)"
        if len(short) == len(table.rows):
            what = "rows" if len(lengths) == 1 else f"rows in the longest of {len(lengths)} series"
            raise ValueError(f"{table.title}: {max(lengths)} {what}, {sizes}. Give more rows, or shorten these.")
        if short:
            log.warning(
                "%s: %d of %d series are left out, %s: %s.",
                table.title, len(short), len(lengths), f"for they have less than the {sizes}", ", ".join(short[:5]),
            )  # fmt: skip
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        found = {part: self._part(table, part, starts) for part in PARTS}
        for part in PARTS:
            if len(found[part]) == 0:
                rows = max(np.diff(borders(length, self.split)[part])[0] for length in lengths)
                least = needed if part == "train" else self.horizon
                dropped = " Windows with missing values were dropped (--data.table.missing)." if rows >= least else ""
                raise ValueError(
                    f"{table.title}: the {part} part has {rows} rows, {least} needed for one window.{dropped}\n"
                    "Give more rows, another --data.split, or a shorter --data.lookback or --data.horizon."
                )
        return found

    def _part(self, table: Table, part: str, starts: np.ndarray) -> np.ndarray:
        found = []
        possible = 0
        for row, start in zip(table.rows, starts, strict=True):
            span = borders(len(row.values), self.split)[part]
            numbers = origins(row, span, lookback=self.lookback, horizon=self.horizon, targets=len(table.targets))
            possible += max(0, span[1] - self.horizon - max(span[0], self.lookback) + 1)
            found.append(start + numbers)
        numbers = np.concatenate(found)
        if len(numbers) < possible:
            log.warning("%s: %d of %d %s windows stay, without those that need a missing value.",
                        table.title, len(numbers), possible, part)  # fmt: skip
        return numbers


def _co2(options: TableOptions) -> Table:
    from statsmodels.datasets import co2

    frame = co2.load_pandas().data.rename_axis("week").reset_index()
    frame["week"] = pd.DatetimeIndex(frame["week"]).tz_localize(None)
    return from_frame("weekly CO2 at Mauna Loa", frame, "week", ["co2"], options)


def _read(path: str, option: str, options: TableOptions) -> Table:
    return read_table(path if path.startswith(HUB) else str(locate(path, "forecasting", option)), options)


def _continued(table: Table, more: Table) -> Table:
    """Series with the rows that continue them."""
    rest = {row.name: row for row in more.rows}
    names = {row.name for row in table.rows}
    odd = sorted(names ^ rest.keys())
    if odd or [more.targets, more.inputs] != [table.targets, table.inputs]:
        what = f"series {odd[0]!r} is in one of them only" if odd else "their columns differ"
        raise ValueError(f"{more.title} (--data.test_path) does not continue {table.title}: {what}.")
    if more.zone != table.zone:
        kinds = " and ".join("none" if zone is None else zone for zone in (more.zone, table.zone))
        raise ValueError(
            f"{more.title} (--data.test_path) does not continue {table.title}: the zones of their stamps are {kinds}. "
            "Mend the stamps, or give both a zone by --data.table.time_zone."
        )
    rows = []
    for row in table.rows:
        after = rest[row.name]
        times = None if row.times is None or after.times is None else row.times.append(after.times)
        values, known = np.concatenate([row.values, after.values]), np.concatenate([row.known, after.known])
        rows.append(Rows(row.name, times, values, known, np.concatenate([row.lines, after.lines])))
    return Table(table.title, table.targets, table.inputs, table.step, rows, table.unit, table.time_column)
