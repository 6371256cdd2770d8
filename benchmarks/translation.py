"""The translator's speed: training against torch's own Transformer, and decoding with a cache against without.

Sizes and lengths are those of Multi30k: width 128, feed-forward 256, 4 + 4 blocks, 6,000 words, sentences of 14 tokens
(deviation 4) in batches of 4,096. A ratio of 2 says that ours takes half the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import machine
from benchmarks.timing import ratio, rounds, spread
from experiments.training.optim import Optim
from experiments.training.tables import show_table
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.batching import TokenBatches
from experiments.translation.beam import Hypothesis, beam_search
from experiments.translation.embedding import Words
from experiments.translation.tokens import BOS, EOS, PAD
from experiments.translation.transformer import Transformer

WORDS = Words(6000, 6000, joint=True)
DIM, HIDDEN, HEADS, DEPTH, DROPOUT, SMOOTHING = 128, 256, 4, 4, 0.2, 0.1
TOKENS = 4096
SENTENCES, LENGTH, BEAM = 8, 50, 5
"""Of decoding: sources and translations of 50 tokens."""

Call = Callable[[], object]
Batch = tuple[Tensor, Tensor]


class PlainTransformer(nn.Module):
    """The same network as it is written with torch's parts, padding masks, causal mask and tied words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS.source_size, DIM, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=DIM**-0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors, which are no matter in training
            self.transformer = nn.Transformer(
                DIM, HEADS, DEPTH, DEPTH, HIDDEN, DROPOUT, "gelu", batch_first=True, norm_first=True
            )
        self.dropout = nn.Dropout(DROPOUT)
        angle = torch.arange(512)[:, None] * torch.exp(torch.arange(0, DIM, 2) * (-math.log(10000.0) / DIM))
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1))

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, E]."""
        return self.dropout(self.table(tokens) * DIM**0.5 + self.places[: tokens.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [B, S] and [B, T] -> logits [B, T, V]."""
        length = target.shape[1]
        x = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return x @ self.table.weight.T


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Sources and targets of random words, in the batches that training would make of them."""
    random = np.random.default_rng(seed)
    source = np.clip(np.rint(random.normal(14, 4, 20_000)), 2, 40).astype(np.int64)
    target = np.clip(np.rint(source + random.normal(0, 2, 20_000)), 2, 40).astype(np.int64)
    plan = TokenBatches(source + 1, target + 2, TOKENS, seed=seed).plan(0)[:count]
    return [(_rows(random, source[rows], []), _rows(random, target[rows], [BOS])) for rows in plan]


def _rows(random: np.random.Generator, lengths: np.ndarray, first: list[int]) -> Tensor:
    rows = torch.full((len(lengths), int(lengths.max()) + len(first) + 1), PAD)
    for row, length in zip(rows, lengths, strict=True):
        words = [*first, *random.integers(EOS + 2, WORDS.source_size, length), EOS]
        row[: len(words)] = torch.tensor(words)
    return rows


def training_calls(count: int) -> tuple[dict[str, Call], int]:
    """One optimiser step of each network on the next batch, and how many real tokens a batch has on average."""
    made = batches(count)
    ours = Transformer(
        WORDS, dim=DIM, hidden_dim=HIDDEN, num_heads=HEADS, encoder_depth=DEPTH, decoder_depth=DEPTH, dropout=DROPOUT
    )
    theirs = PlainTransformer()

    def our_loss(source: Tensor, target: Tensor) -> Tensor:
        loss, aux = ours(target[:, :-1], source, labels=target[:, 1:], smoothing=SMOOTHING)
        return loss.smoothed / loss.count + aux

    def their_loss(source: Tensor, target: Tensor) -> Tensor:
        logits = theirs(source, target[:, :-1])
        labels = target[:, 1:].reshape(-1)
        return F.cross_entropy(logits.flatten(0, 1), labels, label_smoothing=SMOOTHING, ignore_index=PAD)

    tokens = sum(int((part != PAD).sum()) for batch in made for part in batch) // count
    return {
        "ours": _step(ours, our_loss, _cycle(made)),
        "theirs": _step(theirs, their_loss, _cycle(made)),
    }, tokens


def _step(network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Iterator[Batch]) -> Call:
    optimizer = Optim().optimizer(network.train())

    def once() -> None:
        optimizer.zero_grad()
        loss(*next(batches)).backward()
        optimizer.step()

    return once


def _cycle(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def decoding_calls(network: Transformer | Bahdanau) -> dict[str, Callable[[], list[list[Hypothesis]]]]:
    """Beam search to the full length, by steps over a state and by one full forward for each token."""
    source = torch.randint(EOS + 2, WORDS.source_size, (SENTENCES, LENGTH))
    whole = copy.deepcopy(network.eval())
    words = whole.words
    # The network gives logits at all places; a search that knows better than that wants those of the last one alone.
    words.logits = lambda x: F.linear(x[:, -1:], words.output_weight)  # type: ignore[method-assign]

    def search(step: Any, state: Any, reorder: Any) -> list[list[Hypothesis]]:
        # No end symbol, so that every hypothesis has the full length.
        return beam_search(
            step, state, batch_size=SENTENCES, bos=BOS, eos=-1, max_len=LENGTH, beam=BEAM, n_best=BEAM, reorder=reorder
        )

    @torch.no_grad()
    def cached() -> list[list[Hypothesis]]:
        def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            logits, state = network(tokens[:, None], state=state)
            return logits[:, 0], state

        return search(step, network.start(source, LENGTH), network.reorder)

    def full() -> list[list[Hypothesis]]:
        def step(tokens: Tensor, state: Batch) -> tuple[Tensor, Batch]:
            prefix = torch.cat([state[1], tokens[:, None]], dim=1)
            return whole(prefix, state[0])[0][:, 0], (state[0], prefix)

        def reorder(state: Batch, rows: Tensor) -> Batch:
            return state[0][rows], state[1][rows]

        return search(step, (source, source.new_zeros(SENTENCES, 0)), reorder)

    return {"ours": cached, "theirs": full}


def differs(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> int:
    """In how many hypotheses two searches differ."""
    pairs = zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True)
    return sum(a.tokens != b.tokens or abs(a.score - b.score) > 1e-4 for a, b in pairs)


def measure(folder: Path, arguments: list[str]) -> int:
    """Measures, writes `result.json` and prints the table."""
    parser = argparse.ArgumentParser(prog="make reproduce FIGURE=translation", description=__doc__)
    parser.add_argument("--steps", type=int, default=41, help="pairs of training steps (41)")
    parser.add_argument("--searches", type=int, default=5, help="pairs of beam searches of each network (5)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    calls, tokens = training_calls(options.steps + 1)
    times = list(track(rounds(calls, options.steps), "training steps", total=options.steps))
    rows: dict[str, dict[str, Any]] = {"training / torch nn.Transformer": _row(times) | {"tokens": tokens}}
    for network in (
        Transformer(WORDS, dim=DIM, hidden_dim=HIDDEN, num_heads=HEADS, encoder_depth=DEPTH, decoder_depth=DEPTH),
        Bahdanau(WORDS, dim=DIM, hidden_dim=HIDDEN),
    ):
        searches = decoding_calls(network)
        wrong = differs(*(call() for call in searches.values()))
        name = f"beam {BEAM}, {type(network).__name__}, cached / full forwards"
        times = list(track(rounds(searches, options.searches), name, total=options.searches))
        rows[name] = _row(times) | {"tokens": SENTENCES * LENGTH, "hypotheses_that_differ": wrong}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"machine": machine(), "pairs": rows}, indent=1) + "\n")
    table = Table("ours / theirs", "ours, ms", "theirs, ms", "tokens a second", "times faster", "95 % at least")
    for name, row in rows.items():
        middle = [f"{1000 * row[side]['median']:.0f}" for side in ("ours", "theirs")]
        rate = f"{row['tokens'] / row['ours']['median']:.0f}"
        table.add_row(name, *middle, rate, f"{row['ratio']:.2f}", f"{row['lower95']:.2f}")
    show_table(table)
    for name, row in rows.items():
        if row.get("hypotheses_that_differ"):
            print(f"error: {name}: {row['hypotheses_that_differ']} hypotheses differ")
            return 1
    return 0


def _row(times: list[dict[str, float]]) -> dict[str, Any]:
    ours, theirs = ([row[side] for row in times] for side in ("ours", "theirs"))
    return {**ratio(ours, theirs), "ours": spread(ours), "theirs": spread(theirs)}
