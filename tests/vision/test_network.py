"""The Vision Transformer: sizes, positions, pooling, layers of their own."""

import functools
from typing import get_args

import pytest
import torch

from attnzoo import CATALOGUE, Local, Softmax, record
from experiments.vision.network import PictureFacts, PositionName, VisionTransformer

DIGITS = PictureFacts(8, 8, 1, 10, mean=[0.3], std=[0.4])


def network(pictures: PictureFacts = DIGITS, **options: object) -> VisionTransformer:
    return VisionTransformer(pictures, **{"dim": 16, "depth": 2, "num_heads": 2, **options}).eval()  # type: ignore[arg-type]


def test_v01_a_picture_that_the_patch_does_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"50x50.*patches of 16.*--model\.patch_size.*--data\.image_size"):
        network(PictureFacts(50, 50, 3, 2, [0.5] * 3, [0.5] * 3), patch_size=16)


def test_v02_pictures_of_another_size_are_refused_with_the_size_found_and_wanted() -> None:
    model = network(PictureFacts(64, 64, 3, 2, [0.5] * 3, [0.5] * 3), patch_size=16)
    with pytest.raises(ValueError, match=r"3x64x64.*these are 3x62x62.*--data\.image_size=\[64,64\]"):
        model(torch.rand(1, 3, 62, 62))


def test_v02_pictures_with_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="1x8x8.*these are 3x8x8"):
        network()(torch.rand(1, 3, 8, 8))


def test_height_and_width_are_never_mixed_up() -> None:
    model = network(PictureFacts(32, 96, 3, 2, [0.5] * 3, [0.5] * 3), patch_size=8, pool="mean", stem="patch")
    assert model.grid == (4, 12)
    picture = torch.rand(1, 3, 32, 96)
    with torch.no_grad(), record(model) as sites:
        model(picture)
    before = sites["blocks.0.attention"][0].v
    changed = picture.clone()
    changed[:, :, :8, 8:16] += 0.5  # row 0, column 1 of the grid
    with torch.no_grad(), record(model) as sites:
        model(changed)
    moved = (sites["blocks.0.attention"][0].v - before).abs().amax((0, 1, 3)) > 1e-6
    assert moved.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("position", get_args(PositionName))
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_every_position_tells_places_apart_except_none(position: PositionName, pool: str) -> None:
    """Swapping two patches moves the output, unless nothing says where they stand."""
    torch.manual_seed(0)
    model = network(position=position, pool=pool, stem="patch")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name:
                parameter.normal_()
    picture = torch.rand(1, 1, 8, 8)
    swapped = picture.clone()
    swapped[..., 0:2, 0:2], swapped[..., 4:6, 6:8] = picture[..., 4:6, 6:8], picture[..., 0:2, 0:2]
    with torch.no_grad():
        difference = (model(picture)[0] - model(swapped)[0]).abs().max()
    assert (difference < 1e-5) == (position == "none")


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mechanism_fits_without_further_options(name: str) -> None:
    model = network(attention=CATALOGUE[name]).train()
    logits, aux = model(torch.rand(3, 1, 8, 8))
    (logits.sum() + aux).backward()
    assert logits.shape == (3, 10)
    assert aux.shape == ()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_single_blocks_can_have_a_mechanism_of_their_own() -> None:
    model = network(attention_at={"1": functools.partial(Local, window=5)})
    kinds = [type(block.attention.mechanism) for block in model.blocks]
    assert kinds == [Softmax, Local]


def test_a_block_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="block '7'; there are blocks 0 to 1"):
        network(attention_at={"7": Local})


def test_an_even_window_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"window=4 is even.*take 3, 5"):
        network(attention=functools.partial(Local, window=4))


@pytest.mark.parametrize("name", ["depth", "patch_size", "num_heads", "hidden_dim", "dim"])
def test_sizes_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--model\.{name} is 0; it must be at least 1"):
        network(**{name: 0})


def test_m10_a_picture_gives_the_same_alone_and_among_others() -> None:
    model = network()
    pictures = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(pictures)[0][:1], model(pictures[:1])[0], atol=1e-5, rtol=0)


def test_the_class_token_reads_all_patches_and_the_mean_all_tokens() -> None:
    for pool in ("class", "mean"):
        model = network(pool=pool, stem="patch")
        picture = torch.rand(1, 1, 8, 8, requires_grad=True)
        model(picture)[0].square().sum().backward()
        assert picture.grad is not None
        assert picture.grad.count_nonzero() == 64


def test_pixels_of_float32_go_into_a_model_of_half_precision() -> None:
    logits, _ = network().to(torch.bfloat16)(torch.rand(2, 1, 8, 8))
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
