"""Training and judging an encoder on ListOps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from attnzoo import DiversityKind, Mechanism, Softmax
from attnzoo.positions import PositionName
from experiments.listops.expressions import SYMBOLS, encode
from experiments.listops.network import ListOpsEncoder
from experiments.training.exporting import Part, Probabilities
from experiments.training.losses import cross_entropy_sum
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim


class Majority(MulticlassAccuracy):
    """Accuracy of always answering the value that is the most frequent one in training."""

    def __init__(self, classes: int, answer: int) -> None:
        super().__init__(classes, average="micro")
        self.answer = answer

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Whatever the model says, [B, classes], the answer stays the same."""
        super().update(torch.full_like(labels, self.answer), labels)


class ListOpsClassifier(Experiment):
    """An encoder that names the value of an expression, 0 to 9.

    Args:
        attention: mechanism of every block: a class name, with its options behind a dot.
        position: none; added to the embeddings: sinusoidal, learned; inside the attention: rope, rope_halves, alibi,
            t5, offset, shaw.
        dim: width of the model.
        depth: how many blocks.
        num_heads: heads of each block; must divide dim.
        head_diversity: weight of the term that keeps heads different, such as 0.03; 0 for none. It rises over the first
            tenth of the run and is off in its last fifth.
        head_diversity_kind: how alike is measured: projected, cka, overlap, li_subspace, li_position or li_output.
        hidden_dim: width of the feed-forward; null for 2 dim.
        dropout: in the branches of the blocks. Dropout of attention weights is the mechanism's own option.
        optim: optimiser and schedule.
    """

    task = "listops"

    def __init__(
        self,
        attention: Callable[[int, int], Mechanism] = Softmax,
        position: PositionName = "learned",
        dim: int = 64,
        depth: int = 3,
        num_heads: int = 4,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(optim)
        self.options = {
            "attention": attention, "position": position, "dim": dim, "depth": depth, "num_heads": num_heads,
            "head_diversity": head_diversity, "head_diversity_kind": head_diversity_kind, "hidden_dim": hidden_dim,
            "dropout": dropout,
        }  # fmt: skip

    def build_network(self, facts: dict[str, Any]) -> nn.Module:
        """The network for expressions with these facts."""
        options: dict[str, Any] = self.options
        return ListOpsEncoder(facts["symbols"], facts["classes"], facts["max_length"], **options)

    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        """Accuracy, and that of one answer for all."""
        return {
            "accuracy": MulticlassAccuracy(facts["classes"], average="micro"),
            "majority": Majority(facts["classes"], facts["majority"]),
        }

    def step(self, batch: tuple[Tensor, Tensor], stage: Stage) -> Step:
        """Cross entropy."""
        assert self.network is not None
        tokens, labels = batch
        logits, aux = self.network(tokens)
        total, count = cross_entropy_sum(logits, labels)
        return Step(total, count, aux, (logits, labels))

    def primary(self, values: dict[str, float]) -> float:
        """Accuracy."""
        return values["accuracy"]

    def export_parts(self) -> list[Part]:
        """Numbers of symbols [B, max_length], 0 at padding on the right, to probabilities [B, classes]."""
        assert self.network is not None and self.facts is not None

        def tokens(count: int) -> Tensor:
            made = torch.randint(1, self.facts["symbols"], (count, self.facts["max_length"]))  # type: ignore[index]
            made[0, 3:] = 0
            return made

        network = Probabilities(self.network)
        return [Part("model", network, (tokens(2),), ({0: "batch"},), ["tokens"], ["probabilities"], (tokens(5),))]

    def export_texts(self) -> dict[str, str]:
        """The symbols, each on the line of its number."""
        return {"symbols.txt": "\n".join(SYMBOLS) + "\n"}

    def predict(self, expression: str) -> Tensor:
        """Probabilities of the values 0 to 9, [10].

        Args:
            expression: symbols with spaces between, such as "[MAX 4 [MIN 7 2 ] 1 ]".

        Raises:
            ValueError: for another symbol, none, or more than the model was made for.
        """
        assert self.network is not None and self.facts is not None
        numbers = encode(expression.split())
        longest = self.facts["max_length"]
        if not 0 < len(numbers) <= longest:
            raise ValueError(f"An expression has 1 to {longest} symbols; this one has {len(numbers)}.")
        # To the length of training, for which some mechanisms are built.
        tokens = torch.zeros(1, longest, dtype=torch.long, device=self.device)
        tokens[0, : len(numbers)] = torch.tensor(numbers)
        training = self.network.training
        self.network.eval()
        try:
            with torch.no_grad():
                logits, _ = self.network(tokens)
        finally:
            self.network.train(training)
        found: Tensor = logits[0].softmax(-1)
        return found
