"""The words of a command line, before they are parsed."""

from __future__ import annotations

import logging
from pathlib import Path

import yaml

from experiments.training.runs import newest_last
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
    wanted = value_of(words, "--ckpt_path")
    if wanted in (None, "null"):
        return words, preset
    root = value_of(words, "--run.root") or "runs"
    last = wanted == "last"
    path = newest_last(root, value_of(words, "--run.preset") or preset) if last else Path(str(wanted))
    run = path.resolve().parent.parent
    configs = sum(word.partition("=")[0] in ("--config", "-c") for word in words)
    if last and configs > 1:
        raise UsageError("--ckpt_path=last takes its options from the run; leave out the second --config.")
    of_preset = configs == 1 and run.parent.name == preset and (run / "config.yaml").is_file()
    if not last and not of_preset:
        return words, preset
    log.info("From %s, with the options of its run.", path)
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip or name in ("--config", "-c", "--ckpt_path"):
            skip = not skip and not equals
        else:
            kept.append(word)
    return [f"--ckpt_path={path}", *kept], run.parent.name


def help_of_config(words: list[str]) -> list[str]:
    """Let `--model.help` and `--data.help` tell of the classes that the config names."""
    config = value_of(words, "--config") or value_of(words, "-c")
    wanted = [key for key in ("model", "data") if f"--{key}.help" in words]
    if config is None or not wanted:
        return words
    content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    classes = {f"--{key}.help": content[key]["class_path"] for key in wanted}
    return [f"{word}={classes[word]}" if word in classes else word for word in words]


def value_of(words: list[str], option: str) -> str | None:
    """What is given for `option`, None where it is not among the words."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else next(iter(words[place + 1 :]), None)
    return None
