"""Text for the tests of the translator."""

from __future__ import annotations

import gzip
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

LANGUAGES = {"en": "dog", "de": "Hund", "fr": "chien"}
CASES = Path(__file__).parent.parent / "cases" / "translation"


@pytest.fixture(scope="session")
def cases() -> Path:
    """The small files of the acceptance cases."""
    return CASES


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="experiments")
    return caplog


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the user's own cache."""
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root / "attnzoo"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests find what they made, wherever they run."""
    monkeypatch.delenv("ATTNZOO_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder of sets: `folder({"train": 9, "test_2016": 2})`, line n of a language is "n dog", "n Hund"."""

    def make(sizes: dict[str, int], languages: tuple[str, ...] = ("en", "de"), ending: str = "") -> Path:
        root = tmp_path / "text"
        root.mkdir(exist_ok=True)
        for name, size in sizes.items():
            for language in languages:
                lines = "".join(f"{name} {n} {LANGUAGES[language]}\n" for n in range(size)).encode()
                (root / f"{name}.{language}{ending}").write_bytes(gzip.compress(lines) if "gz" in ending else lines)
        return root

    return make
