"""Draw a digit in the browser and see what a trained model reads.

    make setup
    .venv/bin/pip install --editable '.[demo]'
    .venv/bin/python -m examples.draw_digit [CHECKPOINT]

Without a checkpoint it takes the best one of the newest finished vision run under runs/.
"""

import sys
from typing import Any

import gradio
import numpy as np
import torch
from PIL import Image

import experiments
from experiments.training.finding import newest_finished
from experiments.vision.pictures import to_tensor


def main(checkpoint: str) -> None:
    """Serves the page on this machine until it is stopped."""
    model = experiments.load(checkpoint)
    size, channels = tuple(model.facts["image_size"]), model.facts["channels"]

    def read(drawing: dict[str, Any] | None) -> dict[str, float]:
        if drawing is None:
            return {}
        ink = np.asarray(drawing["composite"].convert("RGBA"))[..., 3]
        light_on_dark = torch.as_tensor(to_tensor(Image.fromarray(ink), size, channels))
        return dict(zip(model.facts["classes"], model.predict(light_on_dark).tolist(), strict=True))

    page = gradio.Interface(read, gradio.Sketchpad(type="pil"), gradio.Label(num_top_classes=5), live=True)
    page.launch()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(newest_finished("vision")))
