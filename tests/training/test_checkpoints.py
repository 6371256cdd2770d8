"""Checkpoints are written whole, hold plain values, and are enough to use the model."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from training_toys import Toy, ToyData, trainer

from attnzoo import Local
from attnzoo.heads.figures import Head, HeadHealth, Health
from experiments.training import head_figures, saved
from experiments.training.checkpoints import BestAndLast
from experiments.training.ema import Ema, EmaWeights
from experiments.training.module import Experiment
from experiments.training.optim import Optim
from experiments.training.writing import check_writable, remove_leftovers, write_figure, write_whole

SAVER = """
import sys, torch
from pathlib import Path
from experiments.training.checkpoints import WholeFiles
path, number, entry = Path(sys.argv[1]), 0, {"class_path": "", "init_args": {}, "facts": {}}
while True:
    number += 1
    content = {"experiment": entry | {"number": number}, "weights": torch.full((4_000_000,), number)}
    WholeFiles().save_checkpoint(content, path)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_r07_a_killed_writer_leaves_the_last_good_file(tmp_path: Path) -> None:
    """R07, 38: at twenty moments of saving the newest checkpoint loads, and is of one piece; then a kill."""
    path = tmp_path / "last.ckpt"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for moment in range(20):
                time.sleep(0.003 * moment)
                process.send_signal(signal.SIGSTOP)
                # A stopped process leaves the folder as a kill would.
                content = saved.read(path)
                assert content["weights"].eq(content["experiment"]["number"]).all()
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()
    content = saved.read(path)
    assert content["weights"].eq(content["experiment"]["number"]).all()
    (tmp_path / ".last.ckpt.123.tmp").write_bytes(b"half")
    assert [p.name for p in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_leftovers_go_when_training_starts(tmp_path: Path) -> None:
    (tmp_path / ".best.ckpt.1.tmp").write_bytes(b"half")
    trainer(tmp_path, max_epochs=1).fit(Toy(), datamodule=ToyData())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


class FullDisk:
    """A file on a disk with room for 100 bytes."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()

    def write(self, content: Any) -> None:
        self.file.write(bytes(content[:100]))
        raise OSError(errno.ENOSPC, "No space left on device")


def test_r08_disk_full_says_path_and_bytes_and_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R08: the earlier best is untouched, and no half file stays behind."""
    path = tmp_path / "best.ckpt"
    write_whole(path, b"the earlier one")
    real_open = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: FullDisk(real_open(self, *a, **k)))
    with pytest.raises(OSError, match="5,000,000 bytes needed") as caught:
        write_whole(path, b"x" * 5_000_000)
    monkeypatch.undo()
    assert str(path) in str(caught.value)
    assert "untouched" in str(caught.value)
    assert path.read_bytes() == b"the earlier one"
    assert [p.name for p in tmp_path.iterdir()] == ["best.ckpt"]


def test_a_full_disk_leaves_pictures_and_tables_of_heads_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health([HeadHealth(Head("decoder", 0), 1.0, *[None] * 10)], {})
    figures: dict[str, Callable[[Path, int], None]] = {
        "heads.csv": lambda path, step: head_figures.append_rows(path, health, step),
        "heads.png": lambda path, step: write_figure(path, Figure((1, step)), "--run.root"),
    }
    for name, write in figures.items():
        write(tmp_path / name, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == set(figures)
    real_open = Path.open

    def full(path: Path, mode: str = "r", **options: Any) -> Any:
        file = real_open(path, mode, **options)
        return FullDisk(file) if "w" in mode else file

    monkeypatch.setattr(Path, "open", full)
    for name, write in figures.items():
        with pytest.raises(OSError, match=r"bytes needed.*untouched.*--run\.root"):
            write(tmp_path / name, 2)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    """Neither is replaced by a file of its name: /dev/null stays what it is."""
    (tmp_path / "elsewhere").mkdir()
    link, pipe = tmp_path / "link.csv", tmp_path / "pipe"
    link.symlink_to(tmp_path / "elsewhere" / "table.csv")
    write_whole(link, b"first")
    write_whole(link, b"second")
    assert link.is_symlink() and (tmp_path / "elsewhere" / "table.csv").read_bytes() == b"second"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)


def fitted(tmp_path: Path, model: Toy, *callbacks: Any) -> Path:
    torch.manual_seed(0)
    trainer(tmp_path, list(callbacks), max_epochs=1).fit(model, datamodule=ToyData(noise=0.0))
    return tmp_path / "best.ckpt"


def test_a_place_that_cannot_be_written_is_told_by_its_option_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file" / "below" / "a.png", tmp_path, Path("/proc/none/a.png")):
        with pytest.raises(OSError, match=r"cannot be written: .*\. Give another place by --out\."):
            check_writable(path, "--out")
        with pytest.raises(OSError, match=r"could not be written: .*choose another place by --out\."):
            write_whole(path, b"new", "--out")
    for path in (tmp_path / "new" / "a.png", tmp_path / "file"):
        check_writable(path, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


def test_r09_checkpoints_hold_plain_values(tmp_path: Path) -> None:
    """R09: options, facts, data and versions, for a model that was made in Python."""
    model = Toy(functools.partial(Local, window=3), Optim(lr=0.02, betas=(0.8, 0.9)))
    entry = torch.load(fitted(tmp_path, model), weights_only=True)["experiment"]
    assert entry["class_path"] == "training_toys.Toy"
    assert entry["init_args"]["attention"]["init_args"] == {"window": 3}
    assert entry["init_args"]["optim"]["betas"] == [0.8, 0.9]
    assert entry["facts"] == {"inputs": 3, "mean": [0.25]}
    assert entry["data"]["init_args"]["batch_size"] == 2
    assert entry["versions"]["torch"] == str(torch.__version__)
    assert all(isinstance(value, int | float | str | list | dict | None) for value in entry.values())


def test_r09_a_file_of_text_is_no_checkpoint(tmp_path: Path) -> None:
    """R09: what torch says of its own options is of no use here."""
    path = tmp_path / "config.yaml"
    path.write_text("seed_everything: 0\n")
    with pytest.raises(ValueError, match=r"config\.yaml is refused: it is no checkpoint\. Only tensors"):
        Experiment.from_checkpoint(path)


def test_r09_a_file_with_objects_is_refused_and_not_run(tmp_path: Path) -> None:
    """R09: nothing in it is called."""
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    path = tmp_path / "trap.ckpt"
    torch.save({"experiment": Trap()}, path)
    with pytest.raises(ValueError, match=r"trap\.ckpt is refused: it holds objects"):
        Experiment.from_checkpoint(path)
    with pytest.raises(ValueError, match="holds objects"):
        trainer(tmp_path).fit(Toy(), datamodule=ToyData(), ckpt_path=path, weights_only=False)
    assert not ran.exists()


def test_options_that_are_no_plain_values_are_named_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'width'"):
        fitted(tmp_path, Toy(width=torch.ones(1)))  # type: ignore[arg-type]


def test_half_a_file_a_foreign_file_and_none_are_refused(tmp_path: Path) -> None:
    path = fitted(tmp_path, Toy())
    half = tmp_path / "half.ckpt"
    half.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"half\.ckpt is damaged or cut off, and cannot be read\. Take .*best\.ckpt"):
        saved.read(half)
    foreign = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {}}, foreign)
    with pytest.raises(ValueError, match="not written by an experiment"):
        saved.read(foreign)
    with pytest.raises(FileNotFoundError, match="none"):
        saved.read(tmp_path / "none.ckpt")


def test_from_checkpoint_needs_the_file_alone(tmp_path: Path) -> None:
    """31: on the CPU, with the options it was trained with."""
    model = Toy(functools.partial(Local, window=3))
    path = fitted(tmp_path, model)
    again = Experiment.from_checkpoint(path)
    assert isinstance(again, Toy)
    assert not again.training
    assert again.network is not None
    assert again.network.attention.mechanism.window == 3
    x = torch.randn(4, 3)
    assert torch.equal(again.network(x), model.eval().network(x))
    assert again.optim == model.optim


def test_from_checkpoint_takes_the_average(tmp_path: Path) -> None:
    """40: the saved best model is the averaged one; the trained weights stand beside it."""
    path = fitted(tmp_path, Toy(), EmaWeights(Ema(0.9)))
    content = saved.read(path)
    model = Experiment.from_checkpoint(path)
    name, value = next(iter(model.state_dict().items()))
    assert torch.equal(value, content["state_dict"][name])
    assert not torch.equal(value, content["raw_state_dict"][name])


def test_weights_that_do_not_fit_are_said_in_a_line(tmp_path: Path) -> None:
    path = fitted(tmp_path, Toy())
    content = saved.read(path)
    name = "network.layers.2.weight"
    content["state_dict"][name] = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"layers\.2\.weight is \[5, 4\] in the checkpoint and \[1, 4\]"):
        saved.rebuild_model(Experiment, content)
    del content["state_dict"][name]
    with pytest.raises(ValueError, match=r"1 weight.s. are missing in the checkpoint"):
        saved.rebuild_model(Experiment, content)


def test_a_checkpoint_without_weights_or_with_weights_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    path, spoilt = fitted(tmp_path, Toy()), tmp_path / "spoilt.ckpt"
    for change, said in (
        ({"state_dict": None}, "holds no weights"),
        ({"state_dict": {"network.embed.weight": "text"}}, "holds no weights"),
        (
            {"network.embed.bias": float("nan")},
            r"spoilt\.ckpt is of no use: network\.embed\.bias has values that are not",
        ),
        ({"network.embed.bias": float("inf")}, "are not finite"),
    ):
        content = saved.read(path)
        for name, value in change.items():
            if name in content["state_dict"]:
                content["state_dict"][name].fill_(value)
            else:
                content[name] = value
        torch.save(content, spoilt)
        with pytest.raises(ValueError, match=said):
            Experiment.from_checkpoint(spoilt)
    del content["state_dict"]
    torch.save(content, spoilt)
    with pytest.raises(ValueError, match="holds no weights"):
        saved.read(spoilt)


def test_other_data_is_refused_by_its_facts(tmp_path: Path) -> None:
    """Measured figures may differ, what the network is built from may not."""
    path = fitted(tmp_path, Toy())
    data = ToyData()
    data.facts = {"inputs": 3, "mean": [0.5]}
    made = trainer(tmp_path)
    made.test(Experiment.from_checkpoint(path), datamodule=data, verbose=False)
    data.facts = {"inputs": 4, "mean": [0.5]}
    with pytest.raises(ValueError, match="inputs = 3; this data has 4"):
        made.test(Experiment.from_checkpoint(path), datamodule=data, verbose=False)


def test_among_equal_scores_the_lower_loss_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "primary", lambda self, values: 1.0)
    keeper = BestAndLast()
    trainer(tmp_path, [keeper], max_epochs=3).fit(Toy(), datamodule=ToyData())
    assert keeper.best_step == 30
