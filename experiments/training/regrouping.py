"""A run that goes on with another number of processes than it had."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

log = logging.getLogger("experiments")


def fit_to_processes(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Move the place inside an epoch to that of the batches which the processes of now have, and say so.

    Where all of them together take as many samples in a step as before, the place is the same and the run goes on as
    it would have. Otherwise it goes on after the same share of the epoch, at the start of an optimiser step.
    """
    states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    before = states[0].get("processes") if states else None
    now = trainer.world_size
    if before in (None, now):
        return
    state = states[0]
    position, batches = state["position"], state["batches"]
    here = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    log.warning("The run had %d process(es) and goes on with %d.", before, now)
    if batches == here:
        return
    log.warning(
        "An epoch had %d steps of a batch in each process and has %d: together they take other batches, and the rate "
        "falls over another number of steps. --data.batch_size (or batch_tokens) times processes as before, with "
        "--run.override_ckpt=true, keeps both.",
        batches, here,
    )  # fmt: skip
    if not 0 < position < batches:
        return
    moved = position * here // batches
    moved -= moved % trainer.accumulate_grad_batches
    log.warning(
        "Epoch %d goes on at batch %d of %d, as it stood at %d of %d: some samples may come twice, or not at all.",
        state["epoch"] + 1, moved + 1, here, position + 1, batches,
    )  # fmt: skip
    state.update(position=moved, batches=here)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    progress.update(dict.fromkeys(progress, moved))
