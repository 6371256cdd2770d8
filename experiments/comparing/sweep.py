"""The command `sweep`: every run of a sweep file, one after the other, without a server.

What is known is read from the run folders: a finished run is not repeated, one that was stopped goes on from its
last checkpoint, and one that failed stays a row with its message until the file that holds it is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from experiments.comparing import files, processes
from experiments.training.runs import being_trained, read_results
from experiments.training.usage import UsageError, config_path, nearest, presets, python
from experiments.training.words import over_options_of_run, value_of

ABOUT = """Runs a sweep file without a server; interrupted and started again it repeats nothing.

  --config=vit         the preset
  --over=attention     configs/sweeps/<preset>-<over>.yaml says what is tried
  --seeds=3            seeds 0, 1, 2 in the place of those of the file
  --match=params       parameters (or flops) within 2 % of the preset's, by hidden_dim
Options of fit go to every run: --trainer.max_epochs=5, --run.root=FOLDER.
"""


class Outcome(NamedTuple):
    """What became of one trial.

    Attributes:
        seconds: that it took.
        score: `test/primary`, None where there is none.
        failure: why it failed, empty where it finished.
    """

    seconds: float
    score: float | None
    failure: str = ""


def sweep(argv: list[str]) -> int:
    """Run what is left of a sweep.

    Args:
        argv: see `ABOUT`.

    Returns:
        0 when all runs have finished, 1 when some failed, 128 + n when signal n stopped it.
    """
    options, extra = _options(argv)
    path = files.find(options.config, options.over)
    path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    files.read(path)  # what is wrong with it is said before a process is started
    notes = Path(value_of(extra, "--run.root") or "runs").expanduser() / "sweeps" / path.stem
    notes.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    with _alone(notes):
        context = processes.server(["experiments.comparing.plan", *_modules(options.config)])
        drawn, refusal = notes / "plan.json", notes / "plan.failed"
        console.print(f"{path}: builds every model once, to see which fit", markup=False, soft_wrap=True)
        asked = (str(path), extra, options.seeds, options.match, str(drawn))
        status = processes.run(context, "experiments.comparing.plan:write", notes / "plan.log", refusal, asked)
        if status > processes.STOPPED:
            console.print("stopped before the first run; the same command begins again", soft_wrap=True)
            return status
        if status:
            raise ValueError(refusal.read_text(encoding="utf-8"))
        plan = json.loads(drawn.read_text(encoding="utf-8"))
        trials, runs = plan["trials"], Path(plan["runs"])
        console.print(f"{len(trials)} runs into {runs}", markup=False, soft_wrap=True)
        outcomes: dict[str, Outcome] = {}
        with _progress(console) as bar:
            task = bar.add_task("", total=len(trials), left="")
            for number, trial in enumerate(trials):
                name = trial["name"]
                _wait(runs, name, console)
                known = outcome(runs, notes, name)
                if known is None:
                    started = time.monotonic()

                    def tick(name: str = name, number: int = number, started: float = started) -> None:
                        names = [each["name"] for each in trials[number:]]
                        left = time_left(names, outcomes, time.monotonic() - started)
                        bar.update(task, description=name, left=left)

                    options_of_run = [*_going_on(runs, name, trial["words"]), f"--run.name={name}"]
                    failure = notes / f"{name}.failed"
                    status = processes.run(
                        context, "experiments.comparing.sweep:train", notes / f"{name}.log", failure,
                        (options_of_run,), tick,
                    )  # fmt: skip
                    if status > processes.STOPPED:
                        bar.stop()
                        console.print(f"stopped in {name}; the same command goes on there", soft_wrap=True)
                        return status
                    known = outcome(runs, notes, name) or Outcome(0.0, None, f"no results; see {notes / name}.log")
                    if not console.is_terminal:
                        said = known.failure or f"{known.seconds:.0f} s"
                        console.print(f"{number + 1}/{len(trials)}  {name}  {said}", markup=False, soft_wrap=True)
                outcomes[name] = known
                bar.update(task, completed=number + 1)
    console.print(_table(trials, outcomes, plan["left_out"]))
    failed = [name for name, known in outcomes.items() if known.failure]
    if failed:
        console.print(f"{len(failed)} failed; delete {notes}/NAME.failed to try one again", soft_wrap=True)
    console.print(f"next  {python()} -m experiments compare --runs='{runs}/*'", markup=False, soft_wrap=True)
    return 1 if failed else 0


def train(words: list[str]) -> int:
    """One run, in a process of its own; `words` are options of `fit`."""
    from experiments.training.commands import fit

    # Where it has several processes, Lightning starts the others by the module and the words of this one.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("experiments.__main__")
    sys.argv[1:] = ["fit", *words]
    return fit(words)


def outcome(runs: Path, notes: Path, name: str) -> Outcome | None:
    """What is known of a trial, from its run folder or from the file that says why it failed; None while it is open."""
    failure = notes / f"{name}.failed"
    if failure.is_file():
        said = failure.read_text(encoding="utf-8", errors="replace").strip()
        return Outcome(0.0, None, said or f"failed, and {failure} does not say why; see {notes / name}.log")
    for folder in _folders(runs, name):
        content = read_results(folder) or {}
        if content.get("status") == "finished":
            return Outcome(content.get("seconds", 0.0), content.get("metrics", {}).get("test/primary"))
    return None


def time_left(names: Sequence[str], outcomes: dict[str, Outcome], spent: float) -> str:
    """How long the trials `names` will take, the first of which has run for `spent` seconds.

    A trial takes as long as other seeds of it did, or as the mean of all where there are none.

    Example:
        >>> time_left(["a-seed1-0", "b-seed0-0"], {"a-seed0-0": Outcome(10.0, 0.5)}, 4.0)
        'about 16 s left'
    """
    known: dict[str, list[float]] = {}
    for name, each in outcomes.items():
        if not each.failure:
            known.setdefault(_without_seed(name), []).append(each.seconds)
    if not known:
        return ""
    mean = statistics.mean(seconds for every in known.values() for seconds in every)
    first, *rest = (statistics.mean(known.get(_without_seed(name), [mean])) for name in names)
    seconds = max(0.0, first - spent) + sum(rest)
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _without_seed(name: str) -> str:
    return name.rpartition("-seed")[0]


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        "python -m experiments sweep", description=ABOUT, allow_abbrev=False, exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", default="")
    parser.add_argument("--over", default="attention")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--match", choices=("params", "flops"))
    try:
        options, extra = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    if options.config not in presets():
        near = nearest(options.config, presets()) if options.config else ""
        raise UsageError(
            f"sweep needs a preset by --config=NAME (make: EXP=NAME), got {options.config!r}.{near}\n"
            f"Presets: {', '.join(presets())}"
        )
    if options.seeds is not None and options.seeds < 1:
        raise UsageError(f"--seeds={options.seeds} (make: SEEDS) counts seeds, so it is at least 1.")
    return options, extra


def _modules(preset: str) -> list[str]:
    """Modules of the classes that the preset names."""
    content = yaml.safe_load(config_path(preset).read_text(encoding="utf-8"))
    return [content[key]["class_path"].rpartition(".")[0] for key in ("model", "data")]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two sweeps of one file would do the same runs twice."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"Another sweep is at work in {folder}; wait for it, or stop it.") from error
        yield


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _folders(runs: Path, name: str) -> list[Path]:
    return sorted(runs.glob(f"[0-9]*-{name}"))


def _wait(runs: Path, name: str, console: Console) -> None:
    """The run of a sweep that was killed ends by itself, after the step or the validation that it is in."""
    for folder in _folders(runs, name):
        if being_trained(folder):
            console.print(f"{folder} is being trained by another process; waits for it", markup=False, soft_wrap=True)
        while being_trained(folder):
            time.sleep(0.25)


def _going_on(runs: Path, name: str, words: list[str]) -> list[str]:
    """Words by which a run goes on where it was stopped, or begins; what has no checkpoint yet is removed."""
    for folder in _folders(runs, name):
        last = folder / "checkpoints" / "last.ckpt"
        if last.is_file():
            kept = over_options_of_run(words) if (folder / "config.yaml").is_file() else words
            return [*kept, f"--ckpt_path={last}"]
        shutil.rmtree(folder)
    return words


def _table(trials: list[dict[str, Any]], outcomes: dict[str, Outcome], left_out: dict[str, str]) -> Table:
    table = Table("run", "done", "test/primary", "seconds", "what failed, or was left out, and why")
    for label in dict.fromkeys(trial["label"] for trial in trials):
        known = [outcomes[trial["name"]] for trial in trials if trial["label"] == label]
        scores = [each.score for each in known if each.score is not None]
        failures = dict.fromkeys(each.failure for each in known if each.failure)
        table.add_row(
            label, f"{sum(not each.failure for each in known)} of {len(known)}",
            f"{statistics.mean(scores):.4f}" if scores else "", f"{sum(each.seconds for each in known):.0f}",
            " ".join(failures),
        )  # fmt: skip
    for label, reason in left_out.items():
        table.add_row(label, "left out", "", "", reason)
    return table
