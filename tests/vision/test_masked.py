"""Pretraining by hidden patches: what is hidden stays hidden, the loss is over it alone, training goes on from it."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.__main__ import main
from experiments.vision import MaskedPatches
from experiments.vision.finetuning import start_from
from experiments.vision.layers import StemName
from experiments.vision.masked import MaskedTransformer
from experiments.vision.network import PictureFacts, VisionTransformer

WIDE = PictureFacts(8, 16, 3, 2, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
FACTS = {
    "image_size": [8, 16], "channels": 3, "classes": ["a", "b"], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4],
}  # fmt: skip
encoder = functools.partial(VisionTransformer, dim=16, depth=2, num_heads=2, patch_size=4)


@pytest.mark.parametrize("stem", ["patch", "conv", "compact", "residual"])
@pytest.mark.parametrize("pool", ["class", "sequence"])
def test_nothing_of_a_hidden_patch_reaches_what_is_told(stem: StemName, pool: str) -> None:
    model = MaskedTransformer(encoder(WIDE, stem=stem, pool=pool), 4).eval()
    picture, hidden = torch.rand(2, 3, 8, 16), torch.zeros(2, 8, dtype=torch.bool)
    hidden[:, [1, 6]] = True  # row 0, column 1 and row 1, column 2
    changed = picture.clone()
    changed[:, :, 0:4, 4:8] = torch.rand(2, 3, 4, 4)
    changed[:, :, 4:8, 8:12] = torch.rand(2, 3, 4, 4)
    with torch.no_grad():
        (told, true, _), (again, other, _) = model(picture, hidden), model(changed, hidden)
        assert torch.equal(told, again)
        assert ((true - other).abs().amax(2) > 0).tolist() == hidden.tolist()
        changed[:, :, 0:4, 0:4] += 0.3  # a patch that is seen
        assert not torch.allclose(model(changed, hidden)[0], told)


def test_true_pixels_are_those_of_the_patch_in_raster_order() -> None:
    model = MaskedTransformer(encoder(WIDE, stem="patch"), 4).eval()
    picture = torch.rand(1, 3, 8, 16)
    true = model(picture, torch.ones(1, 8, dtype=torch.bool))[1]
    mean, std = (torch.tensor(values)[:, None, None] for values in (WIDE.mean, WIDE.std))
    wanted = (picture[0] - mean) / std
    for number in range(8):
        row, column = 4 * (number // 4), 4 * (number % 4)
        torch.testing.assert_close(true[0, number], wanted[:, row : row + 4, column : column + 4].flatten())


def pretraining(**options: float) -> MaskedPatches:
    model = MaskedPatches(dim=16, depth=1, num_heads=2, patch_size=4, stem="patch", **options)  # type: ignore[arg-type]
    model.facts = FACTS
    model.configure_model()
    return model


def test_the_loss_is_the_mean_over_hidden_pixels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pretraining()
    hidden = torch.tensor([[True, False] * 4, [False] * 7 + [True]])
    monkeypatch.setattr(model, "_hide", lambda count, stage: hidden)
    picture = torch.rand(2, 3, 8, 16)
    step = model.step({"image": picture, "label": torch.tensor([0, 1])}, "train")
    told, true, _ = model.network(picture, hidden)
    errors = [(told[b, n] - true[b, n]).abs().mean() for b in range(2) for n in range(8) if hidden[b, n]]
    assert int(step.count) == len(errors) == 5
    torch.testing.assert_close(step.loss_sum / step.count, torch.stack(errors).mean())


@pytest.mark.parametrize(("share", "number"), [(0.6, 5), (0.01, 1), (0.99, 7)])
def test_as_many_patches_of_each_picture_are_hidden(share: float, number: int) -> None:
    model = pretraining(mask_share=share)
    for stage in ("train", "val"):
        assert model._hide(6, stage).sum(1).tolist() == [number] * 6
    assert torch.equal(model._hide(6, "val"), model._hide(6, "val"))
    assert not torch.equal(model._hide(60, "train"), model._hide(60, "train"))
    with pytest.raises(ValueError, match=r"--model\.mask_share is 1\.0; it must lie between 0 and 1"):
        pretraining(mask_share=1.0)


def test_every_parameter_is_trained() -> None:
    """What pretraining leaves alone would stop several processes."""
    model = MaskedTransformer(encoder(WIDE, stem="compact", pool="sequence", layer_scale=0.1), 4)
    told, true, aux = model(torch.rand(2, 3, 8, 16), torch.rand(2, 8) < 0.5)
    ((told - true).abs().mean() + aux).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


NETWORK = ["--model.dim=16", "--model.depth=1", "--model.num_heads=2", "--model.hidden_dim=16"]
FEW = [
    "--data.image_size=8",
    "--data.batch_size=4",
    "--data.num_workers=0",
    "--trainer.max_steps=2",
    "--run.wandb=false",
    "--run.samples=0",
]
FEW += ["--trainer.accelerator=cpu", "--trainer.precision=32", "--trainer.check_val_every_n_epoch=1"]


def test_training_with_labels_starts_from_the_encoder(
    make_tree: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    report: pytest.LogCaptureFixture,
) -> None:
    root = make_tree({"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2})
    common = [f"--data.path={root}", f"--run.root={tmp_path}", *FEW, *NETWORK]
    assert main(["fit", "--config=vit-cifar10-masked", *common]) == 0
    assert "--model.init_from=" in capsys.readouterr().out
    (checkpoint,) = tmp_path.glob("vit-cifar10-masked/*/checkpoints/last.ckpt")

    shown = {"head.weight", "head.bias", "sequence_pool.score.weight", "sequence_pool.score.bias"}
    model = encoder(
        PictureFacts(8, 8, 3, 5, [0.5] * 3, [0.5] * 3), depth=1, hidden_dim=16, patch_size=2, stem="compact",
        pool="sequence", position="sincos_2d",
    )  # fmt: skip
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    start_from(model, "head.", list("abcde"), str(checkpoint), replace_head=False)
    assert "The head is new, for 5 classes" in report.text
    kept = torch.load(checkpoint, weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        wanted = fresh[name] if name in shown else kept[f"network.encoder.{name}"]
        assert torch.equal(value, wanted), name

    assert main(["fit", "--config=vit-cifar10", *common, f"--model.init_from={checkpoint}"]) == 0
    assert main(["classify", f"--image={root / 'val' / 'a' / '00.png'}", f"--ckpt={checkpoint}"]) == 1
    assert "is of a pretraining model, MaskedPatches" in capsys.readouterr().err
