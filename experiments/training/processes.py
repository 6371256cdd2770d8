"""The processes of a run: who started them, and what the first one decides for all.

Lightning starts the others itself (`--trainer.devices=4`), with the same words and a few environment variables. Where
torchrun or srun has started all of them, they find each other at the address that these give.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only

_VARIABLE = "ATTNZOO_RUN_"
_CHOSEN, _FAILED = "=", "!"
_PATIENCE = timedelta(minutes=10)


def outside() -> TorchElasticEnvironment | SLURMEnvironment | None:
    """What torchrun or srun says of this process, None where neither has started it.

    Raises:
        ValueError: srun was given a form that Lightning does not know.
    """
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if "SLURM_NTASKS" not in os.environ or not SLURMEnvironment.detect():
        return None
    try:
        # Lightning would save a file of its own inside the handler of a signal, while other processes train.
        return SLURMEnvironment(auto_requeue=False)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def sizes() -> tuple[int, int] | None:
    """Processes of each node and number of nodes, as torchrun or srun has them."""
    environment = outside()
    if environment is None:
        return None
    if isinstance(environment, TorchElasticEnvironment):
        each = int(os.environ.get("LOCAL_WORLD_SIZE", environment.world_size()))
        return each, environment.world_size() // each
    return int(os.environ.get("SLURM_NTASKS_PER_NODE", 1)), int(os.environ.get("SLURM_NNODES", 1))


def started_by_another() -> bool:
    """Whether the first process of this run has started this one, and ends all where this one fails."""
    return rank_zero_only.rank > 0 and outside() is None


def end_with_the_first() -> None:
    """Let this process, started by the first one, not outlive it, even where it waits for the others to come."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        # Where it was in an exchange it has noticed by itself, and says more.
        time.sleep(10)
        print("error: the first process of this run has gone, so this one ends.", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="first-process-watch").start()


def decide(name: str, choose: Callable[[], str]) -> str:
    """What the first process chooses, in all processes; the others wait to be told.

    Args:
        name: of the decision; each is made once in the life of a process.
        choose: called in the first process alone.

    Raises:
        ValueError: in the others, where the first has failed, or nothing tells them.
    """
    variable = _VARIABLE + name.upper()
    environment = outside()
    if environment is None or environment.world_size() == 1:
        if rank_zero_only.rank == 0:
            os.environ[variable] = choose()
        elif variable not in os.environ:
            raise ValueError(
                "This process was started as one of several, and not by --trainer.devices=N, torchrun or srun: "
                "use one of these (docs/scaling.md), so that all write to one folder."
            )
        return os.environ[variable]
    store = _store()
    if environment.global_rank() > 0:
        try:
            value = store.get(variable).decode()
        except RuntimeError:  # the store has gone with the first process
            value = _FAILED
        if value == _FAILED:
            raise ValueError("The first process of this run could not start; what it says tells why.")
        return value.removeprefix(_CHOSEN)
    chosen = _FAILED
    try:
        chosen = _CHOSEN + choose()
    finally:
        store.set(variable, chosen)
    return chosen.removeprefix(_CHOSEN)


@functools.cache
def _store() -> dist.Store:
    """Where processes from outside leave words for each other. Kept for the life of the process: the first holds it."""
    environment: ClusterEnvironment | None = outside()
    assert environment is not None
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    rank, world = environment.global_rank(), environment.world_size()
    store: dist.Store = next(dist.rendezvous("env://", rank, world, timeout=_PATIENCE))[0]
    return dist.PrefixStore("attnzoo", store)
