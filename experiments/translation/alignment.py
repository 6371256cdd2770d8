"""Soft alignment: how much each source token counts for each target token, read from the attention to the source.

Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and Translate", arXiv:1409.0473,
section 5.2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attnzoo import MultiheadAttention, record
from experiments.translation.tokens import BOS, PAD

if TYPE_CHECKING:
    from experiments.translation.translator import Translator

END = "</s>"
"""What stands for the end symbol on the axes."""


class Alignment(NamedTuple):
    """The soft alignment of one pair.

    Attributes:
        source: tokens as text, the end symbol last.
        target: tokens as text, the end symbol last.
        weights: [target, source], how much of a source token was read when a target token was chosen; the mean over
            heads and layers. Rows sum to 1 where the mechanism is normalised.
    """

    source: list[str]
    target: list[str]
    weights: Tensor


def cross_sites(network: nn.Module) -> list[str]:
    """Names of the attentions to the source: one in a recurrent decoder, one in each block of a Transformer."""
    names = (name for name, module in network.named_modules() if isinstance(module, MultiheadAttention))
    return [name for name in names if name == "attention" or name.endswith(".cross_attention")]


def blind(model: Translator) -> str | None:
    """Why there is no alignment, or None where there is one."""
    assert model.network is not None
    for site in cross_sites(model.network):
        attention = model.network.get_submodule(site)
        assert isinstance(attention, MultiheadAttention)
        name = type(attention.mechanism).__name__
        if not attention.mechanism.traits.linear_in_v:
            return f"{name} applies no matrix to the values, so there is no alignment"
        context = attention.v_proj.weight.new_zeros(1, 2, attention.v_proj.in_features)
        if site == "attention" and not hasattr(attention.memory(context), "k"):
            return f"the memory of {name} keeps no keys that could be aligned with"
    return None


def align(model: Translator, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[Alignment]:
    """Soft alignments of given pairs, the target being given word by word.

    Args:
        model: its network is left in training or evaluation as it was.
        sources: rows of source tokens, with EOS at the end.
        targets: rows of target tokens, without BOS and EOS.

    Raises:
        ValueError: for an attention to the source that is not linear in v.
    """
    network = model.network
    assert network is not None
    if why := blind(model):
        raise ValueError(why)
    source = _padded(sources).to(model.device)
    given = _padded([[BOS, *row] for row in targets]).to(model.device)
    training = network.training
    network.eval()
    try:
        with torch.no_grad(), record(network) as sites:
            network(given, source)
        # A recurrent decoder calls its attention once for each target token, a Transformer once for all of them.
        layers = [torch.cat([call.map() for call in sites[site]], dim=2) for site in cross_sites(network)]
    finally:
        network.train(training)
    weights = torch.stack(layers).float().mean((0, 2)).cpu()
    return [
        Alignment(
            [*model.source_vocabulary.pieces(row[:-1]), END],
            [*model.target_vocabulary.pieces(target), END],
            weights[i, : len(target) + 1, : len(row)],
        )
        for i, (row, target) in enumerate(zip(sources, targets, strict=True))
    ]


def agreement(alignments: Sequence[Alignment], right: Sequence[Sequence[int | None]]) -> dict[str, float]:
    """How often the most read source token is the right one.

    Args:
        alignments: of pairs whose true alignment is known.
        right: for each pair, for each target token (without the end symbol) the place of its source token, or None
            where it has none.

    Returns:
        Shares from 0 to 1 of the target tokens that have a source token: "exact", and "near", at most one place off.
    """
    off = [
        abs(int(place) - wanted)
        for alignment, places in zip(alignments, right, strict=True)
        for place, wanted in zip(alignment.weights.argmax(-1)[:-1], places, strict=True)
        if wanted is not None
    ]
    return {"exact": sum(x == 0 for x in off) / len(off), "near": sum(x <= 1 for x in off) / len(off)}


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
