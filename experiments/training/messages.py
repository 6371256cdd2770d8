"""What jsonargparse says of wrong options, taken apart."""

from __future__ import annotations

import re


def innermost(message: str) -> str:
    """What the class itself has said, out of jsonargparse's list of types that did not fit."""
    text = relevant(message)
    while match := re.search(r"Errors:\n\s*- (?!Expected an? )(.*)", text, re.DOTALL):
        text = match[1]
    text = re.sub(r"\n\s*Given value type.*", "", text, flags=re.DOTALL)
    return re.sub(r"^(?:Problem with given class_path '[\w.]+':|Parser key \"[\w.]+\":)\s*", "", text).strip()


def relevant(message: str) -> str:
    """`message` without the types that the user did not mean: of a list of errors, the first that is no plain type."""
    head, found, errors = message.partition("Errors:\n")
    if not found:
        return message
    bullet = re.match(r"\s*- ", errors)
    assert bullet is not None
    margin = bullet[0]
    listed, end, given = errors.partition(f"\n{margin[2:-2]}Given value type")
    first, *others = listed.removeprefix(margin).split(f"\n{margin}")
    kept = [first, *others] if first.startswith("Expected a") else [relevant(first)]
    return f"{head}Errors:\n{margin}" + f"\n{margin}".join(kept) + end + given


def option_of(message: str) -> str:
    """The option that it is about, with its dashes; empty where none is named."""
    keys = list(dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message)))
    nested = re.search(r"NestedArg\(key='([^']*)'", message)
    parts = keys[:1] + ([nested[1]] if nested else keys[1:2])
    return f"--{'.'.join(parts)}" if parts else ""


def given_value(message: str) -> str:
    """The value that came, empty where none is named."""
    match = re.search(r"Given value: (\S+)", message)
    return match[1] if match else ""


def class_paths(message: str) -> list[str]:
    """The classes that are named, from the outermost in."""
    return re.findall(r"class_path(?:=|': | )'([\w.]+)'", message.partition("Given value")[0])
