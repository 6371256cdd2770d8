"""tests/CASES.md: each case points to tests that exist and name it, and none of a landed part is missing."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"- ([A-Z]\d\d): (.+)")

LANDED = {
    "M": {f"M{n:02}" for n in range(1, 13)},
    "P": {f"P{n:02}" for n in range(1, 11)},
    "E": {f"E{n:02}" for n in range(1, 11)},
    "V": {f"V{n:02}" for n in range(1, 13)},
    "R": {f"R{n:02}" for n in range(1, 15)},
    "T": {f"T{n:02}" for n in range(1, 15)},
    "K": {f"K{n:02}" for n in range(1, 11)},
    "F": {f"F{n:02}" for n in range(1, 17)},
}
"""The cases of the parts that have landed."""


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


@pytest.mark.parametrize("part", LANDED)
def test_no_case_of_a_landed_part_is_missing(part: str) -> None:
    """What has landed is in the map."""
    assert LANDED[part] - set(read_map()) == set()


REFERENCE = """
A1 A2 A3 A4 A5 A6 A8 A9 A10 A11 A12 A15 A16 B1 B3 B4 B5 B7 B8 C1 C2 C4 D1 D2 D3 D5 E1 E2 F2 F3
G1 G4 G5 G6 H1 I1 J2 J3 J4 J6 J7 K1 K2 K3
"""
"""Ids of the reference on attention mechanisms; a test names its case in its name or docstring.

Not tests: A14 is `make bench`, G2 the catalogue and a rule in CONTRIBUTING.md, H3 the same as C4.
"""


@functools.cache
def all_tests() -> list[str]:
    """Name and docstring of each test function."""
    files = (ROOT / "tests").rglob("test_*.py")
    return [f"{name} {doc}" for path in files for name, doc in known_tests(str(path.relative_to(ROOT))).items()]


@pytest.mark.parametrize("key", REFERENCE.split())
def test_a_case_of_the_reference_is_named_by_a_test(key: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z0-9]){key}(?![A-Za-z0-9])|_{key.lower()}_")
    assert any(pattern.search(text) for text in all_tests())
