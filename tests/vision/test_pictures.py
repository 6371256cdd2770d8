"""Pictures are read as a viewer shows them on white paper."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from experiments.vision.pictures import decode_picture, is_picture, read_picture, scale_pixels, to_tensor

MAGENTA = (255, 0, 255)
WHITE = [255, 255, 255]


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def through(image: Image.Image, kind: str, **options: Any) -> np.ndarray:
    """What is read back of a picture that was saved as a file of that kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return pixels(decode_picture(file.getvalue(), f"picture.{kind}"))


def test_v03_grey_has_three_equal_channels(cases: Path) -> None:
    found = pixels(read_picture(cases / "grey_64.png"))
    assert (found[:, :, 0] == found[:, :, 1]).all() and (found[:, :, 0] == found[:, :, 2]).all()
    assert (found[:, 10] == 40).all() and (found[:, 63] == 252).all()


def test_v04_alpha_is_laid_on_white(cases: Path) -> None:
    colour = pixels(read_picture(cases / "rgba_hidden_colour.png"))
    assert (colour[:, :32] == 255).all()
    assert (colour[:, 32:] == [0, 128, 0]).all()
    grey = pixels(read_picture(cases / "grey_alpha.png"))
    assert (grey[:32, 10] == 40).all() and (grey[32:] == 255).all()


def _palette() -> Image.Image:
    """Green, but magenta at the last pixel."""
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 128, 0, *MAGENTA] + [0] * 750)
    image.putpixel((3, 3), 1)
    return image


def _last(image: Image.Image, colour: Any) -> Image.Image:
    image.putpixel((3, 3), colour)
    return image


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (_palette(), "GIF", {"transparency": 1}),
        (_palette(), "PNG", {"transparency": 1}),
        (_palette(), "PNG", {"transparency": b"\xff\x00"}),
        (_last(Image.new("RGB", (4, 4), (0, 128, 0)), MAGENTA), "PNG", {"transparency": MAGENTA}),
        (_last(Image.new("RGBA", (4, 4), (0, 128, 0, 255)), (*MAGENTA, 0)), "WEBP", {"lossless": True}),
        (_last(Image.new("RGBA", (4, 4), (0, 128, 0, 255)), (*MAGENTA, 0)), "TIFF", {}),
    ],
)
def test_v04_every_kind_of_transparency(image: Image.Image, kind: str, options: dict[str, Any]) -> None:
    found = through(image, kind, **options)
    assert found[3, 3].tolist() == WHITE
    assert found[0, 0].tolist() == [0, 128, 0]


def test_v04_half_transparent_is_mixed_with_white() -> None:
    found = through(Image.new("RGBA", (4, 4), (*MAGENTA, 128)), "PNG")
    assert found[0, 0].tolist() == [255, 127, 255]


def test_v04_clear_grey_value_of_eight_and_sixteen_bits() -> None:
    eight = _last(Image.new("L", (4, 4), 40), 7)
    assert through(eight, "PNG", transparency=7)[[0, 3], [0, 3]].tolist() == [[40] * 3, WHITE]
    sixteen = np.full((4, 4), 40 * 257, np.uint16)
    sixteen[3, 3] = 1000
    found = through(Image.fromarray(sixteen), "PNG", transparency=1000)
    assert found[[0, 3], [0, 3]].tolist() == [[40] * 3, WHITE]


def test_v05_print_colours(cases: Path) -> None:
    found = pixels(read_picture(cases / "cmyk_64.jpg"))
    assert np.abs(found[:, :28] - [255, 0, 0]).max() <= 8
    assert np.abs(found[:, 36:] - [0, 255, 0]).max() <= 8


def test_v05_print_colours_that_are_not_inverted() -> None:
    found = through(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")
    assert np.abs(found - [255, 0, 0]).max() <= 8


def test_v06_turned_by_its_tag(cases: Path) -> None:
    image = read_picture(cases / "exif_rotated_6.jpg")
    assert image.size == (32, 48)
    found = pixels(image)
    for (row, column), colour in {
        (4, 4): (220, 30, 30),
        (4, 27): (30, 200, 30),
        (43, 4): (30, 30, 220),
        (43, 27): (230, 230, 40),
    }.items():
        assert np.abs(found[row, column] - colour).max() <= 10


def test_v06_a_damaged_tag_is_passed_over() -> None:
    assert through(Image.new("RGB", (4, 2)), "PNG", exif=b"Exif\0\0garbagegarbage").shape == (2, 4, 3)


def test_profile_is_part_of_the_picture() -> None:
    """The same numbers under a profile of gamma 1 are lighter on a screen."""
    profile = _linear_profile()
    found = through(Image.new("RGB", (8, 8), (55, 55, 55)), "PNG", icc_profile=profile)
    # linear light 55/255 is 0.5029 in sRGB: 128
    assert np.abs(found - 128).max() <= 2


def test_profile_of_the_screen_changes_nothing() -> None:
    screen = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    assert np.abs(through(image, "PNG", icc_profile=screen) - np.asarray(image)).max() <= 1
    for mode, colour, wanted in (("L", 40, [40] * 3), ("CMYK", (0, 255, 255, 0), [255, 0, 0])):
        found = through(Image.new(mode, (8, 8), colour), "TIFF", icc_profile=screen)
        assert np.abs(found - wanted).max() <= 1, mode


def test_broken_profile_is_passed_over() -> None:
    assert (through(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", icc_profile=b"broken") == [1, 2, 3]).all()


def _linear_profile() -> bytes:
    """sRGB's profile with its curve replaced by the straight one (a curve of no entries)."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for tag in (b"rTRC", b"gTRC", b"bTRC"):
        entry = data.index(tag, 128)
        start = int.from_bytes(data[entry + 4 : entry + 8], "big")
        data[start : start + 12] = b"curv" + bytes(8)
        data[entry + 8 : entry + 12] = (12).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_sixteen_bits_are_scaled(dtype: type) -> None:
    values = np.array([[0, 40 * 257, 65535]], dtype)
    assert through(Image.fromarray(values), "TIFF")[0, :, 0].tolist() == [0, 40, 255]


def test_floats_from_zero_to_one_are_scaled() -> None:
    values = np.array([[0, 40 / 255, 1]], np.float32)
    assert through(Image.fromarray(values), "TIFF")[0, :, 0].tolist() == [0, 40, 255]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([[0, 255]], np.float32), "range from 0 to 255; expected 0 to 1"),
        (np.array([[0, np.nan]], np.float32), "nan"),
        (np.array([[-5, 70000]], np.int32), "range from -5 to 70000; expected 0 to 65535"),
    ],
)
def test_other_ranges_are_refused(values: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        through(Image.fromarray(values), "TIFF")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_picture_of_several(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = through(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (found == [255, 0, 0]).all()


def test_black_and_white() -> None:
    assert through(_last(Image.new("1", (4, 4), 0), 1), "PNG")[[0, 3], [0, 3]].tolist() == [[0] * 3, WHITE]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("truncated.png", "damaged.*truncated"),
        ("not_an_image.png", "no picture"),
        ("nowhere.png", "No such file"),
    ],
)
def test_v07_a_bad_file_is_named(cases: Path, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*{reason}"):
        read_picture(cases / name)


def test_v07_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(ValueError, match=r"empty\.png is empty \(0 bytes\)"):
        read_picture(tmp_path / "empty.png")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_v07_any_format_cut_off_anywhere(kind: str, share: float) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, kind)
    data = file.getvalue()
    with pytest.raises(ValueError, match=r"^cut\.picture "):
        decode_picture(data[: int(share * len(data))], "cut.picture")


@pytest.mark.parametrize("name", ["a.png", "b.JPG", "c.Jpeg", "d.webp", "e.tif", "f.bmp", "g.gif"])
def test_v08_pictures_by_their_ending(name: str) -> None:
    assert is_picture(Path("some.folder") / name)


@pytest.mark.parametrize(
    "name", ["Thumbs.db", ".DS_Store", "desktop.ini", "._a.png", "notes.txt", "png", "a.png.part", "data.h5"]
)
def test_v08_other_files_are_none(name: str) -> None:
    assert not is_picture(name)


def test_wide_96x32_keeps_height_and_width_apart(cases: Path) -> None:
    found = to_tensor(read_picture(cases / "wide_96x32.png"), None, 3)
    assert found.shape == (3, 32, 96) and found.dtype == torch.uint8
    assert torch.equal(found[0], (2 * torch.arange(96)).expand(32, 96).to(torch.uint8))
    assert torch.equal(found[1], (6 * torch.arange(32))[:, None].expand(32, 96).to(torch.uint8))
    assert to_tensor(read_picture(cases / "wide_96x32.png"), (16, 48), 3).shape == (3, 16, 48)


def test_one_by_one_is_that_colour_all_over(cases: Path) -> None:
    found = to_tensor(read_picture(cases / "one_by_one.png"), (8, 12), 3)
    assert found.shape == (3, 8, 12)
    assert torch.equal(found, torch.tensor([10, 20, 30], dtype=torch.uint8)[:, None, None].expand(3, 8, 12))


def test_odd_50x50_is_read_whole(cases: Path) -> None:
    found = to_tensor(read_picture(cases / "odd_50x50.png"), None, 3)
    assert (found[:, 48:] == 255).all() and (found[:, :, 48:] == 255).all() and (found[:, :48, :48] < 255).any()


def test_resizing_does_not_alias() -> None:
    """Stripes one pixel wide become their mean, wherever the places of the small picture fall."""
    stripes = Image.fromarray(np.tile(np.array([0, 0, 0, 255], np.uint8), (64, 16)))
    found = to_tensor(stripes, (8, 8), 1)[0, 1:-1, 1:-1].float()
    assert (found - 255 / 4).abs().max() < 8


def test_one_channel_keeps_the_values_of_grey(cases: Path) -> None:
    found = to_tensor(read_picture(cases / "grey_64.png"), None, 1)
    assert found.shape == (1, 64, 64) and (found[0, :, 10] == 40).all()


def test_v11_eight_bits_and_floats_are_the_same_pixels() -> None:
    eight = torch.arange(256, dtype=torch.uint8)
    scaled = scale_pixels(eight)
    torch.testing.assert_close(scaled, torch.linspace(0, 1, 256))
    assert torch.equal(scale_pixels(scaled), scaled)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.tensor([0.0, 255.0]), "range from 0 to 255; expected 0 to 1"),
        (torch.tensor([-1.0, 1.0]), "range from -1 to 1; expected 0 to 1"),
        (torch.tensor([0.0, float("nan")]), "nan"),
        (torch.tensor([0, 255]), "torch.int64"),
    ],
)
def test_v11_other_ranges_are_refused(found: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_pixels(found)


def test_v11_rounding_passes() -> None:
    assert scale_pixels(torch.tensor([-0.0005, 1.0005])).shape == (2,)
