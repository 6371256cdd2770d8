"""Sweep files: the YAML that `wandb sweep` takes, read for a sweep without a server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from experiments.training.usage import CONFIGS, UsageError, nearest, python

SEED = "seed_everything"


class SweepFile(NamedTuple):
    """What a file asks for.

    Attributes:
        path: where it is.
        words: options that every run gets, such as `--config=vit`.
        parameters: option without dashes -> its values.
    """

    path: Path
    words: list[str]
    parameters: dict[str, list[Any]]

    def combinations(self) -> list[dict[str, Any]]:
        """Every choice of one value for each parameter; all choices of the first seed come first."""
        names = sorted(self.parameters, key=lambda name: name != SEED)
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*map(self.parameters.get, names))]

    def varied(self) -> list[str]:
        """Parameters that have more than one value, without the seed."""
        return [name for name, values in self.parameters.items() if len(values) > 1 and name != SEED]


def find(preset: str, over: str) -> Path:
    """`configs/sweeps/<preset>-<over>.yaml`.

    Raises:
        UsageError: there is none; says which there are.
    """
    folder = CONFIGS / "sweeps"
    path = folder / f"{preset}-{over}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        raise UsageError(
            f"There is no sweep of {preset} over {over}.{nearest(path.stem, known)}\n"
            f"There are, as PRESET-OVER: {', '.join(known)}\n"
            f"For one of your own write {path.relative_to(CONFIGS.parent)}; any of these shows how."
        )
    return path


def read(path: Path) -> SweepFile:
    """Read a sweep file.

    Raises:
        ValueError: it is no grid of plain values, or does not start `fit`; says what to use instead.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("parameters"), dict):
        raise ValueError(f"{path} is no sweep: it must have `method`, `command` and `parameters`.")
    server = f"{python()} -m wandb sweep {path}, then {python()} -m wandb agent ID"
    if content.get("method") != "grid":
        raise ValueError(
            f"{path} has method: {content.get('method')}, which the W&B server steers: {server}.\n"
            "Without a server only method: grid runs."
        )
    for key in ("early_terminate", "run_cap"):
        if key in content:
            raise ValueError(f"{path} has {key}, which the W&B server does: {server}; or take it out.")
    parameters = {str(name): _values(path, name, given, server) for name, given in content["parameters"].items()}
    return SweepFile(path, _words(path, content.get("command")), parameters)


def _values(path: Path, name: str, given: Any, server: str) -> list[Any]:
    given = given if isinstance(given, dict) else {}
    if "value" in given:
        return [given["value"]]
    if isinstance(given.get("values"), list) and given["values"]:
        return given["values"]
    if "parameters" in given:
        raise ValueError(f"{path}: {name} has parameters of its own; write one name with dots, such as {name}.option.")
    raise ValueError(
        f"{path}: {name} has no `value` or `values`, but {', '.join(given) or 'nothing'}: that is for {server}.\n"
        "Without a server give a list of values."
    )


def _words(path: Path, command: Any) -> list[str]:
    """What stands between `fit` and the options that differ."""
    parts = list(map(str, command)) if isinstance(command, list) else []
    if "fit" not in parts or parts[-1] != "${args}":
        raise ValueError(
            f"{path}: command must be a list that starts fit and ends in its options: "
            "[.venv/bin/python, -m, experiments, fit, --config=PRESET, ${args}]"
        )
    return parts[parts.index("fit") + 1 : -1]
