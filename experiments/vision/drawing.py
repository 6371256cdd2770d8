"""Pictures of attention: what each head of each block looks at, and how it adds up over the depth.

Rollout: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv:2005.00928.
"""

from __future__ import annotations

import logging

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attnzoo import Mechanism, record
from experiments.training.pictures import as_written, first_maps
from experiments.vision.network import VisionTransformer
from experiments.vision.pictures import scale_pixels

log = logging.getLogger("experiments")


def block_maps(network: VisionTransformer, image: Tensor) -> list[Tensor]:
    """The attention map of each block for one picture [1, C, H, W]: a list of [H, T, T].

    What has no map, or too many tokens for one, raises ValueError.
    """
    training = network.training
    network.eval()
    try:
        with torch.no_grad(), record(network) as sites:
            network(image)
        return first_maps(sites)
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

    The head reads the class token where there is one, else the mean of the patches; of a weighted mean the plain one is
    taken here.
    """
    if network.pool == "class":
        return weights[0, 1:].unflatten(0, network.grid)
    return weights.mean(0).unflatten(0, network.grid)


def picture_figure(image: Tensor) -> Figure:
    """One picture [C, H, W], uint8 or from 0 to 1, large enough to be looked at."""
    figure = Figure(figsize=(1.6, 1.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(scale_pixels(image).permute(1, 2, 0).squeeze(-1).cpu().numpy(), cmap="gray", vmin=0, vmax=1)
    axes.set_axis_off()
    return figure


@as_written
def attention_figures(network: VisionTransformer, image: Tensor, title: str = "") -> dict[str, Figure]:
    """One figure: the picture, the rollout beside it, and below them every head of every block.

    None, and a message that says so, where a mechanism is not linear in v and so has no map, or tokens are too many.

    Args:
        network: in evaluation or not; left as it was.
        image: pixels 0 to 1, [1, C, H, W].
        title: what the picture was taken for.
    """
    mechanisms = [module for module in network.modules() if isinstance(module, Mechanism)]
    blind = {type(mechanism).__name__ for mechanism in mechanisms if not mechanism.traits.linear_in_v}
    if blind:
        log.info("No attention picture: %s applies no matrix to the values.", ", ".join(sorted(blind)))
        return {}
    try:
        maps = [weights.float().cpu() for weights in block_maps(network, image)]
    except ValueError as error:
        log.info("No attention picture: %s.", error)
        return {}
    pixels = image[0].cpu().permute(1, 2, 0).numpy()
    columns = max(2, *(len(weights) for weights in maps))
    figure = Figure(figsize=(1.6 * columns + 0.6, 1.7 * (len(maps) + 1) + 1.0), layout="constrained")
    names = ", ".join(dict.fromkeys(type(mechanism).__name__ for mechanism in mechanisms))
    readers = {"class": "the class token", "mean": "the mean of all patches"}
    reader = readers.get(network.pool, "the plain mean of all patches")  # the head weighs them by the picture
    figure.suptitle("\n".join(filter(None, (title, f"{names}: where {reader} looks"))), fontsize=9)
    figure.supxlabel(
        "each panel is scaled by itself: black is 0, the brightest is the weight printed over it", fontsize=7
    )
    axes = figure.subplots(len(maps) + 1, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    height, width = pixels.shape[:2]
    place = {"extent": (0, width, height, 0)}
    # Titles are given their y, or matplotlib measures the ticks of every panel to find one: half of the time.
    axes[0, 0].imshow(pixels, cmap="gray", vmin=0, vmax=1, **place)
    axes[0, 0].set_title("picture", fontsize=8, y=1.0)
    _frame(axes[0, 0])
    reached = on_grid(network, rollout(maps))
    axes[0, 1].imshow(reached.numpy(), cmap="magma", vmin=0, **place)
    axes[0, 1].set_title(f"all blocks (rollout): {reached.max():.2f}", fontsize=7, y=1.0)
    for row, weights in enumerate(maps, start=1):
        for head, matrix in enumerate(weights):
            shown = on_grid(network, matrix)
            # Weights of a mechanism that is not normalised may be negative; those stay black.
            axes[row, head].imshow(shown.numpy(), cmap="magma", vmin=0, **place)
            axes[row, head].set_title(f"block {row - 1}, head {head}: {shown.max():.2f}", fontsize=7, y=1.0)
    return {"attention": figure}


def _frame(axis: Axes) -> None:
    # White paper on a white page would not be seen.
    axis.set_axis_on()
    axis.set_xticks([])
    axis.set_yticks([])
