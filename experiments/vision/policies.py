"""RandAugment and TrivialAugment: operations drawn for each picture by itself, done where pictures are read.

RandAugment: Cubuk et al. 2019, arXiv:1909.13719. TrivialAugment: Müller and Hutter 2021, arXiv:2103.10158. Both are
torchvision's; what is here gives each picture of a batch its own draw. The draws come from the generators that the
loader has seeded for the batch, so they do not depend on the number of workers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from experiments.vision.loading import Samples, collate

PolicyName = Literal["none", "randaugment", "trivialaugment"]


class PolicyPictures(Dataset[dict[str, Tensor]]):
    """Samples whose pictures are changed anew each time they are read.

    Args:
        samples: {"image": uint8 [C, H, W], "label": int64}.
        name: of the policy, not "none".
        operations: of RandAugment, on each picture.
        magnitude: of RandAugment's operations, 0 to 30.
    """

    def __init__(self, samples: Samples, name: PolicyName, operations: int = 2, magnitude: int = 9) -> None:
        self.samples = samples
        self.policy = (
            v2.RandAugment(operations, magnitude, fill=[0.0])
            if name == "randaugment"
            else v2.TrivialAugmentWide(fill=[0.0])
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        return sample | {"image": self.policy(sample["image"])}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """A whole batch, each picture with its own draw."""
        read = getattr(self.samples, "__getitems__", None)
        batch: dict[str, Tensor] = collate([self.samples[i] for i in indices] if read is None else read(indices))
        return batch | {"image": torch.stack([self.policy(image) for image in batch["image"]])}
