"""Networks of timm as classifiers: with weights that others have trained, or from the start."""

from __future__ import annotations

import logging
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.training.optim import Optim
from experiments.vision.classifier import PictureClassifier
from experiments.vision.pictures import require_shape

log = logging.getLogger("experiments")

Weights = Literal["auto", "pretrained", "random"]


class TimmNetwork(nn.Module):
    """A network of timm behind the pixels that it was made for.

    Args:
        model: from ``timm.create_model``.
        channels: C; grey pictures are normalised by the mean over timm's three channels.
        size: height and width.

    Raises:
        ValueError: the model's patches do not divide the size; timm would leave the rest of the picture out.
    """

    def __init__(self, model: nn.Module, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.model = model
        self.size = size
        self.grid: tuple[int, int] | None = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        stem = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        cuts = stem is not None and stem.kernel_size == stem.stride
        patch = stem.kernel_size if cuts else (1, 1)
        if size[0] % patch[0] or size[1] % patch[1]:
            raise ValueError(
                f"Pictures of {size[0]}x{size[1]} cannot be cut into this network's patches of {patch[0]}x{patch[1]}; "
                "choose --data.image_size so that they divide it"
            )
        for name in ("mean", "std"):
            values = list(model.pretrained_cfg[name])
            values = [statistics.fmean(values)] if channels == 1 else values
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels 0 to 1, [B, C, H, W] -> logits [B, classes] and aux, which is 0."""
        require_shape(image, self.mean.shape[1], self.size)
        logits = self.model((image.to(self.mean.dtype) - self.mean) / self.std)
        return logits, logits.new_zeros(())


class TimmClassifier(PictureClassifier):
    """Fine-tunes a network of timm, by its name there.

    Args:
        name: as `timm.create_model` takes it.
        weights: pretrained, random, or auto: pretrained where they can be had (a network, or timm's cache), otherwise
            random, which is said.
        keep_head: keep the head that came with the weights; the data must have as many classes, in its order. Otherwise
            it is new.
        drop_path: timm's drop_path_rate.
        label_smoothing: share of the target spread evenly over all classes, from 0 to 1.
        init_from: a checkpoint of this class whose weights a new run starts from.
        replace_head: with init_from, start with a new head where the classes are not those of the checkpoint.
        optim: optimiser and schedule.
    """

    def __init__(
        self,
        name: str = "vit_tiny_patch16_224",
        weights: Weights = "auto",
        keep_head: bool = False,
        drop_path: float = 0.0,
        label_smoothing: float = 0.0,
        init_from: str | None = None,
        replace_head: bool = False,
        optim: Optim = Optim(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(label_smoothing, init_from, replace_head, optim)
        import timm  # takes seconds; only who needs it pays

        if not timm.is_model(name):
            near = timm.list_models(f"*{name}*")[:3] or timm.list_models(f"{name[:4]}*")[:3]
            raise ValueError(f"--model.name={name} is no network of timm. Near: {', '.join(near) or 'none'}.")
        try:
            timm.get_pretrained_cfg(name)
        except RuntimeError as error:
            known = ", ".join(timm.list_pretrained(f"{name.partition('.')[0]}.*"))
            raise ValueError(
                f"--model.name={name}: there are no such weights. There are: {known or 'none'}."
            ) from error
        if keep_head and weights == "random":
            raise ValueError("--model.keep_head=true keeps a trained head; --model.weights=random brings none.")
        self.name, self.weights, self.keep_head, self.drop_path = name, weights, keep_head, drop_path

    def build_network(self, facts: dict[str, Any]) -> TimmNetwork:
        """The network for pictures with these facts, with random weights."""
        network = TimmNetwork(self._create(facts, pretrained=False), facts["channels"], tuple(facts["image_size"]))
        heads = network.model.pretrained_cfg["classifier"]
        self.head = tuple(f"model.{name}." for name in ((heads,) if isinstance(heads, str) else heads))
        return network

    @property
    def starts_from_weights(self) -> bool:
        """Whether a new run begins with weights that are trained."""
        return super().starts_from_weights or self.weights != "random"

    def start(self) -> None:
        """Bring weights into the network: those of ``init_from``, or timm's."""
        assert isinstance(self.network, TimmNetwork) and self.facts is not None
        if self.init_from is not None:
            super().start()
            return
        with _asked_once() as silent:
            try:
                model = self._create(self.facts, pretrained=True)
            except (OSError, RuntimeError) as error:  # no network, or a name without weights
                reason = silent or str(error).splitlines()[0]
                if self.weights == "pretrained":
                    raise ValueError(
                        f"The weights of {self.name} could not be had: {reason}\n"
                        "Start with random ones by --model.weights=random, or take another --model.name."
                    ) from error
                log.warning("%s starts with RANDOM weights; trained ones could not be had: %s", self.name, reason)
                return
        self.network.model.load_state_dict(model.state_dict())
        log.info("%s starts with the weights of timm; its head is %s.", self.name, "kept" if self.keep_head else "new")

    def _create(self, facts: dict[str, Any], *, pretrained: bool) -> nn.Module:
        import timm

        classes, own = len(facts["classes"]), timm.get_pretrained_cfg(self.name)
        if self.keep_head and own.num_classes != classes:
            raise ValueError(
                f"{self.name} has a head for {own.num_classes} classes; this data has {classes}. "
                "Start with a new head by --model.keep_head=false"
            )
        options: dict[str, Any] = {"drop_path_rate": self.drop_path} if self.drop_path else {}
        if own.fixed_input_size:
            options["img_size"] = tuple(facts["image_size"])
        try:
            return timm.create_model(
                self.name, pretrained=pretrained, num_classes=classes, in_chans=facts["channels"], **options
            )
        except (TypeError, AssertionError) as error:
            if "drop_path_rate" in str(error):
                raise ValueError(f"{self.name} has no drop path; leave it out by --model.drop_path=0") from error
            raise ValueError(f"{self.name} cannot be made for this data: {error}") from error


@contextmanager
def _asked_once() -> Iterator[str]:
    """Gives why the hub is silent, if it is; its client then looks in its cache, and does not ask ten times."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    silent = _silent(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = before or bool(silent)
    try:
        yield silent
    finally:
        constants.HF_HUB_OFFLINE = before


def _silent(address: str) -> str:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:  # an answer, if no welcome
        return ""
    except OSError as error:
        return f"{address} does not answer ({getattr(error, 'reason', error)}), and its cache does not hold them"
    return ""
