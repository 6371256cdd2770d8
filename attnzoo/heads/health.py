"""How the heads of a model are doing, measured on a fixed set of batches.

All figures come from outputs and from probes of the code that runs (``probe.py``): for no figure are the weights made,
and every mechanism that is linear in v has them.

    norm            mean |Y_h|, by its mean over the heads of the site          Y_h = O_h W_h, O_h before the projection
    effective_keys  1 / mean of sum_j a_ij^2                                    of the weights a, shares of 1
    visible_keys    mean number of keys that a query could use alike
    unevenness      mean of N_i sum_j (a_ij - b_ij)^2, 0 where all keys weigh alike;  b_ij = 1 / N_i, of equal scores
    sink            mean over sequences of the share that falls on the key most used in it
    first_token     share that falls on the first key
    distance        mean of |i - j| by weight, in tokens
    content         how much of a comes from the input and not from the place: Var a / mean a^2 at one place
    entropy         mean of -sum_j a_ij log a_ij in nats, exact, for Softmax and Flash
    redundancy      the largest linear CKA of Y_h and Y_j, and nearest, which j
    ablation        loss with O_h replaced by its mean, less the loss

Effective keys and unevenness are estimates, within some percent of the exact figures; the others are exact but for
distance between more than 256 keys. Queries that see one key only are left out.

Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited", arXiv:1905.00414 (CKA);
Hutchinson 1990 (the probes); Michel et al. 2019, arXiv:1905.10650, and Voita et al. 2019, arXiv:1905.09418 (ablation).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.heads.figures import Head, Health, figures, notes, with_ablation
from attnzoo.heads.sites import Passed, ablated, capture, find_sites
from attnzoo.heads.sums import Sums, outputs, weights

Run = Callable[[Any], Any]
"""Calls the model on one batch; what it gives is not used."""

Loss = Callable[[Any], tuple[Tensor, Tensor | int]]
"""Calls the model on one batch: the loss summed over samples or tokens, and how many they are."""

Queries = Callable[[str, Any], Tensor | None]
"""Called with the name of a site and a batch: bool [B, T], its real queries, or None for all of them."""

Reduce = Callable[[Tensor], Tensor]
"""The sum of a tensor over all processes."""


def head_health(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    run: Run | None = None,
    loss: Loss | None = None,
    ablate: bool = False,
    queries: Queries | None = None,
    columns: int = 16,
    seed: int = 0,
    reduce: Reduce | None = None,
) -> Health:
    """Measures the heads of every site of ``model``.

    Args:
        model: any module with attentions of attnzoo; it is put into evaluation meanwhile.
        batches: the fixed set; about 512 sequences, and at least 32 tokens for each number in a head. A list, a loader
            that gives the same each time, or an iterator, which is kept as a list where it is needed more than once.
        run: calls the model on a batch; ``model(batch)``, ``model(*batch)`` or ``model(**batch)`` by its type if None.
        loss: calls the model and gives its loss; takes the place of ``run``.
        ablate: measure the ablation of every head too, which takes a pass over all batches for each.
        queries: tells real queries from padding where the mask of the site cannot.
        columns: random columns of the probes.
        seed: of these.
        reduce: where several processes each have a part of the set, gives the sum over all of them.

    Returns:
        The figures.

    Raises:
        ValueError: for a model without heads, no batches, batches of padding alone or in which the loss counts nothing,
            and ``ablate`` without a loss.

    Example:
        >>> from attnzoo import MultiheadAttention
        >>> attn = MultiheadAttention(16, 2)
        >>> nn.init.zeros_(attn.q_proj.weight)[0, 0].item()
        0.0
        >>> health = head_health(attn, [torch.randn(8, 12, 16) for _ in range(4)])
        >>> round(health["attention", 1].effective_keys, 3)
        12.0
    """
    if ablate and loss is None:
        raise ValueError("ablate=True needs loss=, which calls the model on a batch and gives (sum, count)")
    batches = _again(batches) if ablate else batches
    call: Run = loss or run or (lambda batch: _called(model, batch))
    sites = find_sites(model)
    known = {name: Sums.none(site) for name, site in sites.items()}
    seen: dict[str, Passed] = {}
    value = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    count = 0
    with _evaluating(model):
        for batch in batches:
            count += 1
            with capture(model) as passed:
                result = call(batch)
            if loss is not None:
                value += torch.stack([torch.as_tensor(part).detach().double().cpu() for part in result])
            for name, calls in passed.items():
                for one in calls:
                    real = real_queries(one, None if queries is None else queries(name, batch))
                    known[name] = known[name].plus(outputs(sites[name], one, real))
                    if one.call.mechanism.traits.linear_in_v:
                        known[name] = known[name].plus(weights(sites[name], one, real, columns, generator))
                    seen[name] = one
    if not count:
        raise ValueError("head_health needs batches to measure on, got none")
    silent = [name for name in sites if name not in seen]
    if silent:
        raise ValueError(f"no batch went through {', '.join(silent)}; give batches that do, or the part of the model")
    known, value = _reduced(known, value, reduce)
    padded = [name for name in sites if not known[name].tokens]
    if padded:
        raise ValueError(f"nothing but padding went through {', '.join(padded)}; give batches with real tokens")
    health = Health([], {}, None if loss is None else _mean(value))
    for name, site in sites.items():
        health.means[name] = (known[name].total / known[name].tokens).unflatten(0, (site.num_heads, site.value_dim))
        health.notes[name] = notes(site, seen[name], known[name])
        health.heads += figures(site, known[name])
    if ablate:
        assert loss is not None
        every = [entry.head for entry in health.heads]
        health = with_ablation(health, ablation(model, batches, loss, every, health, reduce))
    return health


def ablation(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    heads: Sequence[Head | Sequence[Head]],
    health: Health,
    reduce: Reduce | None = None,
) -> list[float]:
    """By how much the loss rises when the output of a head, or of several heads together, is put to its mean.

    Args:
        model: as for ``head_health``.
        batches: the same as there; of an iterator that was used up there, nothing is left.
        loss: as there.
        heads: one by one, or lists of heads that are ablated together.
        health: what ``head_health`` gave with that loss.
        reduce: as there.

    Raises:
        ValueError: for a health without a loss, and for batches in which the loss counts nothing.
    """
    if health.loss is None:
        raise ValueError("only a loss tells what an ablation costs; give loss= to head_health, too")
    batches, rises = _again(batches), []
    with _evaluating(model):
        for entry in heads:
            together: dict[str, list[int]] = {}
            for head in [entry] if isinstance(entry, Head) else entry:
                together.setdefault(head.site, []).append(head.number)
            with ablated(model, together, health.means):
                rises.append(mean_loss(batches, loss, reduce) - health.loss)
    return rises


def mean_loss(batches: Iterable[Any], loss: Loss, reduce: Reduce | None = None) -> float:
    """The mean loss over the batches.

    Raises:
        ValueError: if there are none, or none of a sample or token that counts.
    """
    value = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        value += torch.stack([torch.as_tensor(part).detach().double().cpu() for part in loss(batch)])
    return _mean(value if reduce is None else reduce(value))


def real_queries(passed: Passed, told: Tensor | None) -> Tensor | None:
    """Bool [B, T], the queries that are no padding, as far as the mask or the caller knows; None for all of them."""
    keep = passed.call.mask.key_keep
    own = None if passed.cross or keep is None or keep.shape[1] != passed.heads.shape[1] else keep
    if own is None or told is None:
        return told if own is None else own
    return own & told


def _mean(value: Tensor) -> float:
    if not value[1]:
        raise ValueError("there is no batch in which the loss counts anything; an iterator gives its batches only once")
    return float(value[0] / value[1])


def _again(batches: Iterable[Any]) -> Iterable[Any]:
    """The batches, to be gone over as often as one likes."""
    return list(batches) if isinstance(batches, Iterator) else batches


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, outside of inference mode, which no probe could pass backward."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _reduced(known: dict[str, Sums], value: Tensor, reduce: Reduce | None) -> tuple[dict[str, Sums], Tensor]:
    if reduce is None:
        return known, value
    parts = [part for sums in known.values() for part in sums] + [value.to(next(iter(known.values())).total)]
    whole = reduce(torch.cat([part.flatten() for part in parts]))
    split = [
        part.view(like.shape) for part, like in zip(whole.split([part.numel() for part in parts]), parts, strict=True)
    ]
    size = len(Sums._fields)
    names = {name: Sums(*split[number * size : (number + 1) * size]) for number, name in enumerate(known)}
    return names, split[-1].cpu()
