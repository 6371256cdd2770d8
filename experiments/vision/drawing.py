"""Pictures of attention: what each head of each block looks at, and how it adds up over the depth.

Rollout: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv:2005.00928.
"""

from __future__ import annotations

import logging

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnzoo import Mechanism, record
from experiments.vision.network import VisionTransformer

log = logging.getLogger("experiments")


def block_maps(network: VisionTransformer, image: Tensor) -> list[Tensor]:
    """The attention map of each block for one picture [1, C, H, W]: a list of [H, T, T].

    A mechanism that is not linear in v has no map: its ValueError says so.
    """
    training = network.training
    network.eval()
    try:
        with torch.no_grad(), record(network) as sites:
            network(image)
        return [calls[0].map()[0] for calls in sites.values()]
    finally:
        network.train(training)


def rollout(maps: list[Tensor]) -> Tensor:
    """How much each input token reaches each output token, residuals counted as half: [T, T].

    Args:
        maps: of each block, [H, T, T]; averaged over the heads.
    """
    tokens = maps[0].shape[-1]
    reached = torch.eye(tokens)
    for attention in maps:
        mixed = 0.5 * attention.float().mean(0).abs() + 0.5 * torch.eye(tokens)
        reached = mixed / mixed.sum(-1, keepdim=True) @ reached
    return reached


def on_grid(network: VisionTransformer, weights: Tensor) -> Tensor:
    """Weights over the patches of what the head reads, [T, T] -> [rows, columns].

    The head reads the class token where there is one, else the mean of the patches.
    """
    if network.pool == "class":
        return weights[0, 1:].unflatten(0, network.grid)
    return weights.mean(0).unflatten(0, network.grid)


def attention_figures(network: VisionTransformer, image: Tensor) -> dict[str, Figure]:
    """One figure: the picture, the rollout over it, and below them every head of every block.

    None, and a message that says so, where a mechanism is not linear in v and so has no map.

    Args:
        network: in evaluation or not; left as it was.
        image: pixels 0 to 1, [1, C, H, W].
    """
    blind = {type(m).__name__ for m in network.modules() if isinstance(m, Mechanism) and not m.traits.linear_in_v}
    if blind:
        log.info("No attention picture: %s applies no matrix to the values.", ", ".join(sorted(blind)))
        return {}
    maps = [weights.cpu() for weights in block_maps(network, image)]
    pixels = image[0].cpu().permute(1, 2, 0).numpy()
    heads = max(len(weights) for weights in maps)
    columns = max(heads, 2)
    figure = Figure(figsize=(1.5 * columns + 0.6, 1.5 * (len(maps) + 1) + 0.5), layout="constrained")
    axes = figure.subplots(len(maps) + 1, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    height, width = pixels.shape[:2]
    shown = {"cmap": "gray", "vmin": 0, "vmax": 1, "extent": (0, width, height, 0)}
    axes[0, 0].imshow(pixels, **shown)
    axes[0, 0].set_title("picture", fontsize=8)
    axes[0, 1].imshow(pixels, **shown)
    axes[0, 1].imshow(
        on_grid(network, rollout(maps)).numpy(),
        cmap="magma",
        alpha=0.6,
        extent=(0, width, height, 0),
        interpolation="bilinear",
    )
    axes[0, 1].set_title("rollout", fontsize=8)
    for row, weights in enumerate(maps, start=1):
        for head, matrix in enumerate(weights):
            axes[row, head].imshow(on_grid(network, matrix).numpy(), cmap="magma", extent=(0, width, height, 0))
            axes[row, head].set_title(f"block {row - 1}, head {head}", fontsize=7)
    return {"attention": figure}
