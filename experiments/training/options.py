"""Options of a small command, read from the signature and the docstring of its function."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from experiments.training.complaints import complain
from experiments.training.words import refuse_empty

PLACES = ("--image", "--ckpt", "--out", "--data", "--csv", "--input", "--output", "--runs")
"""Options that hold a file or a folder."""


def call(function: Callable[..., int], argv: list[str], prog: str) -> int:
    """Calls ``function`` with the options in ``argv``: ``--name=value`` for each of its parameters.

    Args:
        function: typed parameters and a Google docstring; returns the exit status.
        argv: the words after the command.
        prog: what stands before them, for ``--help``.

    Raises:
        UsageError: for an unknown or missing option, or a value of another type.
    """
    parser = ArgumentParser(prog=prog, allow_abbrev=False, exit_on_error=False)
    parser.add_function_arguments(function, as_positional=False)
    argv = _switched(argv, function)
    refuse_empty(argv, PLACES)
    try:
        parsed = parser.parse_args(argv)
    except ArgumentError as error:
        raise complain(str(error), parser, argv) from error
    options: dict[str, Any] = {name: parsed[name] for name in inspect.signature(function).parameters}
    return function(**options)


def _switched(argv: list[str], function: Callable[..., int]) -> list[str]:
    """``--name`` of what is yes or no, without a value, as ``--name=true``: so people write it."""
    switches = {f"--{name}" for name, kind in get_type_hints(function).items() if kind is bool}
    return [
        f"{word}=true" if word in switches and after.lower() not in ("true", "false") else word
        for word, after in itertools.zip_longest(argv, argv[1:], fillvalue="")
    ]
