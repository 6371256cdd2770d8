"""Who may import whom, how long a file may get, and what every public name must have."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnzoo

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "attnzoo").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))
MECHANISMS = [path for path in LIBRARY if path.parent.name == "mechanisms"]
TASKS = sorted(
    path.name
    for path in (ROOT / "experiments").iterdir()
    if path.is_dir() and path.name != "training" and (path / "__init__.py").exists()
)

LONG_FILES: dict[str, str] = {}
"""Files of more than 300 lines, and why each of them is still one room."""

PUBLIC = sorted(
    name
    for name in attnzoo.__all__
    if inspect.isclass(getattr(attnzoo, name)) or inspect.isfunction(getattr(attnzoo, name))
)

HEADS = ("degenerate", "diversity", "figures", "health", "prune", "reinit")
"""What of the heads is public: the figures of one, how they are measured and judged, and what is done about it."""

PUBLIC_MODULES = ("attnzoo", "attnzoo.positions", "attnzoo.swap", *(f"attnzoo.heads.{name}" for name in HEADS))
"""What of the library the experiments may import from."""


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(module, names) of each import in a file, at any depth; ``names`` is empty for ``import module``."""
    package = list(path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, [alias.name for alias in node.names]


def modules(path: Path) -> set[str]:
    """Every module that an import of this file may mean: ``from a import b`` may be a name or a.b."""
    found = set()
    for module, names in imports(path):
        found |= {module, *(f"{module}.{name}" for name in names)}
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_there_is_something_to_look_at() -> None:
    """The other tests here would pass on an empty tree."""
    assert len(MECHANISMS) >= 3
    assert "attnzoo/multihead.py" in map(relative, LIBRARY)
    assert {"vision"} <= set(TASKS)
    found = modules(ROOT / "attnzoo" / "mechanisms" / "local.py")
    assert {"torch.Tensor", "attnzoo.kernels.blocks.banded", "attnzoo.mask"} <= found


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_the_library_imports_torch_and_the_standard_library(path: Path) -> None:
    """Nothing else, at any depth of the file."""
    allowed = {"torch", "attnzoo", *sys.stdlib_module_names}
    assert {module.split(".")[0] for module, _ in imports(path)} <= allowed


@pytest.mark.parametrize("path", MECHANISMS, ids=relative)
def test_a_mechanism_imports_kernels_and_the_contract(path: Path) -> None:
    """Never another mechanism, never the shell, nothing that knows of the catalogue."""
    allowed = (
        "attnzoo.kernels",
        "attnzoo.bias",
        "attnzoo.mask",
        "attnzoo.mechanism",
        "attnzoo.running_sums",
        "attnzoo.state",
        "attnzoo.traits",
    )
    ours = {module for module, _ in imports(path) if under(module, "attnzoo")}
    assert {module for module in ours if not under(module, *allowed)} == set()


@pytest.mark.parametrize("path", [path for path in MECHANISMS if path.stem != "__init__"], ids=relative)
def test_d1_a_mechanism_opens_with_its_paper(path: Path) -> None:
    """D1: title, paper, formula, how it differs from it, when to use it and when not; the pages are made from it."""
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    for part in ("arXiv:", "\nUse it when ", "\nNot when ", "  o"):
        assert part in header, part
    assert "Left out" in header or "Deviations" in header


@pytest.mark.parametrize("path", EXPERIMENTS, ids=relative)
def test_experiments_use_public_names_of_the_library(path: Path) -> None:
    """``from attnzoo import X`` with X in ``__all__``; positions have a public module of their own."""
    for module, names in imports(path):
        if under(module, "attnzoo"):
            assert module in PUBLIC_MODULES
            assert not any(name.startswith("_") or name == "*" for name in names)
            if module == "attnzoo":
                assert set(names) <= {*attnzoo.__all__, "__version__", "positions"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "attnzoo":
            assert node.attr in {*attnzoo.__all__, "__version__"}


@pytest.mark.parametrize("task", ["training", *TASKS])
def test_no_task_knows_another(task: str) -> None:
    """A task imports itself and ``experiments.training``; ``experiments.training`` imports no task."""
    allowed = (f"experiments.{task}", "experiments.training")
    for path in (ROOT / "experiments" / task).rglob("*.py"):
        ours = {module for module in modules(path) if under(module, "experiments")} - {"experiments"}
        assert {module for module in ours if not under(module, *allowed)} == set(), relative(path)


WHAT_COMES_WITH_IT = """
import sys, torch
before = set(sys.modules)
import attnzoo
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_the_library_is_silent_and_loads_little() -> None:
    """In a fresh process, beside torch: itself and the standard library; not a word is printed."""
    command = [sys.executable, "-W", "error", "-c", WHAT_COMES_WITH_IT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (names,) = done.stdout.splitlines()
    assert "attnzoo" in names.split()
    assert set(names.split()) <= {"attnzoo", "torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("folder", ["attnzoo", "experiments", "benchmarks"])
def test_a_long_file_is_two_rooms(folder: str) -> None:
    """More than 300 lines need a reason, and a reason needs more than 300 lines."""
    long = {
        relative(path)
        for path in (ROOT / folder).rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > 300
    }
    assert long == {name for name in LONG_FILES if name.startswith(f"{folder}/")}
    assert all(len(reason) > 20 for reason in LONG_FILES.values())


def test_one_file_calls_the_fused_kernel() -> None:
    """``scaled_dot_product_attention`` stands in kernels/sdpa.py alone."""
    callers = set()
    for path in [*LIBRARY, *EXPERIMENTS]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = {
                ast.Name: lambda n: n.id,
                ast.Attribute: lambda n: n.attr,
                ast.alias: lambda n: n.name,
            }.get(type(node))
            if named is not None and named(node) == "scaled_dot_product_attention":
                callers.add(relative(path))
    assert callers == {"attnzoo/kernels/sdpa.py"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_say_what_they_are(name: str) -> None:
    """A class or function of the package has a docstring of its own, not Python's and not its base's."""
    value = getattr(attnzoo, name)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")
    for base in value.__mro__[1:] if inspect.isclass(value) else ():
        assert value.__doc__ != base.__doc__


@pytest.mark.parametrize("path", [*LIBRARY, *EXPERIMENTS], ids=relative)
def test_constructors_are_annotated(path: Path) -> None:
    """Signatures are the schema of the command line, so every parameter of a public class has a type."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                given = method.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                bare = [a.arg for a in every[1:] if a is not None and a.annotation is None]
                assert bare == [], f"{relative(path)}: {node.name}"


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_types_are_asked_for_in_tuples(path: Path) -> None:
    """``isinstance(x, A | B)`` breaks the graph in torch 2.9, which the library supports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            assert not isinstance(node.args[1], ast.BinOp), f"line {node.lineno}"
