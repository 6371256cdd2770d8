"""Stems, pooling, stochastic depth and layer scale of the Vision Transformer, against the formulas by hand."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.vision.layers import CompactStem, ResidualConvolution, SequencePool, VisionBlock
from experiments.vision.network import PictureFacts, VisionTransformer

CIFAR = PictureFacts(32, 32, 3, 10, [0.5] * 3, [0.25] * 3)


def test_a_compact_stem_without_its_norm_is_that_of_the_paper() -> None:
    """Convolution, ReLU, max pooling, in this order and in the usual memory format."""
    stem = CompactStem(3, 8, patch_size=4).eval()
    norms = [layer for layer in stem.stages if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.eps = 0.0  # in evaluation a fresh norm then does nothing
    image = torch.randn(2, 3, 12, 20)
    x = image
    for layer in stem.stages:
        if isinstance(layer, nn.Conv2d):
            x = F.max_pool2d(F.relu(F.conv2d(x, layer.weight.contiguous(), padding=1)), 2)
    found = stem(image)
    assert found.shape == (2, 8, 3, 5)
    assert [layer.out_channels for layer in stem.stages if isinstance(layer, nn.Conv2d)] == [4, 8]
    torch.testing.assert_close(found, x, atol=1e-5, rtol=1e-5)


def test_a_residual_stem_adds_a_second_convolution_in_each_stage() -> None:
    stem = CompactStem(3, 8, patch_size=4, residual=True).eval()
    image = torch.randn(2, 3, 12, 20)
    x = image
    for layer in stem.stages:
        if isinstance(layer, nn.Conv2d):
            x = F.max_pool2d(F.conv2d(x, layer.weight, padding=1), 2)
        elif isinstance(layer, nn.BatchNorm2d):
            x = F.relu(x / (1 + layer.eps) ** 0.5)  # a fresh norm in evaluation
        elif isinstance(layer, ResidualConvolution):
            x = x + F.relu(F.conv2d(x, layer.branch[0].weight, padding=1) / (1 + layer.branch[1].eps) ** 0.5)
    torch.testing.assert_close(stem(image), x, atol=1e-5, rtol=1e-5)
    sizes = [tuple(p.shape) for p in stem.parameters() if p.ndim == 4]
    assert sizes == [(4, 3, 3, 3), (4, 4, 3, 3), (8, 4, 3, 3), (8, 8, 3, 3)]


def test_the_compact_transformer_of_the_paper_has_its_size() -> None:
    """CCT-2/3x2 is published with 0.28M parameters; ours counted by hand."""
    model = VisionTransformer(
        CIFAR, dim=128, depth=2, num_heads=2, hidden_dim=128, patch_size=4, stem="compact", pool="sequence"
    )
    stem = 3 * 9 * 64 + 2 * 64 + 64 * 9 * 128 + 2 * 128
    block = 4 * 128 * 128 + 3 * 128 + 2 * (128 * 128 + 128) + 4 * 128  # the keys have no bias
    rest = 64 * 128 + 2 * 128 + (128 + 1) + (128 * 10 + 10)
    assert sum(p.numel() for p in model.parameters()) == stem + 2 * block + rest == 284_619


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 6, "stem": "residual"}, r"stem=residual halves the picture: --model\.patch_size is 6"),
        ({"patch_size": 6}, r"stem=compact halves the picture: --model\.patch_size is 6; take 2, 4, 8"),
        ({"patch_size": 1}, r"patch_size is 1; take 2"),
        ({"patch_size": 8, "dim": 18}, r"doubling: 18 is no multiple of 4"),
    ],
)
def test_a_compact_stem_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionTransformer(
            PictureFacts(48, 48, 3, 2, [0.5] * 3, [0.5] * 3),
            **{"dim": 16, "num_heads": 2, "stem": "compact", **options},
        )


def test_sequence_pooling_weighs_the_tokens() -> None:
    pool = SequencePool(2)
    with torch.no_grad():
        pool.score.weight.copy_(torch.tensor([[1.0, 0.0]]))
        pool.score.bias.fill_(0.7)  # moves all scores alike
    x = torch.tensor([[[0.0, 4.0], [float(torch.tensor(3.0).log()), 8.0]]])
    # exp of the scores: 1 and 3
    torch.testing.assert_close(pool(x)[0, 1], torch.tensor(0.25 * 4 + 0.75 * 8))


def test_every_patch_reaches_the_head_through_sequence_pooling() -> None:
    model = VisionTransformer(CIFAR, dim=16, depth=1, num_heads=2, patch_size=4, stem="patch", pool="sequence")
    picture = torch.rand(1, 3, 32, 32, requires_grad=True)
    model(picture)[0].square().sum().backward()
    assert picture.grad is not None and picture.grad.count_nonzero() == picture.numel()


def test_a_pool_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--model\.pool is 'max'; it must be one of class, mean, sequence"):
        VisionTransformer(CIFAR, dim=16, num_heads=2, pool="max")  # type: ignore[arg-type]


class Ones(nn.Module):
    """A branch that adds 1."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return torch.ones_like(x)


class OnesAndAux(Ones):
    """The same as a feed-forward."""

    def forward(self, x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.ones_like(x), x.new_zeros(())


def block_of_ones(**options: float) -> VisionBlock:
    block = VisionBlock(4, 2, **options)
    mechanism = block.attention.mechanism
    block.attention = Ones()
    block.attention.mechanism = mechanism
    block.feed_forward = OnesAndAux()
    return block


def test_branches_are_left_out_by_sample_and_made_up_for() -> None:
    """With p = 0.25 a branch of ones adds 0 or 4/3, to a whole sample; there are two branches."""
    block = block_of_ones(drop_path=0.25)
    found = block.train()(torch.zeros(4000, 3, 4))[0]
    assert torch.equal(found, found[:, :1, :1].expand_as(found))
    values, counts = found[:, 0, 0].mul(3).round().unique(return_counts=True)
    assert values.tolist() == [0, 4, 8]
    assert counts.tolist() == pytest.approx([250, 1500, 2250], abs=120)
    assert torch.equal(block.eval()(torch.zeros(5, 3, 4))[0], torch.full((5, 3, 4), 2.0))


def test_stochastic_depth_rises_from_nothing_to_the_last_block() -> None:
    model = VisionTransformer(CIFAR, dim=16, depth=3, num_heads=2, patch_size=8, drop_path=0.3)
    assert [block.drop_path.p for block in model.blocks] == pytest.approx([0.0, 0.15, 0.3])
    with pytest.raises(ValueError, match=r"--model\.drop_path is 1\.0; it must lie in \[0, 1\)"):
        VisionTransformer(CIFAR, dim=16, num_heads=2, drop_path=1.0)


def test_layer_scale_scales_each_branch_by_its_own_factors() -> None:
    block = block_of_ones(layer_scale=0.5)
    with torch.no_grad():
        block.feed_forward_scale.mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    found = block(torch.zeros(1, 1, 4))[0].flatten()
    assert found.tolist() == [1.0, 1.5, 2.0, 2.5]
    found.sum().backward()
    assert block.attention_scale.grad.tolist() == [1.0] * 4


def test_a_compact_model_trains_whatever_the_memory_format_of_its_pictures() -> None:
    model = functools.partial(VisionTransformer, CIFAR, dim=16, depth=1, num_heads=2, patch_size=4, stem="compact")
    torch.manual_seed(0)
    one = model(pool="mean")
    picture = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(one(picture)[0], one(picture.contiguous(memory_format=torch.channels_last))[0])
    other = model(pool="mean")
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.eval()(picture)[0], one.eval()(picture)[0])
