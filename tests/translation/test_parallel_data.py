"""TranslationData: what is generated, the acceptance cases, order, processes and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from read_pairs import of_case, ready, texts

from experiments.training import specs
from experiments.translation.data import TranslationData
from experiments.translation.tokens import BOS, EOS, PAD, UNK, Vocabulary


def test_number_words_are_the_default() -> None:
    data = ready()
    assert len(texts(data.train_dataloader())) == 12_000
    assert (len(texts(data.val_dataloader())), len(texts(data.test_dataloader()))) == (500, 1_000)
    facts = data.facts
    assert (facts["languages"], facts["joint"], facts["max_length"]) == (["en", "de"], False, 128)
    assert (facts["source_size"], facts["target_size"]) == (30 + 4, 32 + 4)


def test_a_batch_is_words_between_marks() -> None:
    data = ready(batch_tokens=60)
    source, target = (Vocabulary.from_json(data.facts[f"{side}_vocabulary"]) for side in ("source", "target"))
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch = next(iter(loader))
        assert len(batch["index"]) * max(batch["source"].shape[1], batch["target"].shape[1]) <= 60
        for row, text in zip(batch["source"].tolist(), batch["source_text"], strict=True):
            assert row == [*source.encode([text])[0], EOS] + [PAD] * row.count(PAD)
            assert source.decode(row) == text
        for row, text in zip(batch["target"].tolist(), batch["target_text"], strict=True):
            assert row == [BOS, *target.encode([text])[0], EOS] + [PAD] * row.count(PAD)
            assert target.decode(row) == text


def test_the_longest_numbers_are_another_test() -> None:
    found = texts(ready(test="long").test_dataloader())
    assert len(found) == 1_000
    assert {len(source.split()) for source, _ in found} == {9}


def test_dates_are_told_in_characters() -> None:
    data = ready(corpus="dates")
    target = Vocabulary.from_json(data.facts["target_vocabulary"])
    assert sorted(target.pieces(range(4, target.size))) == sorted("0123456789-")
    assert len(texts(data.train_dataloader())) == 20_000
    assert data.facts["languages"] == ["mul", "iso8601"]


def test_what_is_generated_writes_nothing(user_cache: Path) -> None:
    ready().prepare_data()
    assert not user_cache.exists()


def test_t05_unequal_line_counts_stop_before_training(cases: Path) -> None:
    """T05: also where only the part that is scored is short."""
    with pytest.raises(ValueError, match=r"short_side\.src has 12 lines and .*short_side\.tgt has 11"):
        of_case(cases, "short_side").setup("fit")
    good, bad = ([str(cases / f"{name}.{side}") for side in ("src", "tgt")] for name in ("clean", "short_side"))
    for part in ("val", "test"):
        with pytest.raises(ValueError, match="12 lines and .* has 11"):
            TranslationData(**{"train": good, "val": good, "test": good, part: bad}).setup("fit")


def test_t06_blank_pairs_are_counted_and_the_others_keep_their_partner(
    cases: Path, report: pytest.LogCaptureFixture
) -> None:
    """T06."""
    data = of_case(cases, "blank_lines")
    data.setup("fit")
    assert "4 of 12 pairs skipped" in report.text
    lines = [(cases / f"blank_lines.{side}").read_text(encoding="utf-8").split("\n") for side in ("src", "tgt")]
    kept = [0, 1, 3, 4, 5, 7, 8, 10]
    assert texts(data.train_dataloader()) == [(lines[0][i].strip(), lines[1][i].strip()) for i in kept]


@pytest.mark.parametrize("other", ["crlf", "no_final_newline"])
def test_t07_the_same_facts_whatever_the_line_ends(cases: Path, other: str) -> None:
    """T07: vocabularies of 47 and 50 words, and 12 pairs."""
    clean, found = of_case(cases, "clean", tokens="words"), of_case(cases, other, tokens="words")
    assert found.facts == clean.facts
    assert (found.facts["source_size"], found.facts["target_size"]) == (47 + 4, 50 + 4)
    assert texts(found.train_dataloader()) == texts(clean.train_dataloader())
    assert len(texts(found.test_dataloader())) == 12


def test_t08_an_encoding_for_the_target_alone(cases: Path) -> None:
    """T08."""
    with pytest.raises(ValueError, match=r"latin1\.tgt, line 4: byte 0xE4"):
        of_case(cases, "latin1").setup("fit")
    found = of_case(cases, "latin1", target_encoding="latin-1")
    assert texts(found.train_dataloader()) == texts(of_case(cases, "clean").train_dataloader())


def test_t09_a_checkpoint_brings_its_vocabularies(cases: Path) -> None:
    """T09: the text of training may be gone where other text is tested, with the words of then."""
    facts = of_case(cases, "clean", tokens="words").facts
    unknown = str(cases / "unknown_words.src")
    data = TranslationData(path="gone", test=[unknown, unknown])
    data.setup("test")
    data.use(facts)
    assert data.facts == facts
    batch = next(iter(data.test_dataloader()))
    words = Vocabulary.from_json(facts["source_vocabulary"])
    assert sorted(map(words.decode, batch["source"].tolist())) == sorted(
        " ".join(word if words.encode([word]) != [[UNK]] else "<unk>" for word in text.split())
        for text in batch["source_text"]
    )


def test_t09_vocabularies_of_another_order_are_refused(cases: Path, tmp_path: Path) -> None:
    """T09: given by hand, and of the same sizes."""
    facts = of_case(cases, "clean", tokens="words").facts
    files = []
    for side in ("source", "target"):
        text = facts[f"{side}_vocabulary"]
        a, b = Vocabulary.from_json(text).pieces([10, 11])
        swapped = text.replace(f'"{a}":10', '"#":10').replace(f'"{b}":11', f'"{a}":11').replace('"#":10', f'"{b}":10')
        (tmp_path / side).write_text(swapped, encoding="utf-8")
        files.append(str(tmp_path / side))
    data = of_case(cases, "clean", vocabulary=files)
    assert data.facts["source_size"] == facts["source_size"]
    with pytest.raises(ValueError, match=rf"{data.facts['vocabulary']}, and the model was .* {facts['vocabulary']}"):
        data.use(facts)
    for side, file in zip(("source", "target"), files, strict=True):
        Path(file).write_text(facts[f"{side}_vocabulary"], encoding="utf-8")
    same = of_case(cases, "clean", vocabulary=files)
    same.use(facts)
    assert same.facts == facts


def test_taking_vocabularies_over_changes_what_was_encoded(cases: Path) -> None:
    data = of_case(cases, "clean")
    before = next(iter(data.test_dataloader()))["source"]
    data.use(of_case(cases, "clean", tokens="characters").facts)
    assert next(iter(data.test_dataloader()))["source"].shape[1] > 2 * before.shape[1]


def test_t11_unknown_words_are_said(cases: Path, report: pytest.LogCaptureFixture) -> None:
    """T11, where pairs are read: the same share that counting by hand gives."""
    unknown = str(cases / "unknown_words.src")
    clean = [str(cases / "clean.src"), str(cases / "clean.src")]
    data = TranslationData(train=clean, val=clean, test=[unknown, unknown], tokens="words")
    data.setup("fit")
    batch = next(iter(data.test_dataloader()))
    assert int((batch["source"] == UNK).sum()) == 7
    assert int((batch["source"] >= UNK).sum()) == 16
    assert "7 of 16 source tokens of the test part are unknown (43.75 %)." in report.text


def test_t13_long_training_pairs_are_left_out_and_others_cut(cases: Path, report: pytest.LogCaptureFixture) -> None:
    """T13: pair 5, 3,000 tokens, before step 1; a test has all its 12 lines."""
    data = of_case(cases, "long_line", tokens="words")
    data.setup("fit")
    loader = data.train_dataloader()
    assert "1 of 12 pairs of the train part left out" in report.text
    assert "line 5: 3,000 source and" in report.text
    found = texts(loader)
    assert len(found) == 11
    right = texts(of_case(cases, "clean", tokens="words").train_dataloader())
    assert found == right[:4] + right[5:]
    report.clear()
    judged = texts(data.test_dataloader())
    assert len(judged) == 12
    assert len(judged[4][0].split()) == 3_000
    assert "1 of 12 pairs of the test part cut" in report.text
    assert max(batch["source"].shape[1] for batch in data.test_dataloader()) == 128 + 1


def test_nothing_short_enough_is_refused(cases: Path) -> None:
    data = of_case(cases, "clean", tokens="words", max_length=1)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"Every training pair is longer than --data\.max_length=1"):
        data.train_dataloader()


def of_rank(rank: int, world: int, **options: Any) -> TranslationData:
    data = TranslationData(**options)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world)  # type: ignore[assignment]
    return data


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_every_part(folder: Callable[..., Path], world: int) -> None:
    """R02: each pair once, equally many batches; two test lines go to each of three processes."""
    root = str(folder({"train": 30, "val": 7, "test": 2}))
    ranks = [of_rank(rank, world, path=root, batch_tokens=40) for rank in range(world)]
    for part, size in (("train", 30), ("val", 7)):
        loaders = [list(getattr(data, f"{part}_dataloader")()) for data in ranks]
        assert len({len(loader) for loader in loaders}) == 1
        every = [index for loader in loaders for batch in loader for index in batch["index"].tolist()]
        assert sorted(every) == list(range(size))
    tested = [texts(data.test_dataloader()) for data in ranks]
    assert sum(map(len, tested)) == (2 if world == 2 else 6)
    assert all(tested)


def test_order_follows_from_seed_and_epoch(folder: Callable[..., Path]) -> None:
    """R14: and each epoch of a run has another."""
    root = str(folder({"train": 60, "val": 3, "test": 2}))

    def order(seed: int, epoch: int) -> list[list[int]]:
        data = TranslationData(root, batch_tokens=50)
        data.order_seed = seed
        loader = data.train_dataloader()
        loader.batch_sampler.set_epoch(epoch)
        return [batch["index"].tolist() for batch in loader]

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 0)
    assert order(0, 1) != order(1, 1)


def test_lightning_trains_and_tests_on_it(folder: Callable[..., Path], tmp_path: Path) -> None:
    class Counter(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.seen: dict[str, list[str]] = {"train": [], "val": [], "test": []}

        def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
            self.seen["train"] += batch["source_text"]
            return self.weight * 1.0

        def validation_step(self, batch: dict[str, Any], index: int) -> None:
            self.seen["val"] += batch["source_text"]

        def test_step(self, batch: dict[str, Any], index: int) -> None:
            self.seen["test"] += batch["source_text"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Counter()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=tmp_path,
    )  # fmt: skip
    data = TranslationData(str(folder({"train": 30, "val": 7, "test": 2})), batch_tokens=60)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert {name: len(seen) for name, seen in module.seen.items()} == {"train": 60, "val": 14, "test": 2}
    assert set(module.seen["train"][:30]) == set(module.seen["train"][30:])
    assert module.seen["train"][:30] != module.seen["train"][30:]


def test_options_are_plain_values_and_make_the_same_data_again(cases: Path) -> None:
    data = of_case(cases, "clean", columns=["en", "de"], tokens="words", cache=None)
    described = specs.describe(data)
    again = specs.rebuild(lightning.LightningDataModule, described)
    assert specs.describe(again) == described
    assert isinstance(again, TranslationData)
    assert again.facts == data.facts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 0.0}, r"--data\.held_out is 0\.0; expected a share between 0 and 1"),
        ({"max_length": 0}, r"--data\.max_length is 0; expected 1 token or more"),
        ({"corpus": "dates", "path": "x"}, r"--data\.corpus=dates generates text; leave it out"),
        ({"corpus": "dates", "train": "x"}, r"--data\.corpus=dates generates text; leave it out"),
        ({"target_language": "fr"}, r"need --data\.path or --data\.train"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslationData(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ["a", "b", "c"]}, r"--data\.train names 3 files; expected one table, or"),
        ({"train": ["a", "b"]}, r"--data\.train=a: there is no such file or folder"),
        ({"test": "longer"}, r"--data\.test=longer: neither a set of numbers .* Did you mean long\?"),
    ],
)
def test_files_that_are_not_there_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslationData(**options).setup("fit")
