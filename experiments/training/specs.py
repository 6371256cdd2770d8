"""What an object was made from, as plain values: `{class_path, init_args}`, and the way back.

This is what checkpoints and results hold, so that a file can be read with `weights_only=True`, by hand, and
by a program that has other versions of everything.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, ArgumentParser

import attnzoo

T = TypeVar("T")


def plain(value: Any, option: str) -> Any:
    """`value` in numbers, strings, lists and dicts alone.

    Args:
        value: plain already, or a dataclass, a path, or a factory of an attention mechanism.
        option: the name to complain about.

    Raises:
        ValueError: anything else; it could not be read back from a checkpoint.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item, option) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{option}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields, option)
    if callable(value):
        return plain(attnzoo.spec(value), option)
    raise ValueError(
        f"Option {option!r} is a {type(value).__name__}, which a checkpoint cannot hold as a plain value; "
        "pass numbers, strings, lists, dicts, dataclasses of these, or a factory of an attention mechanism."
    )


def describe(thing: Any) -> dict[str, Any]:
    """Class and arguments of a Lightning module or data module.

    Arguments are read from `hparams` where they were saved, else from the attributes of the same name.

    Raises:
        ValueError: an argument is in neither, or is no plain value.
    """
    cls = type(thing)
    parameters = inspect.signature(cls).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    saved = dict(thing.hparams)
    init_args = {}
    for name in [*named, *(name for name in saved if open_ended and name not in named)]:
        if name not in saved and not hasattr(thing, name):
            raise ValueError(
                f"{cls.__name__} keeps no trace of its argument {name!r}; "
                "call self.save_hyperparameters(logger=False) in its __init__."
            )
        init_args[name] = plain(saved[name] if name in saved else getattr(thing, name), name)
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": init_args}


def rebuild(base: type[T], spec: Mapping[str, Any]) -> T:
    """The object that `describe` has described.

    Args:
        base: what it must be a subclass of.
        spec: `{class_path, init_args}`.

    Raises:
        ValueError: no such class, or arguments that it does not take.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "object", fail_untyped=False, required=True)
    try:
        parsed = parser.parse_object({"object": {"class_path": spec["class_path"], "init_args": spec["init_args"]}})
    except ArgumentError as error:
        raise ValueError(
            f"{spec['class_path']} cannot be made from what was saved: {error} "
            "Was it saved by another version, or is a package missing?"
        ) from error
    made: T = parser.instantiate(parsed)["object"]
    return made
