"""A zoo of attention mechanisms behind one contract.

An attention is two parts: a projection shell (``MultiheadAttention``) and a mechanism between heads
(``Softmax``, ``Local``, ...). Every mechanism keeps the contract of ``Mechanism``; ``check_attention`` tests it.
"""

from attnzoo.bias import OffsetBias
from attnzoo.blocks import DecoderBlock, EncoderBlock, FeedForward
from attnzoo.catalogue import CATALOGUE, build, from_spec, spec
from attnzoo.heads.diversity import DiversityKind, HeadDiversity
from attnzoo.latent import MultiheadLatentAttention
from attnzoo.laws import check_attention
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.adaptive_span import AdaptiveSpan
from attnzoo.mechanisms.additive import Additive
from attnzoo.mechanisms.axial import Axial
from attnzoo.mechanisms.block_sparse import BlockSparse
from attnzoo.mechanisms.differential import Differential
from attnzoo.mechanisms.flash import Flash
from attnzoo.mechanisms.global_local import GlobalLocal
from attnzoo.mechanisms.linear import Linear
from attnzoo.mechanisms.linformer import Linformer
from attnzoo.mechanisms.local import Local
from attnzoo.mechanisms.lsh import LSH
from attnzoo.mechanisms.memory_compressed import MemoryCompressed
from attnzoo.mechanisms.moba import MoBA
from attnzoo.mechanisms.nystrom import Nystrom
from attnzoo.mechanisms.performer import Performer
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.mechanisms.strided import Strided
from attnzoo.moe import MixtureOfExperts
from attnzoo.multihead import MultiheadAttention
from attnzoo.record import Call, attention_map, record
from attnzoo.state import reorder
from attnzoo.traits import Traits

__all__ = [
    "CATALOGUE",
    "LSH",
    "AdaptiveSpan",
    "Additive",
    "Axial",
    "BlockSparse",
    "Call",
    "DecoderBlock",
    "Differential",
    "DiversityKind",
    "EncoderBlock",
    "FeedForward",
    "Flash",
    "GlobalLocal",
    "HeadDiversity",
    "Linear",
    "Linformer",
    "Local",
    "Mask",
    "Mechanism",
    "MemoryCompressed",
    "MixtureOfExperts",
    "MoBA",
    "MultiheadAttention",
    "MultiheadLatentAttention",
    "Nystrom",
    "OffsetBias",
    "Performer",
    "Softmax",
    "Strided",
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
