"""How well degenerate heads are found: 200 planted cases over all mechanisms, and estimates against exact figures."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from attnzoo import CATALOGUE, MultiheadAttention
from attnzoo.heads.degenerate import Limits, Watch
from attnzoo.heads.health import ablation, head_health
from attnzoo.heads.sites import capture
from benchmarks.machine import machine
from benchmarks.planted import KINDS, Planted, plant

CASES = 200
CHECKS = 2
QUERIES, KEYS, COLUMNS, DRAWS = 512, 64, 16, 5


def measure(folder: Path, arguments: list[str]) -> int:
    """Prints precision and recall of each cause and the errors of the estimates, and writes `result.json`."""
    argparse.ArgumentParser(prog="make reproduce FIGURE=planted-heads").parse_args(arguments)  # takes none
    torch.set_num_threads(1)
    result = {"cases": CASES, **_planted(), "estimates": _estimates(), "machine": machine()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0


def found_in(case: Planted) -> dict[Any, tuple[str, ...]]:
    """The heads that are flagged after some checks, each with random columns of its own, and by what."""
    watch = Watch(Limits(checks=CHECKS))
    flagged = []
    for seed in range(CHECKS):
        health = head_health(case.model, case.batches, loss=case.loss, seed=seed)
        health, flagged = watch.check(
            health, lambda heads, seen=health: ablation(case.model, case.batches, case.loss, heads, seen)
        )
    return {one.head: one.causes for one in flagged}


def _planted() -> dict[str, Any]:
    counts: Counter[tuple[str, str]] = Counter()
    mechanisms: Counter[str] = Counter()
    impossible: set[str] = set()
    cases = ((name, kind, seed) for seed in itertools.count() for name in CATALOGUE for kind in KINDS)
    missed = []
    with torch.no_grad():
        for _ in track(range(CASES), "cases"):
            case = None
            while case is None:
                name, kind, seed = next(cases)
                case = plant(name, kind, seed)
                if case is None:
                    impossible.add(f"{name} {kind}")
            found = found_in(case)
            right = [head for head, causes in found.items() if head in case.heads and kind in causes]
            mechanisms[name] += 1
            counts[kind, "planted"] += 1
            counts[kind, "found"] += len(right) == 1
            # A head that is of use, and the other of two equal ones, are wrongly found.
            counts[kind, "wrong"] += len(found) - (len(right) >= 1)
            if len(right) != 1 or len(found) != 1:
                missed.append(f"{name} {kind} {seed}: planted {case.heads}, found {found}")
    table = {
        kind: {
            "planted": counts[kind, "planted"],
            "recall": counts[kind, "found"] / counts[kind, "planted"],
            "precision": counts[kind, "found"] / max(1, counts[kind, "found"] + counts[kind, "wrong"]),
        }
        for kind in KINDS
    }
    return {
        "causes": table, "mechanisms": dict(mechanisms), "cannot_have": sorted(impossible), "missed": missed,
    }  # fmt: skip


def _estimates() -> dict[str, dict[str, float]]:
    """Relative error of the effective keys, root mean square over heads and draws and the largest, by mechanism."""
    errors = {}
    for name, mechanism in track(CATALOGUE.items(), "estimates"):
        torch.manual_seed(0)
        site: dict[str, Any] = {"max_len": KEYS, "grid": (8, 8), "prefix_tokens": 0, "layer": 0}
        attn = MultiheadAttention(64, 4, mechanism, **site).eval()
        with torch.no_grad():
            attn.q_proj.weight.mul_(3)
        x = torch.randn(QUERIES // KEYS, KEYS, 64)
        with capture(attn) as passed, torch.no_grad():
            attn(x)
        weights = passed["attention"][0].call.map().double()
        total = weights.sum(-1, keepdim=True)
        drawn = [head_health(attn, [x], columns=COLUMNS, seed=seed) for seed in range(DRAWS)]
        if drawn[0].heads[0].effective_keys is None:
            continue  # no shares
        exact = 1 / (weights / total).square().sum(-1).mean((0, 2))
        away = [
            float(one.effective_keys / exact[one.head.number] - 1) for health in drawn for one in health.heads
        ]  # fmt: skip
        errors[name] = {
            "rms": round(statistics.fmean(error**2 for error in away) ** 0.5, 4),
            "largest": round(max(map(abs, away)), 4),
        }
    return errors
