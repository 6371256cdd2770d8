"""Runs as they stand in their folders."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from experiments.training.runs import whole_lines
from experiments.training.usage import short

SCORE = "test/primary"


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes:
        path: the folder.
        results: `results.json`.
        config: `config.yaml`.
        rows: of `metrics.csv`, none where there is no file.
    """

    path: Path
    results: dict[str, Any]
    config: dict[str, Any]
    rows: list[dict[str, str]]

    @cached_property
    def options(self) -> dict[str, Any]:
        """Every option that is set, by its name with dots."""
        return {name: value for name, value in flat(self.config).items() if value is not None}

    @property
    def score(self) -> float | None:
        """`test/primary`, larger is better; None where it was not measured or is no number."""
        value: float | None = self.results["metrics"].get(SCORE)
        return value

    @property
    def name(self) -> str:
        """Preset and folder."""
        return f"{self.path.parent.name}/{self.path.name}"


def find(pattern: str, say: Callable[[str], None] = print) -> list[Run]:
    """The runs that a glob pattern names, or that lie in the folders that it names.

    Args:
        pattern: of paths.
        say: told of each run that cannot be read.

    Raises:
        ValueError: there are none.
    """
    folders: list[Path] = []
    whole = Path(pattern).expanduser()
    # A pattern that begins at the root of the disk cannot be looked for from here.
    places = [whole] if whole.is_dir() else sorted(Path(whole.anchor).glob(str(whole.relative_to(whole.anchor))))
    for path in places:
        # A run that was killed has no results.
        inside = [
            file.parent
            for depth in ("", "*/", "*/*/")
            for name in ("results.json", "config.yaml")
            for file in path.glob(f"{depth}{name}")
        ]
        folders += inside if path.is_dir() else []
    runs = [run for folder in sorted(set(folders)) if (run := _read(folder, say)) is not None]
    if not runs:
        raise ValueError(
            f"No runs at {pattern}; train some (make sweep EXP=vit), or name others by RUNS='runs/vit/*' (--runs)."
        )
    return runs


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested options by names with dots; `init_args` and the like left out of the names.

    Example:
        >>> flat({"model": {"class_path": "a.B", "init_args": {"dim": 8, "betas": [0.9, 0.98]}}})
        {'model': 'a.B', 'model.dim': 8, 'model.betas': [0.9, 0.98]}
    """
    if not isinstance(config, Mapping):
        return {prefix: config}
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix if key in ("class_path", "init_args") else f"{prefix}.{key}".lstrip(".")
        found |= flat(value, name)
    return found


def left_out(path: Path, error: Exception) -> str:
    """A line that says what is not shown, and why."""
    name = os.fsencode(path).decode(errors="replace")
    return f"left out, for it cannot be read: {name}: {short(str(error), lines=1)}"


def _read(folder: Path, say: Callable[[str], None]) -> Run | None:
    try:
        config = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), _LOADER)
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise ValueError("config.yaml has no model")
        results = _results(folder, config)
        # What is no Unicode, of a name or an escape, would spoil the page about all runs.
        json.dumps([str(folder), config, results], ensure_ascii=False).encode()
        return Run(folder, results, config, _rows(folder / "metrics.csv"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError, csv.Error) as error:
        say(left_out(folder, error))
        return None


_TEXTS = ("preset", "mechanism", "status")
_NUMBERS = ("parameters", "epochs", "step_ms", "peak_memory_mib", "visible_pairs")


def _results(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What `results.json` says, figures that are not finite as None; as far as is known where there is no file.

    Raises:
        ValueError: it does not hold what every run writes.
    """
    path = folder / "results.json"
    if not path.is_file():
        mechanism = flat(config["model"].get("init_args", {})).get("attention", "?")
        known = {"preset": folder.parent.name, "mechanism": str(mechanism).rpartition(".")[2], "metrics": {}}
        return {**known, "seed": config.get("seed_everything") or 0, "status": "without an end (killed, or running)"}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("metrics"), dict):
        raise ValueError("results.json has no metrics")
    for name in _TEXTS:
        if not isinstance(content.get(name), str):
            raise ValueError(f"results.json: {name} should be a word, got {content.get(name)!r}")
    if type(content.get("seed")) is not int:
        raise ValueError(f"results.json: seed should be a whole number, got {content.get('seed')!r}")
    costs = {name for name in content if name in _NUMBERS or name.startswith("flops_per_")}
    return {
        **content,
        **{name: _number(name, content[name]) for name in costs},
        "metrics": {name: _number(name, value) for name, value in content["metrics"].items()},
    }


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"results.json: {name} should be a number, got {value!r}")
    try:
        return value if math.isfinite(value) else None
    except OverflowError as error:
        raise ValueError(f"results.json: {name} is too large for a number, it has {len(str(value))} digits") from error


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    rows = list(csv.DictReader(io.StringIO(whole_lines(path), newline="")))
    if rows and "step" not in rows[0]:
        raise ValueError("metrics.csv has no column step")
    for number, row in enumerate(rows, 2):
        for name, value in row.items():
            try:
                # Not every figure is measured at every step.
                float(value or ("" if name == "step" else 0))
            except (TypeError, ValueError) as error:
                raise ValueError(f"metrics.csv, line {number}, {name}: {value!r} is no number") from error
    return rows


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
