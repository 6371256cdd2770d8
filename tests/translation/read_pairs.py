"""Reading TranslationData in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.translation.data import TranslationData


def of_case(cases: Path, name: str, **options: Any) -> TranslationData:
    """The pair of files as all three parts."""
    files = [str(cases / f"{name}.src"), str(cases / f"{name}.tgt")]
    return TranslationData(train=files, val=files, test=files, **options)


def texts(loader: Any) -> list[tuple[str, str]]:
    """Pairs of texts in order of their index."""
    found = {}
    for batch in loader:
        for index, *pair in zip(batch["index"].tolist(), batch["source_text"], batch["target_text"], strict=True):
            assert index not in found
            found[index] = tuple(pair)
    return [found[index] for index in sorted(found)]


def ready(*parts: Any, **options: Any) -> TranslationData:
    data = TranslationData(*parts, **options)
    data.setup("fit")
    return data
