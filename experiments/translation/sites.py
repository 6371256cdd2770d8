"""Which mechanism stands at which site of the Transformer, and what is said where one cannot serve."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attnzoo import CATALOGUE, Mechanism, spec

Attention = Callable[[int, int], Mechanism]
Made = TypeVar("Made")

NEEDS = {
    "encoder": ("bidirectional", "key_keep"),
    "decoder": ("causal", "streaming"),
    "cross": ("cross", "rectangular", "key_keep"),
}
"""The traits that a kind of site needs. Sources are padded; a decoder takes steps when it translates."""


def choose(
    defaults: Mapping[str, tuple[Attention, int]],
    attention_at: Mapping[str, Attention] | None = None,
    *,
    option: str | None = None,
) -> dict[str, dict[int, Attention]]:
    """The factory of each site: kind -> number -> factory.

    Args:
        defaults: kind -> (factory, how many sites of this kind there are).
        attention_at: other factories for single sites, such as "encoder.0".
        option: what the option is called that chooses the mechanism, if not by the kind of site.

    Raises:
        ValueError: for a site that does not exist, or a mechanism that lacks what its site needs.
    """
    chosen = {kind: dict.fromkeys(range(depth), factory) for kind, (factory, depth) in defaults.items()}
    for name, factory in (attention_at or {}).items():
        kind, _, number = str(name).partition(".")
        if kind not in chosen or not number.isdigit() or int(number) not in chosen[kind]:
            there = ", ".join(f"{kind}.0 to {kind}.{len(sites) - 1}" for kind, sites in chosen.items())
            raise ValueError(f"--model.attention_at has the site {name!r}; there are {there}")
        chosen[kind][int(number)] = factory
    for kind, sites in chosen.items():
        for number, factory in sites.items():
            mechanism = _class_in(factory)
            if mechanism is not None:
                check(f"{kind}.{number}", mechanism, option)
    return chosen


def check(site: str, mechanism: type[Mechanism] | Mechanism, option: str | None = None) -> None:
    """Raises ``ValueError`` if a mechanism lacks a trait that its site needs.

    Args:
        site: "decoder.1" and the like.
        mechanism: the class, or an object of it.
        option: see ``choose``.
    """
    kind = site.partition(".")[0]
    missing = [trait for trait in NEEDS[kind] if not getattr(mechanism.traits, trait)]
    if not missing:
        return
    name = mechanism.__name__ if isinstance(mechanism, type) else type(mechanism).__name__
    why = mechanism.reasons.get(missing[0], f"it is not {missing[0]}")
    able = [other for other, cls in CATALOGUE.items() if all(getattr(cls.traits, trait) for trait in NEEDS[kind])]
    elsewhere = ""
    if kind == "decoder" and all(getattr(mechanism.traits, trait) for trait in NEEDS["encoder"]):
        elsewhere = f" It can stay in the encoder alone: --model.encoder_attention={name}"
    raise ValueError(
        f"{name} cannot serve at {site}: {why}.\n"
        f"It must have the traits {', '.join(NEEDS[kind])}, as these have: {', '.join(able)}.\n"
        f"Take one of them, such as --model.{option or f'{kind}_attention'}={able[0]}.{elsewhere}"
    )


def build(site: str, make: Callable[[], Made]) -> Made:
    """What ``make`` gives; what it refuses is said with the name of the site."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{site}: {error}") from error


def with_length(factory: Attention, max_len: int) -> Attention:
    """A factory for cross-attention that knows how long a source can get, where its class asks and nobody said it."""
    mechanism = _class_in(factory)
    if mechanism is None or "max_len" not in inspect.signature(mechanism).parameters:
        return factory
    given = spec(factory)["init_args"].get("max_len")
    return factory if given is not None else functools.partial(factory, max_len=max_len)


def _class_in(factory: Any) -> type[Mechanism] | None:
    """The class inside a factory; None for a callable that does not show it."""
    if isinstance(factory, functools.partial):
        # On the command line the class stands among the arguments of a partial.
        return next(filter(None, map(_class_in, (factory.func, *factory.args))), None)
    return factory if isinstance(factory, type) and issubclass(factory, Mechanism) else None
