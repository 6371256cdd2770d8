"""Weights that are spread over processes (FSDP2): a strategy of Lightning, and what is done with such tensors.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277; the second form
of it, a tensor of each parameter, is `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from experiments.training import saved

NAME = "fsdp2"


def blocks(network: nn.Module) -> list[nn.Module]:
    """The repeated parts of a network: what stands in its `ModuleList`s, the outermost ones."""
    found: list[nn.Module] = []
    for child in network.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return found


def local(tensor: Tensor | None) -> Tensor:
    """The part of this process; a tensor that is not spread is its own part."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, in every process; all must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, equal in all processes, spread as `like` is."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    # Each process takes its part of its own copy; nothing is sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gathered(values: Mapping[str, Tensor], here: bool) -> dict[str, Tensor]:
    """All tensors whole, those that were spread on the CPU; one after the other, kept where `here`, else nothing."""
    found = {}
    for name, value in values.items():
        complete = whole(value.detach())
        if here:
            found[name] = complete.cpu() if isinstance(value, DTensor) else complete
    return found


def load_whole(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy the weights of a checkpoint, which are whole, into a module that may be spread."""
    with torch.no_grad():
        for name, value in module.state_dict().items():
            value.copy_(spread_as(values[name].to(value.device), value))


def agree_on_buffers(module: nn.Module) -> None:
    """Give all processes the buffers of the first, such as the statistics of batch norms, which each takes alone."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for value in module.buffers():
            if value.is_floating_point():
                torch.distributed.broadcast(value, src=0)


@contextmanager
def assembled(network: nn.Module) -> Iterator[None]:
    """Every process has all weights meanwhile, so that each may call parts of the network as often as it likes.

    A search makes as many steps as its sentences need; processes that gather weights step by step would wait for the
    one that has ended.
    """
    spread = [module for module in network.modules() if isinstance(module, FSDPModule)]
    for module in spread:
        module.unshard()
    try:
        yield
    finally:
        for module in spread:
            module.reshard()


class Sharded(ModelParallelStrategy):
    """`--trainer.strategy=fsdp2`: every process keeps its share of weights, gradients and the optimiser's averages.

    Each block, and what is left of the network, is gathered when it is needed and let go afterwards. With
    `--trainer.precision=bf16-mixed` it is gathered and computed in bfloat16, batch norms in float32, and gradients are
    summed in float32.
    Checkpoints are those of any other run: whole, in one file, plain values.
    """

    strategy_name = NAME

    def setup_environment(self) -> None:
        """One axis of processes, all for the data."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Spread the network, once, and make the optimiser over what is left here.

        Raises:
            ValueError: a network that cannot be spread.
        """
        network = self.lightning_module.network  # type: ignore[union-attr]
        if not isinstance(network, FSDPModule):
            self._spread(network)
        super().setup(trainer)

    def _spread(self, network: nn.Module) -> None:
        if any(isinstance(module, nn.RNNBase) for module in network.modules()):
            raise ValueError(
                f"--trainer.strategy={NAME}: {type(network).__name__} has recurrent layers, which torch cannot spread "
                "over processes. Take --trainer.strategy=ddp."
            )
        mixed = self.precision_plugin.precision == "bf16-mixed"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        mesh = self.device_mesh["data_parallel"]
        # Processes must start alike; under DDP the first one's weights are sent to all.
        for value in network.parameters():
            torch.distributed.broadcast(value.data, src=0)
        agree_on_buffers(network)
        if mixed:
            # Their statistics are float32, and so must be what they work on.
            full = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=torch.bfloat16)
            for module in network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    fully_shard(module, mesh=mesh, mp_policy=full)
        for block in blocks(network):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(network, mesh=mesh, mp_policy=policy)

    def on_validation_start(self) -> None:
        """All judge the same model."""
        agree_on_buffers(self.lightning_module.network)  # type: ignore[union-attr]

    def on_test_start(self) -> None:
        """All judge the same model."""
        agree_on_buffers(self.lightning_module.network)  # type: ignore[union-attr]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights in the first process, nothing in the others."""
        assert self.lightning_module is not None
        return gathered(self.lightning_module.state_dict(), self.is_global_zero)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimiser's state as of one process, in the first one."""
        state = getattr(optimizer, "_optimizer", optimizer).state_dict()
        state["state"] = {key: gathered(values, self.is_global_zero) for key, values in state["state"].items()}
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As a run of one process does."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The content of a file; weights are taken from it by `load_model_state_dict`."""
        return saved.read(Path(checkpoint_path))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Each process takes its part."""
        assert self.lightning_module is not None
        load_whole(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each process takes its part."""
        for optimizer, content in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                key: {
                    # The number of steps is no tensor of the parameter's shape.
                    name: spread_as(value.to(like.device), like) if value.shape == like.shape else value
                    for name, value in values.items()
                }
                for key, values in content["state"].items()
                for like in [parameters[key]]
            }
            optimizer.load_state_dict({**content, "state": state})


if NAME not in StrategyRegistry:
    StrategyRegistry.register(NAME, Sharded, "FSDP2: weights spread over processes", save_distributed_checkpoint=False)
