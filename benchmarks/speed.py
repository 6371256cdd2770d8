"""Time and memory of every mechanism by length: forward and backward, and one step of decoding.

B 1, H 8, D 64, float32, without masks. At each length every mechanism runs once a round, in turn, so each is paired
with `Softmax` through torch's fused kernel in the same minute. Sizes are such that budgets are alike: about 256 keys,
blocks or features for each query.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from rich.table import Table

from attnzoo import CATALOGUE, Mask, Mechanism
from attnzoo.catalogue import construct
from benchmarks import costs
from benchmarks.choice import chosen
from benchmarks.machine import library, machine
from benchmarks.memory import live_bytes
from benchmarks.plots import curves
from benchmarks.timing import CLOCKS, exponent, ratio, rounds, spread
from experiments.training.tables import show_table

HEADS, WIDTH = 8, 64
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
GROWTH_FROM = 4096
"""Growth is fitted from here on: below it what a call costs by itself hides it."""
ROUNDS = 9
COUNTED_UP_TO = 2048
"""Above this length counting would take T x S numbers."""
STEPS = 16
"""Steps of decoding that are timed as one."""


class Case(NamedTuple):
    """One mechanism with the sizes that it is measured at."""

    mechanism: str
    options: dict[str, Any]
    causal: bool
    longest: int


CASES = {
    "Softmax": Case("Softmax", {}, False, 16384),
    "Softmax causal": Case("Softmax", {}, True, 16384),
    "Flash, dropout 0.1": Case("Flash", {"dropout": 0.1}, False, 8192),
    "Additive": Case("Additive", {}, False, 1024),
    "Local 257": Case("Local", {"window": 257}, False, 32768),
    "Local 256 causal": Case("Local", {"window": 256}, True, 32768),
    "BlockSparse random": Case("BlockSparse", {"block_size": 64, "layout": "random"}, False, 32768),
    "Strided 128": Case("Strided", {"stride": 128}, True, 8192),
    "GlobalLocal 257": Case("GlobalLocal", {"window": 257, "num_global": 1}, False, 32768),
    "Axial": Case("Axial", {}, False, 32768),
    "MemoryCompressed 4": Case("MemoryCompressed", {"factor": 4}, False, 8192),
    "LSH 64 x 2": Case("LSH", {"bucket_size": 64, "num_rounds": 2}, False, 32768),
    "MoBA 64 x 4": Case("MoBA", {"block_size": 64, "top_k": 4}, False, 8192),
    "Linformer 256": Case("Linformer", {"rank": 256}, False, 32768),
    "Linear": Case("Linear", {}, False, 32768),
    "Linear causal": Case("Linear", {}, True, 32768),
    "Performer": Case("Performer", {}, False, 32768),
    "Performer causal": Case("Performer", {}, True, 32768),
    "Nystrom 64": Case("Nystrom", {"num_landmarks": 64}, False, 32768),
    "Differential": Case("Differential", {}, False, 8192),
    "AdaptiveSpan 128": Case("AdaptiveSpan", {"max_span": 129, "ramp": 32}, False, 32768),
}
"""What is measured, up to which length."""


def build(case: Case, length: int) -> Mechanism:
    """The mechanism of a case, in training, told that its site is ``length`` long and nearly square."""
    rows = 2 ** (int(math.log2(length)) // 2)
    factory = functools.partial(CATALOGUE[case.mechanism], **case.options)
    return construct(factory, HEADS, WIDTH, max_len=length, grid=(rows, length // rows), layer=0)


def training_call(case: Case, length: int) -> Callable[[], None]:
    """Forward and backward of one call."""
    torch.manual_seed(0)
    module = build(case, length)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
    keys = q if module.traits.shared_qk else k
    upstream = torch.randn(1, HEADS, length, WIDTH)
    leaves = [q, k, v, *module.parameters()]

    def call() -> None:
        torch.autograd.grad(module(q, keys, v, Mask(causal=case.causal)), leaves, upstream, allow_unused=True)

    return call


def decoding_call(case: Case, length: int) -> Callable[[], None]:
    """``STEPS`` steps of one token each, behind ``length`` - ``STEPS`` tokens."""
    torch.manual_seed(0)
    module = build(case, length).eval()
    q, k, v = (torch.randn(1, HEADS, length, WIDTH) for _ in range(3))
    before = length - STEPS
    with torch.no_grad():
        state = module.init_state(1, length)
        for start in range(0, before, 512):  # in chunks, so that the prefix costs no T x S numbers
            part = slice(start, min(start + 512, before))
            _, state = module.step(q[:, :, part], k[:, :, part], v[:, :, part], state)

    @torch.no_grad()
    def call() -> None:
        now = state
        for token in range(before, length):
            part = slice(token, token + 1)
            _, now = module.step(q[:, :, part], k[:, :, part], v[:, :, part], now)

    return call


MODES = {"training": training_call, "decoding": decoding_call}


def cases_for(mode: str, length: int, only: list[str]) -> dict[str, Case]:
    """The cases that are measured at this length."""
    found = {name: case for name, case in CASES.items() if length <= case.longest and case.mechanism in CATALOGUE}
    if mode == "decoding":
        found = {name: case for name, case in found.items() if CATALOGUE[case.mechanism].traits.streaming}
    return {name: case for name, case in found.items() if not only or case.mechanism in only}


def piece(
    mode: str, length: int, only: list[str], count: int, clock: Callable[[Callable[[], object]], float]
) -> dict[str, Any]:
    """Seconds of each round, and the live bytes of one call, for each case."""
    calls = {name: MODES[mode](case, length) for name, case in cases_for(mode, length, only).items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with Progress(transient=True) as progress:
        task = progress.add_task(f"{mode}, {length} tokens", total=count)
        for measured in rounds(calls, count, clock):
            for name, value in measured.items():
                times[name].append(value)
            progress.advance(task)
    memory, work = {}, {}
    if mode == "training":
        memory = {name: live_bytes(call) for name, call in calls.items()}
        for name in calls if length <= COUNTED_UP_TO else ():
            module, causal = build(CASES[name], length), CASES[name].causal
            work[name] = {
                "needed": costs.flops(module, length, causal),
                "counted": costs.counted(module, length, causal),
            }
    found = {"seconds": times, "bytes": memory, "forward_flops": work}
    return {"mode": mode, "length": length, **found, "machine": machine()}


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures what this state of the library has not measured yet, writes result and picture, prints the tables."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", default="", help="mechanisms, by name, with commas between; all if left out")
    parser.add_argument("--modes", default=",".join(MODES), help="training, decoding or both, which is the default")
    parser.add_argument("--lengths", default="", help="lengths, with commas between; 512 to 32768 if left out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds at each length ({ROUNDS})")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: where others share the cores")
    options = parser.parse_args(arguments)
    only = chosen(parser, options.only)
    lengths = [int(length) for length in options.lengths.split(",") if length] or LENGTHS
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes: there is no {', '.join(sorted(unknown))}; choose from {', '.join(MODES)}")
    now = library()
    home = folder / "-".join(only) if only else folder
    pieces = []
    for mode in modes:
        for length in lengths:
            path = home / "pieces" / f"{mode}-{length}-{options.rounds}-{options.clock}.json"
            known = json.loads(path.read_text()) if path.is_file() else None
            if known is None or now is None or known["library"] != now:
                known = {"library": now, **piece(mode, length, only, options.rounds, CLOCKS[options.clock])}
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(known))
            pieces.append(known)
    result = summary(pieces)
    (home / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    curves(result, home / "speed.png")
    for mode in modes:
        show_table(table(result, mode))
    print(f"figures: {home / 'result.json'}, {home / 'speed.png'}")
    return 0


def summary(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians with spread, ratios to `Softmax` of the same causality, and exponents of growth."""
    result: dict[str, Any] = {"machine": pieces[-1]["machine"], "training": {}, "decoding": {}}
    for found in pieces:
        mode, length, times = found["mode"], str(found["length"]), found["seconds"]
        for name, values in times.items():
            row = result[mode].setdefault(
                name, {"seconds": {}, "faster_than_softmax": {}, "bytes": {}, "forward_flops": {}}
            )
            row["mechanism"] = CASES[name].mechanism
            row["seconds"][length] = spread(values)
            dense = "Softmax causal" if CASES[name].causal and mode == "training" else "Softmax"
            if dense in times and name != dense:
                row["faster_than_softmax"][length] = ratio(values, times[dense])
            for what in ("bytes", "forward_flops"):
                if name in found[what]:
                    row[what][length] = found[what][name]
    for mode in MODES:
        for row in result[mode].values():
            long = [length for length in row["seconds"] if int(length) >= GROWTH_FROM]
            if len(long) > 1:
                sizes = [int(length) for length in long]
                row["time_exponent"] = exponent(sizes, [row["seconds"][length]["median"] for length in long])
                if row["bytes"]:
                    row["memory_exponent"] = exponent(sizes, [row["bytes"][length] for length in long])
    return result


def table(result: dict[str, Any], mode: str) -> Table:
    """Milliseconds by length, growth, and the ratio to `Softmax` at the longest length that both have."""
    lengths = sorted({int(length) for row in result[mode].values() for length in row["seconds"]})
    heads = [str(length) for length in lengths]
    shown = Table(
        "mechanism", *heads, "time ~ T^", "memory ~ T^", "against Softmax, 95 % bound", title=f"{mode}, ms by tokens"
    )
    for name, row in result[mode].items():
        cells = [
            f"{1000 * row['seconds'][str(length)]['median']:.4g}" if str(length) in row["seconds"] else ""
            for length in lengths
        ]
        growth = [f"{row[key]:.2f}" if key in row else "" for key in ("time_exponent", "memory_exponent")]
        longest = max(row["faster_than_softmax"], key=int, default=None)
        against = row["faster_than_softmax"].get(longest)
        text = "" if against is None else f"{against['ratio']:.2f} x (>= {against['lower95']:.2f}) at {longest}"
        shown.add_row(name, *cells, *growth, text)
    return shown
