"""Pairs as rows of numbers: what batches are made of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from experiments.translation.cache import Cache
from experiments.translation.text import Pairs
from experiments.translation.tokens import BOS, EOS, UNK, Vocabulary
from experiments.translation.vocabularies import Vocabularies

log = logging.getLogger("experiments")


class Encoded(NamedTuple):
    """Texts as rows of numbers, one after the other.

    Attributes:
        numbers: int32 [all tokens].
        ends: int64 [rows], where each row ends in `numbers`.
    """

    numbers: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Encoded:
        """Rows of numbers."""
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
        return cls(flat, np.cumsum([len(row) for row in rows], dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """How many numbers each row has, int64 [rows]."""
        return np.diff(self.ends, prepend=0)

    def row(self, index: int) -> np.ndarray:
        """The numbers of one row."""
        return self.numbers[self.ends[index - 1] if index else 0 : self.ends[index]]

    @classmethod
    def of_texts(cls, vocabulary: Vocabulary, texts: list[str], cache: Cache) -> Encoded:
        """The numbers of texts, made once."""
        causes = [vocabulary.fingerprint, "\n".join(texts)]
        return cls.from_bytes(cache.get("tokens", causes, lambda: cls.of(vocabulary.encode(texts)).to_bytes()))

    def select(self, chosen: Sequence[int]) -> Encoded:
        """Some of the rows, by place."""
        return Encoded.of([self.row(index).tolist() for index in chosen])

    def to_bytes(self) -> bytes:
        """How many rows, their lengths, and all numbers."""
        return np.concatenate(([len(self.ends)], self.lengths, self.numbers)).astype("<i4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Encoded:
        """What `to_bytes` has written."""
        flat = np.frombuffer(data, dtype="<i4")
        count = int(flat[0])
        return cls(flat[1 + count :], np.cumsum(flat[1 : 1 + count], dtype=np.int64))


class Sample(NamedTuple):
    """A pair: its place in the part, rows of numbers with `BOS` and `EOS`, and the texts."""

    index: int
    source: np.ndarray
    target: np.ndarray
    source_text: str
    target_text: str


class EncodedPairs(Dataset[Sample]):
    """Pairs as samples: tokens and `EOS` of the source; `BOS`, tokens and `EOS` of the target.

    Rows longer than `max_length` tokens are cut. A source that is cut still ends with `EOS`, a target does not:
    its text goes on, and the model is not to learn or be judged that it ends there.

    Args:
        pairs: the texts.
        source: rows of numbers.
        target: as many.
        max_length: tokens, without start and end.
    """

    def __init__(self, pairs: Pairs, source: Encoded, target: Encoded, max_length: int) -> None:
        self.pairs, self.source, self.target, self.max_length = pairs, source, target, max_length

    def __len__(self) -> int:
        return len(self.pairs.source)

    def __getitem__(self, index: int) -> Sample:
        cut = self.max_length
        source, target = self.source.row(index), self.target.row(index)
        end = [EOS] if len(target) <= cut else []
        return Sample(
            index,
            np.concatenate((source[:cut], [EOS])),
            np.concatenate(([BOS], target[:cut], end)),
            self.pairs.source[index],
            self.pairs.target[index],
        )

    @property
    def source_lengths(self) -> np.ndarray:
        """Lengths of the rows that samples have, int64 [pairs]."""
        return np.minimum(self.source.lengths, self.max_length) + 1

    @property
    def target_lengths(self) -> np.ndarray:
        """Lengths of the rows that samples have, int64 [pairs]."""
        lengths = self.target.lengths
        return np.where(lengths > self.max_length, self.max_length + 1, lengths + 2)


def encode_pairs(part: str, pairs: Pairs, words: Vocabularies, max_length: int, cache: Cache) -> EncodedPairs:
    """Numbers for the pairs of a part; what is unknown, left out or cut is counted and said.

    Args:
        part: train, val or test. Training pairs that are longer on a side are left out, others are cut.
        pairs: the texts.
        words: the vocabularies.
        max_length: tokens of a text, without start and end.
        cache: keeps the numbers.

    Raises:
        ValueError: no training pair is short enough.
    """
    source, target = (
        Encoded.of_texts(vocabulary, texts, cache)
        for vocabulary, texts in ((words.source, pairs.source), (words.target, pairs.target))
    )
    for side, rows in (("source", source), ("target", target)):
        unknown = int((rows.numbers == UNK).sum())
        if unknown:
            count = len(rows.numbers)
            share = 100 * unknown / count
            log.info("%d of %d %s tokens of the %s part are unknown (%.2f %%).", unknown, count, side, part, share)
    long = np.flatnonzero(np.maximum(source.lengths, target.lengths) > max_length)
    if not len(long):
        return EncodedPairs(pairs, source, target, max_length)
    shown = "; ".join(
        f"line {pairs.lines[i]}: {source.lengths[i]:,} source and {target.lengths[i]:,} target tokens" for i in long[:5]
    )
    more = f"; and {len(long) - 5} more" if len(long) > 5 else ""
    done = "left out" if part == "train" else "cut"
    log.warning(
        "%d of %d pairs of the %s part %s, longer than --data.max_length=%d (%s%s).",
        len(long), len(pairs.source), part, done, max_length, shown, more,
    )  # fmt: skip
    if part != "train":
        return EncodedPairs(pairs, source, target, max_length)
    kept = np.setdiff1d(np.arange(len(pairs.source)), long).tolist()
    if not kept:
        raise ValueError(f"Every training pair is longer than --data.max_length={max_length} tokens; raise it.")
    return EncodedPairs(pairs.select(kept, pairs.name), source.select(kept), target.select(kept), max_length)
