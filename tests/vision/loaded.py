"""Short ways to set up ImageData and to read a loader to its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.vision.data import ImageData


def ready(stage: str = "fit", **options: Any) -> ImageData:
    data = ImageData(**{key: str(value) if key == "path" else value for key, value in options.items()})
    data.setup(stage)
    return data


def labels(loader: Any) -> list[int]:
    return torch.cat([batch["label"] for batch in loader]).tolist()


def images(loader: Any) -> Tensor:
    return torch.cat([batch["image"] for batch in loader])
