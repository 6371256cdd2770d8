"""Training and judging the Vision Transformer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attnzoo import DiversityKind, Mechanism, Softmax
from experiments.training.optim import Optim
from experiments.vision.classifier import PictureClassifier
from experiments.vision.drawing import attention_figures
from experiments.vision.layers import StemName
from experiments.vision.network import Experts, PictureFacts, PoolName, VisionTransformer
from experiments.vision.pictures import scale_pixels
from experiments.vision.places import PositionName


class ImageClassifier(PictureClassifier):
    """A Vision Transformer that names what is in a picture.

    Args:
        attention: mechanism of every block: a class name, with its options behind a dot
            (--model.attention=Local --model.attention.window=9).
        attention_at: other mechanisms for single blocks, by number from 0.
        position: none; added to the embeddings: sinusoidal, learned, sincos_2d, learned_2d; inside the
            attention: rope, rope_halves, rope_2d, alibi, t5, offset, shaw, swin.
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
        stem: patch (cut and project), conv (a 3x3 convolution first), compact (convolution and pooling, in stages) or
            residual (that, with a second convolution in each stage).
        pool: class (read a class token), mean (of all patches) or sequence (a mean with learned weights).
        dropout: in the branches of the blocks. Dropout of attention weights is the mechanism's own option.
        drop_path: probability that a branch of the last block is left out for a sample, rising from 0 in the first.
        layer_scale: start of learned factors of each branch, such as 1e-4; null for none.
        label_smoothing: share of the target spread evenly over all classes, from 0 to 1.
        init_from: a checkpoint whose weights a new run starts from, with the same options of the network.
        replace_head: with init_from, start with a new head where the classes are not those of the checkpoint.
        optim: optimiser and schedule.
    """

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
        super().__init__(label_smoothing, init_from, replace_head, optim)

    def build_network(self, facts: dict[str, Any]) -> VisionTransformer:
        """The network for pictures with these facts."""
        return build_transformer(facts, self.hparams)

    def attention_pictures(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Attention of the first picture of a batch: rollout, and each head of each block."""
        assert isinstance(self.network, VisionTransformer)
        title = f"{self.answer(batch['image'][0])}; it is {self.facts['classes'][int(batch['label'][0])]}"
        return attention_figures(self.network, scale_pixels(batch["image"][:1]), title)


def build_transformer(facts: dict[str, Any], options: Mapping[str, Any]) -> VisionTransformer:
    """The network for pictures with these facts, from those of the options that it knows."""
    height, width = facts["image_size"]
    pictures = PictureFacts(height, width, facts["channels"], len(facts["classes"]), facts["mean"], facts["std"])
    named = inspect.signature(VisionTransformer).parameters
    return VisionTransformer(pictures, **{name: value for name, value in options.items() if name in named})
