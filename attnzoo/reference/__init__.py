"""What "right" means: the slow, obvious formula of every mechanism, row by row in float64.

Nothing here is shared with the code it judges. A mechanism that is a softmax over the pairs of its own
``pattern`` needs no entry; any other has its formula in ``FORMULAS``.
"""

from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.adaptive_span import AdaptiveSpan
from attnzoo.mechanisms.additive import Additive
from attnzoo.mechanisms.axial import Axial
from attnzoo.mechanisms.block_sparse import BlockSparse
from attnzoo.mechanisms.differential import Differential
from attnzoo.mechanisms.global_local import GlobalLocal
from attnzoo.mechanisms.linear import Linear
from attnzoo.mechanisms.linformer import Linformer
from attnzoo.mechanisms.lsh import LSH
from attnzoo.mechanisms.memory_compressed import MemoryCompressed
from attnzoo.mechanisms.moba import MoBA
from attnzoo.mechanisms.nystrom import Nystrom
from attnzoo.mechanisms.performer import Performer
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.mechanisms.strided import Strided
from attnzoo.reference.axial import axial
from attnzoo.reference.features import linear, performer
from attnzoo.reference.mixed_keys import linformer, memory_compressed, nystrom
from attnzoo.reference.places import by_place
from attnzoo.reference.reweighted import adaptive_span, differential
from attnzoo.reference.rows import Formula
from attnzoo.reference.selected import lsh, moba
from attnzoo.reference.softmax import additive, dot_product


def reference(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None
) -> Tensor:
    """The output that ``mechanism`` should give, without dropout, in float64.

    Args:
        mechanism: only its options and parameters are read.
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms to be added to the scores.

    Returns:
        [B, H, T, Dv] float64, differentiable.

    Raises:
        ValueError: if there is no formula for the class.
    """
    mask = as_mask(mask)
    formula = formula_of(mechanism)
    if formula is None:
        raise ValueError(
            f"{type(mechanism).__name__} has no formula in attnzoo.reference and is not exact; "
            f"pass one: check_attention(mechanism, formula=...)"
        )
    return formula(mechanism, q.double(), k.double(), v.double(), mask, bias)


def formula_of(mechanism: Mechanism) -> Formula | None:
    """The formula of a mechanism's class, or of the nearest parent that has one."""
    for cls in type(mechanism).__mro__:
        if cls in FORMULAS:
            return FORMULAS[cls]
    return dot_product if mechanism.traits.exact else None


FORMULAS: dict[type[Mechanism], Formula] = {
    AdaptiveSpan: adaptive_span,
    Additive: additive,
    Axial: axial,
    BlockSparse: by_place,
    GlobalLocal: by_place,
    Strided: by_place,
    Differential: differential,
    LSH: lsh,
    Linear: linear,
    Linformer: linformer,
    MemoryCompressed: memory_compressed,
    MoBA: moba,
    Nystrom: nystrom,
    Performer: performer,
    Softmax: dot_product,
}
