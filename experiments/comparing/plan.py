"""What a sweep will run: which choices fit the model, under which names, and at which size.

`plan` builds every network once and trains none. What a network refuses is left out with the words of the refusal.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

import attnzoo
from attnzoo import CATALOGUE
from experiments.comparing.files import SEED, SweepFile, read
from experiments.training import console, costs, specs
from experiments.training.cli import ExperimentCLI
from experiments.training.module import Experiment
from experiments.training.usage import config_path, short
from experiments.training.words import value_of, values_of
from experiments.training.writing import write_whole

Match = Literal["params", "flops"]

TOLERANCE = 0.02
"""How far parameters or FLOPs may be from those of the preset where they are to be matched."""

WIDEST = 4096
"""The largest feed-forward that is tried."""


class Trial(NamedTuple):
    """One run of a sweep.

    Attributes:
        label: what differs, the seed left out.
        seed: its seed.
        name: words of its run folder, which follow from all its options.
        words: options of `fit`.
    """

    label: str
    seed: int
    name: str
    words: list[str]


class Plan(NamedTuple):
    """Trials in order; what is left out, label -> reason; and the folder that the options of all runs name."""

    trials: list[Trial]
    left_out: dict[str, str]
    runs: Path


def write(path: str, extra: list[str], seeds: int | None, match: Match | None, out: str) -> None:
    """`plan` of the file at `path` as JSON at `out`."""
    made = plan(read(Path(path)), extra, seeds, match)
    trials = [trial._asdict() for trial in made.trials]
    content = {"trials": trials, "left_out": made.left_out, "runs": str(made.runs)}
    write_whole(Path(out), json.dumps(content, indent=1).encode())


def plan(file: SweepFile, extra: list[str], seeds: int | None, match: Match | None) -> Plan:
    """Read a sweep file against the model that it is for.

    Args:
        file: what to choose from.
        extra: more options of every run.
        seeds: run 0 to seeds - 1; those of the file if None.
        match: let `hidden_dim` differ so that parameters or FLOPs are those of the preset within 2 %.

    Raises:
        ValueError: an option of every run is wrong, or one that the file varies, or the model has no `hidden_dim` to
            match by.
    """
    console.quieten()
    if seeds is not None:
        file = file._replace(parameters={**file.parameters, SEED: list(range(seeds))})
    _refuse_varied(file, [(word.partition("=")[0].rstrip("+"), "") for word in extra if word.startswith("--")])
    base = [*file.words, *extra]
    builder = _Builder()
    preset, data = builder.model(base)
    # Configs are read after the model was built, which says what is wrong with them as everywhere else.
    configs = values_of(extra, "-c")
    _refuse_varied(file, [(f"--{name}", config) for config in configs for name in _names(_content(config))])
    size = None if match is None else _Matching(match, builder, preset, data)
    trials: list[Trial] = []
    left: dict[str, str] = {}
    sizes: dict[str, list[str]] = {}
    for choice in file.combinations():
        label = label_of(choice, file)
        seed = int(choice.get(SEED, value_of(base, f"--{SEED}") or 0))
        words = [*file.words, *(f"--{name}={value}" for name, value in choice.items()), *extra]
        if label not in sizes and label not in left:
            try:
                model, of_model = builder.model([word for word in words if not word.startswith(f"--{SEED}=")])
                sizes[label] = [] if size is None else size.words(model, of_model)
            except ValueError as error:
                left[label] = short(str(error), lines=1)
        if label in sizes:
            words += sizes[label]
            trials.append(Trial(label, seed, _name(label, seed, words), words))
    left |= _not_asked(file, builder, preset, data)
    return Plan(trials, left, builder.runs)


def _refuse_varied(file: SweepFile, given: list[tuple[str, str]]) -> None:
    """Options of every run come last, so one that the file varies would make all trials the same under their names.

    Each is given with the config that sets it, "" for the command line.
    """
    for option, config in given:
        name, out = option.removeprefix("--"), f"leave {option} out{f' of {config}' if config else ''}"
        if name == SEED and SEED in file.parameters:
            raise ValueError(f"The seeds of a sweep are given by --seeds=NUMBER (make: SEEDS); {out}.")
        for varied in file.varied():
            if f"{name}.".startswith(f"{varied}.") or f"{varied}.".startswith(f"{name}."):
                raise ValueError(
                    f"The sweep {file.path.stem} varies --{varied}; {out}, or write what it should be "
                    f"into {file.path.name}."
                )


def _content(config: str) -> Any:
    return yaml.safe_load(config_path(config).read_text(encoding="utf-8"))


def _names(content: Any) -> list[str]:
    """Options that a config sets, under the names that they have on a command line."""
    if not isinstance(content, dict):
        return []
    # The options of a class are written without its `init_args`.
    flat = {**content, **(content.get("init_args") or {})}
    below = {key: _names(value) for key, value in flat.items() if key not in ("class_path", "init_args")}
    return [name for key, names in below.items() for name in ([f"{key}.{each}" for each in names] or [str(key)])]


def label_of(choice: dict[str, Any], file: SweepFile) -> str:
    """Short words for what differs: a mechanism by its name, anything else as `option=value`.

    Where a file has one mechanism in several sizes, its options belong to the name.
    """
    parts = []
    for option in file.varied():
        name, options = _mechanism(choice[option])
        if name is None:
            parts.append(f"{option.rpartition('.')[2]}={choice[option]}")
            continue
        several = sum(_mechanism(value)[0] == name for value in file.parameters[option]) > 1
        parts += [name, *(f"{key}={value}" for key, value in options.items() if several)]
    return " ".join(parts) or "all"


def _mechanism(value: Any) -> tuple[str | None, dict[str, Any]]:
    """Class and options that a value of --model.attention names; (None, {}) for another kind of value."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            return None, {}  # the model says what is wrong with it
    if isinstance(value, dict):
        path = value.get("class_path")
        return (path.rpartition(".")[2], value.get("init_args") or {}) if isinstance(path, str) else (None, {})
    name = str(value).rpartition(".")[2]
    return (name if name in CATALOGUE else None), {}


def _name(label: str, seed: int, words: list[str]) -> str:
    """Words for a run folder. They end in a digest of all options, so that other options make another run."""
    # What configs say and not how it is written, or a better comment would train everything again.
    told = [_content(config) for config in values_of(words, "--config", "-c")]
    digest = hashlib.blake2b(json.dumps([told, words], default=str).encode(), digest_size=4).hexdigest()
    return f"{re.sub(r'[^a-z0-9.]+', '-', label.lower()).strip('-.')}-seed{seed}-{digest}"


def _not_asked(file: SweepFile, builder: _Builder, preset: Experiment, data: Any) -> dict[str, str]:
    """Mechanisms of the catalogue that a sweep over attention does not name, and why."""
    if "model.attention" not in file.varied():
        return {}
    reasons, spec = {}, specs.describe(preset)
    for name in CATALOGUE.keys() - {_mechanism(value)[0] for value in file.parameters["model.attention"]}:
        init_args = {**spec["init_args"], "attention": attnzoo.spec(CATALOGUE[name])}
        try:
            builder.build(specs.rebuild(Experiment, {**spec, "init_args": init_args}), data)
            reasons[name] = f"not in {file.path.name}"
        except ValueError as error:
            reasons[name] = short(str(error), lines=1)
    return dict(sorted(reasons.items()))


class _Builder:
    """Makes models with their networks, and reads the same data only once.

    Attributes:
        runs: where a run with the options of the last model would stand.
    """

    def __init__(self) -> None:
        self.runs = Path()
        self._data: dict[str, Any] = {}

    def model(self, words: list[str]) -> tuple[Experiment, Any]:
        cli = ExperimentCLI(words, resume=False)
        self.runs = Path(cli.options.root, cli.options.preset or "run")
        described = json.dumps(specs.describe(cli.datamodule))
        if described not in self._data:
            cli.datamodule.setup("fit")
            self._data[described] = cli.datamodule
        data = self._data[described]
        return self.build(cli.model, data), data

    def build(self, model: Experiment, data: Any) -> Experiment:
        model.facts = dict(data.facts)
        model.configure_model()
        return model.eval()


class _Matching:
    """Finds the `hidden_dim` at which a model costs as much as the preset."""

    def __init__(self, kind: Match, builder: _Builder, model: Experiment, data: Any) -> None:
        self._builder = builder
        if "hidden_dim" not in specs.describe(model)["init_args"]:
            raise ValueError(f"{type(model).__name__} has no option hidden_dim, by which MATCH={kind} sets its size.")
        self._cost: Callable[[Experiment, Any], float] = _parameters if kind == "params" else _flops
        self._unit = "parameters" if kind == "params" else "FLOPs"
        self._target = self._cost(model, data)

    def words(self, model: Experiment, data: Any) -> list[str]:
        """The option to be added, none where the size fits as it is."""
        if self._fits(self._cost(model, data)):
            return []
        spec = specs.describe(model)

        def cost(hidden_dim: int) -> float:
            changed = {**spec, "init_args": {**spec["init_args"], "hidden_dim": hidden_dim}}
            return self._cost(self._builder.build(specs.rebuild(Experiment, changed), data), data)

        above = 1 + bisect.bisect_left(range(1, WIDEST), self._target, key=cost)
        near = min((max(1, above - 1), above), key=lambda width: abs(cost(width) - self._target))
        found = cost(near)
        if not self._fits(found):
            raise ValueError(
                f"cannot be matched: the preset has {self._target:,.0f} {self._unit}, and this has {found:,.0f} "
                f"at hidden_dim={near}"
            )
        return [f"--model.hidden_dim={near}"]

    def _fits(self, cost: float) -> bool:
        return abs(cost - self._target) <= TOLERANCE * self._target


def _parameters(model: Experiment, data: Any) -> float:
    assert model.network is not None
    return float(console.parameter_count(model.network))


def _flops(model: Experiment, data: Any) -> float:
    return costs.flops(model, next(iter(data.val_dataloader())))
