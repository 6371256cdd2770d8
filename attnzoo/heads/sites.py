"""Where the heads of a model are, and what passes through them: calls of the mechanism, heads on their way out.

Letters: B batch, H query heads, T queries, S keys, Dv value width, E width of the output.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.record import Call, record


class Site(NamedTuple):
    """One attention of a model: a shell with its mechanism and its output projection.

    Attributes:
        name: path of the shell in the model; "attention" where the model is the shell.
        shell: ``MultiheadAttention``, ``MultiheadLatentAttention`` or a shell of one's own with the same parts.
        mechanism: between the heads.
        out_proj: from all heads side by side, H Dv numbers, to E.
        num_heads: H.
        value_dim: Dv.
    """

    name: str
    shell: Any
    mechanism: Mechanism
    out_proj: nn.Linear
    num_heads: int
    value_dim: int

    def slices(self) -> Tensor:
        """What the output projection makes of each head: [H, Dv, E]; a view."""
        return self.out_proj.weight.T.unflatten(0, (self.num_heads, self.value_dim))


class Passed(NamedTuple):
    """One call of a site.

    Attributes:
        call: of the mechanism.
        heads: what went into the output projection, behind norm and gate of the heads: [B, T, H Dv].
        cross: whether the keys come from another sequence than the queries.
    """

    call: Call
    heads: Tensor
    cross: bool


def find_sites(model: nn.Module) -> dict[str, Site]:
    """The attentions of a model by name, in the order in which they stand in it.

    Raises:
        ValueError: if there are none; ``attnzoo.swap.adopt`` takes in those of other libraries.
    """
    sites = {}
    for path, shell in model.named_modules():
        # Its own, for a wrapper around a shell, such as that of torch.compile, passes on what the shell has.
        mechanism, out_proj = shell._modules.get("mechanism"), shell._modules.get("out_proj")
        if isinstance(mechanism, Mechanism) and isinstance(out_proj, nn.Linear):
            name, heads = path or "attention", mechanism.num_heads
            sites[name] = Site(name, shell, mechanism, out_proj, heads, out_proj.in_features // heads)
    if not sites:
        raise ValueError(
            f"{type(model).__name__} holds no attention of attnzoo, so there are no heads to look at; "
            f"attnzoo.swap.adopt(model) takes in those of torch, timm and transformers"
        )
    return sites


@contextmanager
def capture(model: nn.Module) -> Iterator[dict[str, list[Passed]]]:
    """Keeps what passes through each site while the context is open; filled in when it closes.

    Args:
        model: in evaluation mode.

    Yields:
        Site name -> its calls. Steps on one memory, as a recurrent decoder takes them, are one call of many queries.
    """
    sites = find_sites(model)
    passed: dict[str, list[Passed]] = {name: [] for name in sites}
    inputs: dict[str, list[Tensor]] = {name: [] for name in sites}
    crosses: dict[str, dict[int, bool]] = {name: {} for name in sites}
    with _uncompiled(model), ExitStack() as stack:
        calls = stack.enter_context(record(model, skip_unreadable=True))
        for name, site in sites.items():
            stack.callback(site.out_proj.register_forward_pre_hook(_keep_input(inputs[name])).remove)
            for method in ("forward", "attend"):
                stack.enter_context(_contexts_kept(site.shell, method, calls[name], crosses[name]))
        yield passed
        for name in sites:
            for number, (call, heads) in enumerate(zip(calls[name], inputs[name], strict=True)):
                cross = crosses[name].get(number, not call.mask.causal)  # a step is causal, or on a memory
                passed[name].append(Passed(call, heads, cross))
            passed[name] = _joined(passed[name])


@contextmanager
def ablated(model: nn.Module, heads: dict[str, list[int]], means: dict[str, Tensor]) -> Iterator[None]:
    """Replaces the outputs of heads by a constant, their mean, while the context is open.

    Args:
        model: any that ``find_sites`` serves.
        heads: site name -> numbers of heads.
        means: site name -> mean output of each head before the output projection, [H, Dv].
    """
    sites = find_sites(model)
    with _uncompiled(model), ExitStack() as stack:
        for name, numbers in heads.items():
            hook = _put_means(sites[name], numbers, means[name])
            stack.callback(sites[name].out_proj.register_forward_pre_hook(hook).remove)
        yield


def _uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """Lets the compiled parts of a model run as they are written: what is compiled already hears no new hook."""
    compiled = any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _keep_input(kept: list[Tensor]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0].detach())

    return hook


@contextmanager
def _contexts_kept(shell: Any, name: str, calls: list[Call], kept: dict[int, bool]) -> Iterator[None]:
    """Keeps, by its number in ``calls``, whether a call came with a context to a method of the shell.

    By shadowing the method on this object: a hook hears ``forward`` alone, and a model may call ``attend`` itself.
    """
    method, outer = getattr(shell, name, None), shell.__dict__.get(name)
    if method is None:
        yield
        return
    parameters = list(signature(method).parameters)
    place = parameters.index("context") if "context" in parameters else None

    def keeping(*args: Any, **named: Any) -> Any:
        before = len(calls)
        result = method(*args, **named)
        context = args[place] if place is not None and place < len(args) else named.get("context")
        for number in range(before, len(calls)):
            kept[number] = kept.get(number, False) or context is not None
        return result

    shell.__dict__[name] = keeping
    try:
        yield
    finally:
        shell.__dict__.pop(name)
        if outer is not None:
            shell.__dict__[name] = outer


def _put_means(site: Site, numbers: list[int], means: Tensor) -> Callable[..., tuple[Tensor]]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        heads = args[0].unflatten(-1, (site.num_heads, site.value_dim)).clone()
        heads[..., numbers, :] = means[numbers].to(heads)
        return (heads.flatten(-2),)

    return hook


def _joined(passed: list[Passed]) -> list[Passed]:
    """Steps on one memory as one call: they differ in their queries alone."""
    runs: list[list[Passed]] = []
    for one in passed:
        if runs and _same_memory(runs[-1][0].call, one.call):
            runs[-1].append(one)
        else:
            runs.append([one])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _same_memory(first: Call, other: Call) -> bool:
    plain = all(x.bias is None and x.mask == Mask(key_keep=x.mask.key_keep) for x in (first, other))
    same = first.k.data_ptr() == other.k.data_ptr() and first.k.shape == other.k.shape
    keep, others = first.mask.key_keep, other.mask.key_keep
    masks = keep is others or (keep is not None and others is not None and torch.equal(keep, others))
    return plain and same and masks


def _as_one(run: list[Passed]) -> Passed:
    q, heads = (torch.cat([getattr(x.call, part) for x in run], dim=2) for part in ("q", "heads"))
    call = run[0].call._replace(q=q, heads=heads)
    return Passed(call, torch.cat([x.heads for x in run], dim=1), run[0].cross)
