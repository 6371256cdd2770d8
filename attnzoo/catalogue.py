"""The table of mechanisms, and how one is built from a name, a class or a partial.

A *factory* is anything that is called ``factory(num_heads, head_dim)`` and gives a ``Mechanism``: the class
itself, or a ``functools.partial`` of it with options. A class of one's own package needs no entry here.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from attnzoo.checks import check_site
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.adaptive_span import AdaptiveSpan
from attnzoo.mechanisms.additive import Additive
from attnzoo.mechanisms.axial import Axial
from attnzoo.mechanisms.block_sparse import BlockSparse
from attnzoo.mechanisms.differential import Differential
from attnzoo.mechanisms.flash import Flash
from attnzoo.mechanisms.global_local import GlobalLocal
from attnzoo.mechanisms.linear import Linear
from attnzoo.mechanisms.linformer import Linformer
from attnzoo.mechanisms.local import Local
from attnzoo.mechanisms.lsh import LSH
from attnzoo.mechanisms.memory_compressed import MemoryCompressed
from attnzoo.mechanisms.moba import MoBA
from attnzoo.mechanisms.nystrom import Nystrom
from attnzoo.mechanisms.performer import Performer
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.mechanisms.strided import Strided

CATALOGUE: dict[str, type[Mechanism]] = {
    "Softmax": Softmax,
    "Flash": Flash,
    "Additive": Additive,
    "Differential": Differential,
    "Local": Local,
    "AdaptiveSpan": AdaptiveSpan,
    "BlockSparse": BlockSparse,
    "Strided": Strided,
    "GlobalLocal": GlobalLocal,
    "Axial": Axial,
    "MemoryCompressed": MemoryCompressed,
    "LSH": LSH,
    "MoBA": MoBA,
    "Linformer": Linformer,
    "Nystrom": Nystrom,
    "Linear": Linear,
    "Performer": Performer,
}

FACTS = ("causal", "max_len", "grid", "prefix_tokens", "layer", "num_kv_heads")
"""What a site knows about itself and tells a mechanism whose signature names it."""

Factory = Callable[..., Mechanism]


def build(name: str, num_heads: int, head_dim: int, **options: Any) -> Mechanism:
    """Builds a mechanism from its name in the catalogue.

    Raises:
        ValueError: for an unknown name, with the nearest one; for an option that it does not have.

    Example:
        >>> build("Local", 2, 8, window=5).window
        5
    """
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"there is no mechanism named {name!r}.{hint} There are: {', '.join(CATALOGUE)}")
    return construct(functools.partial(CATALOGUE[name], **options), num_heads, head_dim)


def construct(factory: Factory, num_heads: int, head_dim: int, **facts: Any) -> Mechanism:
    """Calls a factory and fills in the facts of the site that its signature names and nobody has set.

    Args:
        factory: a Mechanism class, a partial of one, or any callable of (num_heads, head_dim).
        num_heads: H.
        head_dim: D.
        facts: any of ``FACTS``; None means that the site does not know.

    Raises:
        ValueError: if an option contradicts a fact, or is none of the mechanism's; for a fact that cannot be.
    """
    if not callable(factory) or isinstance(factory, Mechanism):
        raise ValueError(
            f"mechanism must be a factory, got {factory!r}: give the class, functools.partial(Class, option=...), "
            f"or a lambda of (num_heads, head_dim)"
        )
    known = _keywords(factory)
    options = _options(factory)
    name = _name(factory)
    if not _takes_anything(factory):
        for option in options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ValueError(f"{name} has no option {option!r}.{hint} It has: {', '.join(known)}")
    given = {}
    for fact, value in facts.items():
        if fact not in FACTS:
            raise ValueError(f"{fact!r} is no fact of a site; the facts are {', '.join(FACTS)}")
        if value is None or fact not in known:
            continue
        own = options.get(fact)
        if own is not None and own != value:
            raise ValueError(f"{name} was given {fact}={own!r}, but the place that it is put in has {fact}={value!r}")
        given[fact] = value
    check_site(name, **facts)
    made = factory(num_heads, head_dim, **given)
    if not isinstance(made, Mechanism):
        raise ValueError(f"an attention factory must give an attnzoo.Mechanism, {name} gave {type(made).__name__}")
    if (made.num_heads, made.head_dim) != (num_heads, head_dim):
        raise ValueError(
            f"{name} was asked for num_heads={num_heads}, head_dim={head_dim} and gave {made.num_heads}, "
            f"{made.head_dim}; a factory takes both from its arguments"
        )
    return made


def spec(factory: Factory) -> dict[str, Any]:
    """Writes a factory down as plain values: {"class_path": ..., "init_args": {...}}.

    Raises:
        ValueError: for a callable in which no Mechanism class can be found, such as a lambda.

    Example:
        >>> spec(functools.partial(Local, window=5))
        {'class_path': 'attnzoo.mechanisms.local.Local', 'init_args': {'window': 5}}
    """
    cls = mechanism_class(factory)
    if isinstance(factory, functools.partial) and any(not callable(part) for part in factory.args):
        raise ValueError(f"{_name(factory)}: give options by name, functools.partial({_name(factory)}, option=...)")
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": _options(factory)}


def from_spec(plain: dict[str, Any]) -> Factory:
    """The factory that ``spec`` wrote down.

    Raises:
        ValueError: if the class cannot be imported or is no Mechanism.
    """
    if "class_path" not in plain:
        raise ValueError(f"a mechanism is written down as class_path and init_args; got {sorted(plain)}")
    path = plain["class_path"]
    module, _, name = path.rpartition(".")
    try:
        cls: Any = getattr(importlib.import_module(module), name) if module else CATALOGUE[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise ValueError(f"cannot import the mechanism {path}: {error}; install the package that has it") from error
    if not (isinstance(cls, type) and issubclass(cls, Mechanism)):
        raise ValueError(f"{path} is no attnzoo.Mechanism")
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (plain.get("init_args") or {}).items()
    }
    factory: Factory = functools.partial(cls, **options) if options else cls
    return factory


def mechanism_class(factory: Factory) -> type[Mechanism]:
    """The Mechanism class inside a factory: itself, or anywhere in a partial.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(factory, type) and issubclass(factory, Mechanism):
        return factory
    if isinstance(factory, functools.partial):
        for part in (factory.func, *factory.args):
            if isinstance(part, functools.partial) or (isinstance(part, type) and issubclass(part, Mechanism)):
                return mechanism_class(part)
    raise ValueError(
        f"{_own_name(factory)} cannot be written down: give a Mechanism class or functools.partial(Class, option=...)"
    )


def _name(factory: Factory) -> str:
    try:
        return mechanism_class(factory).__name__
    except ValueError:
        return _own_name(factory)


def _own_name(factory: object) -> str:
    return getattr(factory, "__name__", repr(factory))


def _options(factory: Factory) -> dict[str, Any]:
    if not isinstance(factory, functools.partial):
        return {}
    inner: dict[str, Any] = {}
    for part in (factory.func, *factory.args):
        inner |= _options(part)
    return inner | factory.keywords


def _signature(factory: Factory) -> inspect.Signature:
    try:
        return inspect.signature(mechanism_class(factory))
    except ValueError:
        return inspect.signature(factory)


def _keywords(factory: Factory) -> list[str]:
    parameters = _signature(factory).parameters.values()
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)][2:]


def _takes_anything(factory: Factory) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _signature(factory).parameters.values())
