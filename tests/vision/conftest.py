"""Pictures for the tests of the vision experiment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

CASES = Path(__file__).parent.parent / "cases" / "vision"


@pytest.fixture(scope="session")
def cases() -> Path:
    """The small files of the acceptance cases."""
    return CASES


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="experiments")
    return caplog


@pytest.fixture(scope="session")
def cifar10() -> Path:
    """CIFAR-10 in parquet files; the data sets are no part of the project."""
    data = Path(os.environ.get("ATTNZOO_DATA", CASES.parents[3] / "shared" / "data"))
    folder = data / "vision" / "cifar10-jpeg"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set ATTNZOO_DATA to the folder of data sets")
    return folder


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of plain pictures: `make_tree({"train/cat": 3, "train/dog": 2}, size=(8, 8))`."""

    def make(counts: dict[str, int], size: tuple[int, int] = (8, 8)) -> Path:
        root = tmp_path / "pictures"
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True)
            for number in range(count):
                shade = (17 * number + 40 * len(folder)) % 256
                Image.new("RGB", size, (shade, 255 - shade, number)).save(root / folder / f"{number:02}.png")
        return root

    return make
