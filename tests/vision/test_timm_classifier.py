"""Networks of timm: the same logits, weights from elsewhere or none, a head that is kept or replaced."""

from __future__ import annotations

import io
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch

from experiments.__main__ import main
from experiments.training import saved
from experiments.vision import TimmClassifier


def classifier(classes: int = 3, channels: int = 3, size: int = 32, **options: Any) -> TimmClassifier:
    model = TimmClassifier(**{"name": "test_vit", **options})
    names = [f"class {number}" for number in range(classes)]
    model.facts = {"classes": names, "channels": channels, "image_size": [size, size]}
    model.configure_model()
    return model


def few_steps(root: Path) -> list[str]:
    return [
        "--config=vit-finetune", f"--run.root={root}", "--run.wandb=false", "--run.samples=0",
        "--trainer.accelerator=cpu", "--model.name=test_vit", "--model.weights=random", "--data.image_size=32",
        "--data.num_workers=0", "--data.batch_size=4", "--trainer.max_steps=2", "--model.optim.warmup_steps=1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["test_vit", "resnet10t"])
def test_the_logits_are_those_of_timm_before_training(name: str) -> None:
    model = classifier(name=name)
    options = {"img_size": 32} if name == "test_vit" else {}
    theirs = timm.create_model(name, num_classes=3, **options).eval()
    theirs.load_state_dict(model.network.model.state_dict())
    picture = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(theirs.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        logits, aux = model.network.eval()(picture)
        assert torch.equal(logits, theirs((picture - mean) / std))
    assert aux.item() == 0


def test_grey_pictures_are_normalised_by_the_mean_of_the_channels() -> None:
    model = classifier(name="resnet10t", channels=1)
    cfg = model.network.model.pretrained_cfg
    assert model.network.mean.flatten().tolist() == pytest.approx([sum(cfg["mean"]) / 3])
    assert model.predict(torch.rand(2, 1, 32, 32)).shape == (2, 3)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A timm whose trained weights are there: each is its number in the network, heads of another size new."""
    create = timm.create_model

    def made(name: str, pretrained: bool = False, **options: Any) -> Any:
        model = create(name, **options)
        if pretrained:
            own = timm.get_pretrained_cfg(name).num_classes
            with torch.no_grad():
                for place, (key, value) in enumerate(model.state_dict().items()):
                    if options["num_classes"] == own or not key.startswith("head."):
                        value.fill_(place)
        return model

    monkeypatch.setattr(timm, "create_model", made)
    return made


def test_trained_weights_go_in_and_the_head_is_new(
    trained: Callable[..., Any], report: pytest.LogCaptureFixture
) -> None:
    model = classifier()
    model.start()
    for place, (key, value) in enumerate(model.network.model.state_dict().items()):
        assert key.startswith("head.") or bool((value == place).all()), key
    assert model.network.model.head.weight.std() > 0
    assert "test_vit starts with the weights of timm; its head is new" in report.text


def test_v10_a_head_is_kept_where_the_classes_are_as_many(
    trained: Callable[..., Any], report: pytest.LogCaptureFixture
) -> None:
    model = classifier(classes=1000, keep_head=True)
    model.start()
    place = list(model.network.model.state_dict()).index("head.weight")
    assert bool((model.network.model.head.weight == place).all())
    assert "its head is kept" in report.text
    with pytest.raises(ValueError, match=r"head for 1000 classes; this data has 5.*--model\.keep_head=false"):
        classifier(classes=5, keep_head=True)
    with pytest.raises(ValueError, match=r"keep_head=true keeps a trained head; --model\.weights=random brings none"):
        TimmClassifier("test_vit", weights="random", keep_head=True)


def test_without_a_network_the_start_is_random_and_said_or_refused(
    monkeypatch: pytest.MonkeyPatch, report: pytest.LogCaptureFixture
) -> None:
    create = timm.create_model

    def unreachable(name: str, pretrained: bool = False, **options: Any) -> Any:
        if pretrained:
            raise FileNotFoundError("An error happened while trying to locate the file on the Hub.")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", unreachable)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *asked, **options: io.BytesIO())
    model = classifier()
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    model.start()
    assert all(torch.equal(before[name], value) for name, value in model.network.state_dict().items())
    assert "test_vit starts with RANDOM weights" in report.text
    with pytest.raises(
        ValueError, match=r"weights of test_vit could not be had: An error.*\n.*--model\.weights=random"
    ):
        classifier(weights="pretrained").start()


def test_a_name_that_timm_does_not_know_gets_near_ones() -> None:
    with pytest.raises(ValueError, match=r"--model\.name=test_vi is no network of timm\. Near: test_vit"):
        TimmClassifier("test_vi")


def test_v01_patches_that_do_not_divide_the_picture_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Pictures of 50x50 .* patches of 16x16.*--data\.image_size"):
        classifier(size=50)


def test_v01_a_stem_that_cuts_is_a_patch_whatever_the_network_calls_it() -> None:
    with pytest.raises(ValueError, match=r"Pictures of 50x50 .* patches of 4x4.*--data\.image_size"):
        classifier(name="test_convnext", size=50)


def test_an_option_or_weights_that_the_network_has_not_are_named() -> None:
    with pytest.raises(ValueError, match=r"vgg11 has no drop path; leave it out by --model\.drop_path=0"):
        classifier(name="vgg11", drop_path=0.1)
    with pytest.raises(ValueError, match=r"test_vit\.none: there are no such weights\. There are: test_vit\.r160"):
        TimmClassifier("test_vit.none")


def test_a_hub_that_is_silent_is_asked_once(monkeypatch: pytest.MonkeyPatch, report: pytest.LogCaptureFixture) -> None:
    def silent(*asked: Any, **options: Any) -> None:
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", silent)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/nowhere")
    classifier().start()
    assert re.search(r"RANDOM weights.*does not answer \(no network here\), and its cache", report.text)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_p07_places_of_timm_are_resized_for_larger_pictures(
    make_tree: Callable[..., Path], tmp_path: Path, report: pytest.LogCaptureFixture
) -> None:
    root = make_tree({"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2})
    assert main(["fit", *few_steps(tmp_path), f"--data.path={root}", "--data.image_size=[32,48]"]) == 0
    (checkpoint,) = tmp_path.glob("vit-finetune/*/checkpoints/last.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    table = content["state_dict"]["network.model.pos_embed"]
    assert table.shape[:2] == (1, 1 + 2 * 3)
    table[0, 1:, 0], table[0, 1:, 1] = 3.0, torch.arange(3.0).repeat(2)
    torch.save(content, checkpoint)
    model = TimmClassifier("test_vit", weights="random", init_from=str(checkpoint))
    model.facts = saved.origin(content)["facts"] | {"image_size": [64, 96]}
    model.configure_model()
    model.start()
    found = model.network.model.pos_embed[0]
    assert torch.equal(found[0], table[0, 0])
    torch.testing.assert_close(found[1:, 0], torch.full((24,), 3.0))
    columns = found[1:, 1].view(4, 6)
    assert (columns[0].diff() > 0).all() and torch.allclose(columns, columns[:1], atol=1e-5)
    assert "resized: 2x3 to 4x6" in report.text


def test_v02_pictures_of_another_size_are_refused() -> None:
    for name in ("test_vit", "resnet10t"):
        with pytest.raises(ValueError, match=r"3x64x64.*these are 3x62x62.*--data\.image_size=\[64,64\]"):
            classifier(name=name, size=64).predict(torch.rand(1, 3, 62, 62))


def test_v10_a_checkpoint_with_other_classes_is_refused_or_gets_a_new_head(
    make_tree: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line, through training and classification."""
    few = few_steps(tmp_path)
    root = make_tree({"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2})
    assert main(["fit", *few, f"--data.path={root}"]) == 0
    (checkpoint,) = tmp_path.glob("vit-finetune/*/checkpoints/last.ckpt")
    picture = root / "val" / "a" / "00.png"
    assert main(["classify", f"--image={picture}", f"--ckpt={checkpoint}"]) == 0
    assert "attention: no picture" in capsys.readouterr().out

    (root / "train" / "c").mkdir()
    for number in range(4):
        (root / "train" / "c" / f"{number}.png").write_bytes(picture.read_bytes())
    again = ["fit", *few, f"--data.path={root}", f"--model.init_from={checkpoint}"]
    assert main(again) == 1
    assert "was trained on 2 classes; this data has 3" in (said := capsys.readouterr().err) and "replace_head" in said
    assert main([*again, "--model.replace_head=true"]) == 0

    model = classifier(init_from=str(checkpoint), replace_head=True)
    fresh = model.network.model.head.weight.clone()
    model.start()
    kept = torch.load(checkpoint, weights_only=True)["state_dict"]
    heads = {"model.head.weight", "model.head.bias"}
    assert torch.equal(model.network.model.head.weight, fresh) and fresh.shape[0] == 3
    for name, value in model.network.state_dict().items():
        assert name in heads or torch.equal(value, kept[f"network.{name}"]), name
