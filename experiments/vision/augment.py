"""Augmentation of whole batches: one affine move, erased boxes, MixUp and CutMix.

Sources: RandomErasing, Zhong et al. 2017, arXiv:1708.04896. MixUp, Zhang et al. 2017, arXiv:1710.09412.
CutMix, Yun et al. 2019, arXiv:1905.04899.

Every random number comes from torch's global generator of the calling process, drawn on the CPU, so that one
seed gives one result on any device. Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.distributions import Beta
from torch.nn import functional as F

from experiments.vision.loading import Samples
from experiments.vision.pictures import scale_pixels
from experiments.vision.policies import PolicyName, PolicyPictures

ERASED_SHARE = (0.02, 0.33)
ERASED_LOG_RATIO = (math.log(0.3), math.log(3.3))


@dataclass(frozen=True)
class Augment:
    """What happens to training pictures, drawn anew for each picture of each batch. All off by default.

    Moves leave a black border (zeros).

    Args:
        policy: none, randaugment or trivialaugment: operations on colours and shape, before all else.
        policy_operations: how many RandAugment does on each picture.
        policy_magnitude: how strong they are, 0 to 30.
        translate: largest shift, as a share of height and of width.
        rotate: largest turn, in degrees, either way.
        scale: largest change of size, as a share; 0.1 draws from 0.9 to 1.1.
        shear: largest slant along the width, in degrees, either way.
        hflip: mirror left and right, half of the time.
        crop_padding: largest shift in whole pixels (the same as padding by so much and cropping).
        erase: probability that a box (up to a third of the picture) is made black.
        mixup: parameter of the Beta distribution of MixUp's shares; 0 is off.
        cutmix: the same for CutMix. With both on, each batch takes one of them by a fair coin.

    Raises:
        ValueError: a value out of its range; the message names the option.

    Example:
        >>> batch = {"image": torch.zeros(5, 1, 8, 8, dtype=torch.uint8), "label": torch.arange(5)}
        >>> Augment(rotate=10, mixup=0.2)(batch, num_classes=5)["label"].shape
        torch.Size([5, 5])
    """

    policy: PolicyName = "none"
    policy_operations: int = 2
    policy_magnitude: int = 9
    translate: float = 0.0
    rotate: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    hflip: bool = False
    crop_padding: int = 0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.policy not in get_args(PolicyName):
            raise ValueError(
                f"--data.augment.policy is {self.policy!r}; expected one of {', '.join(get_args(PolicyName))}."
            )
        if self.policy_operations < 1 or not 0 <= self.policy_magnitude <= 30:
            raise ValueError(
                f"--data.augment.policy_operations is {self.policy_operations} and policy_magnitude "
                f"{self.policy_magnitude}; expected 1 or more, and 0 to 30."
            )
        highest = {"translate": 1, "rotate": 180, "scale": 0.9, "shear": 80, "erase": 1}
        for name in (*highest, "crop_padding", "mixup", "cutmix"):
            value, high = getattr(self, name), highest.get(name, math.inf)
            if not 0 <= value <= high:
                wanted = f"0 (off) to {high}" if name in highest else "0 (off) or more"
                raise ValueError(f"--data.augment.{name} is {value}; expected {wanted}.")

    def on_reading(self, samples: Samples) -> Samples | PolicyPictures:
        """The samples with the policy, which acts on one picture at a time and so belongs to who reads them."""
        if self.policy == "none":
            return samples
        return PolicyPictures(samples, self.policy, self.policy_operations, self.policy_magnitude)

    def __call__(self, batch: dict[str, Tensor], num_classes: int) -> dict[str, Tensor]:
        """Augment a training batch, in all but the policy.

        Args:
            batch: "image" [B, C, H, W], uint8 or floats from 0 to 1, and "label" int64 [B].
            num_classes: how many classes mixed targets are spread over.

        Returns:
            The batch as it came if all is off. Otherwise "image" as floats from 0 to 1, and "label" as it
            came, or, where pictures were mixed, float [B, num_classes] with rows that sum to 1 (not smoothed:
            that is for the loss).
        """
        if self == OFF:
            return batch
        image, label = batch["image"], batch["label"]
        if self.translate or self.rotate or self.scale or self.shear:
            image = self._move(scale_pixels(image))
        elif self.hflip or self.crop_padding:
            image = self._move_whole_pixels(image)
        image = scale_pixels(image)
        if self.erase:
            image = image.masked_fill(self._erased(image), 0.0)
        if self.mixup or self.cutmix:
            image, label = self._mix(image, label, num_classes)
        return batch | {"image": image, "label": label}

    def _move(self, image: Tensor) -> Tensor:
        """All moves as one map from places in the result to places in the source, in pixels."""
        count, _, height, width = image.shape
        turn = torch.deg2rad(_between(-self.rotate, self.rotate, count))
        slant = torch.tan(torch.deg2rad(_between(-self.shear, self.shear, count)))
        zoom = 1 / _between(1 - self.scale, 1 + self.scale, count)
        mirror = 1 - 2 * torch.randint(2, (count,)) if self.hflip else torch.ones(count)
        size = torch.tensor([width, height], dtype=torch.float32)
        shift = _between(-self.translate, self.translate, count, 2) * size
        shift = shift + torch.randint(-self.crop_padding, self.crop_padding + 1, (count, 2))
        cos, sin = turn.cos() * zoom, turn.sin() * zoom
        cells = [cos * mirror, cos * slant + sin, -sin * mirror, cos - sin * slant]
        # affine_grid counts from -1 to 1 on both axes, whatever the height and width
        linear = torch.stack(cells, 1).view(count, 2, 2) * size / size[:, None]
        theta = torch.cat([linear, (2 * shift / size)[:, :, None]], 2).to(image)
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def _move_whole_pixels(self, image: Tensor) -> Tensor:
        """What `_move` comes to where nothing is turned or zoomed, exact and much faster."""
        count, _, height, width = image.shape
        padding = self.crop_padding
        shift = torch.randint(2 * padding + 1, (2, count, 1))
        rows = torch.arange(height) + shift[0]
        columns = torch.arange(width)
        if self.hflip:
            columns = torch.where(torch.randint(2, (count, 1)) == 1, columns.flip(0), columns)
        columns = columns + shift[1]
        picture = torch.arange(count)[:, None, None]
        padded = F.pad(image, (padding,) * 4)
        moved = padded[
            picture.to(image.device), :, rows[:, :, None].to(image.device), columns[:, None].to(image.device)
        ]
        return moved.permute(0, 3, 1, 2)

    def _erased(self, image: Tensor) -> Tensor:
        count, _, height, width = image.shape
        area = _between(*ERASED_SHARE, count)
        ratio = _between(*ERASED_LOG_RATIO, count).exp()
        chosen = torch.rand(count) < self.erase
        box = _boxes((area * ratio).sqrt(), (area / ratio).sqrt(), height, width)
        return (box & chosen[:, None, None, None]).to(image.device)

    def _mix(self, image: Tensor, label: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Mix each picture with the one before it in the batch, so that any batch size will do."""
        cut = self.cutmix > 0 and (self.mixup == 0 or bool(torch.rand(()) < 0.5))
        alpha = self.cutmix if cut else self.mixup
        share = Beta(alpha, alpha).sample((len(image),))
        other = image.roll(1, 0)
        if cut:
            side = (1 - share).sqrt()
            box = _boxes(side, side, *image.shape[-2:])
            share = 1 - box.float().mean((1, 2, 3))  # boxes are whole pixels, cut off at the border
            image = torch.where(box.to(image.device), other, image)
        else:
            image = torch.lerp(other, image, share.to(image)[:, None, None, None])
        return image, soft_targets(label, label.roll(1, 0), share.to(image.device), num_classes)


OFF = Augment()
"""No augmentation."""


def soft_targets(labels_a: Tensor, labels_b: Tensor, share: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Targets of mixed samples: `(1 - smoothing) * (share * a + (1 - share) * b) + smoothing / num_classes`.

    Args:
        labels_a: int64 [B], classes that count with `share`.
        labels_b: int64 [B], classes that count with the rest.
        share: floats from 0 to 1, [B] or one for all.
        num_classes: number of classes.
        smoothing: label smoothing; leave it at 0 where the loss smooths, so that it is done once.

    Returns:
        Floats [B, num_classes] whose rows sum to 1.

    Example:
        >>> soft_targets(torch.tensor([0]), torch.tensor([2]), torch.tensor(0.3), 3, smoothing=0.1)
        tensor([[0.3033, 0.0333, 0.6633]])
    """
    share = share.expand(len(labels_a))[:, None]
    mixed = share * F.one_hot(labels_a, num_classes) + (1 - share) * F.one_hot(labels_b, num_classes)
    return mixed * (1 - smoothing) + smoothing / num_classes


def _between(low: float, high: float, *shape: int) -> Tensor:
    return torch.empty(shape).uniform_(low, high)


def _boxes(tall: Tensor, wide: Tensor, height: int, width: int) -> Tensor:
    """Boxes of given shares of height and width [B], anywhere, cut off at the border: bool [B, 1, H, W]."""

    def span(share: Tensor, length: int) -> Tensor:
        extent = (share * length).round()
        first = ((length + 1) * torch.rand(len(share))).floor() - (extent / 2).floor()
        place = torch.arange(length)
        return (place >= first[:, None]) & (place < (first + extent)[:, None])

    return span(tall, height)[:, None, :, None] & span(wide, width)[:, None, None, :]
