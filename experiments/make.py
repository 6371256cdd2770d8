"""`python -m experiments.make TARGET`: turns the variables of make into the words of a command.

The Makefile exports EXP, ATTENTION, ARGS and the like; they are read here from the environment and never pasted
into a shell line, so that spaces, quotes and semicolons in them mean nothing to a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping

from experiments.__main__ import ended
from experiments.__main__ import main as run
from experiments.training.usage import UsageError, config_path, nearest, preset_lines

TARGETS = {
    "train": {"EXP": "--config", "ATTENTION": "--model.attention"},
    "classify": {"IMAGE": "--image", "CKPT": "--ckpt", "INVERT": "--invert", "OUT": "--out"},
    "translate": {"TEXT": "--text", "INPUT": "--input", "OUT": "--output", "CKPT": "--ckpt"},
    "forecast": {"CSV": "--csv", "CKPT": "--ckpt", "OUT": "--out"},
    "sweep": {"EXP": "--config", "OVER": "--over", "SEEDS": "--seeds", "MATCH": "--match"},
    "compare": {"RUNS": "--runs", "OUT": "--out"},
    "heads": {"CKPT": "--ckpt", "OUT": "--out"},
    "sync": {},
    "export": {"CKPT": "--ckpt", "OUT": "--out"},
}
"""Target -> variable -> option."""

REQUIRED = {"classify": ("IMAGE", "digit.png"), "forecast": ("CSV", "table.csv")}
"""Target -> the variable it needs, and an example."""


ANYWHERE = ("ARGS", "PYTHON")
"""Variables of every target."""


def foreign(target: str, flags: str) -> list[str]:
    r"""Variables given on the command line of make that its target does not read.

    Args:
        target: of make.
        flags: ``MAKEFLAGS``, in which make hands them on behind two dashes, blanks in them behind a backslash.

    Example:
        >>> foreign("train", r"k -- EXP=vit ATTN=Local ARGS=--run.name=a\ b=c")
        ['ATTN']
    """
    given = re.findall(r"(?<!\\)\s(\w+)[:+?]*=", flags.partition(" --")[2])
    return [name for name in given if name not in TARGETS[target] and name not in ANYWHERE]


def words(target: str, environment: Mapping[str, str]) -> list[str]:
    """The command of a target: variables that are set become options, ARGS is split as a shell splits words.

    Example:
        >>> words("train", {"EXP": "vit", "ATTENTION": "Local", "ARGS": "--trainer.max_epochs=3"})
        ['fit', '--config=vit', '--model.attention=Local', '--trainer.max_epochs=3']
    """
    options = [f"{option}={environment[name]}" for name, option in TARGETS[target].items() if environment.get(name)]
    return ["fit" if target == "train" else target, *options, *shlex.split(environment.get("ARGS", ""))]


def main(target: str, environment: Mapping[str, str]) -> int:
    """Runs a target; returns the exit status."""
    if unknown := foreign(target, environment.get("MAKEFLAGS", "")):
        names = [*TARGETS[target], "ARGS"]
        said = f"make {target} reads no {unknown[0]}=.{nearest(unknown[0], names)}"
        print(f"error: {said} It reads {', '.join(names)}.", file=sys.stderr)
        return 2
    if target == "train" and not environment.get("EXP"):
        print('make train EXP=PRESET [ATTENTION=NAME] [ARGS="--option=value ..."]\n\npresets:')
        print("\n".join(preset_lines()))
        return 0
    required, example = REQUIRED.get(target, ("", ""))
    if required and not environment.get(required):
        print(
            f"error: make {target} needs {required}=, for example: make {target} {required}={example}", file=sys.stderr
        )
        return 2
    if target == "train":
        try:
            config_path(environment["EXP"])
        except UsageError as error:
            print(f"error: {error}".replace("--config=", "EXP="), file=sys.stderr)
            return 2
    try:
        return run(words(target, environment))
    except ValueError as error:  # ARGS with a quote that is not closed
        print(f"error: ARGS={environment.get('ARGS')!r}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(ended(lambda: main(sys.argv[1], os.environ)))
