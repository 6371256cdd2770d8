"""Using a trained classifier: on a picture, and as a file for other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from experiments.training.finding import newest_finished
from experiments.training.options import call
from experiments.vision.drawing import attention_figures
from experiments.vision.module import ImageClassifier
from experiments.vision.network import VisionTransformer
from experiments.vision.pictures import scale_pixels

PICTURES = (".png", ".pdf", ".svg", ".jpg")
TOLERANCE = 1e-5
"""How far an exported model may be from the one that it was made of."""


def classify(argv: list[str]) -> int:
    """Names what is in a picture. Arguments: see ``_classify``."""
    return call(_classify, argv, "python -m experiments classify")


def export(argv: list[str]) -> int:
    """Writes a model as .pt2 and .onnx. Arguments: see ``_export``."""
    return call(_export, argv, "python -m experiments export")


def _classify(image: str, ckpt: str | None = None, top: int = 5, invert: bool = False, out: str | None = None) -> int:
    """Name what is in a picture, and draw what the model attended to.

    Args:
        image: file of the picture, in any format; resized to what the model was trained on.
        ckpt: checkpoint; the best one of the newest finished vision run if null.
        top: how many classes to print.
        invert: swap dark and light first, for dark ink on white paper where training had light on dark.
        out: file of the attention picture (.png, .pdf, .svg, .jpg); in the run's figures/ if null.
    """
    if out is not None and Path(out).suffix not in PICTURES:
        raise ValueError(f"--out={out}: the attention picture is written as one of {', '.join(PICTURES)}")
    path = Path(ckpt) if ckpt else newest_finished("vision")
    model = ImageClassifier.from_checkpoint(path)
    assert isinstance(model.network, VisionTransformer) and model.facts is not None
    pixels = model.read(image)
    pixels = 255 - pixels if invert else pixels
    console = Console(highlight=False, soft_wrap=True, markup=False)
    note = _brightness(scale_pixels(pixels).mean().item(), model.facts["mean"], invert)
    if note:
        console.print(note)
    probabilities = model.predict(pixels)
    console.print(f"{image}, by {path}")
    table = Table("class", "probability", box=None)
    best = probabilities.topk(min(max(top, 1), len(probabilities)))
    for share, number in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        table.add_row(Text(model.facts["classes"][number]), f"{share:.4f}")
    console.print(table)
    title = f"{Path(image).name}: {model.answer(pixels)}"
    figures = attention_figures(model.network, scale_pixels(pixels)[None], title)
    for figure in figures.values():
        target = Path(out) if out else _beside(path, "figures") / f"{Path(image).stem}-attention.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, bbox_inches="tight", dpi=120)
        console.print(f"attention: {target}")
    return 0


def _brightness(light: float, means: list[float], inverted: bool) -> str:
    """A note where dark and light seem to be swapped, compared with training."""
    usual = sum(means) / len(means)
    if abs(1 - light - usual) + 0.2 >= abs(light - usual):
        return ""
    what = f"the picture is {'lighter' if light > usual else 'darker'} (mean {light:.2f}) than those of training"
    cure = "leave --invert out" if inverted else "--invert=true (make: INVERT=true) swaps dark and light"
    return f"note: {what} ({usual:.2f}), so do not trust what follows; {cure}"


class _Probabilities(nn.Module):
    """What is exported: pixels 0 to 1 in, probabilities out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        logits, _ = self.network(image)
        return logits.softmax(-1)


def _export(ckpt: str | None = None, out: str | None = None) -> int:
    """Write a model as PyTorch program (.pt2) and as ONNX, and compare both with the checkpoint.

    Both take float pixels from 0 to 1, [batch, channels, height, width], any batch size, and give probabilities.

    Args:
        ckpt: checkpoint; the best one of the newest finished vision run if null.
        out: folder to write to; `export` beside the checkpoint's run if null.
    """
    import onnxruntime

    path = Path(ckpt) if ckpt else newest_finished("vision")
    model = ImageClassifier.from_checkpoint(path)
    assert model.facts is not None and model.network is not None
    folder = Path(out) if out else _beside(path, "export")
    folder.mkdir(parents=True, exist_ok=True)
    wrapped = _Probabilities(model.network).eval()
    # Two, since a batch of one would be taken for a size that never changes.
    example = torch.rand(2, model.facts["channels"], *model.facts["image_size"])
    program = torch.export.export(wrapped, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    torch.export.save(program, folder / "model.pt2")
    onnx = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["image"], output_names=["probabilities"])
    assert onnx is not None
    onnx.save(folder / "model.onnx")

    pictures = torch.rand(5, *example.shape[1:])
    with torch.no_grad():
        right = wrapped(pictures)
    loaded = torch.export.load(folder / "model.pt2").module()(pictures)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (ran,) = session.run(None, {session.get_inputs()[0].name: pictures.numpy()})
    differences = {
        "model.pt2": (loaded - right).abs().max().item(),
        "model.onnx": (torch.from_numpy(ran) - right).abs().max().item(),
    }
    for name, difference in differences.items():
        if not difference <= TOLERANCE:
            raise ValueError(
                f"{folder / name} differs from {path} by {difference:.2g}, more than {TOLERANCE:g}; do not use it"
            )
        print(f"{folder / name}: equals the checkpoint (within {difference:.1e}; {TOLERANCE:g} is allowed)")
    return 0


def _beside(checkpoint: Path, name: str) -> Path:
    """A folder of the run that a checkpoint belongs to, or beside a checkpoint that stands alone."""
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / name
