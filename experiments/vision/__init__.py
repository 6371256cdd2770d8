"""Image classification: a Vision Transformer over the zoo, its pretraining without labels, and networks of timm."""

from experiments.vision.data import ImageData
from experiments.vision.masked import MaskedPatches
from experiments.vision.module import ImageClassifier
from experiments.vision.timm_classifier import TimmClassifier

__all__ = ["ImageClassifier", "ImageData", "MaskedPatches", "TimmClassifier"]
