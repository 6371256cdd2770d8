"""Translation: Bahdanau's network and the Transformer over the zoo, from raw text to BLEU."""

from experiments.translation.data import TranslationData
from experiments.translation.module import BahdanauTranslator, TransformerTranslator

__all__ = ["BahdanauTranslator", "TransformerTranslator", "TranslationData"]
