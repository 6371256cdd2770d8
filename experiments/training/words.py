"""The words of a command line, before they are parsed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from experiments.training.runs import newest_last, newest_unfinished
from experiments.training.usage import UsageError, config_path

log = logging.getLogger("experiments")


def resolve_configs(words: list[str]) -> tuple[list[str], str | None]:
    """Words with the short names of presets made paths, and the name of the first config."""
    resolved, first = [], None
    expects = False
    for word in words:
        name, equals, value = word.partition("=")
        if expects or (name in ("--config", "-c") and equals):
            path = config_path(word if expects else value)
            first = first or path.stem
            resolved.append(str(path) if expects else f"{name}={path}")
            expects = False
        else:
            expects = word in ("--config", "-c")
            resolved.append(word)
    return resolved, first


def resolve_checkpoint(words: list[str], preset: str | None) -> tuple[list[str], str | None]:
    """Words with `--ckpt_path=last` made the path of the newest run, and its preset.

    One `--config` beside it says which preset's newest run is meant. The options are those of that run, not those
    of the preset as it stands: a run that was started with more options goes on with them. The same holds for the
    path of a checkpoint in a run of that preset.
    """
    root, of = value_of(words, "--run.root") or "runs", value_of(words, "--run.preset") or preset
    if value_of(words, "--resume") not in (None, "null"):
        return _resumed(words, root, of, preset)
    wanted = value_of(words, "--ckpt_path")
    if wanted in (None, "null"):
        return words, preset
    last = wanted == "last"
    path = Path(_decide("last", lambda: str(newest_last(root, of))) if last else str(wanted))
    run = _with_options(path) if last else path.resolve().parent.parent
    configs = sum(word.partition("=")[0] in ("--config", "-c") for word in words)
    if last and configs > 1:
        raise UsageError("--ckpt_path=last takes its options from the run; leave out the second --config.")
    of_preset = configs == 1 and run.parent.name == preset and (run / "config.yaml").is_file()
    if not last and not of_preset:
        return words, preset
    log.info("From %s, with the options of its run.", path)
    return [f"--ckpt_path={path}", *_without(words, "--config", "-c", "--ckpt_path")], run.parent.name


def _resumed(words: list[str], root: str, of: str | None, preset: str | None) -> tuple[list[str], str | None]:
    """Words for `--resume=auto`: those that go on with an unfinished run, or that begin a new one."""
    how = value_of(words, "--resume")
    if how != "auto":
        raise UsageError(f"--resume is {how!r}; it can be auto. A checkpoint is given by --ckpt_path=PATH.")
    if value_of(words, "--ckpt_path") not in (None, "null"):
        raise UsageError("--resume=auto finds the checkpoint itself; leave --ckpt_path out, or --resume.")
    name = value_of(words, "--run.name")
    found = _decide("resume", lambda: str(newest_unfinished(root, of, name) or ""))
    others = _without(words, "--resume")
    if not found:
        log.info("No run of %s waits to be finished; a new one begins.", of or "any preset")
        return others, preset
    run = _with_options(Path(found))
    log.info("From %s, with the options of its run.", found)
    return [f"--ckpt_path={found}", *over_options_of_run(others)], run.parent.name


def over_options_of_run(words: list[str]) -> list[str]:
    """Words of the command that has begun a run, as they are laid over its options where it goes on."""
    kept = []
    for word in _without(words, "--config", "-c"):
        if word.partition("=")[0].endswith("+"):
            # The same command has put it there when the run began, and would do so a second time.
            log.info("%s stands in the options of the run.", word)
        else:
            kept.append(word)
    return kept


def _with_options(checkpoint: Path) -> Path:
    """The run of a checkpoint, which must have its options still: trained on without them it would be another run."""
    run = checkpoint.resolve().parent.parent
    if not (run / "config.yaml").is_file():
        raise UsageError(
            f"The run of {checkpoint} has lost its config.yaml, so it cannot go on as it began.\nPut that file back, "
            f"or begin a new run from its weights: --config=PRESET --ckpt_path={checkpoint} (without --resume). "
            "Or move its folder away."
        )
    return run


def _decide(name: str, choose: Callable[[], str]) -> str:
    # Brings torch along, which a wrong word should not wait for.
    from experiments.training.processes import decide

    return decide(name, choose)


def _without(words: list[str], *names: str) -> list[str]:
    """Words without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip or name in names:
            skip = not skip and not equals
        else:
            kept.append(word)
    return kept


def help_of_config(words: list[str]) -> list[str]:
    """Let `--model.help` and `--data.help` tell of the classes that the config names."""
    wanted = [key for key in ("model", "data") if f"--{key}.help" in words]
    classes: dict[str, str] = {}
    for config in values_of(words, "--config", "-c") if wanted else []:
        content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        classes |= {
            f"--{key}.help": content[key]["class_path"] for key in wanted if "class_path" in content.get(key, {})
        }
    return [f"{word}={classes[word]}" if word in classes else word for word in words]


def refuse_empty(words: list[str], options: Iterable[str]) -> None:
    """Refuse an empty value of any of these options, which stands where a variable of the shell is not set.

    Raises:
        UsageError: with the option.
    """
    for option in options:
        if value_of(words, option) == "":
            raise UsageError(f"{option} is empty; is a variable that stands there not set? Else leave it out.")


def value_of(words: list[str], option: str) -> str | None:
    """What is given for `option`, the last time where it is given several times; None where it is not."""
    return next(reversed(values_of(words, option)), None)


def values_of(words: list[str], *options: str) -> list[str]:
    """All that is given for any of these options, as `--option=value` or `--option value`.

    Example:
        >>> values_of(["--config=vit", "-c", "wide.yaml"], "--config", "-c")
        ['vit', 'wide.yaml']
    """
    found = []
    for word, after in itertools.zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name in options and (equals or after is not None):
            found.append(value if equals else after)
    return found
