"""Augmentation moves, erases and mixes whole batches and keeps pixels and targets what they should be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.training.losses import cross_entropy_sum
from experiments.vision.augment import OFF, Augment, soft_targets

ALL = Augment(
    translate=0.1,
    rotate=20,
    scale=0.2,
    shear=10,
    hflip=True,
    crop_padding=1,
    erase=0.5,
    mixup=0.4,
    cutmix=1.0,
)


def batch(count: int, channels: int = 1, height: int = 8, width: int = 8, classes: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    image = torch.randint(1, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)
    return {"image": image, "label": torch.arange(count) % classes}


def is_one_of(found: Tensor, wanted: list[Tensor]) -> bool:
    return any(torch.allclose(found, option, atol=1e-4) for option in wanted)


def test_off_gives_the_batch_as_it_came() -> None:
    came = batch(4)
    assert OFF(came, 3) is came


def test_v12_mixed_targets_are_smoothed_once() -> None:
    found = soft_targets(torch.tensor([0]), torch.tensor([2]), torch.tensor(0.3), 3, smoothing=0.1)
    torch.testing.assert_close(found, torch.tensor([[0.3033, 0.0333, 0.6633]]), atol=5e-5, rtol=0)


def test_v12_the_loss_smooths_what_mixing_left_unsmoothed() -> None:
    """The gradient of cross entropy at equal logits is 1/3 - target, so it shows the target in force."""
    target = soft_targets(torch.tensor([0]), torch.tensor([2]), torch.tensor([0.3]), 3)
    logits = torch.zeros(1, 3, requires_grad=True)
    total, _ = cross_entropy_sum(logits, target, smoothing=0.1)
    total.backward()
    in_force = 1 / 3 - logits.grad
    torch.testing.assert_close(in_force, torch.tensor([[0.3033, 0.0333, 0.6633]]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("mix", [Augment(mixup=0.4), Augment(cutmix=1.0), Augment(mixup=0.4, cutmix=1.0)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_v12_any_batch_size_is_mixed(mix: Augment, count: int) -> None:
    for _ in range(5):
        found = mix(batch(count), 3)
        assert found["image"].shape == (count, 1, 8, 8)
        torch.testing.assert_close(found["label"].sum(1), torch.ones(count))
        assert (found["label"] >= 0).all()


def test_v12_targets_say_how_much_of_each_picture_is_there() -> None:
    """Pictures of one class are of one shade, so that the mean of a mixed one is that of its target."""
    shades = torch.arange(5.0) / 5
    came = {"image": shades[:, None, None, None].expand(5, 1, 9, 12), "label": torch.arange(5)}
    for mix in (Augment(mixup=1.0), Augment(cutmix=1.0)):
        seen = []
        for _ in range(20):
            found = mix(came, 5)
            torch.testing.assert_close(found["image"].mean((1, 2, 3)), found["label"] @ shades, atol=1e-5, rtol=0)
            seen.append(found["label"].diagonal())
        assert torch.stack(seen).std() > 0.1, "the shares should vary"


def test_mirror() -> None:
    came = batch(64, 2, 5, 7)
    found = Augment(hflip=True)(came, 3)["image"]
    plain = came["image"] / 255
    kept = [torch.allclose(a, b, atol=1e-4) for a, b in zip(found, plain, strict=True)]
    turned = [torch.allclose(a, b.flip(-1), atol=1e-4) for a, b in zip(found, plain, strict=True)]
    assert all(k or t for k, t in zip(kept, turned, strict=True))
    assert 16 < sum(turned) < 48


def test_shift_by_whole_pixels_is_padding_and_cropping() -> None:
    came = batch(64, 2, 5, 7)
    found = Augment(crop_padding=1)(came, 3)["image"]
    padded = F.pad(came["image"] / 255, (1, 1, 1, 1))
    crops = [padded[:, :, y : y + 5, x : x + 7] for y in range(3) for x in range(3)]
    hits = torch.tensor(
        [
            [torch.allclose(f, c, atol=1e-4) for c in crop]
            for f, crop in zip(found, zip(*crops, strict=True), strict=True)
        ]
    )
    assert (hits.sum(1) == 1).all()
    assert (hits.sum(0) > 0).all(), "every shift should come up in 64 draws"


@pytest.mark.parametrize("options", [{"crop_padding": 2}, {"hflip": True}, {"crop_padding": 1, "hflip": True}])
@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_whole_pixels_are_moved_exactly(options: dict[str, int], kind: str) -> None:
    """Each result is one of the crops of the padded picture or of its mirror image, bit for bit, and all come up."""
    came = batch(256, 3, 4, 6)
    if kind == "floats":
        came["image"] = came["image"] / 255
    found = Augment(**options)(came, 3)["image"]
    margin = options.get("crop_padding", 0)
    seen = set()
    for picture, result in zip(came["image"] if kind == "floats" else came["image"] / 255, found, strict=True):
        places = []
        for mirrored in (False, True) if "hflip" in options else (False,):
            padded = F.pad(picture.flip(-1) if mirrored else picture, (margin,) * 4)
            for y in range(2 * margin + 1):
                for x in range(2 * margin + 1):
                    if torch.equal(padded[:, y : y + 4, x : x + 6], result):
                        places.append((mirrored, y, x))
        assert places
        seen.update(places)
    assert len(seen) == (2 * margin + 1) ** 2 * (2 if "hflip" in options else 1)


def fixed(monkeypatch: pytest.MonkeyPatch, value: Callable[[float, float], float]) -> None:
    """Let every range be drawn at one place instead of at random."""
    monkeypatch.setattr(
        "experiments.vision.augment._between", lambda low, high, *shape: torch.full(shape, value(low, high))
    )


@pytest.mark.parametrize("size", [(9, 9), (9, 15), (15, 9)])
def test_turn_by_a_quarter_keeps_its_shape(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 5 pixels stays one of 5 where height and width differ."""
    fixed(monkeypatch, lambda low, high: high)
    height, width = size
    image = torch.zeros(1, 1, height, width)
    image[0, 0, height // 2, width // 2 : width // 2 + 5] = 1
    found = Augment(rotate=90)({"image": image, "label": torch.zeros(1, dtype=torch.long)}, 3)["image"][0, 0]
    column = found[:, width // 2]
    torch.testing.assert_close(found.sum(), torch.tensor(5.0), atol=1e-3, rtol=0)
    torch.testing.assert_close(column.sum(), torch.tensor(5.0), atol=1e-3, rtol=0)
    assert column[height // 2] > 0.99


def test_zoom_makes_things_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, lambda low, high: high if high > 1 else 0.0)
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 6:10, 6:10] = 1
    found = Augment(scale=0.5)({"image": image, "label": torch.zeros(1, dtype=torch.long)}, 3)["image"]
    torch.testing.assert_close(found.sum(), torch.tensor(36.0), atol=1.5, rtol=0)


def test_shift_is_a_share_of_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, lambda low, high: high if high < 1 else 1.0)
    image = torch.zeros(1, 1, 8, 16)
    image[0, 0, 4, 8] = 1
    found = Augment(translate=0.25)({"image": image, "label": torch.zeros(1, dtype=torch.long)}, 3)["image"]
    assert found[0, 0, 4 - 2, 8 - 4] > 0.99


def test_slant_moves_rows_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed(monkeypatch, lambda low, high: high if high != 0 else 0.0)
    image = torch.zeros(1, 1, 9, 9)
    image[0, 0, :, 4] = 1
    found = Augment(shear=45)({"image": image, "label": torch.zeros(1, dtype=torch.long)}, 3)["image"][0, 0]
    torch.testing.assert_close(found, torch.eye(9).flip(1), atol=1e-4, rtol=0)


def test_erasing_blackens_one_box_of_some() -> None:
    came = batch(200, 3, 16, 24)
    found = Augment(erase=0.5)(came, 3)["image"]
    black = (found == 0).all(1)
    touched = black.any(2).any(1)
    assert 70 < touched.sum() < 130
    for picture in black[touched]:
        rows, columns = picture.any(1), picture.any(0)
        assert picture.sum() == rows.sum() * columns.sum(), "one box"
        assert picture.sum() <= 0.4 * 16 * 24
    torch.testing.assert_close(found[~touched], came["image"][~touched] / 255)


@pytest.mark.parametrize("size", [(1, 1), (5, 9), (32, 96)])
def test_everything_at_once_stays_from_zero_to_one(size: tuple[int, int]) -> None:
    found = ALL(batch(7, 3, *size), 3)
    assert found["image"].shape == (7, 3, *size)
    assert found["image"].min() >= 0 and found["image"].max() <= 1 + 1e-5


def test_r14_a_seed_gives_the_same_draws_again_and_another_gives_others() -> None:
    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ALL(batch(5), 3)["image"]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotate": -5}, r"--data\.augment\.rotate is -5; expected 0 \(off\) to 180"),
        ({"erase": 1.5}, r"--data\.augment\.erase is 1\.5; expected 0 \(off\) to 1"),
        ({"mixup": -0.1}, r"--data\.augment\.mixup is -0\.1; expected 0 \(off\) or more"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augment(**options)
