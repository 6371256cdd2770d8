"""What a trained network does for one sample: matrix products of a forward pass, and the pairs that attention sees."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from attnzoo import Mask, Mechanism, record
from experiments.training.module import Experiment

SAMPLES = 2
QUERIES = 256
"""How many of a batch, and of its queries, are looked at for their pairs."""


def measure(model: Experiment, data: pl.LightningDataModule, mechanism: str) -> dict[str, float | None]:
    """Costs on the first validation batch, for `results.json`.

    Args:
        model: in evaluation mode, on its device.
        data: set up.
        mechanism: name of the class whose sites are looked at for their pairs.

    Returns:
        `flops_per_<sample, token ...>` and `visible_pairs`; nothing where the weights are spread over processes, for
        this is called on the first one alone.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return {}
    batch = model.receive(next(iter(data.val_dataloader())), data)
    unit = model.unit.removesuffix("s")
    assert model.network is not None
    return {f"flops_per_{unit}": flops(model, batch), "visible_pairs": visible_pairs(model, batch, mechanism)}


def flops(model: Experiment, batch: Any) -> float:
    """Floating point operations of the matrix products of a forward pass, for one sample or token.

    Counted by torch as the code runs, so a kernel that computes pairs which a mask hides pays for them; two for a
    multiplication with its addition.
    """
    cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={cpu_kernel: _fused}) as counter:
        step = model.step(batch, "val")
    return round(counter.get_total_flops() / max(1.0, float(step.count)), 1)


def visible_pairs(model: Experiment, batch: Any, mechanism: str) -> float | None:
    """Share of the pairs of query and key that have a weight, of those that the masks allow.

    The mean over the sites at which the mechanism of this name stands.
    A mechanism that mixes keys before it weighs them gives every pair a weight, so its share is 1.

    Returns:
        0 to 1; None where there is no such site, or it applies no matrix to the values.
    """
    network = model.network
    assert isinstance(network, nn.Module)
    # A layer may have the name of a mechanism, as torch's Linear has.
    found = (module for module in network.modules() if isinstance(module, Mechanism))
    named = [module for module in found if type(module).__name__ == mechanism]
    if not named or not all(module.traits.linear_in_v for module in named):
        return None
    with torch.no_grad(), record(network) as sites:
        model.step(batch, "val")
    shares = [_share(calls[0]) for calls in sites.values() if calls and calls[0].mechanism in named]
    return round(sum(shares) / len(shares), 4) if shares else None


def _share(call: Any) -> float:
    """Of one recorded call, on a few samples and queries, so that no long sequence needs T x S numbers."""
    mask = call.mask
    few = call._replace(
        q=call.q[:SAMPLES], k=call.k[:SAMPLES], v=call.v[:SAMPLES],
        mask=Mask(mask.causal, _rows(mask.key_keep), _rows(mask.pair_keep, 4), _rows(mask.segments)),
        bias=_rows(call.bias, 4) if isinstance(call.bias, Tensor) else call.bias,
    )  # fmt: skip
    queries = call.q.shape[2]
    chosen = torch.linspace(0, queries - 1, min(queries, QUERIES), device=call.q.device).long()
    weights = few.map(chosen)
    allowed = few.mask.visible(queries, weights.shape[3], weights.device)
    if allowed is not None:
        # Key padding alone has one row for all queries.
        allowed = allowed if allowed.shape[-2] == 1 else allowed[..., chosen, :]
    total = weights.numel() if allowed is None else int(allowed.sum()) * weights.numel() // allowed.numel()
    return int(weights.count_nonzero()) / max(1, total)


def _rows(part: Tensor | None, batched: int = 2) -> Tensor | None:
    """The first samples, where `part` has as many dimensions as one that differs by sample."""
    return part[:SAMPLES] if part is not None and part.dim() == batched else part


def _fused(query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)
