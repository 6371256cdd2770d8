"""Reading pictures: what a viewer shows on white paper, upright, three channels of 8 bits.

A file says more about its pixels than their numbers: which side is up, what shows through, which colours are
meant, how many bits there are. All of that is applied here, once, for training and for prediction alike.
"""

from __future__ import annotations

import io
import struct
import warnings
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

TOLERANCE = 1e-3
"""How far float pixels may leave 0 to 1; resizing and rounding do so by less."""

# EPS is a program that Pillow hands to another one, MPEG has no reader.
_NOT_READ = {"EPS", "MPEG"}
# Tried first: Pillow half opens a file in each format before the right one.
_USUAL = {"JPEG", "PNG", "WEBP", "GIF"}
_PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}


def read_picture(path: str | Path) -> Image.Image:
    """Read a picture as a viewer shows it on white paper.

    Turns it upright (EXIF), brings its colours to sRGB (profile, print colours), scales 16 bits and floats to
    8 bits, lays what is transparent on white, and takes the first picture of an animation. EXIF data that are
    damaged, and a colour profile that is broken or meant for other pixels, are passed over, as viewers do.

    Args:
        path: the file.

    Returns:
        An RGB picture, 8 bits a channel.

    Raises:
        ValueError: the file cannot be read as a picture; the message has the path and the reason.

    Example:
        >>> read_picture("examples/seven.png").size
        (64, 64)
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; a picture file was expected.") from error
    return decode_picture(data, str(path))


def decode_picture(data: bytes, name: str) -> Image.Image:
    """Decode the bytes of a picture file as `read_picture` does; `name` stands in error messages."""
    if not data:
        raise ValueError(f"{name} is empty (0 bytes); a picture file was expected.")
    try:
        with warnings.catch_warnings():  # Pillow warns of half of what it refuses, without a name
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_formats())
            image.load()
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ValueError(f"{name} is too large: more than {most:,} pixels.") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is no picture in a known format.") from error
    except Exception as error:  # a decoder may raise anything when its file is damaged
        raise ValueError(f"{name} is a damaged picture: {str(error).rstrip('.')}.") from error
    try:
        return _on_white(_upright(image))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def is_picture(path: str | Path) -> bool:
    """Whether a file has the ending of a picture and is not hidden (`._cat.jpg` and `Thumbs.db` are none)."""
    path = Path(path)
    return not path.name.startswith(".") and path.suffix.lower() in _extensions()


def to_tensor(image: Image.Image, size: tuple[int, int] | None, channels: int) -> Tensor:
    """Turn a picture into pixels of a given size.

    Args:
        image: a picture, RGB or grey.
        size: height and width in pixels; None keeps the picture's own.
        channels: 3 for colours, 1 for grey.

    Returns:
        uint8 [C, H, W], resized bicubically with antialiasing where the size differs.
    """
    pixels = transforms.pil_to_tensor(image.convert("RGB" if channels == 3 else "L"))
    if size is None or tuple(pixels.shape[-2:]) == tuple(size):
        return pixels
    return transforms.resize(pixels, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)


def scale_pixels(pixels: Tensor) -> Tensor:
    """Bring pixels to floats from 0 to 1: uint8 is divided by 255, floats from 0 to 1 pass.

    Args:
        pixels: uint8 from 0 to 255, or floats from 0 to 1, of any shape.

    Returns:
        Floats of the same shape.

    Raises:
        ValueError: another type, or floats beyond 0 to 1.

    Example:
        >>> scale_pixels(torch.tensor([0, 255], dtype=torch.uint8))
        tensor([0., 1.])
    """
    if pixels.dtype == torch.uint8:
        return pixels.float() / 255
    if not pixels.is_floating_point():
        raise ValueError(f"Pixels came as {pixels.dtype}; give uint8 from 0 to 255 or floats from 0 to 1.")
    low, high = pixels.min().item(), pixels.max().item()
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):  # written so that NaN is refused
        raise ValueError(
            f"Float pixels range from {low:g} to {high:g}; expected 0 to 1. "
            "Scale them (divide by 255 if they are 8-bit values), or give uint8."
        )
    return pixels


def require_shape(image: Tensor, channels: int, size: tuple[int, int]) -> None:
    """Refuse a batch [B, C, H, W] of other channels, height or width than a model takes.

    Raises:
        ValueError: with what was found, what was expected, and the option that resizes.
    """
    if image.dim() != 4 or tuple(image.shape[1:]) != (channels, *size):
        found = "x".join(map(str, image.shape[1:]))
        raise ValueError(
            f"The model takes pictures of {channels}x{size[0]}x{size[1]} (channels, height, width); these are {found}. "
            f"Resize them: --data.image_size=[{size[0]},{size[1]}]"
        )


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except (SyntaxError, struct.error):  # damaged EXIF data beside good pixels
        return image


def _on_white(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    colour, alpha = _split_alpha(image)
    if colour.mode[0] in "IF":
        colour = _eight_bits(colour)
    if profile:
        colour = _to_srgb(colour, profile)
    colour = colour.convert("RGB")
    if alpha is None:
        return colour
    paper = Image.new("RGB", colour.size, "white")
    paper.paste(colour, mask=alpha)
    return paper


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colours, and how much of them covers the paper (None: all)."""
    if not image.has_transparency_data:
        return image, None
    if image.mode.startswith("I;16"):  # Pillow has no alpha for these; the file names one value as clear
        seen = np.asarray(image) != image.info["transparency"]
        return image, Image.fromarray(seen.astype(np.uint8) * 255)
    grey = image.mode in ("1", "L", "LA", "La")
    image = image.convert("LA" if grey else "RGBA")
    return image.convert("L" if grey else "RGB"), image.getchannel("A")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale one channel of 16-bit whole numbers, or of floats from 0 to 1, to 8 bits."""
    values = np.asarray(image, dtype=np.float64)
    full = 1.0 if image.mode == "F" else 65535.0
    low, high = values.min(), values.max()
    slack = TOLERANCE * full if image.mode == "F" else 0.0
    if not (low >= -slack and high <= full + slack):
        found = f"its pixels range from {low:g} to {high:g}"
        raise ValueError(f"{found}; expected 0 to {full:g}. Save it with 8 bits.")
    return Image.fromarray(np.rint(values.clip(0, full) * (255 / full)).astype(np.uint8))


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    if image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "CMYK"):
        image = image.convert("RGB")
    found = _transform(profile)
    if found is None:
        return image
    transform, mode = found
    if image.mode == "L" and mode == "RGB":
        image = image.convert("RGB")
    return transform.apply(image) if image.mode == mode else image


@lru_cache(maxsize=16)
def _transform(profile: bytes) -> tuple[ImageCms.ImageCmsTransform, str] | None:
    """How to bring the colours of a profile to sRGB, and the mode it is for; None if it can't be used."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = _PROFILE_MODES[source.profile.xcolor_space.strip()]
        screen = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        return ImageCms.ImageCmsTransform(source, screen, mode, "RGB"), mode
    except (OSError, ValueError, KeyError):
        return None


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    known = {name: factory for name, (factory, _) in Image.OPEN.items() if name not in _NOT_READ}
    read = [name for name, factory in known.items() if not _is_stub(factory)]
    return tuple(sorted(read, key=lambda name: name not in _USUAL))


@cache
def _extensions() -> frozenset[str]:
    formats = set(_formats())
    return frozenset(ending for ending, name in Image.registered_extensions().items() if name in formats)


def _is_stub(factory: object) -> bool:
    """Stubs know the mark of their format, and no more."""
    return isinstance(factory, type) and issubclass(factory, ImageFile.StubImageFile)
