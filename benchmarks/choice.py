"""Which mechanisms a user wants measured."""

from __future__ import annotations

import argparse

from attnzoo import CATALOGUE
from experiments.training.usage import nearest


def chosen(parser: argparse.ArgumentParser, names: str) -> list[str]:
    """The names between commas; the parser ends the program, with the nearest right word, where one is none."""
    found = [name for name in names.split(",") if name]
    for name in found:
        if name not in CATALOGUE:
            parser.error(f"there is no mechanism named {name!r}.{nearest(name, CATALOGUE)}")
    return found
