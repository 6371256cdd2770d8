"""Which heads are degenerate: of no use, and for a reason that can be seen.

A head is flagged if, in several checks one after the other, its ablation raises the loss by at most a thousandth and

    dead        its output is less than a tenth as long as that of the others
    uniform     it weighs all keys alike
    sink        it always looks at one key
    duplicate   another head of the site gives the same; of the two only the one whose ablation costs less

No head is flagged for a low entropy, or for looking at places rather than content: useful heads do so (Voita et al.
2019, arXiv:1905.09418). Nor for a cause alone: a head that averages may be the one that counts.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnzoo.heads.figures import Head, HeadHealth, Health, with_ablation


@dataclass(frozen=True)
class Limits:
    """From where on a head is degenerate.

    Attributes:
        useless: how much the loss may rise when the head is ablated, as a share of the loss.
        dead: relative output norm below which a head is dead.
        uniform: unevenness below which it is uniform.
        sink: share on one key above which it is a sink.
        duplicate: redundancy above which it is a duplicate.
        checks: how many checks have to agree.
        ablations: how many heads are ablated in one check.
    """

    useless: float = 1e-3
    dead: float = 0.1
    uniform: float = 0.05
    sink: float = 0.95
    duplicate: float = 0.95
    checks: int = 3
    ablations: int = 4

    def __post_init__(self) -> None:
        if self.checks < 1 or self.ablations < 1:
            raise ValueError(f"checks and ablations must be at least 1, got {self.checks} and {self.ablations}")


def causes(entry: HeadHealth, limits: Limits | None = None) -> tuple[str, ...]:
    """The causes that a head shows, whether or not it is of use; a figure that is missing shows none."""
    limits = limits or Limits()
    shown = {
        "dead": entry.norm < limits.dead,
        "uniform": entry.unevenness is not None and entry.unevenness < limits.uniform,
        "sink": entry.sink is not None and entry.sink > limits.sink,
        "duplicate": entry.redundancy is not None and entry.redundancy > limits.duplicate,
    }
    return tuple(name for name, there in shown.items() if there)


@dataclass(frozen=True)
class Flagged:
    """A head that is degenerate, and by what."""

    head: Head
    causes: tuple[str, ...]


def degenerate(health: Health, limits: Limits | None = None) -> list[Flagged]:
    """The heads that a single check flags, of a health with a loss and the ablation of every head."""
    alone = replace(limits or Limits(), checks=1, ablations=max(1, len(health.heads)))
    known = {entry.head: entry.ablation for entry in health.heads if entry.ablation is not None}
    return Watch(alone).check(health, lambda heads: [known[head] for head in heads])[1]


class Watch:
    """Judges the heads of a model check by check.

    Args:
        limits: from where on a head is degenerate.

    Example:
        >>> import torch
        >>> from attnzoo import MultiheadAttention
        >>> from attnzoo.heads.health import ablation, head_health
        >>> attn, x = MultiheadAttention(16, 2), torch.randn(8, 12, 16)
        >>> with torch.no_grad():
        ...     _ = attn.v_proj.weight[:8].zero_()
        >>> loss = lambda batch: (attn(batch).square().sum(), batch.numel())
        >>> health = head_health(attn, [x], loss=loss)
        >>> watch = Watch(Limits(checks=1))
        >>> _, flagged = watch.check(health, lambda heads: ablation(attn, [x], loss, heads, health))
        >>> [(entry.head.number, entry.causes) for entry in flagged]
        [(0, ('dead',))]
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._number = 0
        self._streak: dict[Head, int] = {}
        self._tested: dict[Head, int] = {}

    def check(
        self, health: Health, ablate: Callable[[Sequence[Head]], list[float]], spared: Collection[Head] = ()
    ) -> tuple[Health, list[Flagged]]:
        """One check.

        Args:
            health: figures, with the loss.
            ablate: measures the rise of the loss for some heads; called once, for those that show a cause, at most
                ``limits.ablations`` of them. Who waits longest, and who is nearest to being flagged, comes first; a
                duplicate brings the other with it, for neither is judged alone.
            spared: heads that are not judged, such as those that have just begun anew.

        Returns:
            The figures with these ablations, and the heads that have been degenerate in ``limits.checks`` checks.

        Raises:
            ValueError: if the health was measured without a loss.
        """
        if health.loss is None:
            raise ValueError("only a loss tells which heads are of use; give loss= to head_health")
        self._number += 1
        suspects = {
            entry.head: entry for entry in health.heads if causes(entry, self.limits) and entry.head not in spared
        }
        self._streak = {head: self._streak.get(head, 0) for head in suspects}
        waiting = sorted(suspects, key=lambda head: (-self._streak[head], self._tested.get(head, 0)))
        order = dict.fromkeys(one for head in waiting for one in (head, self._twin(suspects[head])) if one in suspects)
        tested = sorted(list(order)[: self.limits.ablations], key=list(suspects).index)
        if tested:
            health = with_ablation(health, ablate(tested), tested)
        bound = self.limits.useless * abs(health.loss or 0.0)
        for head in tested:
            self._tested[head] = self._number
        found = {head: self._judged(health, head, bound) for head in tested}
        for head, verdict in found.items():
            if verdict is not None:
                self._streak[head] = self._streak[head] + 1 if verdict else 0
        flagged = [Flagged(head, verdict) for head, verdict in found.items() if verdict and self._enough(head)]
        return health, flagged

    def forget(self, head: Head) -> None:
        """Begin to count anew, for a head that was begun anew."""
        self._streak.pop(head, None)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, from which another watch goes on exactly."""
        return {
            "number": self._number,
            "streak": [[*head, count] for head, count in self._streak.items()],
            "tested": [[*head, number] for head, number in self._tested.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._number = state["number"]
        self._streak = {Head(site, number): count for site, number, count in state["streak"]}
        self._tested = {Head(site, number): check for site, number, check in state["tested"]}

    def _enough(self, head: Head) -> bool:
        return self._streak[head] >= self.limits.checks

    def _twin(self, entry: HeadHealth) -> Head | None:
        if "duplicate" not in causes(entry, self.limits) or entry.nearest is None:
            return None
        return Head(entry.head.site, entry.nearest)

    def _judged(self, health: Health, head: Head, bound: float) -> tuple[str, ...] | None:
        """The causes for which a useless head counts as degenerate in this check; None where that is not known."""
        entry = health[head]
        assert entry.ablation is not None
        if not entry.ablation <= bound:
            return ()
        found = causes(entry, self.limits)
        if "duplicate" not in found:
            return found
        others = tuple(cause for cause in found if cause != "duplicate")
        assert entry.nearest is not None
        partner = health[head.site, entry.nearest]
        if partner.ablation is None:
            # Of the two one may stay, and which one is only known when both were ablated.
            return others or None
        return found if self._rank(entry, bound) < self._rank(partner, bound) else others

    def _rank(self, entry: HeadHealth, bound: float) -> tuple[bool, int, float, int]:
        """The smaller goes. Who was chosen before is chosen again, or noise would keep either from being flagged."""
        assert entry.ablation is not None
        return (entry.ablation > bound, -self._streak.get(entry.head, 0), entry.ablation, -entry.head.number)
