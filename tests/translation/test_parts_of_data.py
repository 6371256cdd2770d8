"""Where text is found: folders, tables, files, a hub; and what is held out where a part is missing."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, DatasetDict
from read_pairs import of_case, ready, texts

from experiments.translation.data import TranslationData


@pytest.mark.parametrize("ending", ["", ".gz", ".txt", ".txt.gz"])
def test_a_folder_holds_parts_by_name(folder: Callable[..., Path], ending: str) -> None:
    root = folder({"train": 9, "dev": 3, "test": 2}, ending=ending)
    (root / "README.md").write_text("no text")
    data = ready(str(root))
    assert texts(data.train_dataloader()) == [(f"train {n} dog", f"train {n} Hund") for n in range(9)]
    assert len(texts(data.val_dataloader())) == 3
    assert texts(data.test_dataloader())[1] == ("test 1 dog", "test 1 Hund")
    assert data.facts["joint"]


def test_one_of_several_tests_is_chosen(folder: Callable[..., Path], report: pytest.LogCaptureFixture) -> None:
    root = str(folder({"train": 9, "val": 3, "test_b": 2, "test_a": 4}))
    assert len(texts(ready(root).test_dataloader())) == 4
    assert "The test part is test_a; --data.test may name test_b." in report.text
    assert len(texts(ready(root, test="test_b").test_dataloader())) == 2
    with pytest.raises(ValueError, match=r"--data\.test=.*test_c: neither a set of .* Did you mean test_[ab]\?"):
        ready(root, test="test_c")


def test_languages_choose_the_files(folder: Callable[..., Path]) -> None:
    root = str(folder({"train": 9, "val": 3, "test": 2}, ("en", "de", "fr")))
    data = ready(root, source_language="fr", target_language="en")
    assert texts(data.train_dataloader())[0] == ("train 0 chien", "train 0 dog")
    assert data.facts["languages"] == ["fr", "en"]
    with pytest.raises(
        ValueError, match=r"holds train\.de, train\.en, train\.fr; expected train\*\.en and train\*\.cs"
    ):
        ready(root, target_language="cs")


@pytest.mark.parametrize(
    "languages",
    [{"source_language": "en", "target_language": "en"}, {"source_language": "de"}, {"target_language": "en"}],
)
def test_a_text_is_not_translated_into_itself(
    languages: dict[str, str], folder: Callable[..., Path], report: pytest.LogCaptureFixture
) -> None:
    root = folder({"train": 9, "val": 3, "test": 2})
    for options in ({"path": str(root)}, {"train": str(root / "train.tsv")}):
        with pytest.raises(ValueError, match="are both '(en|de)'.*name two languages"):
            TranslationData(**options, **languages)
    train = [str(root / "train.en"), str(root / "train.de")]
    assert TranslationData(train=train, **languages).train == train
    ready(None, train=[train[0], train[0]])
    assert "--data.train names" in report.text and "translated into itself" in report.text


def test_a_part_with_one_side_is_refused(folder: Callable[..., Path]) -> None:
    root = folder({"train": 9, "val": 3, "test": 2})
    (root / "val.de").unlink()
    with pytest.raises(ValueError, match=r"holds val\.en; expected val\*\.en and val\*\.de"):
        ready(str(root))
    (root / "val.de.gz").write_bytes(gzip.compress(b"x\n" * 3))
    (root / "val.de").write_bytes(b"x\n" * 3)
    with pytest.raises(ValueError, match=r"holds val\.de and val\.de\.gz; move one of them away"):
        ready(str(root))


def test_a_folder_of_tests_alone_can_be_tested(folder: Callable[..., Path], cases: Path) -> None:
    data = TranslationData(str(folder({"test": 2})))
    data.setup("test")
    data.use(of_case(cases, "clean").facts)
    assert len(texts(data.test_dataloader())) == 2
    with pytest.raises(ValueError, match=r"holds test\.de, test\.en; expected train\*\.en"):
        data.setup("fit")


def test_tables_in_a_folder_and_columns_by_name(tmp_path: Path) -> None:
    lines = "".join(f"{n} dog\t{n} Hund\tby x\n" for n in range(9)).encode()
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(lines))
    for part in ("val", "test"):
        (tmp_path / f"{part}.tsv").write_bytes(lines)
    assert texts(ready(str(tmp_path)).train_dataloader())[8] == ("8 dog", "8 Hund")
    data = ready(str(tmp_path), columns=["en", "de", "by"], source_language="de", target_language="en")
    assert texts(data.test_dataloader())[8] == ("8 Hund", "8 dog")


def test_parts_that_are_missing_are_held_out_by_source(tmp_path: Path, report: pytest.LogCaptureFixture) -> None:
    """No source is on two sides, and the choice does not depend on the order of lines."""
    rows = [f"source {n % 60}\ttarget {n}" for n in range(100)]
    found = []
    for name, lines in (("a.tsv", rows), ("b.tsv", rows[::-1])):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        data = ready(str(tmp_path / name), held_out=0.1)
        parts = [texts(getattr(data, f"{part}_dataloader")()) for part in ("train", "val", "test")]
        assert sorted(chain.from_iterable(parts)) == sorted(tuple(row.split("\t")) for row in rows)
        sources = [{source for source, _ in part} for part in parts]
        assert [len(part) for part in sources] == [48, 6, 6]
        assert len(set.union(*sources)) == 60
        found.append([sorted(part) for part in parts])
    assert found[0] == found[1]
    assert "There is no val and no test part: held out of training" in report.text


def test_only_what_is_missing_is_held_out(folder: Callable[..., Path]) -> None:
    root = str(folder({"train": 50, "test": 2}))
    data = ready(root)
    assert [len(texts(getattr(data, f"{part}_dataloader")())) for part in ("train", "val", "test")] == [49, 1, 2]
    # Whichever part is asked for first.
    assert len(texts(TranslationData(root).train_dataloader())) == 49


def test_too_little_to_hold_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\na\tc\n")
    with pytest.raises(ValueError, match=r"has 1 different source texts, too few .*--data\.val and --data\.test"):
        ready(str(tmp_path / "x.tsv"))


def test_training_text_in_other_parts_is_said(tmp_path: Path, report: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\nc\td\n")
    (tmp_path / "y.tsv").write_text("a\tb\ne\tf\n")
    ready(train=str(tmp_path / "x.tsv"), val=str(tmp_path / "y.tsv"), test=str(tmp_path / "y.tsv"))
    assert "1 of 2 sources of the val part are in training, too." in report.text


@pytest.mark.parametrize("place", ["", "translation"])
def test_text_is_looked_for_in_the_data_folder(
    folder: Callable[..., Path], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder({"train": 9, "val": 3, "test": 2})
    data = tmp_path / "sets"
    (data / place).mkdir(parents=True)
    shutil.move(root, data / place)
    monkeypatch.setenv("ATTNZOO_DATA", str(data))
    assert len(texts(ready("text").train_dataloader())) == 9
    files = ["text/train.en", "text/train.de"]
    assert len(texts(ready(train=files, val=files, test=files).train_dataloader())) == 9
    with pytest.raises(
        ValueError,
        match=r"--data\.path=texd: there is no such .*, nor in .*sets \(ATTNZOO_DATA\) or its translation\. "
        r"Did you mean .*text\?",
    ):
        ready("texd")
    monkeypatch.delenv("ATTNZOO_DATA")
    with pytest.raises(ValueError, match="ATTNZOO_DATA, which names a folder of data sets, is not set"):
        ready("text")


def test_a_data_set_of_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a field of translations, and with two named columns."""
    nested = [{"translation": {"en": f"{n} dog", "de": f"{n} Hund", "fr": "x"}} for n in range(9)]
    flat = [{"en": f"{n} dog", "de": f"{n} Hund" if n else None} for n in range(9)]
    stores = {
        ("me/nested", "de-en"): DatasetDict({p: Dataset.from_list(nested) for p in ("train", "validation", "test")}),
        ("me/flat", None): DatasetDict({"train": Dataset.from_list(flat), "test": Dataset.from_list(flat)}),
        ("me/none", None): DatasetDict({"test": Dataset.from_list(flat)}),
    }

    def load_dataset(name: str, config: str | None) -> DatasetDict:
        if (name, config) not in stores:
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return stores[name, config]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(ready("hub:me/nested:de-en").val_dataloader())[8] == ("8 dog", "8 Hund")
    data = ready("hub:me/flat", source_language="de", target_language="en", held_out=0.1)
    assert texts(data.test_dataloader())[0] == ("1 Hund", "1 dog")
    assert len(texts(data.train_dataloader())) == 7
    with pytest.raises(ValueError, match=r"hub:me/flat, train part has en, de; expected en and cs"):
        ready("hub:me/flat", target_language="cs")
    with pytest.raises(ValueError, match=r"hub:me/none has the parts test; expected one named train"):
        ready("hub:me/none")
    with pytest.raises(ValueError, match=r"--data\.path=hub:me/gone: Dataset 'me/gone' doesn't exist"):
        ready("hub:me/gone")
