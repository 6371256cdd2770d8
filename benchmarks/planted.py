"""Models with a head that is degenerate by construction: what a test of degeneration must find, and what it must not.

A model is two encoder blocks. Its targets are its own outputs with the planted head put to its mean, and noise: so the
planted head is of no use and every other head is. Beside it stands a decoy, a head that shows a cause and is of use: it
averages, or it gives what another gives.

Letters: B batch, H heads, T tokens, D head width, E width.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo import CATALOGUE, EncoderBlock, MultiheadAttention, record
from attnzoo.heads.figures import Head
from attnzoo.heads.parts import inputs, output, tensor_of
from attnzoo.heads.sites import ablated, find_sites

DIM, HEADS, GRID, BATCH, BATCHES = 32, 4, (4, 8), 8, 2
TOKENS = GRID[0] * GRID[1]
KINDS = ("dead", "uniform", "sink", "duplicate")
NOISE = 0.1
"""Of the targets, by their deviation."""


class Planted(NamedTuple):
    """One case.

    Attributes:
        model: in evaluation mode.
        batches: inputs and targets.
        kind: what was planted.
        heads: where; of a duplicate both heads, of which one is to be found.
        decoy: heads that show a cause and are of use.
    """

    model: Network
    batches: list[tuple[Tensor, Tensor]]
    kind: str
    heads: tuple[Head, ...]
    decoy: tuple[Head, ...]

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        """Squared error, summed, and how many numbers."""
        x, y = batch
        return (self.model(x) - y).square().sum(), y.numel()


class Network(nn.Module):
    """Two blocks, without aux."""

    def __init__(self, mechanism: str) -> None:
        super().__init__()
        site: dict[str, Any] = {"grid": GRID, "prefix_tokens": 0, "max_len": TOKENS}
        self.blocks = nn.ModuleList(
            EncoderBlock(DIM, HEADS, CATALOGUE[mechanism], layer=layer, **site) for layer in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]."""
        for block in self.blocks:
            x, _ = block(x)
        return x


def plant(mechanism: str, kind: str, seed: int) -> Planted | None:
    """A case; None where the mechanism cannot have such a head: a key that all look at, when none is seen by all."""
    for attempt in range(20):
        case = _attempt(mechanism, kind, random.Random(f"{mechanism} {kind} {seed} {attempt}"))
        if case is None or _of_use(case):
            return case
    raise AssertionError(f"no decoy of use in 20 attempts: {mechanism}, {kind}, {seed}")


def _attempt(mechanism: str, kind: str, draw: random.Random) -> Planted | None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(draw.getrandbits(63))
        model = Network(mechanism).eval()
        start = torch.randn(DIM)
        inputs_ = [torch.randn(BATCH, TOKENS, DIM) for _ in range(BATCHES)]
        for x in inputs_:
            x[:, 0] = start
        sites = list(find_sites(model))
        for block in model.blocks:
            block.attention.q_proj.weight.mul_(3)  # heads that choose
        # A sink needs a token that is the same everywhere, as the first one is before the first block.
        place = sites[0] if kind == "sink" else draw.choice(sites)
        first, second, third, fourth = draw.sample(range(HEADS), HEADS)
        _put(model, Head(place, first), kind, Head(place, second), start)
        decoy = sites[1] if place == sites[0] else sites[0]
        if draw.random() < 0.5:
            _put(model, Head(decoy, third), "uniform", None, start)
            useful: tuple[Head, ...] = (Head(decoy, third),)
        else:
            _put(model, Head(decoy, third), "duplicate", Head(decoy, fourth), start)
            useful = (Head(decoy, third), Head(decoy, fourth))
        if kind == "sink" and not _is_sink(model, inputs_[0], Head(place, first)):
            return None
        batches = _with_targets(model, inputs_, Head(place, first))
    heads = (Head(place, first), Head(place, second)) if kind == "duplicate" else (Head(place, first),)
    return Planted(model, batches, kind, heads, useful)


@torch.no_grad()
def _of_use(case: Planted) -> bool:
    """Whether the loss needs each decoy: what a planted head does at random may be undone by chance elsewhere."""
    before = _whole_loss(case)
    for head in case.decoy:
        means = {head.site: _mean_outputs(case.model, torch.cat([x for x, _ in case.batches]), head.site)}
        with ablated(case.model, {head.site: [head.number]}, means):
            if _whole_loss(case) - before < 2e-3 * before:
                return False
    return True


def _whole_loss(case: Planted) -> float:
    return float(sum(case.loss(batch)[0] for batch in case.batches))


def _mean_outputs(model: Network, x: Tensor, site: str) -> Tensor:
    with record(model) as calls:
        model(x)
    heads, norm = calls[site][0].heads, find_sites(model)[site].shell.head_norm
    return (heads if norm is None else norm(heads)).mean((0, 2))


def _with_targets(model: Network, inputs_: list[Tensor], planted: Head) -> list[tuple[Tensor, Tensor]]:
    means = _mean_outputs(model, torch.cat(inputs_), planted.site)
    with ablated(model, {planted.site: [planted.number]}, {planted.site: means}):
        targets = [model(x) for x in inputs_]
    size = NOISE * torch.cat(targets).std()
    return [(x, y + torch.randn_like(y) * size) for x, y in zip(inputs_, targets, strict=True)]


def _put(model: Network, head: Head, kind: str, other: Head | None, start: Tensor) -> None:
    site = find_sites(model)[head.site]
    shell = site.shell
    rows = slice(head.number * shell.head_dim, (head.number + 1) * shell.head_dim)
    if kind == "dead":
        # Values that are small grow again in a norm of the heads.
        (shell.out_proj.weight[:, rows] if shell.head_norm is not None else shell.v_proj.weight[rows]).mul_(1e-3)
    elif kind == "uniform":
        for linear in filter(None, (shell.q_proj, shell.k_proj)):
            linear.weight[rows] = 0
    elif kind == "duplicate":
        assert other is not None
        _copy(site, other.number, head.number)
        turn, _ = torch.linalg.qr(torch.randn(shell.value_dim, shell.value_dim))
        if shell.head_norm is None:  # a gain for each number would see the turn
            shell.v_proj.weight[rows] = turn @ shell.v_proj.weight[rows]
            shell.out_proj.weight[:, rows] = shell.out_proj.weight[:, rows] @ turn.T
    else:
        _make_sink(shell, head.number, rows, start)


def _copy(site: Any, source: int, target: int) -> None:
    for part in (*inputs(site), output(site)):
        tensor = tensor_of(site.shell, part).data
        part.block(tensor, target).copy_(part.block(tensor, source))


def _make_sink(shell: MultiheadAttention, number: int, rows: slice, start: Tensor) -> None:
    """A score for the direction of the first token, from a query that is always the same."""
    direction = nn.functional.layer_norm(start, (DIM,))
    direction = direction / direction.norm()
    for linear in filter(None, (shell.q_proj, shell.k_proj)):
        linear.weight[rows] = 0
    if shell.k_proj is None:
        return
    parts = shell.mechanism.qk_parts
    width = shell.head_dim // parts
    first = rows.start
    if hasattr(shell.mechanism, "score_weight"):  # scores within tanh
        shell.mechanism.query_weight[number] = torch.eye(width)
        shell.mechanism.key_weight[number] = torch.eye(width)
        shell.mechanism.score_weight[number] = 40 * torch.eye(width)[0]
        shell.k_proj.weight[first] = 2 * direction
        shell.q_proj.bias[first] = -8
        return
    for part in range(parts):
        shell.k_proj.weight[first + part * width] = 5 * direction
        shell.q_proj.bias[first + part * width] = width**0.5


def _is_sink(model: Network, x: Tensor, head: Head) -> bool:
    """By the whole matrix, which no probe makes."""
    with record(model) as calls:
        model(x)
    weights = calls[head.site][0].map()[:, head.number]
    total = weights.sum(-1, keepdim=True)
    if bool((total < 1e-3).any()) or bool((weights < -1e-3 * total).any()):
        return False  # no shares
    return bool((weights / total).mean(1).amax(-1).mean() > 0.97)
