"""Using a trained classifier: from Python, from the command line, as an exported file; and starting from one."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from PIL import Image
from quick_vit import SMALL

import experiments
from attnzoo import Softmax
from experiments.__main__ import main
from experiments.training import pictures
from experiments.vision import ImageClassifier
from experiments.vision.drawing import attention_figures, block_maps, rollout
from experiments.vision.network import PictureFacts, VisionTransformer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one finished run on the digits."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["fit", "--config=vit", f"--run.root={root}", "--trainer.max_epochs=2", *SMALL]) == 0
    return root


@pytest.fixture
def checkpoint(runs: Path) -> Path:
    (found,) = runs.glob("vit/*/checkpoints/best.ckpt")
    return found


def test_the_model_predicts_from_the_file_alone(checkpoint: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.ckpt"
    shutil.copy(checkpoint, alone)
    model = experiments.load(alone)
    probabilities = model.predict(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(3))
    assert model.facts["classes"] == [str(digit) for digit in range(10)]


def test_r09_the_checkpoint_holds_plain_values_only(checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    entry = content["experiment"]
    assert entry["class_path"].endswith("ImageClassifier")
    assert entry["init_args"]["attention"]["class_path"].endswith("Softmax")
    assert json.loads(json.dumps(entry)) == entry


def test_v11_eight_bits_and_floats_give_the_same_and_unscaled_floats_are_refused(checkpoint: Path) -> None:
    model = experiments.load(checkpoint)
    pixels = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(model.predict(pixels), model.predict(pixels.float() / 255), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="range from .* to 25[0-9]"):
        model.predict(torch.full((1, 1, 8, 8), 255.0))


def test_a_file_gives_what_its_pixels_give(checkpoint: Path, tmp_path: Path) -> None:
    model = experiments.load(checkpoint)
    pixels = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    Image.fromarray(pixels[0].numpy()).save(tmp_path / "digit.png")
    torch.testing.assert_close(model.predict(tmp_path / "digit.png"), model.predict(pixels))


def test_classify_prints_the_classes_and_draws_the_attention(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (20, 20), 30).save(tmp_path / "dark.png")
    target = tmp_path / "out" / "attention.png"
    arguments = [f"--image={tmp_path / 'dark.png'}", f"--ckpt={checkpoint}", f"--out={target}", "--top=3"]
    assert main(["classify", *arguments]) == 0
    printed = capsys.readouterr().out
    shares = [float(line.split()[-1]) for line in printed.splitlines() if line.strip()[:1].isdigit()]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert "swaps dark and light" not in printed
    with Image.open(target) as picture:
        assert min(picture.size) > 100


def test_a_picture_on_white_paper_is_pointed_out_and_can_be_inverted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ink = Image.new("L", (8, 8), 255)
    ink.putpixel((3, 3), 0)
    ink.save(tmp_path / "ink.png")
    arguments = ["classify", f"--image={tmp_path / 'ink.png'}", f"--ckpt={checkpoint}", f"--out={tmp_path / 'a.png'}"]
    assert main(arguments) == 0
    assert "--invert=true" in capsys.readouterr().out
    assert main([*arguments, "--invert=true"]) == 0
    printed = capsys.readouterr().out
    assert "--invert=true" not in printed
    light = 255 - torch.frombuffer(bytearray(ink.tobytes()), dtype=torch.uint8).view(1, 8, 8)
    best = experiments.load(checkpoint).predict(light).max()
    assert f"{best:.4f}" in printed


def test_v06_a_picture_is_turned_upright_in_prediction(checkpoint: Path, cases: Path) -> None:
    pixels = experiments.load(checkpoint).read(cases / "exif_rotated_6.jpg")
    # Red top left is darker than green top right, blue bottom left darkest of all.
    assert pixels.shape == (1, 8, 8)
    assert pixels[0, 7, 0] < pixels[0, 0, 0] < pixels[0, 0, 7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image=no.png"], "no.png"),
        (["--imge=x.png"], "Did you mean --image"),
        (["--image=no.png", "--top=0"], "--top is 0"),
        (["--image=examples/seven.png", "--out=/proc/none/a.png"], "--out"),
        ([], "image"),
    ],
)
def test_wrong_words_to_classify_get_a_short_answer(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["classify", f"--ckpt={checkpoint}", *arguments]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) <= 3


def test_the_newest_finished_run_is_used_and_none_is_said(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "dark.png"
    Image.new("L", (8, 8), 30).save(picture)
    monkeypatch.chdir(tmp_path)
    assert main(["classify", f"--image={picture}"]) == 1
    assert "no finished vision run under runs/" in capsys.readouterr().err
    (tmp_path / "runs").symlink_to(runs)
    assert main(["classify", f"--image={picture}"]) == 0
    assert "best.ckpt" in capsys.readouterr().out


def test_a_run_that_never_validated_is_used_by_its_last_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--run.root=runs", "--trainer.max_steps=2", "--trainer.limit_val_batches=0", *SMALL]
    assert main(["fit", "--config=vit", *words]) == 0
    Image.new("L", (8, 8), 30).save("dark.png")
    assert main(["classify", "--image=dark.png"]) == 0
    assert "last.ckpt" in capsys.readouterr().out


@pytest.mark.slow
def test_a_mechanism_with_parameters_is_drawn_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Additive: its map hangs on a parameter, and its chunks on the batch."""
    arguments = [f"--run.root={tmp_path / 'runs'}", "--model.attention=Additive", "--trainer.max_steps=2", *SMALL]
    assert main(["fit", "--config=vit", *arguments]) == 0
    (found,) = (tmp_path / "runs").glob("vit/*/checkpoints/last.ckpt")
    Image.new("L", (8, 8), 30).save(tmp_path / "dark.png")
    assert main(["classify", f"--image={tmp_path / 'dark.png'}", f"--ckpt={found}", f"--out={tmp_path / 'a.png'}"]) == 0
    assert main(["export", f"--ckpt={found}", f"--out={tmp_path}"]) == 0
    assert "equals the checkpoint" in capsys.readouterr().out


def test_a_mechanism_without_a_map_is_trained_and_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Softmax, "traits", dataclasses.replace(Softmax.traits, linear_in_v=False))
    arguments = [f"--run.root={tmp_path / 'runs'}", "--trainer.max_steps=2", *SMALL]
    assert main(["fit", "--config=vit", *arguments]) == 0
    printed = capsys.readouterr()
    assert "No attention picture: Softmax" in printed.out + printed.err
    (found,) = (tmp_path / "runs").glob("vit/*/checkpoints/last.ckpt")
    Image.new("L", (8, 8), 30).save(tmp_path / "dark.png")
    assert main(["classify", f"--image={tmp_path / 'dark.png'}", f"--ckpt={found}"]) == 0
    assert "probability" in capsys.readouterr().out


def test_an_attention_picture_of_no_known_kind_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (8, 8), 30).save(tmp_path / "dark.png")
    assert main(["classify", f"--image={tmp_path / 'dark.png'}", f"--ckpt={checkpoint}", "--out=notes.md"]) == 1
    assert "--out=notes.md" in capsys.readouterr().err


def test_exported_files_equal_the_checkpoint_for_any_batch_size(checkpoint: Path, tmp_path: Path) -> None:
    assert main(["export", f"--ckpt={checkpoint}", f"--out={tmp_path}"]) == 0
    model = experiments.load(checkpoint)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    program = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (1, 3, 8):
        pictures = torch.rand(batch, 1, 8, 8)
        right = model.predict(pictures)
        (ran,) = session.run(None, {"image": pictures.numpy()})
        torch.testing.assert_close(torch.from_numpy(ran), right, atol=1e-5, rtol=0)
        torch.testing.assert_close(program(pictures), right, atol=1e-5, rtol=0)


def folder_of(make_tree: Callable[..., Path], *classes: str) -> Path:
    return make_tree({f"{part}/{name}": 3 for part in ("train", "val") for name in classes})


@pytest.fixture
def three_classes(make_tree: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A folder of three classes and a checkpoint trained on it."""
    data = folder_of(make_tree, "cat", "dog", "owl")
    arguments = [f"--data.path={data}", f"--run.root={tmp_path / 'three'}", "--trainer.max_epochs=1", *SMALL]
    assert main(["fit", "--config=vit", *arguments]) == 0
    (found,) = (tmp_path / "three").glob("vit/*/checkpoints/best.ckpt")
    return data, found


def test_v10_another_number_of_classes_is_refused_or_gets_a_new_head(
    three_classes: tuple[Path, Path], make_tree: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, before = three_classes
    for name in ("fox", "hen"):
        for part in ("train", "val"):
            shutil.copytree(data / part / "cat", data / part / name)
    arguments = [f"--data.path={data}", f"--model.init_from={before}", f"--run.root={tmp_path / 'five'}", *SMALL]
    arguments += ["--trainer.max_epochs=1", "--model.optim.lr=1e-30", "--ema=null"]
    assert main(["fit", "--config=vit", *arguments]) == 1
    error = capsys.readouterr().err
    assert "3 classes" in error
    assert "has 5" in error
    assert "--model.replace_head=true" in error
    assert len(error.strip().splitlines()) <= 3

    assert main(["fit", "--config=vit", *arguments, "--model.replace_head=true"]) == 0
    assert "head is new" in "".join(capsys.readouterr())
    (after,) = (tmp_path / "five").glob("vit/*/checkpoints/last.ckpt")
    old, new = (torch.load(path, weights_only=True)["state_dict"] for path in (before, after))
    parameters = [name for name, _ in experiments.load(after).named_parameters()]
    for name in parameters:
        if name.startswith("network.head."):
            assert new[name].shape[0] == 5
        else:
            assert torch.equal(old[name], new[name]), name


def test_v10_a_class_list_of_the_same_length_is_compared_by_name(
    three_classes: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, before = three_classes
    for part in ("train", "val"):
        (data / part / "owl").rename(data / part / "yak")
    arguments = [f"--data.path={data}", f"--model.init_from={before}", f"--run.root={tmp_path / 'yak'}", *SMALL]
    assert main(["fit", "--config=vit", *arguments]) == 1
    assert "other classes (cat, dog, owl)" in capsys.readouterr().err


def test_the_map_that_is_drawn_is_the_one_that_ran() -> None:
    network = VisionTransformer(PictureFacts(8, 8, 1, 10, [0.3], [0.4]), dim=16, depth=2, num_heads=2)
    maps = block_maps(network, torch.rand(1, 1, 8, 8))
    assert [tuple(weights.shape) for weights in maps] == [(2, 17, 17)] * 2
    for weights in [*maps, rollout(maps)]:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert network.training


def test_rollout_counts_residuals_as_half() -> None:
    uniform = torch.full((1, 2, 2), 0.5)
    torch.testing.assert_close(rollout([uniform]), torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
    first_only = torch.tensor([[[1.0, 0], [1, 0]]])
    torch.testing.assert_close(rollout([first_only, first_only]), torch.tensor([[1.0, 0], [0.75, 0.25]]))


def test_attention_pictures_of_a_batch() -> None:
    model = ImageClassifier(dim=16, depth=1, num_heads=2)
    model.facts = {"classes": ["a", "b"], "image_size": [8, 8], "channels": 1, "mean": [0.3], "std": [0.4]}
    model.configure_model()
    batch = {"image": torch.rand(2, 1, 8, 8), "label": torch.zeros(2, dtype=torch.long)}
    figures = model.attention_pictures(batch)
    titles = [axis.get_title() for axis in figures["attention"].axes]
    assert titles[0] == "picture"
    assert [title.split(":")[0] for title in titles[1:]] == [
        "all blocks (rollout)",
        "block 0, head 0",
        "block 0, head 1",
    ]
    assert "it is a" in figures["attention"].get_suptitle()
    assert "Softmax" in figures["attention"].get_suptitle()


def test_attention_of_a_model_in_half_precision_is_drawn() -> None:
    network = VisionTransformer(PictureFacts(8, 8, 1, 10, [0.3], [0.4]), dim=16, depth=1, num_heads=2)
    figures = attention_figures(network.to(torch.bfloat16), torch.rand(1, 1, 8, 8))
    assert len(figures["attention"].axes) == 4


def test_a_map_of_too_many_tokens_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    network = VisionTransformer(PictureFacts(8, 8, 1, 10, [0.3], [0.4]), dim=16, depth=1, num_heads=2)
    monkeypatch.setattr(pictures, "LONGEST_MAP", 3)
    assert attention_figures(network, torch.rand(1, 1, 8, 8)) == {}
