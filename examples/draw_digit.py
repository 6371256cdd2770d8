"""Draw a digit in the browser and see what a trained model reads.

    make setup
    .venv/bin/pip install --editable '.[demo]'
    .venv/bin/python -m examples.draw_digit [CHECKPOINT]

Without a checkpoint it takes the best one of the newest finished vision run under runs/.
"""

import functools
import sys
from typing import Any

import gradio
from PIL import Image

import experiments
from experiments.training.finding import newest_finished
from experiments.vision import ImageClassifier
from experiments.vision.pictures import to_tensor


def read(model: ImageClassifier, drawing: dict[str, Any] | None) -> dict[str, float]:
    """Class -> probability of what was drawn; the ink counts as light on dark, as in the digits of training."""
    if drawing is None:
        return {}
    ink: Image.Image = drawing["composite"].convert("RGBA").getchannel("A")
    pixels = to_tensor(ink, tuple(model.facts["image_size"]), model.facts["channels"])
    return dict(zip(model.facts["classes"], model.predict(pixels).tolist(), strict=True))


def main(checkpoint: str) -> None:
    """Serves the page on this machine until it is stopped."""
    model = experiments.load(checkpoint)
    page = gradio.Interface(
        functools.partial(read, model), gradio.Sketchpad(type="pil"), gradio.Label(num_top_classes=5), live=True
    )
    page.launch()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(newest_finished(["vision"])))
