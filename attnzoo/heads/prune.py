"""Heads taken out of a model for good: it computes what it did with these heads at their mean, with less work."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.heads.figures import Head
from attnzoo.heads.parts import Part, check_own, head_axes, inputs, output
from attnzoo.heads.reinit import check_heads, check_means, fold
from attnzoo.heads.sites import Site, find_sites
from attnzoo.latent import MultiheadLatentAttention
from attnzoo.positions.relative import Alibi


def prune_heads(model: nn.Module, heads: Sequence[Head], means: Mapping[str, Tensor]) -> None:
    """Removes heads, in place; optimisers have to be made anew.

    The mean of what a head gave goes into the bias of the output projection, which gets one where it had none. Of
    grouped heads keys and values stay grouped where every group keeps equally many heads, else each head that stays
    gets a copy of its own.

    Args:
        model: any with shells of attnzoo.
        heads: which; each site must keep one.
        means: ``Health.means`` of the model as it is.

    Raises:
        ValueError: for heads that do not exist, all heads of a site, a position whose terms follow from the number of
            heads, means of other heads, and weights that are computed or held by another module, too. Nothing has been
            changed then.

    Example:
        >>> from attnzoo import MultiheadAttention
        >>> from attnzoo.heads.health import head_health
        >>> attn, x = MultiheadAttention(16, 4), torch.randn(4, 9, 16)
        >>> prune_heads(attn, [Head("attention", 2)], head_health(attn, [x]).means)
        >>> attn.num_heads, attn(x).shape
        (3, torch.Size([4, 9, 16]))
    """
    sites = find_sites(model)
    chosen = {head.site: sorted(other.number for other in heads if other.site == head.site) for head in heads}
    for name, numbers in chosen.items():
        check_heads(sites, name, numbers)
        if len(numbers) == sites[name].num_heads:
            raise ValueError(
                f"{name}: all {len(numbers)} heads would go; an attention keeps one, or is taken out whole"
            )
        if isinstance(getattr(sites[name].shell, "position", None), Alibi):
            raise ValueError(f"{name}: the slopes of Alibi follow from the number of heads, so none can be taken out")
        check_own(model, sites[name])
        check_means(sites[name], means)
    for name, numbers in chosen.items():
        _prune(sites[name], numbers, means[name])


def _prune(site: Site, numbers: list[int], means: Tensor) -> None:
    shell, kept = site.shell, [head for head in range(site.num_heads) if head not in numbers]
    if site.out_proj.bias is None:
        weight = site.out_proj.weight
        site.out_proj.bias = nn.Parameter(weight.new_zeros(len(weight)), requires_grad=weight.requires_grad)
    fold(site.out_proj.weight, site.out_proj.bias, numbers, means)
    groups, picked = _groups(site, kept)
    for part in (*inputs(site), output(site)):
        if not part.owner.startswith("mechanism"):
            _keep(shell, part, kept if part.blocks == site.num_heads and part.blocks != groups else picked, site)
    pruned = _smaller(site.mechanism, kept)
    shell.mechanism, shell.num_heads = pruned, len(kept)
    for name in ("gate", "position"):
        if hasattr(getattr(shell, name, None), "num_heads"):
            getattr(shell, name).num_heads = len(kept)
    if isinstance(shell, MultiheadLatentAttention):
        shell.absorbed = None if shell.absorbed is None else _smaller(shell.absorbed, kept)
    else:
        shell.num_kv_heads = len(picked)


def _groups(site: Site, kept: list[int]) -> tuple[int, list[int]]:
    """How many key/value heads there are, and which of them stay, in their new order."""
    groups = getattr(site.shell, "num_kv_heads", site.num_heads)
    share = site.num_heads // groups
    stays = [sum(head // share == group for head in kept) for group in range(groups)]
    if len({count for count in stays if count}) == 1:
        return groups, [group for group, count in enumerate(stays) if count]
    return groups, [head // share for head in kept]


def _keep(shell: nn.Module, part: Part, blocks: Iterable[int], site: Site) -> None:
    owner = shell.get_submodule(part.owner)
    tensor = getattr(owner, part.name)
    chosen = torch.cat([part.block(tensor.detach(), number) for number in blocks], dim=part.axis)
    setattr(owner, part.name, nn.Parameter(chosen, requires_grad=tensor.requires_grad))
    if isinstance(owner, nn.Linear) and part.name == "weight":
        owner.out_features, owner.in_features = chosen.shape


def _smaller(mechanism: Any, kept: list[int]) -> Any:
    axes = head_axes(mechanism)
    smaller = copy.deepcopy(mechanism)
    smaller.num_heads = len(kept)
    index = torch.tensor(kept)
    for path, axis in axes.items():
        owner, _, name = path.rpartition(".")
        holder = smaller.get_submodule(owner)
        tensor = getattr(holder, name)
        chosen = tensor.detach().index_select(axis, index.to(tensor.device))
        if isinstance(tensor, nn.Parameter):
            setattr(holder, name, nn.Parameter(chosen, requires_grad=tensor.requires_grad))
        else:
            setattr(holder, name, chosen)
    return smaller
