"""Writes a trained model as files for other programs, and checks that these give the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo import Mechanism
from experiments.training.finding import newest_finished
from experiments.training.module import Experiment
from experiments.training.options import call
from experiments.training.writing import check_writable

TOLERANCE = 1e-5
"""How far an exported model may be from the one that it was made of."""


class Part(NamedTuple):
    """One network to be exported.

    Attributes:
        name: of its files, without suffix.
        network: takes tensors and gives tensors.
        example: inputs to trace it by; no size that varies may be 1, which would be taken for fixed.
        varying: for each input its dimensions of free size: number -> name, or (name, greatest size).
        inputs: names of the inputs.
        outputs: names of the outputs.
        check: inputs of other sizes, for the comparison.
    """

    name: str
    network: nn.Module
    example: tuple[Tensor, ...]
    varying: tuple[dict[int, str | tuple[str, int]], ...]
    inputs: Sequence[str]
    outputs: Sequence[str]
    check: tuple[Tensor, ...]


class Probabilities(nn.Module):
    """A classifier whose network gives logits and aux, as one that gives probabilities."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """What the network takes -> [B, classes]."""
        logits, _ = self.network(inputs)
        return logits.softmax(-1)


def export(argv: list[str]) -> int:
    """Writes a model as .pt2 and .onnx. Arguments: see ``_export``."""
    return call(_export, argv, "python -m experiments export")


def _export(ckpt: str | None = None, out: str | None = None) -> int:
    """Write a model as PyTorch program (.pt2) and as ONNX, and compare both with the checkpoint.

    A classifier takes float pixels from 0 to 1, [batch, channels, height, width], and gives probabilities. A translator
    is two networks, encoder and decoder, and its vocabularies; README.txt beside them says how they go together. A
    forecaster takes and gives scaled values; README.txt and scaling.json say how they are scaled.

    Args:
        ckpt: checkpoint; the best one of the newest finished run if null.
        out: folder to write to; `export` beside the checkpoint's run if null.
    """
    path = Path(ckpt) if ckpt else newest_finished(())
    model = Experiment.from_checkpoint(path)
    parts = model.export_parts()
    if not parts:
        raise ValueError(f"{path}: a {model.task} model has nothing to export; name another by --ckpt=PATH (CKPT=PATH)")
    folder = Path(out) if out else beside(path, "export")
    check_writable(folder / "README.txt", "--out")
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for file, difference in write_part(part, folder).items():
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"{file} differs from {path} by {difference:.2g}, more than {TOLERANCE:g}; do not use it"
                )
            print(f"{file}: equals the checkpoint (within {difference:.1e}; {TOLERANCE:g} is allowed)")
    for name, text in model.export_texts().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)
    return 0


def write_part(part: Part, folder: Path) -> dict[Path, float]:
    """Writes ``<name>.pt2`` and ``<name>.onnx``; returns how far each is from the network on ``part.check``."""
    import onnxruntime

    limits = {size: (size, None) if isinstance(size, str) else size for dims in part.varying for size in dims.values()}
    sizes = {size: torch.export.Dim(name, min=1, max=most) for size, (name, most) in limits.items()}
    shapes = tuple({dim: sizes[size] for dim, size in dims.items()} for dims in part.varying)
    network = part.network.eval()
    with warnings.catch_warnings():
        # torch's recurrent layers hold their weights in a list as well; nothing is lost.
        warnings.filterwarnings("ignore", message=r"The tensor attributes .*_flat_weights")
        try:
            program = torch.export.export(network, part.example, dynamic_shapes=shapes)
        except (RuntimeError, TypeError) as error:
            names = sorted({type(x).__name__ for x in network.modules() if isinstance(x, Mechanism)})
            raise ValueError(
                f"The {part.name} with {', '.join(names)} cannot be exported for sizes that vary: "
                f"{str(error).strip().splitlines()[0]}\nA model with Softmax and rotary or no positions can."
            ) from error
    torch.export.save(program, folder / f"{part.name}.pt2")
    onnx = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=list(part.inputs), output_names=list(part.outputs)
    )
    assert onnx is not None
    onnx.save(folder / f"{part.name}.onnx")

    with torch.no_grad():
        right = _listed(network(*part.check))
        loaded = _listed(torch.export.load(folder / f"{part.name}.pt2").module()(*part.check))
    session = onnxruntime.InferenceSession(folder / f"{part.name}.onnx", providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    ran = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, part.check, strict=True)})
    return {
        folder / f"{part.name}.pt2": _furthest(loaded, right),
        folder / f"{part.name}.onnx": _furthest([torch.from_numpy(x) for x in ran], right),
    }


def beside(checkpoint: Path, name: str) -> Path:
    """A folder of the run that a checkpoint belongs to, or beside a checkpoint that stands alone."""
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / name


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _furthest(found: list[Tensor], right: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(found, right, strict=True))
