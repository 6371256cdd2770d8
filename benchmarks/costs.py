"""What a forward pass has to do, by formula: multiplications and additions of its matrix products, and bytes.

Letters: H heads, D head width (of keys and values), T tokens; sizes as in `benchmarks.speed.CASES`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from attnzoo import Mask, Mechanism

BYTES = 4
"""Of a float32."""


def flops(mechanism: Mechanism, length: int, causal: bool) -> float:
    """What the formula needs, two for a multiplication with its addition; softmax and masks not counted."""
    heads, width = mechanism.num_heads, mechanism.head_dim
    options: Any = mechanism
    name = type(mechanism).__name__
    if name in ("Linear", "Performer"):
        features = width if name == "Linear" else options.num_features
        sums = 4 * length * features * (width + 1)
        return heads * (sums + (4 * length * width * features if name == "Performer" else 0))
    if name == "Linformer":
        return heads * (4 * length * options.rank * width + 4 * length * options.rank * width)
    if name == "Nystrom":
        marks = options.num_landmarks
        inverse = 8 * marks**3 * options.iterations
        return heads * (8 * length * marks * width + 2 * marks**2 * width * 2 + inverse)
    if name == "MemoryCompressed":
        blocks = math.ceil(length / options.factor)
        return heads * (2 * length * width * width + 2 * length * width + 4 * length * blocks * width)
    if name == "Additive":
        hidden = options.hidden_dim
        return heads * (4 * length * width * hidden + 2 * length**2 * hidden + 2 * length**2 * width)
    products = 6 if name == "Differential" else 4  # two maps of half the width, each times all of v
    return products * heads * width * pairs(mechanism, length, causal)


def pairs(mechanism: Mechanism, length: int, causal: bool) -> float:
    """How many pairs of query and key a head looks at; of those that choose by content, as many as they may."""
    options: Any = mechanism
    name = type(mechanism).__name__
    if name == "Axial":
        return float(length * sum(options.grid))
    if name == "MoBA":
        return length * (options.top_k * options.block_size + length / options.block_size / 2)
    if name == "LSH":
        return float(length * options.num_rounds * 2 * options.bucket_size)
    if name == "AdaptiveSpan":
        return float(length * (options.max_span if causal else 2 * options.max_span - 1))
    pattern = mechanism.pattern(length, length, causal)
    if pattern is None:
        return length * (length + 1) / 2 if causal else float(length**2)
    return pattern.float().sum().item() / (pattern.shape[0] if pattern.dim() == 3 else 1)


def counted(mechanism: Mechanism, length: int, causal: bool) -> int:
    """What torch's counter sees in one forward pass, with SDPA as the matrix products that it is made of."""
    q, k, v = inputs(mechanism, length)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        mechanism.eval()(q, k, v, Mask(causal=causal))
    return counter.get_total_flops()


def state_bytes(mechanism: Mechanism, length: int) -> float:
    """What decoding has to remember after ``length`` tokens."""
    heads, width = mechanism.num_heads, mechanism.head_dim
    options: Any = mechanism
    name = type(mechanism).__name__
    if name in ("Linear", "Performer"):
        features = width if name == "Linear" else options.num_features
        return BYTES * heads * features * (width + 2)
    if name == "Local":
        return BYTES * heads * 2 * min(length, options.reach(causal=True)[0]) * width
    if name == "MemoryCompressed":
        return BYTES * heads * 2 * (math.ceil(length / options.factor) + options.factor) * width
    key_width = options.hidden_dim if name == "Additive" else width
    return BYTES * heads * length * (key_width + width)


def held(mechanism: Mechanism, length: int) -> int:
    """Bytes of the state after ``length`` tokens, as they are."""
    q, k, v = inputs(mechanism, length)
    with torch.no_grad():
        _, state = mechanism.eval().step(q, k, v, mechanism.init_state(1, length))
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(leaf.nbytes for leaf in tensors)


def inputs(mechanism: Mechanism, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one sample; k is q where they are shared."""
    shape = 1, mechanism.num_heads, length, mechanism.head_dim
    q, k, v = (torch.randn(shape) for _ in range(3))
    return q, (q if mechanism.traits.shared_qk else k), v
