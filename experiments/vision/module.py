"""Training and judging the Vision Transformer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from attnzoo import DiversityKind, Mechanism, Softmax
from experiments.training.exporting import Part
from experiments.training.losses import LossMean, cross_entropy_sum
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim
from experiments.vision.drawing import attention_figures
from experiments.vision.finetuning import start_from
from experiments.vision.layers import StemName
from experiments.vision.network import Experts, PictureFacts, PoolName, VisionTransformer
from experiments.vision.pictures import read_picture, scale_pixels, to_tensor
from experiments.vision.places import PositionName


class Probabilities(nn.Module):
    """What is exported: pixels 0 to 1 in, probabilities out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, classes]."""
        logits, _ = self.network(image)
        return logits.softmax(-1)


class NegativeLogLikelihood(LossMean):
    """Mean of -log p(label) in nats, without smoothing, exact for unequal batches."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Logits [B, classes] and labels int64 [B]."""
        super().update(*cross_entropy_sum(logits, labels))


class ImageClassifier(Experiment):
    """A Vision Transformer that names what is in a picture.

    Args:
        attention: mechanism of every block: a class name, with its options behind a dot
            (--model.attention=Local --model.attention.window=9).
        attention_at: other mechanisms for single blocks, by number from 0.
        position: none; added to the embeddings: sinusoidal, learned, sincos_2d, learned_2d; inside the
            attention: rope, rope_halves, rope_2d, offset.
        dim: width of the model.
        depth: how many blocks.
        num_heads: heads of each block; must divide dim.
        num_kv_heads: key/value heads, a divisor of num_heads (grouped queries); null for as many.
        head_diversity: weight of the term that keeps heads different, such as 0.03; 0 for none. It rises over the first
            tenth of the run and is off in its last fifth.
        head_diversity_kind: how alike is measured: projected, cka, overlap, li_subspace, li_position or li_output.
        hidden_dim: width of the feed-forward, or of each expert; null for 2 dim.
        experts: several feed-forwards in each block, of which a token takes the best few; null for a plain one.
        patch_size: pixels along a patch; must divide height and width.
        stem: patch (cut and project), conv (a 3x3 convolution first) or compact (convolution and pooling, in stages).
        pool: class (read a class token), mean (of all patches) or sequence (a mean with learned weights).
        dropout: in the branches of the blocks. Dropout of attention weights is the mechanism's own option.
        drop_path: probability that a branch of the last block is left out for a sample, rising from 0 in the first.
        layer_scale: start of learned factors of each branch, such as 1e-4; null for none.
        label_smoothing: share of the target spread evenly over all classes, from 0 to 1.
        init_from: a checkpoint whose weights a new run starts from, with the same options of the network.
        replace_head: with init_from, start with a new head where the classes are not those of the checkpoint.
        optim: optimiser and schedule.
    """

    task = "vision"

    def __init__(
        self,
        attention: Callable[[int, int], Mechanism] = Softmax,
        attention_at: dict[str, Callable[[int, int], Mechanism]] | None = None,
        position: PositionName = "learned",
        dim: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_diversity: float = 0.0,
        head_diversity_kind: DiversityKind = "projected",
        hidden_dim: int | None = None,
        experts: Experts | None = None,
        patch_size: int = 2,
        stem: StemName = "conv",
        pool: PoolName = "class",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        label_smoothing: float = 0.0,
        init_from: str | None = None,
        replace_head: bool = False,
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(optim)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"--model.label_smoothing is {label_smoothing}; it must lie in [0, 1)")
        if replace_head and init_from is None:
            raise ValueError("--model.replace_head=true needs --model.init_from, the checkpoint to start from")
        self.label_smoothing = label_smoothing
        self.init_from, self.replace_head = init_from, replace_head

    def build_network(self, facts: dict[str, Any]) -> VisionTransformer:
        """The network for pictures with these facts."""
        height, width = facts["image_size"]
        pictures = PictureFacts(height, width, facts["channels"], len(facts["classes"]), facts["mean"], facts["std"])
        named = inspect.signature(VisionTransformer).parameters
        return VisionTransformer(pictures, **{name: value for name, value in self.hparams.items() if name in named})

    def setup(self, stage: str) -> None:
        """Take the facts over, and in a new run the weights of ``init_from``."""
        super().setup(stage)
        if stage == "fit" and self.init_from is not None and self.trainer.ckpt_path is None:
            self.configure_model()
            assert self.network is not None and self.facts is not None
            start_from(self.network, self.facts["classes"], self.init_from, self.replace_head)

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

    def attention_pictures(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Attention of the first picture of a batch: rollout, and each head of each block."""
        assert isinstance(self.network, VisionTransformer)
        title = f"{self.answer(batch['image'][0])}; it is {self.facts['classes'][int(batch['label'][0])]}"
        return attention_figures(self.network, scale_pixels(batch["image"][:1]), title)

    def answer(self, image: Tensor) -> str:
        """What one picture [C, H, W] is taken for, in words."""
        assert self.facts is not None
        share, number = self.predict(image).max(-1)
        return f"taken for {self.facts['classes'][int(number)]} ({share:.2f})"
