"""The two vocabularies of a translator: made of training pairs, read from files, or taken from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.training.data_folder import locate
from experiments.translation.cache import Cache
from experiments.translation.sources import DOMAIN
from experiments.translation.text import Pairs
from experiments.translation.tokens import Kind, Vocabulary

log = logging.getLogger("experiments")


class Vocabularies(NamedTuple):
    """Those of source and target; one object twice where they are joint."""

    source: Vocabulary
    target: Vocabulary

    @property
    def joint(self) -> bool:
        """Whether one serves both sides."""
        return self.source is self.target

    @property
    def fingerprint(self) -> str:
        """Of both; one where they are joint."""
        prints = [self.source.fingerprint, self.target.fingerprint]
        return prints[0] if self.joint else "-".join(prints)

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint holds, as plain values."""
        return {
            "source_vocabulary": self.source.to_json(),
            "target_vocabulary": self.target.to_json(),
            "vocabulary": self.fingerprint,
            "joint": self.joint,
            "source_size": self.source.size,
            "target_size": self.target.size,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Vocabularies:
        """Those that `facts` describe."""
        source = Vocabulary.from_json(facts["source_vocabulary"])
        return cls(source, source if facts["joint"] else Vocabulary.from_json(facts["target_vocabulary"]))

    @classmethod
    def from_files(cls, files: Sequence[str]) -> Vocabularies:
        """One file for both sides, or one for each.

        Raises:
            ValueError: there is no such file, or what is in it is no vocabulary for translation.
        """
        if len(files) not in (1, 2):
            raise ValueError(f"--data.vocabulary names {len(files)} files; expected one, or [SOURCE,TARGET].")
        found = []
        for file in files:
            path = locate(file, DOMAIN, "--data.vocabulary")
            try:
                found.append(Vocabulary.from_json(path.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ValueError(f"--data.vocabulary={path}: {error}") from error
        return cls(found[0], found[-1])

    @classmethod
    def train(cls, pairs: Pairs, *, kind: Kind, size: int, joint: bool, cache: Cache) -> Vocabularies:
        """Make them of training pairs: one of the texts of both sides, or one of each."""
        sides = [pairs.source + pairs.target] if joint else [pairs.source, pairs.target]
        found = []
        for texts in sides:

            def make(texts: Sequence[str] = texts) -> bytes:
                return Vocabulary.train(texts, kind=kind, size=size).to_json().encode()

            made = cache.get("vocabulary", [kind, str(size), "\n".join(texts)], make)
            found.append(Vocabulary.from_json(made.decode()))
        return cls(found[0], found[-1])
