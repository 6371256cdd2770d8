"""`make heads` on checkpoints, from the command line to the picture."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from attnzoo.heads.figures import Head, HeadHealth, Health
from experiments.__main__ import main
from experiments.make import words
from experiments.training import head_figures, heads, saved
from experiments.training.tables import show_table

SHORT = [
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
    "--trainer.limit_test_batches=1",
    "--run.wandb=false",
    "--run.samples=0",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two steps."""
    return tmp_path_factory.mktemp("runs")


def trained(runs: Path, preset: str, *options: str) -> Path:
    assert main(["fit", f"--config={preset}", f"--run.root={runs}", *SHORT, *options]) == 0
    return next((runs / preset).glob("*/checkpoints/last.ckpt"))


@pytest.fixture(scope="module")
def vit(runs: Path) -> Path:
    return trained(runs, "vit", "--model.depth=2")


def test_the_table_has_a_row_for_each_head_and_a_picture_is_drawn(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = saved.read(vit)
    assert main(["heads", f"--ckpt={vit}", "--samples=64", f"--out={tmp_path / 'heads.png'}"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "%" in line]
    assert len(rows) == 8 and rows[0][0] == "blocks.0.attention" and rows[4][0] == "blocks.1.attention"
    assert "64 validation samples" in printed and "ablation: rise of the loss" in printed
    assert (tmp_path / "heads.png").stat().st_size > 10_000
    after = saved.read(vit)
    assert all(torch.equal(value, after["state_dict"][name]) for name, value in before["state_dict"].items())


def test_the_figures_are_those_of_the_checkpoint_every_time(vit: Path) -> None:
    first, second = (heads.probe_set(vit, samples=64).health(ablate=True) for _ in range(2))
    assert first.heads == second.heads
    assert first.loss == second.loss


@pytest.mark.parametrize(
    "preset", ["forecaster", "translator", pytest.param("translator-bahdanau", marks=pytest.mark.slow)]
)
def test_checkpoints_of_every_experiment(runs: Path, preset: str) -> None:
    """Padding of targets is left out: what a query of the decoder could see is told by the sentences."""
    beam = ["--model.decoding.beam=1"] if preset.startswith("translator") else []
    probes = heads.probe_set(trained(runs, preset, *beam), samples=40)
    health = probes.health(ablate=True)
    assert all(entry.ablation is not None and entry.effective_keys is not None for entry in health.heads)
    if preset == "translator":
        (own,) = {entry.visible_keys for entry in health.heads if entry.head.site == "decoder.0.attention"}
        lengths = [int(row.sum()) for batch in probes.batches for row in batch["target"][:, 1:] != 0]
        seen = [place for length in lengths for place in range(2, length + 1)]  # the first query sees one key
        assert own == pytest.approx(sum(seen) / len(seen), rel=1e-4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of plain pictures."""
    root = tmp_path_factory.mktemp("pictures")
    for part, kind, shade in itertools.product(("train", "val"), ("cat", "dog"), range(3)):
        (root / part / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (90 * shade, len(kind), shade)).save(root / part / kind / f"{shade}.png")
    return root


def of_timm(pictures: Path, name: str, *options: str) -> list[str]:
    data = [f"--data.path={pictures}", "--data.image_size=32", "--data.cache=null"]
    return [*data, f"--model.name={name}", "--model.weights=random", *options]


def test_heads_of_timm_are_watched_and_told(
    runs: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy with attention of attnzoo is looked at; the network that is trained and kept stays as timm made it."""
    path = trained(runs, "vit-finetune", *of_timm(pictures, "test_vit", "--head_monitor.every=2"))
    assert (path.parents[1] / "figures" / "heads.csv").read_text().count("model.blocks.0.attn.shell") == 2
    assert not [name for name in saved.read(path)["state_dict"] if "shell" in name]
    probes = heads.probe_set(path, samples=6)
    with torch.no_grad():
        theirs = probes.loss(probes.batches[0])[0]
    assert probes.health().loss == pytest.approx(float(theirs) / len(probes.batches[0]["image"]), rel=1e-5)
    capsys.readouterr()
    assert main(["heads", f"--ckpt={path}", f"--out={tmp_path / 'heads.png'}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert rows[0][0] == "model.blocks.0.attn.shell"
    assert (tmp_path / "heads.png").stat().st_size > 10_000


def test_a_network_without_attention_is_told_in_a_line(
    runs: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = of_timm(pictures, "test_convnext")
    path = trained(runs, "vit-finetune", "--run.name=convolutions", *options)
    capsys.readouterr()
    assert main(["heads", f"--ckpt={path}"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "TimmNetwork holds no attention that is known here" in said
    fit = ["fit", "--config=vit-finetune", f"--run.root={runs}", *SHORT]
    assert main([*fit, *options, "--head_monitor.every=500"]) == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "TimmNetwork holds no attention that is known here" in said
    assert main([*fit, *of_timm(pictures, "test_vit", "--head_reinit.every=500")]) == 1
    assert "--head_monitor watches heads of torch, timm" in capsys.readouterr().err


def test_mistakes_are_answered_in_a_line(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["heads", f"--ckpt={vit}", "--out=heads.txt"]) == 1
    assert "written as one of .png" in capsys.readouterr().err
    assert main(["heads", f"--ckpt={vit}", "--samples=0"]) == 1
    assert "--samples is 0" in capsys.readouterr().err
    assert main(["heads", f"--ckpt={vit}", f"--data={tmp_path / 'gone'}"]) == 1
    error = capsys.readouterr().err
    assert "gone" in error and "give --data=PATH" in error and "Traceback" not in error
    assert "was trained on --data.path=null" in error
    assert main(["heads", f"--ckpt={vit}", "--out=/proc/none/a.png"]) == 1
    assert "cannot be written" in (error := capsys.readouterr().err) and "--out" in error
    assert main(["heads", str(vit)]) == 2
    assert f"Did you mean --ckpt={vit}?" in capsys.readouterr().err
    assert main(["heads", "vit"]) == 2
    assert "Did you mean" not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["heads"]) == 1
    assert "no finished run" in capsys.readouterr().err


def test_make_hands_its_variables_on() -> None:
    assert words("heads", {"CKPT": "a.ckpt", "OUT": "b.png", "ARGS": "--samples=9"}) == [
        "heads", "--ckpt=a.ckpt", "--out=b.png", "--samples=9",
    ]  # fmt: skip


def test_a_narrow_console_cuts_no_column(
    vit: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = head_figures.table(heads.probe_set(vit, samples=64).health(ablate=True))
    capsys.readouterr()
    show_table(table)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1 + 8
    assert "…" not in printed


@pytest.mark.slow
def test_data_without_a_path_are_given_none(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained(runs, "listops", "--model.depth=1")
    capsys.readouterr()
    assert main(["heads", f"--ckpt={path}", "--data=/tmp"]) == 1
    assert "--data=/tmp: listops makes its data itself" in capsys.readouterr().err


def test_figures_that_are_missing_are_named_as_their_columns_are() -> None:
    head = Head("decoder", 0)
    entry = HeadHealth(head, 1.0, None, None, None, None, None, None, None, None, None, None)
    reasons = {"redundancy": "there is one head", "nearest": "there is one head", "visible_keys": "why"}
    assert head_figures.notes(Health([entry], {}, notes={"decoder": reasons})) == [
        "CKA, twin: there is one head (decoder)", "of: why (decoder)",
    ]  # fmt: skip


def test_of_two_duplicates_the_table_sends_one_away() -> None:
    """Without both the loss may be another, and it is a table by which heads are pruned."""
    plain = HeadHealth(Head("decoder", 0), 1.0, 8.0, 9.0, 1.0, 0.1, 0.1, 2.0, 0.5, 1.0, 0.99, 1, ablation=0.0005)
    entries = [
        plain,
        replace(plain, head=Head("decoder", 1), nearest=0, ablation=0.0),
        replace(plain, head=Head("decoder", 2), nearest=0, ablation=0.3),
        replace(plain, head=Head("decoder", 3), redundancy=0.2),
    ]
    said = ["duplicate, but head 1 goes first", "duplicate: degenerate", "duplicate, but of use", ""]
    assert list(head_figures.verdicts(Health(entries, {}, 2.0)).values()) == said
    unmeasured = Health([replace(one, ablation=None) for one in entries], {}, 2.0)
    assert list(head_figures.verdicts(unmeasured).values()) == ["duplicate"] * 3 + [""]


def test_monitoring_by_options(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user gives them; the run tells what it found."""
    options = ["--head_monitor.every=1", "--head_monitor.samples=64", "--head_reinit.every=1", "--model.depth=1"]
    trained(runs, "vit", "--run.name=watched", *options)
    (run,) = (runs / "vit").glob("*watched*")
    assert "head_monitor:\n  every: 1\n  samples: 64" in (run / "config.yaml").read_text()
    assert "heads/norm_min" in (run / "metrics.csv").read_text()
    assert {path.name for path in (run / "figures").iterdir()} >= {"heads.png", "heads.csv"}
    printed = capsys.readouterr().out
    assert re.search(r"After step 2 \d of 4 heads show a cause of degeneration.* is in .*figures/heads\.csv", printed)
    assert "Degenerate heads: 0 begun anew, 0 switched off." in printed
