"""Pretraining without labels: some patches are hidden, and their pixels are to be told from the others.

Xie et al. 2021, "SimMIM: A Simple Framework for Masked Image Modeling", arXiv:2111.09886. Hidden patches are grey
already in the picture, so that no convolution sees across their border.

Shapes: B batch, C channels, H height, W width, P patch size, N patches, E width of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from attnzoo import Mechanism, Softmax
from experiments.training.losses import LossMean
from experiments.training.module import Experiment, Stage, Step
from experiments.training.optim import Optim
from experiments.vision.layers import StemName
from experiments.vision.module import build_transformer
from experiments.vision.network import PoolName, VisionTransformer
from experiments.vision.pictures import scale_pixels
from experiments.vision.places import PositionName


class MaskedTransformer(nn.Module):
    """A Vision Transformer without its head, a learned token for hidden patches, and one linear layer to pixels.

    Args:
        encoder: what is to be pretrained; its head and sequence pooling, which nothing would train, are taken out.
        patch_size: P.
    """

    def __init__(self, encoder: VisionTransformer, patch_size: int) -> None:
        super().__init__()
        dim, channels = encoder.head.in_features, encoder.mean.shape[1]
        encoder.head, encoder.sequence_pool = nn.Identity(), None
        self.encoder = encoder
        self.patch_size = patch_size
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.to_pixels = nn.Linear(dim, channels * patch_size**2)
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, image: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tell the pixels of hidden patches.

        Args:
            image: pixels 0 to 1, [B, C, H, W].
            hidden: bool [B, N], patches in raster order.

        Returns:
            Told pixels and true ones, normalised, both [B, N, C P P], and aux.
        """
        pixels = self.encoder.normalised(image)
        rows, columns = self.encoder.grid
        cover = hidden.view(-1, 1, rows, columns).to(pixels.dtype)
        cover = F.interpolate(cover, scale_factor=self.patch_size, mode="nearest")
        x = self.encoder.tokens(pixels * (1 - cover))
        x = torch.where(hidden[:, :, None], self.mask_token.to(x.dtype), x)
        x, aux = self.encoder.encode(x)
        told = self.to_pixels(x[:, x.shape[1] - rows * columns :])
        return told, F.unfold(pixels, self.patch_size, stride=self.patch_size).transpose(1, 2), aux


class AbsoluteError(LossMean):
    """Mean absolute error of the pixels of hidden patches, exact for unequal batches."""


class MaskedPatches(Experiment):
    """Pretrains the network of ``ImageClassifier`` on pictures alone; a run with labels starts from it by init_from.

    Args:
        mask_share: share of the patches that is hidden, the same number in each picture.
        attention: mechanism of every block, as for ``ImageClassifier``; so are the options that follow.
        attention_at: other mechanisms for single blocks.
        position: name of the position encoding.
        dim: width of the model.
        depth: how many blocks.
        num_heads: heads of each block.
        num_kv_heads: key/value heads; null for as many.
        hidden_dim: width of the feed-forward; null for 2 dim.
        patch_size: pixels along a patch.
        stem: patch, conv, compact or residual.
        pool: class, mean or sequence; only whether there is a class token matters here.
        dropout: in the branches of the blocks.
        drop_path: probability that a branch of the last block is left out.
        layer_scale: start of learned factors of each branch; null for none.
        optim: optimiser and schedule.

    Raises:
        ValueError: a share that hides nothing or everything.
    """

    task = "pretraining"

    def __init__(
        self,
        mask_share: float = 0.6,
        attention: Callable[[int, int], Mechanism] = Softmax,
        attention_at: dict[str, Callable[[int, int], Mechanism]] | None = None,
        position: PositionName = "learned",
        dim: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        hidden_dim: int | None = None,
        patch_size: int = 2,
        stem: StemName = "conv",
        pool: PoolName = "class",
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(optim)
        if not 0 < mask_share < 1:
            raise ValueError(f"--model.mask_share is {mask_share}; it must lie between 0 and 1")
        self.mask_share, self.patch_size = mask_share, patch_size

    def build_network(self, facts: dict[str, Any]) -> MaskedTransformer:
        """The network for pictures with these facts."""
        return MaskedTransformer(build_transformer(facts, self.hparams), self.patch_size)

    def build_metrics(self, facts: dict[str, Any]) -> dict[str, Metric]:
        """Mean absolute error of hidden pixels, normalised."""
        return {"mae": AbsoluteError()}

    def step(self, batch: dict[str, Tensor], stage: Stage) -> Step:
        """Mean absolute error over the pixels of hidden patches; labels are not looked at."""
        assert isinstance(self.network, MaskedTransformer)
        image = scale_pixels(batch["image"])
        hidden = self._hide(len(image), stage).to(image.device)
        told, true, aux = self.network(image, hidden)
        errors = (told.float() - true).abs().mean(2)[hidden]
        count = torch.tensor(len(errors), device=errors.device)
        return Step(errors.sum(), count, aux, (errors.sum(), count))

    def primary(self, values: dict[str, float]) -> float:
        """Minus the mean absolute error."""
        return -values["mae"]

    def next_commands(self, checkpoint: str) -> list[str]:
        """Training with labels from here."""
        return [f'make train EXP=vit-cifar10 ARGS="--model.init_from={checkpoint}"']

    def _hide(self, count: int, stage: Stage) -> Tensor:
        """As many patches of each picture; in evaluation always the same ones, so that runs can be compared."""
        assert isinstance(self.network, MaskedTransformer)
        rows, columns = self.network.encoder.grid
        number = min(max(round(self.mask_share * rows * columns), 1), rows * columns - 1)
        generator = None if stage == "train" else torch.Generator().manual_seed(0)
        order = torch.rand(count, rows * columns, generator=generator).argsort(1)
        return order.argsort(1) < number
