"""A translator as two networks for other programs: an encoder that runs once, a decoder that gives the next word."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo import Mask
from experiments.training.exporting import Part
from experiments.translation.bahdanau import Bahdanau, BahdanauState
from experiments.translation.embedding import real
from experiments.translation.sharing import Sources
from experiments.translation.tokens import BOS, EOS, PAD, UNK
from experiments.translation.transformer import Transformer


class TransformerEncoder(nn.Module):
    """source int64 [B, S], EOS at the end, padded with 0 -> context [B, S, E]."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: Tensor) -> Tensor:
        """See the class."""
        return self.network.encode(source)[0]


class TransformerDecoder(nn.Module):
    """target int64 [B, T], BOS first; source; context -> log probabilities of the word after each place, [B, T, V]."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        self.network = network

    def forward(self, target: Tensor, source: Tensor, context: Tensor) -> Tensor:
        """See the class."""
        x, _ = self.network.decode(target, context, Mask(key_keep=real(source)))
        return self.network.words.logits(self.network.decoder_norm(x)).log_softmax(-1)


class BahdanauEncoder(nn.Module):
    """source int64 [B, S], EOS at the end, padded with 0 -> annotations [B, S, 2 H] and the first state [B, H]."""

    def __init__(self, network: Bahdanau) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        annotations, _, hidden = self.network.encode(source)
        return annotations, hidden


class BahdanauDecoder(nn.Module):
    """target int64 [B, 1], the word before; source; annotations; state -> log probabilities [B, V], next state."""

    def __init__(self, network: Bahdanau) -> None:
        super().__init__()
        self.network = network

    def forward(self, target: Tensor, source: Tensor, annotations: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        memory = self.network.attention.memory(annotations, mask=Mask(key_keep=real(source)))
        sources = Sources.of((memory,), source.shape[0], source.device)
        logits, state = self.network(target, state=BahdanauState(hidden, sources))
        return logits[:, 0].log_softmax(-1), state.hidden


@torch.no_grad()
def parts(network: Transformer | Bahdanau, source_size: int) -> list[Part]:
    """Encoder and decoder, of any number of rows."""
    if isinstance(network, Transformer):
        return _transformer(network, source_size)
    return _bahdanau(network, source_size)


def _transformer(network: Transformer, source_size: int) -> list[Part]:
    encoder = TransformerEncoder(network).eval()
    most = network.max_len
    words, before = ({0: "rows", 1: (f"{side}_length", most)} for side in ("source", "target"))
    source, other = _sources(2, 5, source_size), _sources(3, 7, source_size)
    example, check = ((_targets(len(x), length), x, encoder(x)) for x, length in ((source, 4), (other, 6)))
    names = ["target", "source", "context"]
    return [
        Part("encoder", encoder, (source,), (words,), ["source"], ["context"], (other,)),
        Part(
            "decoder", TransformerDecoder(network), example, (before, words, words), names, ["log_probabilities"], check
        ),
    ]


def _bahdanau(network: Bahdanau, source_size: int) -> list[Part]:
    encoder = BahdanauEncoder(network).eval()
    rows = {0: "rows"}
    # Neither format has a recurrence of free length, so sources come padded to the greatest one.
    source, other = (_sources(count, network.max_len, source_size) for count in (2, 3))
    example, check = ((_targets(len(x), 1), x, *encoder(x)) for x in (source, other))
    names, outputs = ["target", "source", "annotations", "state"], ["log_probabilities", "next_state"]
    return [
        Part("encoder", encoder, (source,), (rows,), ["source"], ["annotations", "state"], (other,)),
        Part("decoder", BahdanauDecoder(network), example, (rows,) * 4, names, outputs, check),
    ]


def _sources(rows: int, length: int, words: int) -> Tensor:
    source = torch.randint(UNK, words, (rows, length))
    source[0, length // 2 :] = PAD  # so that padding is compared too
    return source


def _targets(rows: int, length: int) -> Tensor:
    return torch.full((rows, length), UNK).index_fill(1, torch.tensor([0]), BOS)


def texts(network: Transformer | Bahdanau, facts: dict[str, Any]) -> dict[str, str]:
    """The vocabularies, and how everything goes together."""
    recurrent = isinstance(network, Bahdanau)
    step = (
        "decoder: target [rows, 1] (the word before), source, annotations, state -> log probabilities [rows, words] of "
        "the next word, and the next state. Begin with <bos> and the encoder's state."
        if recurrent
        else "decoder: target [rows, T] (<bos> and the words so far), source, context -> log probabilities "
        "[rows, T, words] of the word after each place; the last one is new."
    )
    special = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "<unk>": UNK}
    lines = [
        "Text becomes numbers by source_vocabulary.json, numbers become text by target_vocabulary.json: files of the "
        "library tokenizers.",
        f"In both: {', '.join(f'{name} {number}' for name, number in special.items())}.",
        f"encoder: source int64 [rows, {network.max_len if recurrent else 'S'}], each with <eos> at its end and padded "
        f"on the right with <pad> -> {'annotations and state' if recurrent else 'context'}.",
        step,
        "A translation ends at <eos>; of <pad>, <bos> and <unk> none is chosen, however probable.",
        f"Sources of up to {facts['max_length']} tokens were trained on.",
    ]
    vocabularies = {f"{side}_vocabulary.json": facts[f"{side}_vocabulary"] for side in ("source", "target")}
    pretty = {name: json.dumps(json.loads(text), ensure_ascii=False) + "\n" for name, text in vocabularies.items()}
    return {**pretty, "README.txt": "\n".join(lines) + "\n"}
