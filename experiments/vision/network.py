"""A Vision Transformer over any mechanism.

Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv:2010.11929; the convolutional stem after
Xiao et al. 2021, "Early Convolutions Help Transformers See Better", arXiv:2106.14881.

Shapes: B batch, C channels, H height, W width, P patch size, E width of the model, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attnzoo import DiversityKind, FeedForward, HeadDiversity, Mechanism, MixtureOfExperts, Softmax
from attnzoo.positions import Learned2D
from experiments.vision.layers import SequencePool, StemName, VisionBlock, make_stem
from experiments.vision.pictures import require_shape
from experiments.vision.places import PositionName, added, inside

Attention = Callable[[int, int], Mechanism]
PoolName = Literal["class", "mean", "sequence"]


@dataclass(frozen=True)
class PictureFacts:
    """What the pictures are like: shape, classes, and the mean and deviation of their pixels, 0 to 1."""

    height: int
    width: int
    channels: int
    num_classes: int
    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True)
class Experts:
    """Options of ``attnzoo.MixtureOfExperts``.

    Args:
        num_experts: feed-forwards of a block.
        top_k: how many of them a token takes.
        capacity_factor: in training, how many tokens an expert serves, as a multiple of its even share.
        balance_weight: of the term of the loss that spreads the tokens over the experts.
        z_weight: of the term of the loss that keeps the scores of the router small.
    """

    num_experts: int = 4
    top_k: int = 2
    capacity_factor: float = 1.25
    balance_weight: float = 0.01
    z_weight: float = 0.001


class VisionTransformer(nn.Module):
    """Patches or a small convolutional stem, positions, encoder blocks, a linear head.

    Args:
        pictures: what the pictures are like.
        attention: factory of the mechanism in every block.
        attention_at: other factories for single blocks, by number from 0.
        position: name of the position encoding; see ``attnzoo.positions``. What goes by offset (alibi, t5, offset,
            shaw) takes the patches in raster order, a class token first; rope_2d and swin know rows and columns.
            t5 tells both sides apart and has a table for each block, where T5 shares one between all.
        dim: E.
        depth: how many blocks.
        num_heads: H.
        num_kv_heads: key/value heads, a divisor of H; H if None.
        head_diversity: weight of the term that keeps the heads different; 0 for none.
        head_diversity_kind: see ``attnzoo.HeadDiversity``.
        hidden_dim: width of the feed-forward, or of each expert; 2 E if None.
        experts: a mixture of experts in the place of the feed-forward; None for one network.
        patch_size: P; height and width must be multiples of it.
        stem: "patch" cuts and projects; "conv" looks with a 3x3 convolution first; "compact" halves the picture by
            convolution and pooling until it comes to P; "residual" does so with a second convolution in each stage.
        pool: "class" reads a class token, "mean" the mean of the patches, "sequence" a mean with learned weights.
        dropout: of the branches of a block.
        drop_path: probability that a branch of the last block is left out for a sample; it rises with the depth,
            from 0.
        layer_scale: start of the learned factors of each branch; None for no such factors.

    Raises:
        ValueError: for sizes that do not divide, an unknown position, or a block that does not exist.
    """

    def __init__(
        self,
        pictures: PictureFacts,
        *,
        attention: Attention = Softmax,
        attention_at: Mapping[str, Attention] | None = None,
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
    ) -> None:
        super().__init__()
        self.size = (pictures.height, pictures.width)
        for name, value in (
            ("dim", dim), ("depth", depth), ("num_heads", num_heads), ("patch_size", patch_size),
            ("num_kv_heads", num_kv_heads), ("hidden_dim", hidden_dim),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"--model.{name} is {value}; it must be at least 1")
        for name, share in (("dropout", dropout), ("drop_path", drop_path)):
            if not 0 <= share < 1:
                raise ValueError(f"--model.{name} is {share}; it must lie in [0, 1)")
        if pool not in get_args(PoolName):
            raise ValueError(f"--model.pool is {pool!r}; it must be one of {', '.join(get_args(PoolName))}")
        if pictures.height % patch_size or pictures.width % patch_size:
            raise ValueError(
                f"Pictures of {pictures.height}x{pictures.width} cannot be cut into patches of {patch_size}; "
                f"choose --model.patch_size or --data.image_size so that it divides both"
            )
        if dim % num_heads:
            raise ValueError(f"--model.dim={dim} is no multiple of --model.num_heads={num_heads}")
        others = _by_layer(attention_at or {}, depth)
        self.grid = (pictures.height // patch_size, pictures.width // patch_size)
        self.pool = pool
        prefix = 1 if pool == "class" else 0
        tokens = prefix + self.grid[0] * self.grid[1]
        shape = (1, pictures.channels, 1, 1)
        self.register_buffer("mean", torch.tensor(pictures.mean).view(shape))
        self.register_buffer("std", torch.tensor(pictures.std).view(shape))
        self.stem = make_stem(stem, pictures.channels, dim, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if prefix else None
        self.position = added(position, dim, tokens, self.grid, prefix)
        diversity = HeadDiversity(head_diversity, head_diversity_kind) if head_diversity else None
        self.blocks = nn.ModuleList(
            VisionBlock(
                dim,
                num_heads,
                mechanism=others.get(layer, attention),
                feed_forward=FeedForward if experts is None else functools.partial(MixtureOfExperts, **asdict(experts)),
                hidden_dim=2 * dim if hidden_dim is None else hidden_dim,
                dropout=dropout,
                drop_path=drop_path * layer / max(depth - 1, 1),
                layer_scale=layer_scale,
                causal=False,
                position=inside(position, num_heads, dim // num_heads, self.grid, prefix),
                num_kv_heads=num_kv_heads,
                head_diversity=diversity,
                max_len=tokens,
                grid=self.grid,
                prefix_tokens=prefix,
                layer=layer,
            )
            for layer in range(depth)
        )
        self.in_two_dimensions = position in ("rope_2d", "sincos_2d")
        self.turns = position in ("rope", "rope_halves", "rope_2d")
        self.norm = nn.LayerNorm(dim)
        self.sequence_pool = SequencePool(dim) if pool == "sequence" else None
        self.head = nn.Linear(dim, pictures.num_classes)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels 0 to 1, [B, C, H, W] -> logits [B, classes] and aux.

        Raises:
            ValueError: for pictures of another size or number of channels.
        """
        x, aux = self.encode(self.tokens(self.normalised(image)))
        return self.head(self._pooled(x)), aux

    def normalised(self, image: Tensor) -> Tensor:
        """Pixels 0 to 1 -> pixels of mean 0 and deviation 1, checked for their shape."""
        require_shape(image, self.mean.shape[1], self.size)
        image = image.to(self.mean.dtype)  # pixels come in float32, whatever the precision of the weights
        return (image - self.mean) / self.std

    def tokens(self, pixels: Tensor) -> Tensor:
        """What the stem makes of ``normalised`` pixels: one token a patch, in raster order, [B, N, E]."""
        return self.stem(pixels).flatten(2).transpose(1, 2)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, N, E] -> tokens behind the last norm, the class token first if there is one, and aux."""
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        places = self._places(x.device)
        if isinstance(self.position, Learned2D):
            x = x + self.position()
        elif self.position is not None:
            x = x + self.position(places).to(x.dtype)
        aux = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x, positions=places if self.turns else None)
            aux = aux + more
        return self.norm(x), aux

    def _pooled(self, x: Tensor) -> Tensor:
        if self.sequence_pool is not None:
            return self.sequence_pool(x)
        return x[:, 0] if self.pool == "class" else x.mean(1)

    def _places(self, device: torch.device) -> Tensor:
        rows, columns = self.grid
        prefix = 0 if self.class_token is None else 1
        if not self.in_two_dimensions:
            return torch.arange(prefix + rows * columns, device=device)
        # The class token stands at (0, 0), outside of the grid, which begins at (1, 1).
        place = torch.arange(rows * columns, device=device)
        grid = torch.stack([place // columns, place % columns], dim=-1) + prefix
        return torch.cat([grid.new_zeros(prefix, 2), grid])


def _by_layer(attention_at: Mapping[str, Attention], depth: int) -> dict[int, Attention]:
    for key in attention_at:
        if not str(key).isdigit() or int(key) >= depth:
            raise ValueError(f"--model.attention_at has block {key!r}; there are blocks 0 to {depth - 1}")
    return {int(key): factory for key, factory in attention_at.items()}
