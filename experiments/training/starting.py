"""How a run starts: processes, devices, strategy, and options that Lightning would take without effect.

Also how it may end: what is said where memory runs out or another process is lost.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import lightning.pytorch as pl
import torch

from experiments.training import processes, sharding, specs
from experiments.training.checkpoints import WholeFiles

log = logging.getLogger("experiments")


def settle(config: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's options with those that the way of starting decides.

    Raises:
        ValueError: an option out of range, or a start that cannot be.
    """
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0), ("check_val_every_n_epoch", 1)):
        value = config.get(name)
        if value is not None and value < least:
            raise ValueError(f"--trainer.{name} is {value}; it must be at least {least}.")
    for name in ("max_epochs", "max_steps"):
        if config.get(name) == 0:
            raise ValueError(f"--trainer.{name} is 0, which leaves nothing to train; expected 1 or more.")
    if config.get("val_check_interval") == 0:
        raise ValueError("--trainer.val_check_interval is 0; give a number of batches, or a share of an epoch.")
    strategy = config.get("strategy")
    if isinstance(strategy, str) and strategy.startswith("fsdp") and strategy != sharding.NAME:
        raise ValueError(
            f"--trainer.strategy={strategy} can neither clip gradients nor train on CPUs; take --trainer.strategy="
            f"{sharding.NAME}, which spreads weights over processes too (docs/scaling.md)."
        )
    plugins = config.get("plugins") or []
    plugins = [*(plugins if isinstance(plugins, list) else [plugins]), WholeFiles()]
    environment, found = processes.outside(), processes.sizes()
    if environment is None or found is None:
        if config.get("num_nodes", 1) > 1:
            raise ValueError(
                f"--trainer.num_nodes={config['num_nodes']}: several nodes are started by torchrun or srun; "
                "docs/scaling.md has the commands."
            )
        return {**config, "plugins": plugins}
    for name, here in zip(("devices", "num_nodes"), found, strict=True):
        given = config.get(name)
        if given not in (None, "auto", 1) and str(given) != str(here):
            log.warning("--trainer.%s is %s, but torchrun or srun has started %d; that holds.", name, given, here)
        config[name] = here
    return {**config, "plugins": [*plugins, environment]}


def explained(error: BaseException, trainer: pl.Trainer, data: pl.LightningDataModule, last: Any) -> str | None:
    """What to say of an error that is no mistake in the code; None for any other.

    Args:
        error: what training has raised.
        trainer: of the run.
        data: of the run.
        last: where the newest state was saved, None if nowhere.
    """
    said = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in said:
        options = specs.describe(data)["init_args"]
        unit = next((name for name in ("batch_tokens", "batch_size") if name in options), None)
        option = "" if unit is None else f"--data.{unit} (it is {options[unit]}), and "
        return (
            f"Memory ran out in step {trainer.global_step + 1}: lower {option}raise --trainer.accumulate_grad_batches "
            "by as much: the update stays the same.\nOr take --activation_checkpointing=true, --trainer.precision="
            f"bf16-mixed, a smaller model, or several devices with --trainer.strategy={sharding.NAME}."
        )
    lost = r"gloo|NCCL|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|[Tt]imed out|TCPStore"
    if trainer.world_size > 1 and isinstance(error, RuntimeError) and re.search(lost, said):
        goes_on = "" if last is None or not last.is_file() else f"\nGo on with: fit --ckpt_path={last}"
        return (
            f"Process {trainer.global_rank} of {trainer.world_size} ends, for another one has ended or cannot be "
            f"reached; what that one said tells why.{goes_on}"
        )
    return None
