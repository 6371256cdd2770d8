"""Beam search over any network that goes by steps. It knows nothing of the network but ``step``.

Every sentence has ``beam`` slots. At each step the best continuations fill them; one that is the end symbol is a result
and takes its slot with it, as in the code of Bahdanau et al. 2014 (arXiv:1409.0473), so a beam of 1 is exactly greedy.

    score = log probability / length ** length_penalty         length: tokens and the end symbol

What was cut at the greatest length comes behind all that ended: a part of a sentence is better than nothing only.

Shapes: B sentences, A of them not done, N open hypotheses of all of these, K beam, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnzoo


class Hypothesis(NamedTuple):
    """One result.

    Attributes:
        tokens: numbers, a forced prefix among them; without BOS and EOS.
        score: what results are ranked by.
        log_probability: of all tokens and the end symbol, in nats.
        finished: whether it ended by itself; False where it was cut at the greatest length.
    """

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool


Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


@torch.no_grad()
def beam_search(
    step: Step,
    state: Any,
    *,
    batch_size: int,
    bos: int,
    eos: int,
    max_len: int | Sequence[int],
    beam: int = 5,
    n_best: int = 1,
    length_penalty: float = 1.0,
    prefixes: Sequence[Sequence[int]] | None = None,
    reorder: Callable[[Any, Tensor], Any] = attnzoo.reorder,
    device: torch.device | str = "cpu",
) -> list[list[Hypothesis]]:
    """The best hypotheses of each sentence.

    Rows are open hypotheses only: what ended, and whole sentences that are decided, leave the batch. No sentence
    depends on the others.

    Args:
        step: called with the last tokens int64 [N] and the state; gives logits [N, V] of the next one and the state.
        state: of B rows, before BOS.
        batch_size: B.
        bos: number of the start symbol, which is fed first.
        eos: number of the end symbol.
        max_len: the most tokens of a hypothesis, the end symbol counted; one for all or one for each sentence.
        beam: K.
        n_best: how many results to give for each sentence; the first one does not depend on it.
        length_penalty: p of the score; 0 ranks by log probability, more favours long results.
        prefixes: tokens that the hypotheses of each sentence must begin with; their log probability counts.
        reorder: picks rows of a state: ``reorder(state, rows)`` with int64 [N'].
        device: where the tokens are made.

    Returns:
        For each sentence its results, the best first: ``n_best`` of them, or fewer if there are fewer.

    Raises:
        ValueError: for sizes that do not fit, a prefix that cannot be, or logits that are NaN.

    Example:
        >>> def step(tokens, state):  # one of two words at each place, or the end (0)
        ...     return torch.tensor([0.3, 0.45, 0.25]).log().expand(len(tokens), 3), state
        >>> found = beam_search(step, None, batch_size=1, bos=0, eos=0, max_len=3, beam=4, reorder=lambda s, rows: s)
        >>> found[0][0].tokens, round(found[0][0].score, 2)
        ([1, 1], -0.93)
    """
    sentences = [
        _Sentence(prefix, limit, beam, n_best, length_penalty)
        for prefix, limit in zip(*_checked(batch_size, eos, max_len, beam, n_best, prefixes), strict=True)
    ]
    active = sentences
    # The slots of the sentences that go on: nats [A, K], -inf where a slot is empty, and tokens [A, K, length].
    # Not in the default dtype, which is the model's while one of bf16-true runs.
    nats = torch.full((batch_size, beam), -torch.inf, dtype=torch.float32, device=device)
    nats[:, :1] = 0
    history = torch.zeros(batch_size, beam, 0, dtype=torch.int64, device=device)
    length = 0
    while active:
        rows = (nats > -torch.inf).flatten().nonzero()[:, 0]
        last = history.flatten(0, 1)[rows, -1] if length else torch.full_like(rows, bos)
        logits, state = step(last, state)
        gain, words = _continuations(logits, beam)
        forced = [
            (row, active[number].prefix[length])
            for row, number in enumerate((rows // beam).tolist())
            if length < len(active[number].prefix)
        ]
        _force(gain, words, logits, forced)
        free = torch.tensor([sentence.free for sentence in active], device=device)
        nats, slot, word = _fill(nats, rows, gain, words, free)
        length += 1
        history = torch.cat([history.gather(1, slot[..., None].expand(-1, -1, length - 1)), word[..., None]], dim=2)

        alive = nats > -torch.inf
        ends = alive & (word == eos)
        cut = alive & ~ends & torch.tensor([[sentence.max_len == length] for sentence in active], device=device)
        for finished, found in ((True, ends), (False, cut)):
            numbers = found.nonzero()[:, 0].tolist()
            for number, total, tokens in zip(numbers, nats[found].tolist(), history[found].tolist(), strict=True):
                active[number].add(tokens[: length - finished], total, finished)
        nats = nats.masked_fill(ends | cut, -torch.inf)

        best = nats.amax(1).tolist()
        stays = [number for number, sentence in enumerate(active) if sentence.goes_on(best[number], length)]
        active = [active[number] for number in stays]
        kept = torch.tensor(stays, dtype=torch.int64, device=device)
        row_of_slot = torch.zeros(slot.numel(), dtype=torch.int64, device=device)
        row_of_slot[rows] = torch.arange(len(rows), device=device)
        origin = row_of_slot.view_as(slot).gather(1, slot)[kept]
        nats, history = nats[kept], history[kept]
        origin = origin[nats > -torch.inf]
        # A state that stays as it is need not be copied.
        if active and not (len(origin) == len(rows) and torch.equal(origin, row_of_slot[rows])):
            state = reorder(state, origin)
    return [sentence.best() for sentence in sentences]


class _Sentence:
    """Results of one sentence, and what is still open about it."""

    def __init__(self, prefix: Sequence[int], max_len: int, beam: int, n_best: int, penalty: float) -> None:
        self.prefix, self.max_len, self.free, self.n_best, self.penalty = prefix, max_len, beam, n_best, penalty
        self.results: list[Hypothesis] = []

    def add(self, tokens: list[int], nats: float, finished: bool) -> None:
        """One result; one that ended takes its slot with it."""
        self.results.append(Hypothesis(tokens, nats / (len(tokens) + finished) ** self.penalty, nats, finished))
        self.free -= finished

    def goes_on(self, best: float, length: int) -> bool:
        """Whether an open hypothesis of ``length`` tokens, the best one of ``best`` nats, can come among the n best.

        What a hypothesis has in nats only falls. So the most that it can reach is what it has at the length that suits
        it best: the greatest, or the next one where the penalty is 0 or below.
        """
        if best == -math.inf or len(self.results) < self.n_best:
            return best > -math.inf
        reach = max(best / end**self.penalty for end in (length + 1, self.max_len))
        # Of equals the one that ended first stays in front.
        return reach > sorted(result.score for result in self.results)[-self.n_best]

    def best(self) -> list[Hypothesis]:
        """At most ``n_best`` results."""
        return sorted(self.results, key=lambda result: (not result.finished, -result.score))[: self.n_best]


def _checked(
    batch_size: int,
    eos: int,
    max_len: int | Sequence[int],
    beam: int,
    n_best: int,
    prefixes: Sequence[Sequence[int]] | None,
) -> tuple[list[Sequence[int]], list[int]]:
    """Prefix and greatest length of each sentence."""
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best must lie between 1 and the beam, got n_best={n_best} and beam={beam}")
    limits = [max_len] * batch_size if isinstance(max_len, int) else list(max_len)
    starts = [()] * batch_size if prefixes is None else list(prefixes)
    for name, given in (("max_len", limits), ("prefixes", starts)):
        if len(given) != batch_size:
            raise ValueError(f"{name} must have one entry for each of the {batch_size} sentences, got {len(given)}")
    for number, (start, limit) in enumerate(zip(starts, limits, strict=True)):
        if limit <= len(start):
            raise ValueError(
                f"sentence {number}: max_len={limit} leaves no token behind a prefix of {len(start)}; it must be larger"
            )
        if eos in start:
            raise ValueError(f"sentence {number}: the prefix {list(start)} holds the end symbol, {eos}")
    return starts, limits


def _continuations(logits: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """The most probable next tokens of each row: nats [N, k] and numbers [N, k]."""
    logits = logits.float()
    top, words = logits.topk(min(beam, logits.shape[1]))
    gain = top - logits.logsumexp(1, keepdim=True)
    if gain.isnan().any():
        raise ValueError(
            "the logits of a step are NaN, or -inf for all words, so no token can be chosen; "
            "look at the training loss of this model"
        )
    return gain, words


def _force(gain: Tensor, words: Tensor, logits: Tensor, forced: list[tuple[int, int]]) -> None:
    """Makes given tokens the only candidates of given rows, in place."""
    if not forced:
        return
    rows, tokens = torch.tensor(forced, device=gain.device).T
    nats = logits[rows].float().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    if (nats == -torch.inf).any():
        raise ValueError(f"a prefix holds the token {int(tokens[nats == -torch.inf][0])}, whose probability is 0")
    gain[rows] = -torch.inf
    gain[rows, 0], words[rows, 0] = nats, tokens


def _fill(nats: Tensor, rows: Tensor, gain: Tensor, words: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of each sentence: nats, slot of origin and token, [A, K] each, best first."""
    (sentences, beam), width = nats.shape, gain.shape[1]
    totals = nats.new_full((sentences * beam, width), -torch.inf)
    totals[rows] = nats.flatten()[rows, None] + gain
    tokens = words.new_zeros(sentences * beam, width)
    tokens[rows] = words
    # Stable, so that equals come in one order whatever the batch.
    best, order = totals.view(sentences, -1).sort(dim=1, descending=True, stable=True)
    best, order = best[:, :beam], order[:, :beam]
    best = best.masked_fill(torch.arange(beam, device=best.device) >= free[:, None], -torch.inf)
    return best, order // width, tokens.view(sentences, -1).gather(1, order)
