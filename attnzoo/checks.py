"""What options and inputs must be, said in the name of who takes them. Nothing here reads what stands in a tensor."""

from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor, nn


def whole(owner: str, **options: object) -> None:
    """Raises ``ValueError``, in the name of ``owner``, for an option that is neither None nor a whole number."""
    for name, value in options.items():
        # A size of a traced program is a SymInt.
        if value is not None and (isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt))):
            raise ValueError(f"{owner}: {name} must be a whole number, got {value!r}")


def at_least(least: int, owner: str, **options: object) -> None:
    """Raises ``ValueError``, in the name of ``owner``, for an option that is no whole number from ``least`` up."""
    whole(owner, **options)
    for name, value in options.items():
        if value is not None and value < least:  # type: ignore[operator]
            raise ValueError(f"{owner}: {name} must be at least {least}, got {value}")


def number(owner: str, **options: object) -> None:
    """Raises ``ValueError``, in the name of ``owner``, for an option that is neither None nor a number."""
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ValueError(f"{owner}: {name} must be a number, got {value!r}")


def yes_or_no(owner: str, **options: object) -> None:
    """Raises ``ValueError``, in the name of ``owner``, for an option that is neither None nor a bool."""
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{owner}: {name} must be True or False, got {value!r}")


def check_grid(owner: str, grid: object, axes: int | None = None) -> None:
    """Raises ``ValueError`` unless ``grid`` holds the length of each axis, of which there are ``axes``."""
    fits = isinstance(grid, Sequence) and not isinstance(grid, str) and len(grid) == (axes or len(grid)) > 0
    if not fits or any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in grid):  # type: ignore
        raise ValueError(f"{owner}: grid must hold the length of each axis, all at least 1; got {grid!r}")


def check_site(
    owner: str,
    *,
    causal: object = None,
    max_len: object = None,
    grid: object = None,
    prefix_tokens: object = None,
    layer: object = None,
    num_kv_heads: object = None,
) -> None:
    """Raises ``ValueError`` for facts of a site that cannot be; None is a fact that it does not know."""
    yes_or_no(owner, causal=causal)
    at_least(1, owner, max_len=max_len, num_kv_heads=num_kv_heads)
    at_least(0, owner, prefix_tokens=prefix_tokens, layer=layer)
    if grid is not None:
        check_grid(owner, grid)


def check_tokens(name: str, x: object, layer: nn.Module) -> None:
    """Raises ``ValueError`` unless x is [B, length, width] as the linear layer or the norm takes it."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; a mask is given as mask=...")
    width = layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm) else layer.in_features
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"{name} must be [B, length, {width}], got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be of floating-point numbers, got {x.dtype}")
    # A layer that keeps its weights in another way, such as a quantised one, takes what it takes; and a norm takes
    # tokens of less precision than its own.
    kind = layer.weight.dtype if type(layer) is nn.Linear else x.dtype
    if x.dtype != kind and not _casts_itself(x):
        raise ValueError(f"{name} must be {kind}, as the weights are; got {x.dtype}")


def one_kind(owner: str, names: str, *tensors: Tensor) -> None:
    """Raises ``ValueError`` unless all tensors, whose names are ``names``, are of one floating-point type."""
    kinds = [x.dtype for x in tensors]
    if not all([kind.is_floating_point for kind in kinds]):
        raise ValueError(f"{owner} takes floating-point {names}; got {', '.join(map(str, kinds))}")
    if kinds.count(kinds[0]) < len(kinds) and not _casts_itself(tensors[0]):
        raise ValueError(f"{owner} takes {names} of one floating-point type; got {', '.join(map(str, kinds))}")


def _casts_itself(x: Tensor) -> bool:
    """Whether autocast brings tensors where x is to one type by itself."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
