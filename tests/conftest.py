"""What every test relies on: one thread, one seed, default number format."""

import logging
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = ["conftest.py", "*/conftest.py"]
"""They are loaded as plugins; collected for doctests too, two of one name would stop the run."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "traits(*names): run on the mechanisms that have all of these traits")
    # Two cores are shared by everything that runs, and sums must not depend on how many there are.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Each test draws the same numbers whichever ran before it, and prints no messages that another asked for."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    logging.getLogger("experiments").handlers.clear()


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan(request: pytest.FixtureRequest) -> Iterator[None]:
    """What ``torch.empty`` gives is NaN in tests of the library, so that a kernel that reads it is found out."""
    if not {"attnzoo", "laws"} & set(request.path.parts[-2:]):
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="measure the records in tests/golden anew")
