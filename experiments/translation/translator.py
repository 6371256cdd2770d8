"""What both translators share: the loss, scores in evaluation, and translating plain text."""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from experiments.training.exporting import Part
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim
from experiments.training.samples import Samples, spread_evenly
from experiments.training.sharding import assembled
from experiments.translation import exporting
from experiments.translation.alignment import align, blind
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.drawing import alignment_figure
from experiments.translation.embedding import Words
from experiments.translation.scores import BleuTokenizer, TokenLoss, TranslationScores
from experiments.translation.search import Decoding, Translation, check_beam, search
from experiments.translation.tokens import EOS, PAD, Vocabulary
from experiments.translation.transformer import Transformer

log = logging.getLogger("experiments")

Primary = Literal["bleu", "bleu_lc_tok", "chrf", "exact_match"]


class Translator(Experiment):
    """What both translators share. A subclass writes `build_network`.

    Args:
        label_smoothing: share of the target spread evenly over the vocabulary, from 0 to 1.
        decoding: how translations are searched for.
        primary: the score that chooses the best checkpoint.
        bleu_tokenizer: how BLEU cuts text into words; none where references are in tokens already.
        optim: optimiser and schedule.
    """

    task = "translation"
    unit = "tokens"

    def __init__(
        self, label_smoothing: float, decoding: Decoding, primary: Primary, bleu_tokenizer: BleuTokenizer, optim: Optim
    ) -> None:
        super().__init__(optim)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"--model.label_smoothing is {label_smoothing}; it must lie in [0, 1)")
        if primary not in get_args(Primary):
            raise ValueError(f"--model.primary is {primary!r}; it must be one of {', '.join(get_args(Primary))}")
        self.label_smoothing, self.decoding = label_smoothing, decoding
        self.judged_by, self.bleu_tokenizer = primary, bleu_tokenizer
        self.source_vocabulary: Vocabulary
        self.target_vocabulary: Vocabulary

    @abstractmethod
    def build_network(self, facts: dict[str, Any]) -> Transformer | Bahdanau:
        """The network for these vocabularies."""

    def setup(self, stage: str) -> None:
        """Give the data the vocabularies of a checkpoint, or take over those of the data."""
        if self.facts is not None:
            self.trainer.datamodule.use(self.facts)  # type: ignore[attr-defined]
        super().setup(stage)

    def configure_model(self) -> None:
        """Build network and metrics, and the vocabularies that the facts hold."""
        super().configure_model()
        assert self.facts is not None
        self.source_vocabulary = Vocabulary.from_json(self.facts["source_vocabulary"])
        self.target_vocabulary = Vocabulary.from_json(self.facts["target_vocabulary"])

    def options(self, network: type, facts: dict[str, Any]) -> dict[str, Any]:
        """Those options of this experiment that a network takes, and its words."""
        named = inspect.signature(network).parameters
        words = Words(facts["source_size"], facts["target_size"], facts["joint"])
        return {"words": words, **{name: value for name, value in self.hparams.items() if name in named}}

    def check_facts(self, saved: dict[str, Any], found: dict[str, Any]) -> None:
        """Refuse other vocabularies, and text that may be longer than the network takes."""
        if saved["vocabulary"] != found["vocabulary"]:
            raise ValueError(
                f"The model was trained with the vocabularies {saved['vocabulary']}; these are {found['vocabulary']}. "
                "Their words have other numbers, so take the data and the vocabulary options of that run."
            )
        if found["max_length"] > saved["max_length"]:
            raise ValueError(
                f"--data.max_length is {found['max_length']}; the model was trained for {saved['max_length']}, so "
                f"give --data.max_length={saved['max_length']} or less."
            )

    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        """Loss by token, and scores of the translations."""
        return {"loss": TokenLoss(), "text": TranslationScores(self.bleu_tokenizer, facts["languages"][1])}

    def step(self, batch: dict[str, Any], stage: Stage) -> Step:
        """Cross entropy over the real tokens of the target, end symbols included; smoothed in training."""
        assert self.network is not None
        smoothing = self.label_smoothing if stage == "train" else 0.0
        given, labels = batch["target"][:, :-1], batch["target"][:, 1:]
        loss, aux = self.network(given, batch["source"], labels=labels, smoothing=smoothing, **self.forcing(stage))
        return Step(loss.smoothed, loss.count, aux, (loss.plain, loss.count), loss.plain)

    def real_queries(self, site: str, batch: dict[str, Any]) -> Tensor | None:
        """Which queries of an attention are words: targets are padded, and no mask tells."""
        return None if site.startswith("encoder") else batch["target"][:, 1:] != PAD

    def forcing(self, stage: Stage) -> dict[str, float]:
        """Further arguments of the network."""
        return {}

    def update_metrics(self, metrics: MetricCollection, step: Step, batch: dict[str, Any]) -> None:
        """Loss, and the translations: greedy in validation, by beam in tests."""
        metrics["loss"].update(*step.outputs)
        beam = self.decoding.beam if metrics is self.evaluation["test"] else 1
        found = self.search(batch["source"], beam=beam)
        metrics["text"].update([hypotheses[0].text for hypotheses in found], batch["target_text"])

    def primary(self, values: dict[str, float]) -> float:
        """The score named by the option."""
        return values[self.judged_by]

    def on_test_epoch_end(self) -> None:
        """Scores, and what they were computed by."""
        super().on_test_epoch_end()
        scores = self.evaluation["test"]["text"]  # type: ignore[index]
        self.remarks = {"signatures": scores.signatures(), "beam": self.decoding.beam}
        log.info("bleu: %s", self.remarks["signatures"]["bleu"])

    def search(self, source: Tensor, *, beam: int | None = None, n_best: int = 1) -> list[list[Translation]]:
        """The best translations of each source row.

        Args:
            source: int64 [B, S], tokens and EOS, padded right.
            beam: hypotheses followed at once; the option `decoding.beam` if None.
            n_best: how many of them to give, at most `beam`.

        Returns:
            For each row at most n_best translations, the best first.

        Raises:
            ValueError: a beam out of range.
        """
        assert isinstance(self.network, Transformer | Bahdanau)
        beam = self.decoding.beam if beam is None else beam
        check_beam("beam", beam)
        with assembled(self.network):
            found = search(self.network, source, self.decoding, beam, n_best)
        decode = self.target_vocabulary.decode
        return [[Translation(decode(h.tokens), h.tokens, h.score, h.finished) for h in row] for row in found]

    def predict(self, texts: str | Sequence[str], *, beam: int | None = None) -> str | list[str]:
        """Translate a line, or many.

        Args:
            texts: plain text; an empty line gives an empty line.
            beam: as `search`.

        Returns:
            A string for a string, a list for a list.
        """
        lines = [texts] if isinstance(texts, str) else list(texts)
        found = [row[0].text if row else "" for row in self.translate(lines, beam=beam)]
        return found[0] if isinstance(texts, str) else found

    def translate(
        self, lines: Sequence[str], *, beam: int | None = None, n_best: int = 1, first_line: int = 1
    ) -> list[list[Translation]]:
        """Translations with scores. Lines of like length go through together; the order stays that of the lines.

        Args:
            lines: plain text.
            beam: as `search`.
            n_best: as `search`.
            first_line: number of the first line, for messages.

        Returns:
            For each line its translations, the best first; none for an empty line.
        """
        rows = self.coded(lines, first_line)
        order = sorted((i for i, line in enumerate(lines) if line.strip()), key=lambda i: len(rows[i]))
        found: list[list[Translation]] = [[] for _ in lines]
        # A wider beam than usual takes as much memory, by fewer lines at once.
        wider = max(1.0, (beam or 1) / self.decoding.beam)
        while order:
            # From the longest on, so that a batch too large for the memory fails at once.
            count = max(1, int(self.decoding.batch_tokens / wider) // len(rows[order[-1]]))
            batch, order = order[-count:], order[:-count]
            source = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(rows[i]) for i in batch], batch_first=True, padding_value=PAD
            )
            for i, row in zip(batch, self.search(source.to(self.device), beam=beam, n_best=n_best), strict=True):
                found[i] = row
        return found

    def coded(self, lines: Sequence[str], first_line: int = 1) -> list[list[int]]:
        """Source rows of lines, each with EOS; what is longer than in training is cut, with a warning."""
        assert self.facts is not None
        most = self.facts["max_length"]
        rows = self.source_vocabulary.encode(lines)
        for number, row in enumerate(rows, first_line):
            if len(row) > most:
                log.warning("line %d: cut to %d tokens: it has %d > %d.", number, most, len(row), most)
        return [[*row[:most], EOS] for row in rows]

    def next_commands(self, checkpoint: str) -> list[str]:
        """Using the model that was trained."""
        return [f'make translate TEXT="..." CKPT={checkpoint}', f"make export CKPT={checkpoint}"]

    def export_parts(self) -> list[Part]:
        """Encoder and decoder."""
        assert isinstance(self.network, Transformer | Bahdanau) and self.facts is not None
        return exporting.parts(self.network, self.facts["source_size"])

    def export_texts(self) -> dict[str, str]:
        """Vocabularies, and how the parts go together."""
        assert isinstance(self.network, Transformer | Bahdanau) and self.facts is not None
        return exporting.texts(self.network, self.facts)

    def sample_table(self, data: Any, count: int) -> Samples:
        """Translations of some lines beside their references, each with its soft alignment where there is one."""
        pairs, clear = data.pairs("val"), blind(self) is None
        numbers = spread_evenly(len(pairs.source), count)
        lines = [pairs.source[number] for number in numbers]
        found = [row[0] for row in self.translate(lines)]
        pictures: list[Any] = []
        if clear:
            soft = align(self, self.coded(lines), [translation.tokens for translation in found])
            pictures = [[alignment_figure([one])] for one in soft]
        rows = [
            [number, line, pairs.target[number], translation.text, *picture]
            for number, line, translation, picture in zip(
                numbers, lines, found, pictures or [[]] * len(lines), strict=True
            )
        ]
        return Samples(["sample", "source", "reference", "translation", *["alignment"] * clear], rows)

    def attention_pictures(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Soft alignments of the translations of three lines."""
        if why := blind(self):
            log.info("No alignment picture: %s.", why)
            return {}
        source = batch["source"][:3]
        rows = [row[row != PAD].tolist() for row in source]
        targets = [row[0].tokens for row in self.search(source)]
        return {"alignment": alignment_figure(align(self, rows, targets), type(self.network).__name__)}
