"""Vocabularies by option, and what is kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from read_pairs import ready, texts

from experiments.translation.data import TranslationData
from experiments.translation.tokens import Vocabulary


def test_vocabularies_are_joint_or_separate(folder: Callable[..., Path]) -> None:
    root = str(folder({"train": 30, "val": 3, "test": 2}))
    joint, separate = ready(root).facts, ready(root, joint=False).facts
    assert joint["source_vocabulary"] == joint["target_vocabulary"]
    assert separate["source_vocabulary"] != separate["target_vocabulary"]
    assert joint["vocabulary"] != separate["vocabulary"]
    assert not ready(root, tokens="words").facts["joint"]
    assert ready(root, tokens="words", joint=True).facts["joint"]


def test_one_file_of_a_vocabulary_serves_both_sides(folder: Callable[..., Path], tmp_path: Path) -> None:
    root = str(folder({"train": 30, "val": 3, "test": 2}))
    made = Vocabulary.train(["train 0 dog", "train 1 Hund"], kind="words", size=50)
    (tmp_path / "both.json").write_text(made.to_json(), encoding="utf-8")
    facts = ready(root, vocabulary=str(tmp_path / "both.json")).facts
    assert (facts["joint"], facts["source_size"], facts["vocabulary"]) == (True, made.size, made.fingerprint)
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"--data\.vocabulary=.*bad\.json: it cannot be read"):
        _ = ready(root, vocabulary=str(tmp_path / "bad.json")).facts
    with pytest.raises(ValueError, match=r"names 3 files; expected one, or \[SOURCE,TARGET\]"):
        _ = ready(root, vocabulary=["a", "b", "c"]).facts


def stamps(cache: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}


def batches_of(data: TranslationData) -> list[list[Any]]:
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    return [[batch["source"].tolist(), batch["target"].tolist()] for loader in loaders for batch in loader]


def test_a_second_run_and_a_second_process_write_nothing(folder: Callable[..., Path], user_cache: Path) -> None:
    root = str(folder({"train": 30, "val": 3, "test": 2}))
    first = TranslationData(root)
    first.prepare_data()
    written = stamps(user_cache)
    assert len(written) == 1 + 2 * 3  # a vocabulary; both sides of each part
    second = TranslationData(root)
    second.setup("fit")
    assert batches_of(second) == batches_of(first)
    second.prepare_data()
    assert stamps(user_cache) == written
    plain = TranslationData(root, cache=None)
    assert batches_of(plain) == batches_of(first)
    assert plain.facts == first.facts == second.facts


def test_the_cache_follows_text_and_options(folder: Callable[..., Path], user_cache: Path) -> None:
    root = folder({"train": 30, "val": 3, "test": 2})
    TranslationData(str(root)).prepare_data()
    before = set(stamps(user_cache))
    TranslationData(str(root), vocabulary_size=60).prepare_data()
    other = set(stamps(user_cache)) - before
    assert len(other) == 7
    (root / "val.en").write_text("one\ntwo\nthree\n")
    TranslationData(str(root)).prepare_data()
    assert len(set(stamps(user_cache)) - before - other) == 1


def test_a_damaged_file_is_made_anew_with_a_warning(
    folder: Callable[..., Path], user_cache: Path, report: pytest.LogCaptureFixture
) -> None:
    root = str(folder({"train": 30, "val": 3, "test": 2}))
    first = TranslationData(root)
    right, facts = batches_of(first), first.facts
    for file in user_cache.iterdir():
        content = file.read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
            file.write_bytes(damaged)
            report.clear()
            again = TranslationData(root)
            assert (batches_of(again), again.facts) == (right, facts)
            assert f"{file} is damaged and is made anew." in report.text
            assert file.read_bytes() == content


def test_where_nothing_can_be_kept_it_is_said(
    folder: Callable[..., Path], tmp_path: Path, report: pytest.LogCaptureFixture
) -> None:
    root = str(folder({"train": 30, "val": 3, "test": 2}))
    (tmp_path / "file").write_text("")
    data = TranslationData(root, cache=str(tmp_path / "file"))
    assert len(texts(data.train_dataloader())) == 30
    assert "Nothing could be kept in" in report.text


def test_no_unfinished_file_stays(folder: Callable[..., Path], tmp_path: Path) -> None:
    cache = tmp_path / "kept"
    TranslationData(str(folder({"train": 30, "val": 3, "test": 2})), cache=str(cache)).prepare_data()
    assert all(file.name.startswith(("vocabulary-", "tokens-")) for file in cache.iterdir())
