"""Which numbers of a model belong to one head.

Letters: H query heads, G key/value heads, D head width, Dv value width, E width of the model.
"""

import inspect
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.heads.sites import Site
from attnzoo.latent import MultiheadLatentAttention
from attnzoo.mechanism import Mechanism
from attnzoo.multihead import MultiheadAttention
from attnzoo.positions.grid import SwinBias
from attnzoo.positions.relative import Alibi, Relative


class Part(NamedTuple):
    """A tensor that falls into equal blocks along one axis, a block for each head or key/value head.

    Attributes:
        owner: path of the module in the shell that has it, "" for the shell.
        name: of the tensor there.
        axis: along which the blocks lie.
        blocks: how many there are: H, or G.
    """

    owner: str
    name: str
    axis: int
    blocks: int

    @property
    def path(self) -> str:
        """Path of the tensor in the shell."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    def block(self, tensor: Tensor, number: int) -> Tensor:
        """One block, a view."""
        size = tensor.shape[self.axis] // self.blocks
        return tensor.narrow(self.axis, number * size, size)


def inputs(site: Site) -> list[Part]:
    """What makes queries, keys, values and gates of the input, and what the mechanism has for each head.

    Raises:
        ValueError: for a shell whose parts are not known.
    """
    shell, heads = site.shell, site.num_heads
    if isinstance(shell, MultiheadLatentAttention):
        query = "q_proj" if shell.q_rank is None else "q_proj.2"
        rows = {query: heads, "k_up": heads, "v_up": heads}
    elif isinstance(shell, MultiheadAttention):
        groups = shell.num_kv_heads
        rows = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
        if shell.gate is not None:
            rows["gate.proj"] = heads
    else:
        raise ValueError(f"{site.name}: {type(shell).__name__} is no shell of attnzoo, so its parts are not known")
    parts = []
    for path, blocks in rows.items():
        linear = _get(shell, path)
        if linear is not None:
            names = ["weight"] if linear.bias is None else ["weight", "bias"]
            parts += [Part(path, name, 0, blocks) for name in names]
    return parts + _of_mechanism(site) + _of_position(site)


def output(site: Site) -> Part:
    """The columns of the output projection."""
    return Part("out_proj", "weight", 1, site.num_heads)


def check_own(model: nn.Module, site: Site) -> None:
    """Raises ``ValueError`` unless the numbers of its heads are parameters of this attention alone.

    A weight that is computed from others, as by ``parametrize``, would come back as it was at the next call; one that
    another attention holds as well, such as a table of positions, would change that one, too.
    """
    held = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    places = sum(module is site.shell for _, module in model.named_modules(remove_duplicate=False))
    for part in (*inputs(site), output(site), Part("out_proj", "bias", 0, 1)):
        owner = site.shell.get_submodule(part.owner)
        tensor = getattr(owner, part.name)
        if tensor is not None and part.name not in owner._parameters and part.name not in owner._buffers:
            raise ValueError(
                f"{site.name}: {part.path} is computed from other tensors; make it plain first, as "
                f"parametrize.remove_parametrizations does"
            )
        if isinstance(tensor, nn.Parameter) and held[id(tensor)] > places:
            raise ValueError(
                f"{site.name}: {part.path} is held in another place as well, which would change with it; give each "
                f"attention one of its own"
            )


def head_axes(mechanism: Mechanism) -> dict[str, int]:
    """Which parameters and buffers of a mechanism have an axis for the heads: path -> axis.

    Found by building the same mechanism with twice the heads. Which options it had is read from its attributes.

    Raises:
        ValueError: for a mechanism that does not keep an option, so that it cannot be built again, and for a tensor
            that grows with the heads in another way than along one axis.
    """
    if not mechanism.state_dict(keep_vars=True):
        return {}
    name = type(mechanism).__name__
    named = list(inspect.signature(type(mechanism)).parameters.values())[2:]
    kept = {option.name: getattr(mechanism, option.name) for option in named if hasattr(mechanism, option.name)}
    for option in named:
        needed = option.default is option.empty and option.kind in (option.KEYWORD_ONLY, option.POSITIONAL_OR_KEYWORD)
        if needed and option.name not in kept:
            raise ValueError(
                f"{name} does not keep its option {option.name}, so that what it has for each head cannot be told; "
                f"set self.{option.name} in its constructor"
            )
    with torch.random.fork_rng(devices=[]):
        twin = type(mechanism)(2 * mechanism.num_heads, mechanism.head_dim, **kept)
    larger = {path: tensor.shape for path, tensor in twin.state_dict().items()}
    axes = {}
    for path, tensor in mechanism.state_dict().items():
        shape, wider = tensor.shape, larger.get(path)
        if wider == shape:
            continue
        fitting = [axis for axis in range(len(shape)) if wider == (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])]
        if not fitting:
            raise ValueError(
                f"{name}: {path} is {tuple(shape)}, built anew with twice the heads "
                f"{'not there' if wider is None else tuple(wider)}, so that no part of it is known to be one "
                f"head's; a mechanism keeps its options as attributes"
            )
        axes[path] = fitting[0]
    return axes


def _of_mechanism(site: Site) -> list[Part]:
    parts = []
    for path, axis in head_axes(site.mechanism).items():
        owner, _, name = path.rpartition(".")
        parts.append(Part(f"mechanism.{owner}" if owner else "mechanism", name, axis, site.num_heads))
    return parts


def _of_position(site: Site) -> list[Part]:
    position = getattr(site.shell, "position", None)
    if isinstance(position, (Relative, SwinBias)) and not isinstance(position, Alibi):
        return [Part("position", "table", 0, site.num_heads)]
    return []


def tensor_of(shell: nn.Module, part: Part) -> Tensor:
    """The tensor itself."""
    found: Tensor = getattr(_get(shell, part.owner), part.name)
    return found


def _get(shell: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = shell
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found
