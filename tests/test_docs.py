"""What the documents say runs: their Python blocks, their make lines, their links."""

import re
import shlex
from pathlib import Path

import pytest

from experiments.__main__ import COMMANDS
from experiments.make import TARGETS, words
from experiments.training.usage import presets

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_run_in_order(name: str) -> None:
    """G5."""
    found = blocks(ROOT / name, "python")
    assert found
    scope: dict[str, object] = {"__name__": "page"}
    for block in found:
        exec(compile(block, name, "exec"), scope)


def make_lines() -> list[str]:
    lines = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/RESULTS.md"):
        text = page.read_text(encoding="utf-8")
        lines += re.findall(r"^make [^\n#]*", "\n".join(blocks(page, "sh")), re.MULTILINE)
        lines += re.findall(r"`(make [^`]+)`", re.sub(r"\s+", " ", text))
    return sorted({line.strip() for line in lines})


@pytest.mark.parametrize("line", make_lines())
def test_every_make_line_names_a_target_its_variables_and_a_preset(line: str) -> None:
    target, *variables = shlex.split(line)[1:]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
    given = dict(variable.split("=", 1) for variable in variables)
    exported = re.search(r"^export (.*)$", makefile, re.MULTILINE)
    assert exported is not None
    assert given.keys() <= set(exported[1].split())
    if "EXP" in given:
        assert given["EXP"] in presets()
    if target in TARGETS:
        assert words(target, given)[0] in COMMANDS


def test_every_preset_opens_with_its_command_and_its_expected_score() -> None:
    assert presets()
    for name, first_line in presets().items():
        assert f"make train EXP={name}" in first_line
        assert re.search(r"\d", first_line.partition(":")[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
