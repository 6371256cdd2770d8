"""Runs sorted into groups of what can be compared, and within a group into models."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import Any

import yaml

from attnzoo import CATALOGUE
from experiments.comparing.reading import Run, flat
from experiments.training.usage import CONFIGS

BASELINE = "Softmax"
_NOT_PART = ("run", "seed_everything", "ckpt_path", "checkpoint", "head_monitor")
"""Options that change no number of a run, or are the seed."""


@dataclass
class Variant:
    """One model in several seeds.

    Attributes:
        label: mechanism, and what else tells it from others of its group.
        mechanism: name of the class.
        runs: seed -> the newest finished run.
        older: finished runs of which a newer one has the same options and seed.
    """

    label: str
    mechanism: str
    runs: dict[int, Run] = field(default_factory=dict)
    older: list[Run] = field(default_factory=list)

    @property
    def scores(self) -> dict[int, float]:
        """Seed -> `test/primary`."""
        return {seed: run.score for seed, run in self.runs.items() if run.score is not None}

    def mean(self, key: str) -> float | None:
        """Mean over the seeds of a figure of `results.json`, None where no run has it."""
        values = [run.results[key] for run in self.runs.values() if run.results.get(key) is not None]
        return sum(values) / len(values) if values else None

    @property
    def flops(self) -> float | None:
        """Of a forward pass for one sample, whatever the task calls one."""
        keys = (key for run in self.runs.values() for key in run.results if key.startswith("flops_per_"))
        return self.mean(next(keys, ""))


@dataclass
class Group:
    """Runs that differ in their model alone: same preset, data and training.

    Attributes:
        title: the preset, and what tells it from other groups of the preset.
        variants: the best mean score first.
        baseline: of the variants with `Softmax` the one nearest to the preset, and plain; None where there is none.
        open: runs that have not finished, by status.
    """

    title: str
    variants: list[Variant]
    baseline: Variant | None
    open: dict[str, list[Run]]

    def against(self, variant: Variant) -> Variant | None:
        """What a variant is compared with: the Softmax that differs in the mechanism alone, or else `baseline`."""
        if variant is self.baseline:
            return variant
        alike = [each for each in self.variants if each.mechanism == BASELINE and others(each) == others(variant)]
        nearest = min(alike, key=_own_options, default=variant)
        return self.baseline if nearest is variant else nearest


def groups(runs: list[Run]) -> list[Group]:
    """Sort runs by what can be compared; groups by preset, variants by their mean score."""
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(json.dumps(_setting(run), sort_keys=True), []).append(run)
    titles = _titles([json.loads(setting) for setting in by_setting])
    return [_group(title, found) for title, found in sorted(zip(titles, by_setting.values(), strict=True), key=_first)]


def _setting(run: Run) -> dict[str, Any]:
    """All options but the seed and those of the model."""
    kept = {
        name: value
        for name, value in run.options.items()
        if name.partition(".")[0] not in _NOT_PART and not name.startswith("model.")
    }
    return {**kept, "preset": run.results["preset"]}


def _titles(settings: list[dict[str, Any]]) -> list[str]:
    return [_title(setting, [each for each in settings if each["preset"] == setting["preset"]]) for setting in settings]


def _title(setting: dict[str, Any], of_preset: list[dict[str, Any]]) -> str:
    """The preset, and as few options as tell the setting from the others of the preset."""
    names: list[str] = []
    rest = [other for other in of_preset if other != setting]
    while rest:
        # One that is set tells more than one that is not; then by name, so that the order of runs says nothing.
        found = sorted(set().union(*rest, setting) - set(names))
        name = max(
            found, key=lambda name: (sum(other.get(name) != setting.get(name) for other in rest), name in setting)
        )
        names.append(name)
        rest = [other for other in rest if other.get(name) == setting.get(name)]
    return ", ".join([str(setting["preset"]), *(f"{name}={setting.get(name, 'not set')}" for name in names)])


def _first(pair: tuple[str, list[Run]]) -> str:
    return pair[0]


def _group(title: str, runs: list[Run]) -> Group:
    unfinished: dict[str, list[Run]] = {}
    by_model: dict[str, list[Run]] = {}
    for run in runs:
        if run.results.get("status") != "finished":
            unfinished.setdefault(str(run.results.get("status")), []).append(run)
        else:
            by_model.setdefault(json.dumps(_model(run), sort_keys=True), []).append(run)
    models = [json.loads(key) for key in by_model]
    differ = {name for name in set().union(*models) if any(model.get(name) != models[0].get(name) for model in models)}
    variants = []
    for model, found in zip(models, by_model.values(), strict=True):
        mechanism = str(found[0].results["mechanism"])
        sizes = [f"{name}={value}" for name, value in _sizes(found[0]).items()]
        rest = sorted(name for name in differ if f"{name}.".partition("model.attention.")[1] == "")
        sizes += [f"{name.removeprefix('model.')}={model[name]}" for name in rest if name in model]
        # By number, so that of two runs with one seed the newer stays.
        found.sort(key=lambda run: run.path.name)
        newest = {int(run.results["seed"]): run for run in found}
        older = [run for run in found if newest[int(run.results["seed"])] is not run]
        variants.append(Variant(" ".join([mechanism, *sizes]), mechanism, dict(sorted(newest.items())), older))
    plain = [variant for variant in variants if variant.mechanism == BASELINE]
    preset = _preset(str(runs[0].results["preset"]))
    variants.sort(key=_mean_score, reverse=True)
    return Group(title, variants, max(plain, key=lambda each: _nearness(each, preset), default=None), unfinished)


def others(variant: Variant) -> dict[str, Any]:
    """Options of the model, those of the mechanism left out."""
    return {
        name: value
        for name, value in _model(next(iter(variant.runs.values()))).items()
        if f"{name}.".partition("model.attention.")[1] == ""
    }


def _preset(name: str) -> dict[str, Any]:
    """Options of a preset; none where it is none of ours."""
    path = CONFIGS / f"{name}.yaml"
    return flat(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _own_options(variant: Variant) -> int:
    """How many options of its mechanism are not the defaults; none where it is plain."""
    return len(_sizes(next(iter(variant.runs.values()))))


def _nearness(variant: Variant, preset: dict[str, Any]) -> tuple[int, ...]:
    """Of several with Softmax: options as in the preset, plain, few that are on, then seeds, then a short name."""
    options = others(variant)
    other = sum(preset.get(name, value) != value for name, value in options.items())
    on = sum(bool(value) for value in options.values())
    return -other, -_own_options(variant), -on, len(variant.runs), -len(variant.label)


def _mean_score(variant: Variant) -> float:
    scores = variant.scores.values()
    return sum(scores) / len(scores) if scores else float("-inf")


def _model(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.options.items() if name.partition(".")[0] == "model"}


def _sizes(run: Run) -> dict[str, Any]:
    """Options of the mechanism that are not its defaults."""
    given = {name.removeprefix("model.attention."): value for name, value in _model(run).items()
             if name.startswith("model.attention.")}  # fmt: skip
    known = CATALOGUE.get(str(run.results["mechanism"]))
    defaults = {} if known is None else {n: p.default for n, p in inspect.signature(known).parameters.items()}
    return {name: value for name, value in given.items() if defaults.get(name) != value}
