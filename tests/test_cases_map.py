"""tests/CASES.md: each case points to tests that exist and name it, and none of a landed part is missing."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"- ([A-Z]\d\d): (.+)")

FOUNDATION = {
    "M": {f"M{n:02}" for n in range(1, 13)},
    "P": {f"P{n:02}" for n in range(1, 11)},
    "E": {"E01", "E02", "E06", "E08", "E09", "E10"},
    "V": {f"V{n:02}" for n in range(1, 13)},
    "R": {"R03", "R04", "R05", "R06", "R07", "R09", "R10", "R12", "R13", "R14"},
    "T": {"T01", "T02"},
}
"""The cases that the foundation must hold, part by part."""


def read_map() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "tests" / "CASES.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("- "):
            match = LINE.fullmatch(line)
            assert match, f"not of the form '- M01: file::test, file::test': {line}"
            assert match[1] not in found, f"{match[1]} has two lines"
            found[match[1]] = match[2].split(", ")
    return found


@functools.cache
def known_tests(file: str) -> dict[str, str]:
    """Name -> docstring of each test function of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("key", sorted(read_map()))
def test_a_case_points_to_tests_that_exist_and_name_it(key: str) -> None:
    """In their name, or in their docstring."""
    for test in read_map()[key]:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), f"{key}: there is no {file}"
        assert name in known_tests(file), f"{key}: {file} has no {name}"
        assert key.lower() in name or key in known_tests(file)[name], f"{key}: {name} does not say so"


@pytest.mark.parametrize("part", FOUNDATION)
def test_no_case_of_a_landed_part_is_missing(part: str) -> None:
    """What the foundation must hold is in the map."""
    assert FOUNDATION[part] - set(read_map()) == set()
