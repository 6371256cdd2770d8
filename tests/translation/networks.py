"""Small networks and sentences for tests of the two translators."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from experiments.translation.bahdanau import Bahdanau
from experiments.translation.beam import Hypothesis, beam_search
from experiments.translation.embedding import Words
from experiments.translation.tokens import BOS, EOS, PAD
from experiments.translation.transformer import Transformer

WORDS = Words(24, 24, joint=True)
Network = Transformer | Bahdanau
KINDS: dict[str, type[Network]] = {"transformer": Transformer, "bahdanau": Bahdanau}


def transformer(words: Words = WORDS, **options: Any) -> Transformer:
    """Two blocks a side, in evaluation, with position tables that are not 0."""
    sizes = {"dim": 16, "num_heads": 2, "encoder_depth": 2, "decoder_depth": 2, "hidden_dim": 24, "max_len": 64}
    network = Transformer(words, **{**sizes, **options}).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "position" in name:
                parameter.normal_()
    return network


def bahdanau(words: Words = WORDS, **options: Any) -> Bahdanau:
    """In evaluation."""
    return Bahdanau(words, **{"dim": 12, "hidden_dim": 16, "max_len": 64, **options}).eval()


def network(kind: str, words: Words = WORDS, **options: Any) -> Network:
    """One of ``KINDS``."""
    return transformer(words, **options) if kind == "transformer" else bahdanau(words, **options)


def sources(*lengths: int, size: int | None = None) -> Tensor:
    """Rows of so many tokens, EOS counted, padded to ``size``: int64 [rows, size]."""
    rows = torch.full((len(lengths), max(lengths) if size is None else size), PAD)
    for row, length in zip(rows, lengths, strict=True):
        if length:
            row[:length] = torch.randint(4, WORDS.source_size, (length,))
            row[length - 1] = EOS
    return rows


def translate(model: Network, source: Tensor, max_len: int, **options: Any) -> list[list[Hypothesis]]:
    """Beam search over the cached steps of a network."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        logits, state = model(tokens[:, None], state=state)
        return logits[:, -1], state

    with torch.no_grad():
        start = model.start(source, max_len)
    return beam_search(
        step, start, batch_size=len(source), bos=BOS, eos=EOS, max_len=max_len, reorder=model.reorder, **options
    )


def translate_anew(model: Network, source: Tensor, max_len: int, **options: Any) -> list[list[Hypothesis]]:
    """The same without a cache: at each step one full forward over the whole prefix."""

    def step(tokens: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        prefix = torch.cat([state[1], tokens[:, None]], dim=1)
        return model(prefix, state[0])[0][:, -1], (state[0], prefix)

    def reorder(state: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        return state[0][rows], state[1][rows]

    start = (source, torch.zeros(len(source), 0, dtype=torch.int64))
    return beam_search(
        step, start, batch_size=len(source), bos=BOS, eos=EOS, max_len=max_len, reorder=reorder, **options
    )


def steps(model: Network, target: Tensor, source: Tensor, *chunks: int) -> Tensor:
    """Logits of whole targets [B, T, V], by steps of so many tokens."""
    state, parts = model.start(source, target.shape[1]), []
    for part in target.split(list(chunks), dim=1):
        logits, state = model(part, state=state)
        parts.append(logits)
    return torch.cat(parts, dim=1)


def loss_of(model: nn.Module, source: Tensor, given: Tensor, labels: Tensor) -> Tensor:
    """The mean loss that is trained on."""
    loss, aux = model(given, source, labels=labels, smoothing=0.1)
    return loss.smoothed / loss.count + aux


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    """Of every parameter."""
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@functools.cache
def trained(kind: str) -> Network:
    """A network that has seen a little: it should say its source backwards, and ends where it thinks fit."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network(kind, dim=16)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(60):
            source = sources(*torch.randint(3, 9, (32,)).tolist())
            target = torch.full((32, source.shape[1] + 1), PAD)
            for row, tokens in zip(target, source, strict=True):
                words = tokens[(tokens != PAD) & (tokens != EOS)].flip(0)
                row[: len(words) + 2] = torch.tensor([BOS, *words, EOS])
            loss, _ = model(target[:, :-1], source, labels=target[:, 1:])
            optimizer.zero_grad()
            (loss.smoothed / loss.count).backward()
            optimizer.step()
    return model
