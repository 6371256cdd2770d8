"""Training and judging what names what is in a picture, whatever its network is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from experiments.training.exporting import Part, Probabilities
from experiments.training.losses import LossMean, cross_entropy_sum
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim
from experiments.training.samples import Samples, spread_evenly
from experiments.vision.drawing import picture_figure
from experiments.vision.finetuning import start_from
from experiments.vision.pictures import read_picture, scale_pixels, to_tensor

ANSWERS = ("first", "second", "third")
"""Classes that a picture of the table of samples is shown with, by their probability."""


class NegativeLogLikelihood(LossMean):
    """Mean of -log p(label) in nats, without smoothing, exact for unequal batches."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Logits [B, classes] and labels int64 [B]."""
        super().update(*cross_entropy_sum(logits, labels))


class PictureClassifier(Experiment):
    """Base class. The network takes pixels 0 to 1, [B, C, H, W], and returns logits [B, classes] and aux.

    Args:
        label_smoothing: share of the target spread evenly over all classes, from 0 to 1.
        init_from: a checkpoint whose weights a new run starts from, with the same options of the network.
        replace_head: with init_from, start with a new head where the classes are not those of the checkpoint.
        optim: optimiser and schedule.

    Attributes:
        head: how the names of the weights that belong to single classes begin.
    """

    task = "vision"
    head: str | tuple[str, ...] = "head."

    def __init__(self, label_smoothing: float, init_from: str | None, replace_head: bool, optim: Optim) -> None:
        super().__init__(optim)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"--model.label_smoothing is {label_smoothing}; it must lie in [0, 1)")
        if replace_head and init_from is None:
            raise ValueError("--model.replace_head=true needs --model.init_from, the checkpoint to start from")
        self.label_smoothing = label_smoothing
        self.init_from, self.replace_head = init_from, replace_head

    def setup(self, stage: str) -> None:
        """Take the facts over, and in a new run the weights to start from."""
        super().setup(stage)
        if stage == "fit" and self.starts_from_weights and self.trainer.ckpt_path is None:
            self.configure_model()
            self.start()

    @property
    def starts_from_weights(self) -> bool:
        """Whether a new run begins with weights of another."""
        return self.init_from is not None

    def start(self) -> None:
        """Bring those weights into the network."""
        assert self.network is not None and self.facts is not None and self.init_from is not None
        start_from(self.network, self.head, self.facts["classes"], self.init_from, self.replace_head)

    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        """Accuracy, top-5 accuracy and negative log likelihood."""
        classes = len(facts["classes"])
        return {
            "accuracy": MulticlassAccuracy(classes, average="micro"),
            "top5": MulticlassAccuracy(classes, average="micro", top_k=min(5, classes)),
            "nll": NegativeLogLikelihood(),
        }

    def step(self, batch: dict[str, Tensor], stage: Stage) -> Step:
        """Smoothed cross entropy in training, plain in evaluation."""
        assert self.network is not None
        logits, aux = self.network(scale_pixels(batch["image"]))
        smoothing = self.label_smoothing if stage == "train" else 0.0
        total, count = cross_entropy_sum(logits, batch["label"], smoothing=smoothing)
        return Step(total, count, aux, (logits, batch["label"]))

    def primary(self, values: dict[str, float]) -> float:
        """Accuracy."""
        return values["accuracy"]

    def read(self, path: str | Path) -> Tensor:
        """A picture file as the model takes it: uint8 [C, H, W], resized to the size of training."""
        assert self.facts is not None
        height, width = self.facts["image_size"]
        return to_tensor(read_picture(path), (height, width), self.facts["channels"])

    def predict(self, images: Tensor | str | Path) -> Tensor:
        """Probabilities of the classes in ``facts["classes"]``.

        Args:
            images: uint8 from 0 to 255 or floats from 0 to 1, [B, C, H, W] or one picture [C, H, W]; or the
                file of a picture.

        Returns:
            [B, classes], or [classes] for one picture.

        Raises:
            ValueError: for another size, or pixels outside of that range, with what was found.
        """
        assert self.network is not None
        if not isinstance(images, Tensor):
            images = self.read(images)
        if images.dim() not in (3, 4):
            raise ValueError(
                f"predict takes pictures [B, C, H, W] or one picture [C, H, W], got {tuple(images.shape)}; "
                f"one of grey pixels [H, W] becomes that by images[None]"
            )
        batch = images if images.dim() == 4 else images[None]
        training = self.network.training
        self.network.eval()
        try:
            with torch.no_grad():
                logits, _ = self.network(scale_pixels(batch).to(self.device))
        finally:
            self.network.train(training)
        probabilities = logits.softmax(-1)
        return probabilities if images.dim() == 4 else probabilities[0]

    def sample_table(self, data: Any, count: int) -> Samples:
        """Some pictures with their labels and the classes that they were taken for."""
        assert self.facts is not None
        loader = data.val_dataloader()
        numbers, classes = spread_evenly(len(loader.dataset), count), self.facts["classes"]
        batch = loader.collate_fn([loader.dataset[number] for number in numbers])
        best = self.predict(batch["image"]).topk(min(len(ANSWERS), len(classes)))
        rows: list[list[Any]] = []
        for place, number in enumerate(numbers):
            picture, label = picture_figure(batch["image"][place]), classes[int(batch["label"][place])]
            shares, taken = best.values[place].tolist(), best.indices[place].tolist()
            answers = [
                cell for share, one in zip(shares, taken, strict=True) for cell in (classes[one], round(share, 4))
            ]
            rows.append([number, picture, label, *answers])
        heads = [head for name in ANSWERS[: best.indices.shape[1]] for head in (name, f"{name} probability")]
        return Samples(["sample", "image", "label", *heads], rows)

    def next_commands(self, checkpoint: str) -> list[str]:
        """Using the model that was trained."""
        return [f"make classify IMAGE=FILE CKPT={checkpoint}", f"make export CKPT={checkpoint}"]

    def export_parts(self) -> list[Part]:
        """Float pixels from 0 to 1, any batch size, to probabilities."""
        assert self.facts is not None and self.network is not None
        size = (self.facts["channels"], *self.facts["image_size"])
        example, check = torch.rand(2, *size), torch.rand(5, *size)
        network = Probabilities(self.network)
        return [Part("model", network, (example,), ({0: "batch"},), ["image"], ["probabilities"], (check,))]

    def answer(self, image: Tensor) -> str:
        """What one picture [C, H, W] is taken for, in words."""
        assert self.facts is not None
        share, number = self.predict(image).max(-1)
        return f"taken for {self.facts['classes'][int(number)]} ({share:.2f})"
