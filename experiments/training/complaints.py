"""Turns what jsonargparse says into what came, what was expected, and the nearest right word."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser

from attnzoo import CATALOGUE, Mechanism
from experiments.training.messages import class_paths, given_value, innermost, option_of, relevant
from experiments.training.module import Experiment
from experiments.training.specs import describe
from experiments.training.usage import UsageError, nearest
from experiments.training.words import value_of


def complain(message: str, parser: ArgumentParser, argv: list[str]) -> UsageError:
    """The error to show for `message` of jsonargparse.

    Args:
        message: its text, often many lines.
        parser: whose options are known.
        argv: the words that were parsed.
    """
    if early := _apart(argv) or _base_model(argv):
        return early
    message = relevant(message)
    option, inner = option_of(message), innermost(message)
    unknown = re.search(r"[Uu]nrecognized arguments: *(\S+)", message)
    if unknown and not option:
        return _unknown_word(unknown[1], _options(parser))
    where, said, known = (
        (unknown and _unknown_inside(option, message, parser))
        or _unknown_option(option, inner, message, parser)
        or _section(option, inner, message, parser)
        or _unknown_class(option, inner, message, argv)
        or _wrong_count(option, inner)
        or _wrong_value(option, inner, message, argv)
        or ("", inner, [])
    )
    written = any(word.partition("=")[0] == where for word in argv)
    files = [] if written else [after for word, after in itertools.pairwise(argv) if word in ("--config", "-c")]
    files += [] if written else [word.partition("=")[2] for word in argv if word.startswith(("--config=", "-c="))]
    place = f" (in {', '.join(files)})" if files else ""
    accepted = f"\nThere are: {', '.join(known)}" if known else ""
    return UsageError(f"{said}{place}{accepted}")


Complaint = tuple[str, str, list[str]]
"""The option, what to say of it, and the words that would be right."""


def _apart(argv: list[str]) -> UsageError | None:
    for (word, after), following in itertools.zip_longest(itertools.pairwise(argv), argv[2:], fillvalue=""):
        if word.startswith("--") and (after.startswith("=") or (word.endswith("=") and not after.startswith("-"))):
            whole = f"{word.rstrip('=')}={after.lstrip('=') or following}"
            return UsageError(f"{word} {after}: there is no space around the sign; did you mean {whole}?")
    return None


def _base_model(argv: list[str]) -> UsageError | None:
    # What it complains about first is an option that such a class wants and no config gives.
    word = value_of(argv, "--model")
    cls = None if word is None else _subclasses(Experiment).get(word.rpartition(".")[2])
    return _base(f"--model={word}", _experiments()) if _is_base(cls) else None


def _unknown_word(word: str, options: list[str]) -> UsageError:
    name = word.partition("=")[0]
    if not name.startswith("-"):
        first = "--ckpt" if name.endswith(".ckpt") and "--ckpt" in options else "--config"
        meant = f"--{word}" if f"--{name}" in options or "=" in word else f"{first}={word}"
        asked = f" Did you mean {meant}?" if first in options or meant == f"--{word}" else ""
        return UsageError(
            f"{word!r} stands alone; options begin with two dashes.{asked} A value with a space in it needs quotes."
        )
    group = [option for option in options if option.rpartition(".")[0] == name.rpartition(".")[0]]
    near = nearest(name, group or options)
    return UsageError(f"{name}: there is no such option.{near}\n--help lists all options.")


def _unknown_inside(option: str, message: str, parser: ArgumentParser) -> Complaint:
    group, _, word = option.rpartition(".")
    accepted = _group(parser, group.rpartition(".")[2], message)
    if accepted:
        return option, f"{option}: there is no such option.{nearest(word, accepted)}", accepted
    accepted = _accepted(message)
    return option, f"{option}: there is no option {group}.{nearest(group.rpartition('.')[2], accepted)}", accepted


def _unknown_option(option: str, inner: str, message: str, parser: ArgumentParser) -> Complaint | None:
    match = re.search(r"(?:Key|Option|option) '([\w.]+)'(?: is not (?:accepted|expected))?", inner)
    if match is None:
        return None
    *groups, word = match[1].split(".")
    if groups and not _top(parser, groups):
        groups, word = [], groups[0]
    group = re.search(r"Group '([\w.]+)'", inner)
    accepted = _group(parser, group[1], message) if group else _accepted(message) or _top(parser, groups)
    at = ".".join(filter(None, (option, group[1] if group else "", match[1])))
    at = option if option.endswith(f".{word}") else at if at.startswith("--") else f"--{at}"
    return at, f"{at}: there is no such option.{nearest(word, accepted)}", accepted


def _section(option: str, inner: str, message: str, parser: ArgumentParser) -> Complaint | None:
    if not re.search("Unable to load config|import path string|Expected a path", inner):
        return None
    examples = _examples(option, message, parser)
    if not examples:
        return None
    name, default = next(iter(examples.items()))
    value = re.search(r"(?:Unable to load config ['\"]|Given value: )([^\s'\"]*)", message)
    such, given = (
        f"{option}.{name}={'...' if default is None else default}",
        f"{option}={value[1]}" if value else option,
    )
    return option, f"{given}: it has options of its own; give them, such as {such}", list(examples)


def _examples(option: str, message: str, parser: ArgumentParser) -> dict[str, Any]:
    """The options inside of one, with their defaults."""
    found = [action for action in parser._actions if f"--{action.dest}".startswith(f"{option}.")]
    inside = {action.dest.rpartition(".")[2]: action.default for action in found if not action.dest.endswith(".help")}
    word = option.rpartition(".")[2]
    kinds = [get_type_hints(cls.__init__).get(word) for path in class_paths(message) if (cls := _import(path))]
    kinds += [getattr(action, "_typehint", None) for action in parser._actions if f"--{action.dest}" == option]
    for kind in kinds:
        for cls in (kind, *get_args(kind)):
            if dataclasses.is_dataclass(cls):
                missing, fields = dataclasses.MISSING, dataclasses.fields(cls)
                inside |= {each.name: None if each.default is missing else each.default for each in fields}
    return inside


def _unknown_class(option: str, inner: str, message: str, argv: list[str]) -> Complaint | None:
    named = r"import path string: (\S+)|Expected a path but (\S+) either"
    kinds = rf"{named}|(No module named|Unable to import|not correspond to)"
    match = re.search(kinds, inner)
    if match is None:
        return None
    path = re.search(r"class_path '([\w.]+)'", message)
    word = match[1] or match[2] or (path[1] if path else given_value(message))
    known: list[str] = []
    if "attention" in option:
        known = list(CATALOGUE)
    elif option == "--model":
        known = _experiments()
    where = _written(argv, word, option) or option
    if word in known:
        form = f"""{where}='{{"0": "{word}"}}'"""
        return where, f"{where}={word}: name blocks, from 0, and what each takes, such as {form}.", []
    return where, f"{where}={word}: there is no such class.{nearest(word.rpartition('.')[2], known)}", known


def _wrong_count(option: str, inner: str) -> Complaint | None:
    match = re.search(r"Expected a tuple with (\d+) elements?\. Got value: (.*)", inner)
    return match and (option, f"{option}={match[2]}: {match[1]} values were expected.", [])


def _wrong_value(option: str, inner: str, message: str, argv: list[str]) -> Complaint | None:
    value = re.search(r"Given value: (\[.*?\]|\S+?)\.?(?:\s|$)", message) or re.search(r"Got value: (.*)", inner)
    nested = re.search(r"val='(.*?)'\)", message)
    literals = ",".join(re.findall(r"Literal\[(.*?)\]", inner))
    choices = list(dict.fromkeys(choice.strip(" '\"") for choice in literals.split(",") if choice))
    named = re.findall(r"Expected an? <class '([\w.]+)'>", inner)
    types = [name for name in dict.fromkeys(named) if name != "NoneType"]
    types += [f"{count} values" for count in re.findall(r"Expected a tuple with (\d+) elements", inner)]
    if value is None or not (choices or types):
        return None
    given = nested[1] if nested else value[1]
    where = _written(argv, given, option) or option
    types = [f"a list, such as [{given}]" if name == "list" else name for name in types]
    accepted = ", ".join([*choices, *filter(None, [" or ".join(types)])])
    wanted = f"expected {'one of ' if choices else ''}{accepted}"
    return where, f"{where}={given}: {wanted}.{nearest(given, choices)}", []


def refuse_bases(model: Experiment) -> None:
    """Refuse a class, of the model or of a mechanism in its options, that others are built on and that does nothing.

    Raises:
        UsageError: with the classes that serve.
    """
    described = describe(model)
    if _is_base(type(model)):
        raise _base(f"--model={type(model).__name__}", _experiments())
    for option, value in described["init_args"].items():
        _refuse_bases_in(value, f"--model.{option}")


def _refuse_bases_in(value: Any, option: str) -> None:
    if isinstance(value, dict):
        path = value.get("class_path")
        if isinstance(path, str) and _is_base(_import(path)):
            raise _base(f"{option}={path.rpartition('.')[2]}", list(CATALOGUE))
        for name, inner in value.items():
            _refuse_bases_in(inner, f"{option}.{name}")


def _base(given: str, names: list[str]) -> UsageError:
    return UsageError(
        f"{given}: others are built on this class, and alone it does nothing.\nThere are: {', '.join(names)}"
    )


def _is_base(cls: Any) -> bool:
    if not isinstance(cls, type):
        return False
    if issubclass(cls, Experiment):
        return any(getattr(method, "__isabstractmethod__", False) for _, method in inspect.getmembers(cls, callable))
    if not issubclass(cls, Mechanism) or cls in CATALOGUE.values():
        return False
    return cls.attend is Mechanism.attend or any(issubclass(known, cls) for known in CATALOGUE.values())


def _options(parser: ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


def _written(argv: list[str], value: str, option: str) -> str | None:
    """The option that has this value among the words: that of the complaint, or else one of its section."""
    section = option.partition(".")[0]
    found = []
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        name, _, given = word.partition("=")
        if name.startswith(section or "--") and (given == value or (not given and after == value)):
            found.append(name)
    return option if option in found else next(iter(found), None)


def _accepted(message: str) -> list[str]:
    # The innermost class that is named is the one that does not take the option.
    for path in reversed(class_paths(message)):
        found = _import(path)
        if found is not None:
            # These two a mechanism gets from the network that it stands in.
            given = ("num_heads", "head_dim") if isinstance(found, type) and issubclass(found, Mechanism) else ()
            return [name for name in inspect.signature(found).parameters if name not in given]
    return []


def _top(parser: ArgumentParser, groups: list[str]) -> list[str]:
    names = [option.removeprefix("--") for option in _options(parser)]
    depth = len(groups)
    split = [name.split(".") for name in names]
    return list(dict.fromkeys(parts[depth] for parts in split if len(parts) > depth and parts[:depth] == groups))


def _group(parser: ArgumentParser, group: str, message: str) -> list[str]:
    for name in class_paths(message):
        annotation = inspect.signature(found).parameters.get(group) if (found := _import(name)) else None
        default = annotation.default if annotation else None
        if dataclasses.is_dataclass(default):
            return [field.name for field in dataclasses.fields(default)]
    return _top(parser, group.split("."))


def _experiments() -> list[str]:
    return [name for name, cls in _subclasses(Experiment).items() if not _is_base(cls)]


def _subclasses(base: type) -> dict[str, type]:
    found: dict[str, type] = {}
    for cls in base.__subclasses__():
        found |= {cls.__name__: cls, **_subclasses(cls)}
    return found


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
