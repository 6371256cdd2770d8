"""Parallel text as batches: number words, written dates, files, or a data set of a hub."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from experiments.training.sampling import ResumableLoader
from experiments.translation.batching import TokenBatches, collate, in_order_of_length
from experiments.translation.cache import Cache, user_folder
from experiments.translation.parts import PARTS, Parts
from experiments.translation.samples import EncodedPairs, encode_pairs
from experiments.translation.sources import NO_CORPUS, Corpus, CorpusName, Form, find, generated
from experiments.translation.text import Pairs
from experiments.translation.tokens import Kind
from experiments.translation.vocabularies import Vocabularies

log = logging.getLogger("experiments")

# A fit ends with a test: what is wrong with that part is said before training, not after.
_NEEDED = {"fit": PARTS, "validate": ("val",), "test": ("test",)}
_GENERATED_TOKENS: dict[CorpusName, Kind] = {"numbers": "words", "dates": "characters"}


class TranslationData(lightning.LightningDataModule):
    """Pairs of texts in padded batches, see `batching.collate`.

    Training batches hold pairs of like length and come in an order that follows from (`order_seed`, epoch) alone.
    Validation and test have every pair once over all processes, in order of length; "index" is its place.

    Args:
        path: a folder with files `train*`, `val*` (or `dev*`), `test*` that end in the language (`train.en`,
            `train.de`) or in `.tsv`; one table; or `hub:NAME[:CONFIG]`, a data set of a hub. Files may be plain or
            .gz. What is not found from here is looked for in the folder that ATTNZOO_DATA names, and in its
            `translation`. Null generates text.
        corpus: what is generated: numbers (English number words to German ones; also if null) or dates (written
            in eight languages, to ISO form).
        train: name of a set at `path` where there are several; a table; or two files, [SOURCE,TARGET].
        val: likewise. Where there is none, it is held out of the training pairs.
        test: likewise. Of the number words, `long` are longer than any in training.
        source_language: ending of source files, or name of the column; en if null.
        target_language: likewise; de if null. Another than the source, unless every text is given as two files.
        columns: names of the columns of tables from the left, languages among them; null where the first line
            names them, or the source comes first and the target second.
        held_out: share of the different source texts that a part which is missing takes out of training.
        encoding: of text files.
        target_encoding: of target files; as `encoding` if null.
        tokens: bpe, words or characters; null for words of numbers, characters of dates, else bpe.
        vocabulary_size: tokens of each vocabulary at most, the four special ones included.
        joint: one vocabulary for both languages; null for bpe alone.
        vocabulary: files of the library tokenizers to use instead: one for both languages, or [SOURCE,TARGET].
        max_length: tokens of a text, without start and end. Longer training pairs are left out; elsewhere the text
            is cut.
        batch_tokens: bound of rows times longest row in a batch, of each process.
        cache: folder that keeps what was made of files; auto for attnzoo in the user's cache folder, null for none.

    Raises:
        ValueError: an option out of range, or that has no effect here; later, whatever is wrong with the data.

    Example:
        >>> data = TranslationData()
        >>> data.setup("fit")
        >>> data.facts["languages"], data.facts["source_size"], data.facts["target_size"]
        (['en', 'de'], 34, 36)
    """

    def __init__(
        self,
        path: str | None = None,
        corpus: CorpusName | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        columns: list[str] | None = None,
        held_out: float = 0.02,
        encoding: str = "utf-8",
        target_encoding: str | None = None,
        tokens: Kind | None = None,
        vocabulary_size: int = 6000,
        joint: bool | None = None,
        vocabulary: str | list[str] | None = None,
        max_length: int = 128,
        batch_tokens: int = 4096,
        cache: str | None = "auto",
    ) -> None:
        super().__init__()
        if not 0 < held_out < 1:
            raise ValueError(f"--data.held_out is {held_out}; expected a share between 0 and 1.")
        if max_length < 1:
            raise ValueError(f"--data.max_length is {max_length}; expected 1 token or more.")
        self._generates = path is None and train is None
        if corpus is not None and not self._generates:
            raise ValueError(f"--data.corpus={corpus} generates text; leave it out with --data.path or --data.train.")
        if self._generates and (source_language or target_language):
            raise ValueError(
                "--data.source_language and --data.target_language need --data.path or --data.train; "
                "generated text has languages of its own."
            )
        source, target = source_language or "en", target_language or "de"
        pairs = path is None and all(
            isinstance(files, list) and len(files) == 2 for files in (train, val, test) if files
        )
        if source == target and not self._generates and not pairs:
            raise ValueError(
                f"--data.source_language and --data.target_language are both {source!r} (en and de if null), so a text "
                "would be translated into itself; name two languages."
            )
        self.path, self.corpus = path, corpus
        self.train, self.val, self.test = train, val, test
        self.source_language, self.target_language, self.columns = source_language, target_language, columns
        self.held_out = held_out
        self.encoding, self.target_encoding = encoding, target_encoding
        self.tokens, self.vocabulary_size, self.joint, self.vocabulary = tokens, vocabulary_size, joint, vocabulary
        self.max_length, self.batch_tokens = max_length, batch_tokens
        self.cache = cache
        self.order_seed = 0
        self._vocabularies: Vocabularies | None = None
        self._samples: dict[str, EncodedPairs] = {}

    def prepare_data(self) -> None:
        """Before training, on the first process alone: make what the others then find in the cache."""
        if self.trainer is None or self.trainer.state.fn == "fit":
            for part in PARTS:
                self._part(part)

    def setup(self, stage: str) -> None:
        """Read the texts that the stage needs; a second call changes nothing."""
        for part in _NEEDED.get(stage, ()):
            self._parts.read(part)

    @property
    def facts(self) -> dict[str, Any]:
        """What a model must know of the data, as plain values.

        "source_vocabulary" and "target_vocabulary" (JSON), "vocabulary" (fingerprint of both), "joint", "source_size"
        and "target_size", "languages" [source, target], "max_length".
        """
        return {**self._words().facts, "languages": list(self._form.languages), "max_length": self.max_length}

    def use(self, facts: Mapping[str, Any]) -> None:
        """Take the vocabularies that a model was trained with, instead of making them of this data.

        Args:
            facts: of the checkpoint.

        Raises:
            ValueError: others are given by --data.vocabulary.
        """
        theirs = Vocabularies.from_facts(facts)
        if self.vocabulary is not None and self._words().fingerprint != theirs.fingerprint:
            raise ValueError(
                f"--data.vocabulary has the fingerprint {self._words().fingerprint}, and the model was trained with "
                f"{theirs.fingerprint}: the same numbers would mean other words. Leave the option out; a checkpoint "
                "holds its vocabularies."
            )
        if self._vocabularies is None or self._vocabularies.fingerprint != theirs.fingerprint:
            self._vocabularies = theirs
            self._samples.clear()

    def pairs(self, part: str) -> Pairs:
        """The pairs of lines of a part, as they were read."""
        return self._parts.read(part)

    def train_dataloader(self) -> ResumableLoader:
        samples = self._part("train")
        rows = samples.source_lengths, samples.target_lengths
        batches = TokenBatches(*rows, self.batch_tokens, seed=self.order_seed, **self._share())
        return ResumableLoader(samples, batch_sampler=batches, collate_fn=collate, pin_memory=_pins())

    def val_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self._in_order("val")

    def test_dataloader(self) -> DataLoader[dict[str, Any]]:
        return self._in_order("test")

    def _in_order(self, part: str) -> DataLoader[dict[str, Any]]:
        samples = self._part(part)
        batches = in_order_of_length(samples.source_lengths, samples.target_lengths, self.batch_tokens, **self._share())
        return DataLoader(samples, batch_sampler=batches, collate_fn=collate, pin_memory=_pins())

    def _share(self) -> dict[str, int]:
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return {"rank": rank, "world_size": world}

    @cached_property
    def _form(self) -> Form:
        usual = self._corpus.languages if self._generates else ("en", "de")
        languages = (self.source_language or usual[0], self.target_language or usual[1])
        return Form(languages, self.columns, self.encoding, self.target_encoding)

    @cached_property
    def _corpus(self) -> Corpus:
        if self._generates:
            return generated(self.corpus or "numbers")
        return NO_CORPUS if self.path is None else find(self.path, self._form)

    @cached_property
    def _parts(self) -> Parts:
        wanted = {"train": self.train, "val": self.val, "test": self.test}
        return Parts(lambda: self._corpus, wanted, self._form, self.held_out)

    @cached_property
    def _cache(self) -> Cache:
        # What is generated is made in less time than it takes to say where it may be kept.
        if self._generates or self.cache is None:
            return Cache(None)
        return Cache(user_folder() if self.cache == "auto" else Path(self.cache).expanduser())

    def _words(self) -> Vocabularies:
        if self._vocabularies is None:
            if self.vocabulary is not None:
                files = [self.vocabulary] if isinstance(self.vocabulary, str) else self.vocabulary
                self._vocabularies = Vocabularies.from_files(files)
            else:
                usual = _GENERATED_TOKENS[self.corpus or "numbers"] if self._generates else "bpe"
                kind = self.tokens or usual
                joint = kind == "bpe" if self.joint is None else self.joint
                self._vocabularies = Vocabularies.train(
                    self._parts.read("train"), kind=kind, size=self.vocabulary_size, joint=joint, cache=self._cache
                )
            log.info(
                "Vocabulary: %s source and %s target tokens%s, fingerprint %s.",
                f"{self._vocabularies.source.size:,}",
                f"{self._vocabularies.target.size:,}",
                ", one for both" if self._vocabularies.joint else "",
                self._vocabularies.fingerprint,
            )
        return self._vocabularies

    def _part(self, part: str) -> EncodedPairs:
        if part not in self._samples:
            pairs = self._parts.read(part)
            self._samples[part] = encode_pairs(part, pairs, self._words(), self.max_length, self._cache)
        return self._samples[part]


def _pins() -> bool:
    return torch.cuda.is_available()
