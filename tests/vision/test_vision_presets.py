"""Every preset of vision on pictures as people have them: the cases V01 to V12 and P07, by folder and by table."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torchvision
import yaml
from loaded import images, labels, ready
from PIL import Image

import experiments
from experiments.__main__ import main
from experiments.training.usage import CONFIGS, presets
from experiments.vision import ImageData
from experiments.vision.finetuning import start_from
from experiments.vision.network import PictureFacts, VisionTransformer

PRESETS = [name for name in presets() if name == "vit" or name.startswith("vit-")]
FIRST = [
    pytest.param(name, marks=[] if name in ("vit-folder", "vit-finetune") else pytest.mark.slow) for name in PRESETS
]
"""One network of ours and one of timm are quick; the others take half a minute."""
SIZE = 32
ODD = ("cmyk_64.jpg", "exif_rotated_6.jpg", "odd_50x50.png", "wide_96x32.png", "one_by_one.png")
PLAIN = ("rgb_64.png", "grey_64.png", "rgba_hidden_colour.png", "grey_alpha.png")


def options_of(preset: str, *further: str) -> list[str]:
    """A run of the preset as short as can be: narrow, one block, one step."""
    content = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8"))
    words = [
        "fit",
        f"--config={preset}",
        "--run.wandb=false",
        "--run.samples=0",
        "--trainer.accelerator=cpu",
        "--trainer.max_epochs=1",
    ]
    words += ["--data.num_workers=0", "--data.batch_size=5", "--trainer.check_val_every_n_epoch=1"]
    words += [f"--data.image_size={SIZE}", "--data.channels=3"]
    if content["model"]["class_path"].endswith("TimmClassifier"):
        words += ["--model.name=test_vit", "--model.weights=random"]
    else:
        words += ["--model.dim=16", "--model.depth=1", "--model.num_heads=2", "--model.hidden_dim=16"]
    if "label_column" in content["data"]["init_args"]:
        words.append("--data.label_column=label")
    return [*words, *further]


@pytest.fixture
def mixed(tmp_path: Path, cases: Path) -> Path:
    """Pictures of every kind, with a file of the system between them; validation lacks a class."""
    root = tmp_path / "mixed"
    for folder in ("train/odd", "train/plain", "val/plain"):
        (root / folder).mkdir(parents=True)
    for folder, names in (("train/odd", ODD), ("train/plain", PLAIN), ("val/plain", PLAIN[:3])):
        for name in names:
            shutil.copy(cases / name, root / folder)
    shutil.copy(cases / "tree" / "train" / "cat" / "Thumbs.db", root / "train" / "odd")
    Image.fromarray(np.full((40, 30), 30000, np.uint16)).save(root / "train" / "odd" / "sixteen.png")
    palette = Image.new("P", (20, 20), 1)
    palette.putpalette([0, 0, 0, 200, 100, 0] + [0] * 762)
    palette.save(root / "train" / "odd" / "palette.gif")
    frames = [Image.new("RGB", (24, 24), (0, 90 * k, 0)) for k in range(3)]
    frames[0].save(root / "train" / "odd" / "moving.webp", save_all=True, append_images=frames[1:])
    return root


@pytest.mark.parametrize("preset", FIRST)
def test_pictures_of_every_kind_train(
    preset: str, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V03, V04, V05, V06, V08, V09, V11 and V12: twelve pictures in batches of five, to prediction."""
    assert main(options_of(preset, f"--data.path={mixed}", f"--run.root={tmp_path}")) == 0
    said = capsys.readouterr().out
    assert "12 train, 3 val, 3 test pictures in 2 classes" in said
    assert "The val part has no picture of: odd." in said
    assert "as they are no pictures: 1 .db" in said
    (checkpoint,) = tmp_path.glob(f"{preset}/*/checkpoints/best.ckpt")
    model = experiments.load(checkpoint)
    if not hasattr(model, "predict"):
        return
    pixels = model.read(mixed / "train" / "odd" / "exif_rotated_6.jpg")
    red, green = pixels[:, 1, 1].tolist(), pixels[:, 1, -2].tolist()
    assert red[0] > 200 > 60 > red[1] and green[1] > 90 > 60 > green[0]
    shares = model.predict(pixels)
    torch.testing.assert_close(shares, model.predict(pixels.float() / 255), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"range from .* to 2\d\d; expected 0 to 1"):
        model.predict(pixels.float())
    with pytest.raises(ValueError, match=r"these are 3x30x30.*--data\.image_size=\[32,32\]"):
        model.predict(torch.rand(1, 3, 30, 30))  # V02


@pytest.mark.parametrize("preset", FIRST)
def test_v07_a_bad_file_stops_with_its_name_or_is_left_out(
    preset: str, mixed: Path, tmp_path: Path, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(cases / "truncated.png", mixed / "train" / "plain" / "bad.png")
    words = options_of(preset, f"--data.path={mixed}", f"--run.root={tmp_path}", "--trainer.max_steps=1")
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "bad.png is a damaged picture" in said and "--data.bad_files=skip" in said
    assert len(said.strip().splitlines()) <= 3
    assert main([*words, "--data.bad_files=skip"]) == 0
    assert "1 of 16 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("preset", PRESETS)
def test_v01_no_pixel_is_left_out_in_silence(
    preset: str, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures that the preset's patch does not divide are refused, with both numbers."""
    content = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8"))
    patch = content["model"]["init_args"].get("patch_size", 16)  # that of test_vit
    size = 50 if 50 % patch else 51
    words = options_of(preset, f"--data.path={mixed}", f"--run.root={tmp_path}", f"--data.image_size={size}")
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"{size}x{size}" in said and str(patch) in said and "--data.image_size" in said
    assert len(said.strip().splitlines()) <= 3


@pytest.mark.parametrize("preset", PRESETS)
def test_the_head_comment_names_the_preset_and_says_what_was_measured(preset: str) -> None:
    text = presets()[preset]
    assert text.startswith(f"make train EXP={preset}")
    assert "not measured" in text or "test accuracy about" in text or "about an hour on two cores" in text


def test_the_presets_keep_to_the_size_that_they_are_for() -> None:
    """3.2M and 0.3M parameters, counted where the class number is that of the data set."""
    for preset, classes, most in (
        ("vit-cifar10", 10, 3_200_000), ("vit-cifar100", 100, 3_200_000),
        ("vit-cifar10-cpu", 10, 3_200_000), ("vit-cifar10-tiny", 10, 300_000),
    ):  # fmt: skip
        content = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8"))["model"]["init_args"]
        for name in ("attention", "label_smoothing", "optim"):
            del content[name]
        with torch.device("meta"):
            network = VisionTransformer(PictureFacts(32, 32, 3, classes, [0.5] * 3, [0.5] * 3), **content)
        assert sum(p.numel() for p in network.parameters()) <= most, preset


def many_classes(count: int) -> datasets.Dataset:
    """CIFAR-100 as hubs have it: a picture, and two columns of labels."""
    cells = [(np.full((32, 32, 3), k % 256, np.uint8), k % 100, k % 20) for k in range(count)]
    table = datasets.Dataset.from_dict(
        {"img": [Image.fromarray(c[0]) for c in cells], "fine_label": [c[1] for c in cells],
         "coarse_label": [c[2] for c in cells]}
    )  # fmt: skip
    table = table.cast_column("fine_label", datasets.ClassLabel(names=[f"fine {k}" for k in range(100)]))
    return table.cast_column("coarse_label", datasets.ClassLabel(names=[f"coarse {k}" for k in range(20)]))


def test_cifar100_from_files_of_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`vit-cifar100`: 100 classes by its own option, 20 by another column; what is ambiguous is asked."""
    (tmp_path / "cifar100").mkdir()
    many_classes(400).to_parquet(tmp_path / "cifar100" / "train-00000.parquet")
    many_classes(100).to_parquet(tmp_path / "cifar100" / "test-00000.parquet")
    words = [word for word in options_of("vit-cifar100") if not word.startswith("--data.label_column")]
    words += [f"--data.path={tmp_path / 'cifar100'}", f"--run.root={tmp_path}", "--trainer.max_steps=1"]
    assert main(words) == 0
    assert "300 train, 100 val, 100 test pictures in 100 classes" in capsys.readouterr().out
    assert main([*words, "--data.label_column=coarse_label"]) == 0
    assert "in 20 classes" in capsys.readouterr().out
    assert main([*words, "--data.label_column=null"]) == 1
    assert "--data.label_column" in capsys.readouterr().err


def test_a_data_set_of_a_hub_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = many_classes(60).rename_column("coarse_label", "label").remove_columns("fine_label")
    asked = []

    def from_hub(name: str, configuration: str | None) -> dict[str, datasets.Dataset]:
        asked.append(name)
        return {"train": table, "test": table.select(range(20))}

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert main(options_of("vit-hub", f"--run.root={tmp_path}", "--trainer.max_steps=1")) == 0
    assert asked == ["zalando-datasets/fashion_mnist"]
    assert "40 train, 20 val, 20 test pictures in 20 classes" in capsys.readouterr().out


def test_tables_bring_the_same_pictures_as_folders(mixed: Path, tmp_path: Path) -> None:
    """V03 to V06 and 16 bits, palettes and animations, through parquet files."""
    files = sorted(path for path in (mixed / "train").rglob("*") if path.is_file() and path.suffix != ".db")
    rows = {
        "image": [{"bytes": path.read_bytes(), "path": path.name} for path in files],
        "label": [int(path.parent.name == "plain") for path in files],
    }
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=False))
    (tmp_path / "tables").mkdir()
    for part in ("train", "val"):
        table.to_parquet(tmp_path / "tables" / f"{part}.parquet")
    one, other = ready(path=tmp_path / "tables", image_size=SIZE), ready(path=mixed, image_size=SIZE)
    assert labels(one.val_dataloader()) == rows["label"]
    order = torch.tensor([sorted(files).index(path) for path in files])
    folder = other._part("train").samples.images
    assert torch.equal(images(one.val_dataloader())[order], folder)


def test_a_picture_too_large_for_memory_is_named(mixed: Path, tmp_path: Path) -> None:
    """A PNG of a few bytes that says it is 60,000 pixels high and wide; Pillow takes it for an attack."""
    small = (mixed / "train" / "plain" / "rgb_64.png").read_bytes()
    header = b"IHDR" + (60000).to_bytes(4, "big") * 2 + small[24:29]
    huge = small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]
    (mixed / "train" / "plain" / "huge.png").write_bytes(huge)
    with pytest.raises(ValueError, match=r"huge\.png is too large: more than 178,956,970 pixels"):
        ready(path=mixed, image_size=SIZE)
    data = ready(path=mixed, image_size=SIZE, bad_files="skip")
    assert len(labels(data.train_dataloader())) == 12


@pytest.mark.parametrize(
    ("stem", "position"), [("patch", "learned_2d"), ("compact", "learned"), ("residual", "learned_2d")]
)
def test_p07_a_learned_grid_is_resized_where_training_goes_on_with_larger_pictures(
    stem: str, position: str, tmp_path: Path, make_tree: Callable[..., Path], report: pytest.LogCaptureFixture
) -> None:
    """P07 in fine-tuning: 4x6 to 8x12, the class token's row unchanged, columns still equal down their length."""
    root = make_tree({"train/a": 4, "train/b": 4, "val/a": 1, "val/b": 1}, size=(24, 16))
    words = options_of(
        "vit", f"--data.path={root}", f"--run.root={tmp_path}", "--data.image_size=[16,24]", f"--model.stem={stem}",
        f"--model.position={position}", "--model.pool=class", "--model.patch_size=4", "--trainer.max_steps=1",
    )  # fmt: skip
    assert main(words) == 0
    (checkpoint,) = tmp_path.glob("vit/*/checkpoints/last.ckpt")
    content = torch.load(checkpoint, weights_only=True)
    table = content["state_dict"]["network.position.table"]
    assert table.shape == (25, 16)
    table[1:, 0], table[1:, 1] = 3.0, torch.arange(6.0).repeat(4)
    torch.save(content, checkpoint)
    new = VisionTransformer(
        PictureFacts(32, 48, 3, 2, [0.5] * 3, [0.5] * 3), dim=16, depth=1, num_heads=2, hidden_dim=16, patch_size=4,
        stem=stem, position=position,
    )  # type: ignore[arg-type]  # fmt: skip
    start_from(new, "head.", ["a", "b"], str(checkpoint), replace_head=False)
    found = new.position.table
    assert found.shape == (97, 16)
    assert torch.equal(found[0], table[0])
    torch.testing.assert_close(found[1:, 0], torch.full((96,), 3.0))
    columns = found[1:, 1].view(8, 12)
    torch.testing.assert_close(columns, columns[:1].expand(8, 12), atol=1e-5, rtol=0)
    assert (columns[0].diff() > 0).all()
    assert "resized: 4x6 to 8x12" in report.text


def test_cifar_as_torchvision_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    class Found:
        """What torchvision gives of a data set on disk."""

        def __init__(self, root: Path, *, train: bool, download: bool) -> None:
            asked.append((Path(root), train, download))
            count = 40 if train else 10
            self.data = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(32, 1).repeat(32, 2).repeat(3, 3)
            self.targets, self.classes = [k % 2 for k in range(count)], ["cat", "dog"]

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Found)
    monkeypatch.setenv("ATTNZOO_DATA", str(tmp_path))
    data = ready(path="torchvision:CIFAR10")
    assert asked == [(tmp_path, True, True), (tmp_path, False, True)]
    assert (data.facts["classes"], data.facts["image_size"]) == (["cat", "dog"], [32, 32])
    assert images(data.test_dataloader())[:, 0, 0, 0].tolist() == list(range(10))
    assert len(labels(data.train_dataloader())) == 36 and labels(data.test_dataloader()) == [0, 1] * 5


def test_a_torchvision_name_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("<urlopen error no route>\nand more")

    monkeypatch.setattr(torchvision.datasets, "CIFAR100", unreachable)
    with pytest.raises(ValueError, match=r"torchvision:CIFAR100: <urlopen error no route> Download it where"):
        ready(path="torchvision:CIFAR100")
    with pytest.raises(ValueError, match="expected torchvision:CIFAR10 or CIFAR100"):
        ImageData("torchvision:MNIST").setup("fit")
