"""Beginning degenerate heads anew while a model trains; which, when, and how often."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from attnzoo.heads.degenerate import Flagged, Limits, Watch
from attnzoo.heads.figures import Head, Health
from attnzoo.heads.reinit import Average, check_reinit, hold_off, reinit_heads, switch_off_heads
from experiments.training.ema import EmaWeights
from experiments.training.head_monitor import probe_set
from experiments.training.module import Experiment
from experiments.training.optim import total_steps
from experiments.training.probing import SAMPLES, ProbeSet, has_attention

log = logging.getLogger("experiments")


@dataclass(frozen=True)
class Reinit:
    """When degenerate heads begin anew; see attnzoo/heads/degenerate.py for which are.

    Args:
        every: optimiser steps from check to check; the first is after the warm-up.
        samples: validation samples that heads are judged by, at least.
        checks: how many checks one after the other must find a head degenerate.
        cooldown: steps for which a head that began anew is left alone.
        share: of all heads, how many may begin anew at once; of each attention only one does.
        attempts: how often a head begins anew; found degenerate once more it is switched off for good.
        until: share of the run after which no head begins anew.
        dry_run: say what would be done, and do nothing.
    """

    every: int = 500
    samples: int = SAMPLES
    checks: int = 3
    cooldown: int = 2000
    share: float = 0.25
    attempts: int = 2
    until: float = 0.7
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("samples", 1), ("checks", 1), ("cooldown", 0), ("attempts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--head_reinit.{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("share", "until"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"--head_reinit.{name} is {getattr(self, name)}; it must lie in (0, 1].")


ACTIONS = {
    (False, False): "begins anew",
    (True, False): "is switched off",
    (False, True): "would begin anew (dry run)",
    (True, True): "would be switched off (dry run)",
}
"""What is done with a head: by whether it is to go for good, and whether anything is done."""


class HeadReinit(pl.Callback):
    """Judges the heads from time to time and begins degenerate ones anew, without a jump of the function.

    Events, counters and judgements so far are in the checkpoint. All processes see the same sums, so all decide alike.
    """

    def __init__(self, options: Reinit, seed: int = 0) -> None:
        self.options, self.seed = options, seed
        self.watch = Watch(Limits(checks=options.checks))
        self.events: list[dict[str, Any]] = []
        self._last: dict[Head, int] = {}
        self._attempts: dict[Head, int] = {}
        self._off: list[Head] = []
        self._probes: ProbeSet | None = None
        self._steps, self._total = 0, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the samples, and refuse what cannot be done before hours have gone by."""
        assert isinstance(pl_module, Experiment) and pl_module.network is not None
        self._steps = trainer.global_step
        total = total_steps(trainer)
        if total is None:
            raise ValueError(
                f"--head_reinit.until={self.options.until} is a share of the run; set --trainer.max_epochs or "
                f"--trainer.max_steps."
            )
        if not has_attention(pl_module.network):
            raise ValueError(
                f"--head_reinit begins heads of attnzoo anew, and {type(pl_module.network).__name__} has none; leave "
                "it out. --head_monitor watches heads of torch, timm and transformers as well."
            )
        check_reinit(pl_module.network)
        self._total = total
        self._probes = probe_set(trainer, pl_module, self.options.samples)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep switched-off heads off; check, where this batch ended an optimiser step that is due."""
        step = trainer.global_step
        if step == self._steps:
            return
        self._steps = step
        assert isinstance(pl_module, Experiment) and pl_module.network is not None
        hold_off(pl_module.network, self._off)
        # A check that can no longer lead to anything would only cost time.
        if step % self.options.every or not pl_module.optim.warmup_steps < step <= self.options.until * self._total:
            return
        assert self._probes is not None
        probes = self._probes
        health = probes.health(seed=step)
        health, flagged = self.watch.check(health, lambda heads: probes.ablation(heads, health), self._spared())
        chosen = self._safe(self._allowed(flagged, health), health)
        if chosen:
            self._act(trainer, pl_module, chosen, health)
        pl_module.write({"heads/begun_anew": float(len(self.events)), "heads/off": float(len(self._off))})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was done."""
        off = sum(event["off"] for event in self.events)
        done = " would have (dry run)" if self.options.dry_run else ""
        log.info("Degenerate heads:%s %d begun anew, %d switched off.", done, len(self.events) - off, off)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, from which a resumed run goes on exactly."""
        return {
            "watch": self.watch.state_dict(),
            "events": self.events,
            "last": [[*head, step] for head, step in self._last.items()],
            "attempts": [[*head, count] for head, count in self._attempts.items()],
            "off": [list(head) for head in self._off],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.watch.load_state_dict(state_dict["watch"])
        self.events = list(state_dict["events"])
        self._last = {Head(site, number): step for site, number, step in state_dict["last"]}
        self._attempts = {Head(site, number): count for site, number, count in state_dict["attempts"]}
        self._off = [Head(*head) for head in state_dict["off"]]

    def _spared(self) -> set[Head]:
        """Heads that are off, or began anew not long ago; as long as their outputs are small they look dead."""
        recent = {head for head, step in self._last.items() if self._steps - step < self.options.cooldown}
        return recent.union(self._off)

    def _allowed(self, flagged: Sequence[Flagged], health: Health) -> list[Flagged]:
        """Those that cost least, one an attention and a share of all."""
        cost = {entry.head: entry.ablation or 0.0 for entry in health.heads}
        most = max(1, int(self.options.share * len(health.heads)))
        found: list[Flagged] = []
        for one in sorted(flagged, key=lambda one: (cost[one.head], one.head)):
            if one.head.site not in {other.head.site for other in found}:
                found.append(one)
        return found[:most]

    def _safe(self, flagged: list[Flagged], health: Health) -> list[Flagged]:
        """As many of them as leave the loss where it is when they go together; the costliest is left out first."""
        assert self._probes is not None and health.loss is not None
        bound = self.watch.limits.useless * abs(health.loss)
        while len(flagged) > 1:
            (rise,) = self._probes.ablation([[one.head for one in flagged]], health)
            if rise <= bound:
                break
            flagged = flagged[:-1]
        return flagged

    def _act(self, trainer: pl.Trainer, module: Experiment, chosen: list[Flagged], health: Health) -> None:
        assert module.network is not None and self._probes is not None and health.loss is not None
        heads = [one.head for one in chosen]
        gone = [head for head in heads if self._attempts.get(head, 0) >= self.options.attempts]
        if not self.options.dry_run:
            averages = self._averages(trainer, module)
            anew = [head for head in heads if head not in gone]
            reinit_heads(
                module.network, anew, health.means, step=self._steps, seed=self.seed,
                optimizer=trainer.optimizers[0], averages=averages,
            )  # fmt: skip
            switch_off_heads(module.network, gone, health.means, averages=averages)
        after = self._probes.mean_loss()
        for one in chosen:
            head = one.head
            what = ACTIONS[head in gone, self.options.dry_run]
            why = " and ".join(one.causes)
            log.info("Step %d: head %d of %s is %s; it %s.", self._steps, head.number, head.site, why, what)
            self.events.append(
                {
                    "step": self._steps, "site": head.site, "head": head.number, "causes": list(one.causes),
                    "off": head in gone, "loss_before": health.loss, "loss_after": after,
                    "dry_run": self.options.dry_run,
                }
            )  # fmt: skip
            self._last[head] = self._steps
            self.watch.forget(head)
            if not self.options.dry_run:
                self._attempts[head] = self._attempts.get(head, 0) + 1
                if head in gone:
                    self._off.append(head)
        module.write({"heads/loss_change": (after - health.loss) / abs(health.loss or 1.0)})

    def _averages(self, trainer: pl.Trainer, module: Experiment) -> list[Average]:
        """The averaged weights of the run, and what its heads give with them."""
        assert self._probes is not None
        ema = next((found for found in trainer.callbacks if isinstance(found, EmaWeights)), None)  # type: ignore[attr-defined]
        if ema is None:
            return []
        with ema.put_in(module):
            means = self._probes.health(seed=self._steps).means
        names = {f"network.{name}": name for name, _ in module.network.named_parameters()}  # type: ignore[union-attr]
        return [Average({names[name]: value for name, value in ema.average.items() if name in names}, means)]
