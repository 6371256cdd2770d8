"""The conformance suite: what it means to be an attention. Usable on anyone's mechanism.

Each law names the kind of fault that it catches; ``tests/laws`` proves it on a planted bug.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from attnzoo.laws import numbers, steps, visibility
from attnzoo.laws.subject import LawBroken, Subject
from attnzoo.mechanism import Mechanism
from attnzoo.reference import formula_of
from attnzoo.reference.rows import Formula
from attnzoo.traits import Traits

__all__ = ["LAWS", "Law", "LawBroken", "check_attention"]


class Law(NamedTuple):
    """One law.

    Attributes:
        check: raises ``LawBroken`` or ``ValueError`` when the mechanism does not keep it.
        applies: whether the traits claim it.
        catches: the fault that it is there for.
    """

    check: Callable[[Subject], None]
    applies: Callable[[Traits], bool]
    catches: str


def _always(traits: Traits) -> bool:
    return True


LAWS: dict[str, Law] = {
    "shapes": Law(numbers.shapes, _always, "lengths that do not fit a block, results in another precision"),
    "formula": Law(numbers.formula, _always, "a wrong scale, axis, head order, alignment; a bias that is ignored"),
    "future": Law(visibility.future, lambda t: t.causal, "sees one key too far"),
    "padding": Law(visibility.padding, lambda t: t.key_keep, "hidden values multiplied by 0, a mask that is dropped"),
    "batch mates": Law(visibility.batch_mates, _always, "a maximum taken over the batch"),
    "empty rows": Law(visibility.empty_rows, _always, "a finite constant for hidden scores: the mean of v"),
    "inputs unchanged": Law(visibility.inputs_unchanged, _always, "a mask or an input changed in place"),
    "streaming": Law(steps.streaming, lambda t: t.streaming, "a step that forgets a chunk"),
    "memory": Law(steps.memory, lambda t: t.cross, "a memory that drops padding"),
    "grouped": Law(steps.grouped, lambda t: t.grouped, "heads in tile order"),
    "gradients": Law(numbers.gradients, _always, "a parameter cut off from the graph"),
    "low precision": Law(numbers.low_precision, _always, "a softmax summed in half precision"),
    "repeats": Law(numbers.repeats, _always, "dropout left on in evaluation"),
    "linear in v": Law(numbers.linear_in_v, lambda t: t.linear_in_v, "a norm behind the weighted sum"),
    "normalised": Law(numbers.normalised, lambda t: t.normalised and t.linear_in_v, "softmax over the queries"),
    "budget": Law(numbers.budget, lambda t: t.budget is not None, "more of the option that buys accuracy buys none"),
    "linear memory": Law(numbers.linear_memory, lambda t: t.linear_memory, "T x S numbers in secret"),
    "refusals": Law(steps.refusals, _always, "an argument that is taken and ignored"),
    "compiles": Law(numbers.compiles, _always, "a graph break"),
}


SITE: dict[str, Any] = {"max_len": 128, "grid": (8, 16), "layer": 1}
"""What a site tells a mechanism that asks for it, where the mechanisms of the catalogue are examined."""


def check_attention(
    mechanism: Mechanism,
    *,
    formula: Formula | None = None,
    laws: Iterable[str] | None = None,
    max_len: int = 128,
) -> dict[str, str]:
    """Checks a mechanism against every law that its traits claim.

    Args:
        mechanism: any ``Mechanism``; it is copied, not changed. Best with several heads and a small width.
        formula: its slow float64 formula; from ``attnzoo.reference`` if None.
        laws: names in ``LAWS``; all if None.
        max_len: the longest sequence that the mechanism takes; 128 stands for any length.

    Returns:
        Law -> "holds", or "not claimed".

    Raises:
        LawBroken: with every law that is broken, and what was seen.
        ValueError: for an unknown law.

    Example:
        >>> from attnzoo import Local
        >>> check_attention(Local(2, 4, window=3), laws=["future", "grouped"])
        {'future': 'holds', 'grouped': 'holds'}
    """
    names = list(LAWS) if laws is None else list(laws)
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise ValueError(f"there is no law named {unknown[0]!r}; there are: {', '.join(LAWS)}")
    subject = Subject(mechanism, formula or formula_of(mechanism), max_len)
    verdicts: dict[str, str] = {}
    broken: list[str] = []
    for name in names:
        law = LAWS[name]
        if not law.applies(mechanism.traits) or (name in ("formula", "low precision") and subject.formula is None):
            verdicts[name] = "not claimed"
            continue
        try:
            law.check(subject)
        except (LawBroken, ValueError) as error:
            broken.append(f"{name}: {error}")
        except Exception as error:  # a mechanism under examination may raise anything
            broken.append(f"{name}: {type(error).__name__}: {error}")
        else:
            verdicts[name] = "holds"
    if broken:
        raise LawBroken(f"{type(mechanism).__name__} breaks {len(broken)} law(s):\n  " + "\n  ".join(broken))
    return verdicts
