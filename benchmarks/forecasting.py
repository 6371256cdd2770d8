"""The forecaster's speed: a training step against neuralforecast's PatchTST, and mechanisms on 4,096 point tokens.

Both are given the same windows: seven series, 336 rows, 96 ahead, patches of 16 rows every 8, width 64, 2 blocks of 4
heads, feed-forward 128, dropout 0.2, batches of 64; forward, squared error, backward, AdamW. neuralforecast is not
installed by `make setup`, since it brings ray: pip install '.[bench-forecasting]'.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from attnzoo import Linear, Linformer, Local, Mechanism, Performer, Softmax
from benchmarks.machine import machine
from benchmarks.timing import CLOCKS, ratio, rounds, spread
from experiments.forecasting.network import ForecastNetwork
from experiments.training.optim import Optim
from experiments.training.tables import show_table

SERIES, LOOKBACK, HORIZON, BATCH = 7, 336, 96, 64
PATCH, STRIDE, DIM, HEADS, DEPTH, HIDDEN, DROPOUT = 16, 8, 64, 4, 2, 128, 0.2

LONG, LONG_BATCH, LONG_DIM = 4096, 4, 32
MECHANISMS: dict[str, Callable[[int, int], Mechanism]] = {
    "Softmax": Softmax,
    "Local, 257 keys": functools.partial(Local, window=257),
    "Linear": Linear,
    "Linformer, 256 keys": functools.partial(Linformer, rank=256),
    "Performer": Performer,
}
"""What point tokens are tried with; about 256 keys or features for each query, as in `make bench`."""


def peer(residual: bool) -> nn.Module:
    """PatchTST of neuralforecast in our size, with the residual attention that it has by default or without."""
    from neuralforecast.models import PatchTST

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = PatchTST(
            h=HORIZON, input_size=LOOKBACK, encoder_layers=DEPTH, n_heads=HEADS, hidden_size=DIM,
            linear_hidden_size=HIDDEN, dropout=DROPOUT, fc_dropout=DROPOUT, patch_len=PATCH, stride=STRIDE,
            res_attention=residual,
        )  # fmt: skip
    return model


def ours() -> ForecastNetwork:
    """The same size in this project: the branch alone, without base and quantiles."""
    return ForecastNetwork(
        lookback=LOOKBACK, horizon=HORIZON, columns=SERIES, targets=SERIES, base="none", patch_size=PATCH,
        stride=STRIDE, dim=DIM, depth=DEPTH, num_heads=HEADS, hidden_dim=HIDDEN, dropout=DROPOUT,
    )  # fmt: skip


def step_of(network: nn.Module, forecast: Callable[[], Tensor], future: Tensor) -> Callable[[], None]:
    """One optimiser step on one batch."""
    optimizer = Optim().optimizer(network.train())

    def once() -> None:
        optimizer.zero_grad()
        (forecast() - future).square().mean().backward()
        optimizer.step()

    return once


def calls() -> dict[str, Callable[[], None]]:
    """A training step of ours and of both forms of theirs, on the same windows."""
    torch.manual_seed(0)
    past, future = torch.randn(BATCH, SERIES, LOOKBACK), torch.randn(BATCH, SERIES, HORIZON)
    network, calendar = ours(), torch.zeros(BATCH, HORIZON, 0)
    found = {"ours": step_of(network, lambda: network(past, calendar)[0], future)}
    rows = past.flatten(0, 1)[..., None]  # theirs takes each series by itself
    for name, residual in (("theirs", True), ("theirs, without residual attention", False)):
        model = peer(residual)
        found[name] = step_of(model, functools.partial(_theirs, model, rows), future.flatten(0, 1))
    return found


def _theirs(model: nn.Module, rows: Tensor) -> Tensor:
    forecast: Tensor = model({"insample_y": rows})
    return forecast[..., 0]


def long_calls() -> dict[str, Callable[[], None]]:
    """A training step on ``LONG`` point tokens with each mechanism."""
    past, future = torch.randn(LONG_BATCH, 1, LONG), torch.randn(LONG_BATCH, 1, HORIZON)
    calendar = torch.zeros(LONG_BATCH, HORIZON, 0)
    found = {}
    for name, attention in MECHANISMS.items():
        torch.manual_seed(0)
        network = ForecastNetwork(
            lookback=LONG, horizon=HORIZON, attention=attention, patch_size=1, dim=LONG_DIM, depth=DEPTH,
            num_heads=HEADS, base="none",
        )  # fmt: skip
        forecast = functools.partial(_first, network, past, calendar)
        found[name] = step_of(network, forecast, future)
    return found


def _first(network: ForecastNetwork, past: Tensor, calendar: Tensor) -> Tensor:
    forecast: Tensor = network(past, calendar)[0]
    return forecast


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures, writes `result.json` and prints both tables."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=forecasting", description=__doc__)
    parser.add_argument("--steps", type=int, default=21, help="rounds of training steps (21)")
    parser.add_argument("--long_steps", type=int, default=9, help="rounds of steps on 4,096 tokens (9)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: where others share the cores")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("neuralforecast") is None:
        parser.error("neuralforecast is not installed: .venv/bin/pip install '.[bench-forecasting]'")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    result: dict[str, Any] = {"machine": machine(), "clock": options.clock}
    for title, made, base, count in (
        ("training step", calls(), "ours", options.steps),
        (f"training step on {LONG} point tokens", long_calls(), "Softmax", options.long_steps),
    ):
        times = list(track(rounds(made, count, CLOCKS[options.clock]), title, total=count))
        columns = {name: [row[name] for row in times] for name in made}
        result[title] = {name: {"seconds": spread(values)} for name, values in columns.items()}
        for name, values in columns.items():
            # How many times faster ours is than theirs, and a mechanism than Softmax.
            pair = (columns[base], values) if base == "ours" else (values, columns[base])
            result[title][name] |= ratio(*pair)
        show_table(_table(title, result[title], base))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _table(title: str, rows: dict[str, Any], base: str) -> Table:
    against = "ours is faster, times" if base == "ours" else f"faster than {base}, times"
    table = Table(title, "ms", against, "95 % at least")
    for name, row in rows.items():
        compared = ("", "") if name == base else (f"{row['ratio']:.2f}", f"{row['lower95']:.2f}")
        table.add_row(name, f"{1000 * row['seconds']['median']:.0f}", *compared)
    return table
