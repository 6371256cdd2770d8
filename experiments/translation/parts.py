"""Which text is trained on, validated on and tested on."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from experiments.translation.sources import Corpus, Form, Read, from_files
from experiments.translation.text import Pairs

log = logging.getLogger("experiments")

PARTS = ("train", "val", "test")


class Parts:
    """The three parts of the data, each found and read when it is asked for, and once.

    Args:
        corpus: gives sets by name. It is not called where the parts that are read are named as files, so that a
            test on other text does not need the text of training.
        wanted: for each part the name of a set, files in a list, or None for the set that is named like the part.
            Where there is none, the part is held out of the training pairs.
        form: how files are written.
        held_out: share of the different source texts that a part takes which is missing.
    """

    def __init__(
        self,
        corpus: Callable[[], Corpus],
        wanted: Mapping[str, str | list[str] | None],
        form: Form,
        held_out: float,
    ) -> None:
        self.corpus, self.wanted, self.form, self.held_out = corpus, wanted, form, held_out
        self._sets: dict[str, Read | None] = {}
        self._pairs: dict[str, Pairs] = {}

    def read(self, part: str) -> Pairs:
        """The pairs of a part.

        Raises:
            ValueError: they cannot be had, by file and line.
        """
        if part not in self._pairs:
            lacking = self._set(part) is None or part == "train"
            missing = [name for name in ("val", "test") if lacking and self._set(name) is None]
            if missing:
                log.info("There is no %s part: held out of training.", " and no ".join(missing))
                found = hold_out(self._own("train"), missing, self.held_out)
            else:
                found = {part: self._own(part)}
            for name, pairs in found.items():
                self._pairs[name] = pairs
                self._report(name)
        return self._pairs[part]

    def _set(self, part: str) -> Read | None:
        if part not in self._sets:
            wanted = self.wanted[part]
            if isinstance(wanted, list):
                self._sets[part] = from_files(wanted, part, self.form)
            else:
                self._sets[part] = self.corpus().choose(part, wanted, self.form)
        return self._sets[part]

    def _own(self, part: str) -> Pairs:
        read = self._set(part)
        assert read is not None
        return read()

    def _report(self, part: str) -> None:
        """Say what was read, and whether it was in training."""
        pairs = self._pairs[part]
        log.info("Data: %s part: %s pairs of %s.", part, f"{len(pairs.source):,}", pairs.name)
        if part != "train" and "train" in self._pairs:
            known = set(self._pairs["train"].source)
            seen = sum(text in known for text in pairs.source)
            if seen:
                log.info("%d of %d sources of the %s part are in training, too.", seen, len(pairs.source), part)


def hold_out(pairs: Pairs, parts: Sequence[str], share: float) -> dict[str, Pairs]:
    """Take parts that are missing out of the training pairs, by a hash of the source text.

    All pairs of one source text go to the same part, so no source is on both sides; the same sources are taken
    however the training text is ordered, and nearly the same ones when text is added.

    Args:
        pairs: the training pairs.
        parts: names of the parts to take.
        share: of the different source texts, for each part; at least one.

    Returns:
        What is left as "train", and these parts.

    Raises:
        ValueError: there are too few different sources.
    """
    texts = sorted(set(pairs.source), key=lambda text: hashlib.blake2b(text.encode()).digest())
    count = math.ceil(share * len(texts))
    if count * len(parts) >= len(texts):
        raise ValueError(
            f"{pairs.name} has {len(texts)} different source texts, too few to hold out {share:g} of them for "
            f"{' and '.join(parts)}. Give these parts by --data.val and --data.test, or lower --data.held_out."
        )
    part_of = {text: part for k, part in enumerate(parts) for text in texts[k * count : (k + 1) * count]}
    chosen: dict[str, list[int]] = {part: [] for part in ("train", *parts)}
    for place, text in enumerate(pairs.source):
        chosen[part_of.get(text, "train")].append(place)
    return {part: pairs.select(places, f"{pairs.name}, {part} part") for part, places in chosen.items()}
