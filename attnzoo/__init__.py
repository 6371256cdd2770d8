"""A zoo of attention mechanisms behind one contract.

An attention is two parts: a projection shell (``MultiheadAttention``) and a mechanism between heads
(``Softmax``, ``Local``, ...). Every mechanism keeps the contract of ``Mechanism``; ``check_attention`` tests it.
"""

from attnzoo.bias import OffsetBias
from attnzoo.blocks import DecoderBlock, EncoderBlock, FeedForward
from attnzoo.catalogue import CATALOGUE, build, from_spec, spec
from attnzoo.laws import check_attention
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.additive import Additive
from attnzoo.mechanisms.local import Local
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.multihead import MultiheadAttention
from attnzoo.record import attention_map, record
from attnzoo.state import reorder
from attnzoo.traits import Traits

__all__ = [
    "CATALOGUE",
    "Additive",
    "DecoderBlock",
    "EncoderBlock",
    "FeedForward",
    "Local",
    "Mask",
    "Mechanism",
    "MultiheadAttention",
    "OffsetBias",
    "Softmax",
    "Traits",
    "attention_map",
    "build",
    "check_attention",
    "from_spec",
    "record",
    "reorder",
    "spec",
]

__version__ = "0.1.0"
