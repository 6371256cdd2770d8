"""Heads begun anew in the middle of training, without a jump of the function.

    fold     b_O <- b_O + E[O_h] W_h,  then W_h <- 0: the head is replaced by its mean, as its ablation was measured
    anew     its rows of W_Q, W_K, W_V, and what the mechanism has for it, drawn as when the shell was built
    moments  of Adam: exp_avg of these slices 0, exp_avg_sq the mean over the other heads of the tensor

With W_h = 0 the first step trains W_h alone, queries, keys and values follow from the second on. exp_avg_sq cannot be 0
beside a step count that is shared by the whole tensor: the first updates would be many times too large.

Keys and values of grouped heads begin anew only with the whole group. Parameters are changed in place, so that
optimisers and the buckets of DDP keep them, by a generator of their own that depends on (seed, step, site, head): every
process does the same.
"""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.heads.figures import Head
from attnzoo.heads.parts import Part, check_own, inputs, output, tensor_of
from attnzoo.heads.sites import Site, find_sites

MEANS_OF_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
MEANS = ("exp_avg", "momentum_buffer")


class Average(NamedTuple):
    """Averaged weights beside those that are trained (EMA, SWA), which a head begins anew in, too.

    Attributes:
        weights: parameter name in the model -> tensor, changed in place.
        means: what ``head_health`` gave for a model of these weights.
    """

    weights: Mapping[str, Tensor]
    means: Mapping[str, Tensor]


class Edit(NamedTuple):
    """New values of one block of one tensor."""

    parameter: Tensor
    part: Part
    number: int
    values: Tensor | None  # None is 0


def reinit_heads(
    model: nn.Module,
    heads: Sequence[Head],
    means: Mapping[str, Tensor],
    *,
    step: int,
    seed: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    averages: Sequence[Average] = (),
) -> None:
    """Begins heads anew, in place. Call it between two optimiser steps, when no gradients are kept.

    Args:
        model: any with shells of attnzoo.
        heads: which; their functions are lost.
        means: ``Health.means`` of the model as it is now.
        step: number of the optimiser step, so that a head begun anew twice is drawn anew.
        seed: of the run.
        optimizer: whose moments are put right.
        averages: copies of the weights that are changed likewise.

    Raises:
        ValueError: for a head that does not exist, a shell without an output bias to take the mean up, means of other
            heads, weights that are split over processes, frozen, computed or held by another module, too, and an
            optimiser that keeps something unknown. Nothing has been changed then.

    Example:
        >>> from attnzoo import MultiheadAttention
        >>> from attnzoo.heads.health import head_health
        >>> attn, x = MultiheadAttention(16, 2), torch.randn(4, 9, 16)
        >>> health = head_health(attn, [x])
        >>> reinit_heads(attn, [Head("attention", 1)], health.means, step=500)
        >>> attn.out_proj.weight[:, 8:].abs().max().item()
        0.0
    """
    chosen, copies = _by_site(model, heads), [Average(dict(model.named_parameters()), means), *averages]
    _check_change(model, chosen, copies)
    for site, _ in chosen:
        _check_trained(site)
    edits = [edit for site, numbers in chosen for edit in _edits(site, numbers, step, seed)]
    blocks = list(_blocks_of_moments(edits, optimizer))
    _apply(model, chosen, edits, copies)
    for block, values in blocks:
        put(block, values)


def switch_off_heads(
    model: nn.Module, heads: Sequence[Head], means: Mapping[str, Tensor], *, averages: Sequence[Average] = ()
) -> None:
    """Replaces heads by their means, in place and without new weights; ``hold_off`` keeps them so in training.

    Args:
        model: as for ``reinit_heads``; so are the others, and what is refused.
        heads: which.
        means: as there.
        averages: as there.
    """
    chosen, copies = _by_site(model, heads), [Average(dict(model.named_parameters()), means), *averages]
    _check_change(model, chosen, copies)
    edits = [Edit(site.out_proj.weight, output(site), number, None) for site, numbers in chosen for number in numbers]
    _apply(model, chosen, edits, copies)


def hold_off(model: nn.Module, heads: Sequence[Head]) -> None:
    """Puts the output slices of heads that are switched off to 0 again, after a step that has trained them."""
    for site, numbers in _by_site(model, heads):
        for number in numbers:
            put(output(site).block(site.out_proj.weight, number), None)


def check_reinit(model: nn.Module) -> None:
    """Raises ``ValueError`` unless the heads of every site could begin anew."""
    for name, site in find_sites(model).items():
        check_heads({name: site}, name, [])
        _check_bias(site)
        check_own(model, site)
        _check_trained(site)


def fold(weight: Tensor, bias: Tensor, numbers: Sequence[int], means: Tensor) -> None:
    """bias [E] <- bias + sum over the heads of E[O_h] W_h, from weight [E, H Dv] and means [H, Dv]; in place."""
    slices = weight.detach().double().T.unflatten(0, means.shape)
    gain = torch.einsum("hv,hve->e", means[list(numbers)].to(slices), slices[list(numbers)])
    put(bias, (bias.detach().double() + gain).to(bias.dtype))


def put(tensor: Tensor, values: Tensor | None) -> None:
    """Overwrites a tensor in place, with 0 if None."""
    with torch.no_grad():
        if values is None:
            tensor.zero_()
        else:
            tensor.copy_(values)


def check_heads(sites: Mapping[str, Site], name: str, numbers: Sequence[int]) -> None:
    """Raises ``ValueError`` unless the site and all these heads exist, once each."""
    if name not in sites:
        raise ValueError(f"there is no attention {name!r}; there are {', '.join(sites)}")
    count = sites[name].num_heads
    if len(set(numbers)) != len(numbers) or not all(0 <= number < count for number in numbers):
        raise ValueError(f"{name} has heads 0 to {count - 1}, each to be named once; got {list(numbers)}")
    if any(hasattr(p, "device_mesh") for p in sites[name].shell.parameters()):
        raise ValueError(f"{name}: its weights are split over processes (FSDP), so that no process has a whole head")


def check_means(site: Site, means: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` unless these are means of the heads that the site has now."""
    found = means[site.name].shape if site.name in means else None
    if found != (site.num_heads, site.value_dim):
        raise ValueError(
            f"{site.name} has {site.num_heads} heads of {site.value_dim}, the means are "
            f"{'of other attentions' if found is None else tuple(found)}; measure them on the model as it is now"
        )


def _by_site(model: nn.Module, heads: Sequence[Head]) -> list[tuple[Site, list[int]]]:
    """Each site with the numbers of its heads, checked."""
    sites = find_sites(model)
    chosen = {head.site: [other.number for other in heads if other.site == head.site] for head in heads}
    for name, numbers in chosen.items():
        check_heads(sites, name, numbers)
        _check_bias(sites[name])
    return [(sites[name], numbers) for name, numbers in chosen.items()]


def _check_bias(site: Site) -> None:
    if site.out_proj.bias is None:
        raise ValueError(
            f"{site.name}: {type(site.shell).__name__} has no bias in its output projection that could take up the "
            f"mean of a head; build it with one, or prune the head"
        )


def _check_trained(site: Site) -> None:
    frozen = [part.path for part in (*inputs(site), output(site)) if _is_frozen(tensor_of(site.shell, part))]
    if frozen:
        raise ValueError(
            f"{site.name}: {', '.join(frozen)} would not be trained (requires_grad=False), so that a head begun anew "
            f"could not learn; unfreeze the attention, or prune the head"
        )


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _check_change(model: nn.Module, chosen: Sequence[tuple[Site, list[int]]], copies: Sequence[Average]) -> None:
    for site, _ in chosen:
        check_own(model, site)
        for copied in copies:
            check_means(site, copied.means)


def _apply(
    model: nn.Module, chosen: Sequence[tuple[Site, list[int]]], edits: Sequence[Edit], copies: Sequence[Average]
) -> None:
    """Folds the means of the chosen heads and puts the edits in, in every copy of the weights."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for weights, means in copies:
        for site, numbers in chosen:
            weight, bias = (weights[names[id(getattr(site.out_proj, part))]] for part in ("weight", "bias"))
            fold(weight, bias, numbers, means[site.name])
        for edit in edits:
            put(edit.part.block(weights[names[id(edit.parameter)]], edit.number), edit.values)


def _edits(site: Site, numbers: Sequence[int], step: int, seed: int) -> Iterator[Edit]:
    parts = inputs(site)
    parameters = dict(site.shell.named_parameters(remove_duplicate=False))
    for number in numbers:
        fresh = _drawn(site, number, step, seed)
        for part in parts:
            if part.path not in parameters:
                continue  # a buffer, drawn once and for all
            share = site.num_heads // part.blocks
            group = number // share
            # Keys and values of a group serve its other heads as well; the last of them to be named draws them.
            if set(range(group * share, (group + 1) * share)) <= set(numbers) and number % share == share - 1:
                values = part.block(tensor_of(fresh, part), group).detach()
                yield Edit(parameters[part.path], part, group, values)
        yield Edit(site.out_proj.weight, output(site), number, None)


def _drawn(site: Site, number: int, step: int, seed: int) -> nn.Module:
    """The shell as it would be built, from a generator that belongs to this event alone."""
    fresh = copy.deepcopy(site.shell).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(random.Random(f"{seed}/{step}/{site.name}/{number}").getrandbits(63))
        for module in (fresh, fresh.mechanism):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    table = getattr(getattr(fresh, "position", None), "table", None)
    if isinstance(table, nn.Parameter):
        put(table, None)  # as every table of relative terms starts
    return fresh


def _blocks_of_moments(
    edits: Sequence[Edit], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Blocks of an optimiser's state and what they become."""
    edited: dict[tuple[int, Part], set[int]] = {}
    for edit in edits:
        edited.setdefault((id(edit.parameter), edit.part), set()).add(edit.number)
    for edit in edits if optimizer is not None else ():
        assert optimizer is not None
        for key, tensor in optimizer.state.get(edit.parameter, {}).items():
            if not isinstance(tensor, Tensor) or tensor.shape != edit.parameter.shape:
                continue  # such as the step, which the whole tensor shares
            block = edit.part.block(tensor, edit.number)
            if key in MEANS:
                yield block, None
            elif key in MEANS_OF_SQUARES:
                gone = edited[id(edit.parameter), edit.part]
                others = [number for number in range(edit.part.blocks) if number not in gone]
                others = others or list(range(edit.part.blocks))
                yield block, torch.stack([edit.part.block(tensor, number) for number in others]).mean(0)
            else:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r}, and nothing says what a new head should find there; "
                    f"AdamW, Adam and SGD are known"
                )
