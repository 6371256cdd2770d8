"""Timing side by side: every call once a round, in turn, in one process; medians, spread and a bound on ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

Call = Callable[[], object]


def rounds(
    calls: Mapping[str, Call], count: int, clock: Callable[[Call], float] | None = None
) -> Iterator[dict[str, float]]:
    """Seconds of each call, ``count`` times, after one call each to warm up. The order turns from round to round.

    ``clock`` measures a call: ``seconds`` if None; ``cpu_seconds`` where other processes share the cores.
    """
    measure = seconds if clock is None else clock
    for call in calls.values():
        call()
    names = list(calls)
    for number in range(count):
        turned = names[number % len(names) :] + names[: number % len(names)]
        yield {name: measure(calls[name]) for name in turned}


def seconds(call: Call) -> float:
    """How long one call takes: by events on a GPU, which answers before it is done."""
    if torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def cpu_seconds(call: Call) -> float:
    """How long all threads of this process compute in one call, whoever else wants the cores."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


CLOCKS: dict[str, Callable[[Call], float]] = {"wall": seconds, "cpu": cpu_seconds}
"""What time a figure is in, by the name that its option has."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and most."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float], draws: int = 2000) -> dict[str, float]:
    """How many times faster ours is: the median over pairs, and its lower 95 % bound by bootstrap over the pairs."""
    pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(draws))
    return {"ratio": statistics.median(pairs), "lower95": medians[int(0.05 * draws)]}


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The power of the length that the values grow with: the slope through the logarithms, by least squares."""
    x, y = torch.tensor(lengths, dtype=torch.float64).log(), torch.tensor(values, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())
