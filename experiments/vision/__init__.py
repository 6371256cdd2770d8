"""Image classification: a Vision Transformer over the zoo."""

from experiments.vision.data import ImageData
from experiments.vision.module import ImageClassifier

__all__ = ["ImageClassifier", "ImageData"]
