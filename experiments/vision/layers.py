"""Layers of the Vision Transformer: stems that make tokens of pixels, its block, and pooling over the tokens.

Convolutional stem: Xiao et al. 2021, "Early Convolutions Help Transformers See Better", arXiv:2106.14881. Compact
stem and sequence pooling: Hassani et al. 2021, "Escaping the Big Data Paradigm with Compact Transformers",
arXiv:2104.05704. Convolutions whose result is added: He et al. 2015, "Deep Residual Learning for Image Recognition",
arXiv:1512.03385. Stochastic depth: Huang et al. 2016, arXiv:1603.09382. Layer scale: Touvron et al. 2021,
arXiv:2103.17239.

Shapes: B batch, C channels, H height, W width, P patch size, E width of the model, T tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from attnzoo import EncoderBlock

StemName = Literal["patch", "conv", "compact", "residual"]


class ResidualConvolution(nn.Module):
    """x + ReLU(norm(convolution of 3x3 of x)), [B, E, H, W] as it came.

    Args:
        dim: E.

    Example:
        >>> ResidualConvolution(8)(torch.rand(2, 8, 6, 4)).shape
        torch.Size([2, 8, 6, 4])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.BatchNorm2d(dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[B, E, H, W] -> [B, E, H, W]."""
        return x + self.branch(x)


class CompactStem(nn.Module):
    """Halves height and width by convolution, max pooling, norm and ReLU, as often as it takes to come to P.

    The width doubles from stage to stage, up to E. Norm and ReLU stand behind the pooling, where they cost a quarter;
    what the paper has, a ReLU before it and no norm, gives the same numbers as a ReLU behind it. Works in the memory
    format ``channels_last``, which is the faster one for convolutions of few channels.

    Args:
        channels: C.
        dim: E, a multiple of P / 2.
        patch_size: P, a power of 2, above 1.
        residual: behind each stage stands a second convolution, whose norm and ReLU are added to what came in. Few
            epochs suffice then, since convolutions know of neighbours what attention must learn.

    Raises:
        ValueError: for other numbers.

    Example:
        >>> CompactStem(3, 16, patch_size=4)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 16, 8, 8])
    """

    def __init__(self, channels: int, dim: int, patch_size: int, *, residual: bool = False) -> None:
        super().__init__()
        stem = "residual" if residual else "compact"
        if patch_size < 2 or patch_size & (patch_size - 1):
            raise ValueError(
                f"--model.stem={stem} halves the picture: --model.patch_size is {patch_size}; take 2, 4, 8"
            )
        if dim % (patch_size // 2):
            raise ValueError(
                f"--model.stem={stem} comes to --model.dim by doubling: {dim} is no multiple of {patch_size // 2}"
            )
        stages: list[nn.Module] = []
        width = dim // (patch_size // 2)
        while width <= dim:
            stages.append(nn.Conv2d(channels, width, 3, padding=1, bias=False))
            stages += [nn.MaxPool2d(2), nn.BatchNorm2d(width), nn.ReLU()]
            stages += [ResidualConvolution(width)] if residual else []
            channels, width = width, 2 * width
        self.stages = nn.Sequential(*stages)

    def forward(self, image: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, E, H / P, W / P]."""
        return self.stages(image.contiguous(memory_format=torch.channels_last))


def make_stem(name: StemName, channels: int, dim: int, patch_size: int) -> nn.Module:
    """[B, C, H, W] -> [B, E, H / P, W / P].

    "patch" cuts and projects, "conv" looks with a 3x3 convolution first, "compact" is a ``CompactStem``, "residual" one
    with a second convolution in each stage.
    """
    if name == "patch":
        return nn.Conv2d(channels, dim, patch_size, stride=patch_size)
    if name in ("compact", "residual"):
        return CompactStem(channels, dim, patch_size, residual=name == "residual")
    if name != "conv":
        raise ValueError(f"--model.stem is {name!r}; it must be 'patch', 'conv', 'compact' or 'residual'")
    return nn.Sequential(
        nn.Conv2d(channels, dim, 3, padding=1, bias=False),
        nn.BatchNorm2d(dim),
        nn.GELU(),
        nn.Conv2d(dim, dim, patch_size, stride=patch_size),
    )


class VisionBlock(EncoderBlock):
    """An encoder block whose branches can be scaled per channel, and left out at random in training.

    Args:
        dim: E.
        num_heads: H.
        drop_path: probability that a branch is left out, drawn for each sample; the others are scaled up.
        layer_scale: start of the learned factors of each branch; None for no such factors.
        options: as for ``EncoderBlock``.
    """

    def __init__(
        self, dim: int, num_heads: int, *, drop_path: float = 0.0, layer_scale: float | None = None, **options: Any
    ) -> None:
        super().__init__(dim, num_heads, **options)
        self.drop_path = StochasticDepth(drop_path, "row")
        scaled = layer_scale is not None
        self.attention_scale = nn.Parameter(torch.full((dim,), layer_scale)) if scaled else None
        self.feed_forward_scale = nn.Parameter(torch.full((dim,), layer_scale)) if scaled else None

    def leave(self, x: Tensor, y: Tensor, norm: nn.LayerNorm) -> Tensor:
        """The sum of x and what the branch made of it."""
        scale = self.attention_scale if norm is self.attention_norm else self.feed_forward_scale
        if scale is not None:
            y = y * scale
        return super().leave(x, self.drop_path(y), norm)


class SequencePool(nn.Module):
    """A weighted mean of the tokens, by weights that each token gets for itself.

    Args:
        dim: E.

    Example:
        >>> SequencePool(8)(torch.rand(2, 5, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, E]."""
        weights = self.score(x).float().softmax(1).to(x.dtype)
        return (weights * x).sum(1)
