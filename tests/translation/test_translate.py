"""Using a trained translator: from Python, from the command line, as a filter."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import experiments
from experiments.__main__ import main
from experiments.translation import TranslationData, translator
from experiments.translation.search import Decoding

NETWORKS = {
    "translator": ["--model.dim=16", "--model.encoder_depth=1", "--model.decoder_depth=1", "--model.num_heads=2"],
    "translator-bahdanau": ["--model.dim=16", "--model.hidden_dim=16"],
}


def pair(cases: Path, name: str) -> str:
    return f"[{cases / name}.src,{cases / name}.tgt]"


def fit(preset: str, cases: Path, root: Path, *more: str, train: str = "clean") -> int:
    sets = [
        f"--data.train={pair(cases, train)}",
        *(f"--data.{part}={pair(cases, 'clean')}" for part in ("val", "test")),
    ]
    return main([
        "fit", f"--config={preset}", *sets, "--data.tokens=words", "--data.joint=false", "--data.cache=null",
        f"--run.root={root}", "--run.wandb=false", "--run.samples=0", "--trainer.accelerator=cpu",
        "--trainer.max_epochs=2", *more,
    ])  # fmt: skip


@pytest.fixture(scope="module", params=NETWORKS)
def runs(request: pytest.FixtureRequest, cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a tiny network on twelve pairs that lie in a folder which is gone afterwards."""
    root = tmp_path_factory.mktemp("runs")
    data = tmp_path_factory.mktemp("data")
    for file in cases.glob("clean.*"):
        shutil.copy(file, data)
    assert fit(request.param, data, root, *NETWORKS[request.param]) == 0
    shutil.rmtree(data)
    return root


@pytest.fixture
def checkpoint(runs: Path) -> Path:
    (found,) = runs.glob("*/*/checkpoints/best.ckpt")
    return found


def run(checkpoint: Path, *words: str) -> int:
    return main(["translate", f"--ckpt={checkpoint}", *words])


def test_t09_the_checkpoint_translates_without_its_data(checkpoint: Path, tmp_path: Path) -> None:
    """T09: words, options and weights are in the file, which holds plain values only."""
    alone = tmp_path / "alone.ckpt"
    shutil.copy(checkpoint, alone)
    assert json.dumps(torch.load(alone, weights_only=True)["experiment"])
    model = experiments.load(alone)
    assert isinstance(model.predict("the red house is small ."), str)
    assert len(model.predict(["the red house is small .", "", "we drink coffee ."])) == 3


def test_t09_a_vocabulary_of_another_order_is_refused(
    checkpoint: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T09: a fingerprint differs, even when the sizes agree."""
    model = experiments.load(checkpoint)
    files = []
    for side in ("source", "target"):
        content = json.loads(model.facts[f"{side}_vocabulary"])
        words = content["model"]["vocab"]
        last, before = sorted(words, key=words.get)[-2:]
        words[last], words[before] = words[before], words[last]
        files.append(tmp_path / f"{side}.json")
        files[-1].write_text(json.dumps(content))
    given = f"--data.vocabulary=[{files[0]},{files[1]}]"
    sets = [f"--data.{part}={pair(cases, 'clean')}" for part in ("train", "val", "test")]
    assert main(["test", f"--ckpt_path={checkpoint}", *sets, given, "--run.override_ckpt=true"]) == 1
    assert "fingerprint" in capsys.readouterr().err


def test_t11_unknown_words_are_translated_and_reported(
    checkpoint: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T11: four lines out, exit status 0, the share of unknown words is said."""
    out = tmp_path / "out.txt"
    assert run(checkpoint, f"--input={cases / 'unknown_words.src'}", f"--output={out}") == 0
    assert out.read_bytes().count(b"\n") == 4
    assert "unknown to the model" in capsys.readouterr().err


def test_t13_a_long_line_is_cut_with_a_warning(
    checkpoint: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T13: twelve lines out; line 5 is cut, and 3000 > 128 is said."""
    out = tmp_path / "out.txt"
    assert run(checkpoint, f"--input={cases / 'long_line.src'}", f"--output={out}", "--beam=1") == 0
    assert out.read_bytes().count(b"\n") == 12
    said = capsys.readouterr().err
    assert "line 5" in said
    assert "3000 > 128" in said


def test_k03_sentences_do_not_depend_on_their_batch(checkpoint: Path) -> None:
    """K03: three sentences of different length, beam 3, in one batch and one by one."""
    model = experiments.load(checkpoint)
    lines = ["the red house is small .", "we drink coffee in the morning .", "house ."]
    together = model.translate(lines, beam=3, n_best=3)
    for line, found in zip(lines, together, strict=True):
        (alone,) = model.translate([line], beam=3, n_best=3)
        assert [one.text for one in alone] == [one.text for one in found]
        assert [one.score for one in alone] == pytest.approx([one.score for one in found], abs=1e-4)


def test_k06_more_results_do_not_change_the_first(checkpoint: Path) -> None:
    """K06, on a trained network."""
    model = experiments.load(checkpoint)
    firsts = {model.translate(["the red house ."], beam=4, n_best=n)[0][0].text for n in (1, 2, 4)}
    assert len(firsts) == 1


def test_a_filter_keeps_lines_and_their_order(
    checkpoint: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty lines stay, line ends of Windows are no words, and a line without an end is a line."""
    typed = io.TextIOWrapper(io.BytesIO(b"the red house is small .\r\n\n  \nwe drink coffee ."))
    monkeypatch.setattr(sys, "stdin", typed)
    assert run(checkpoint) == 0
    lines = capsysbinary.readouterr().out.decode().split("\n")
    assert len(lines) == 5
    assert lines[1:3] == ["", ""]
    model = experiments.load(checkpoint)
    assert [lines[0], lines[3]] == model.predict(["the red house is small .", "we drink coffee ."])


def test_a_beam_that_is_far_too_wide_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="beam is 1000000; 1 to 1000 hypotheses"):
        experiments.load(checkpoint).predict("the red house .", beam=10**6)
    with pytest.raises(ValueError, match="--model.decoding.beam is 1001"):
        Decoding(beam=1001)


def test_a_wide_beam_takes_fewer_lines_at_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = experiments.load(checkpoint)
    lines = ["the red house .", "a dog ."] * 4
    usual = model.predict(lines, beam=20)
    search, rows = model.search, []
    monkeypatch.setattr(model, "search", lambda source, **kept: (rows.append(len(source)), search(source, **kept))[1])
    model.decoding = replace(model.decoding, batch_tokens=80)
    assert model.predict(lines, beam=20) == usual
    assert max(rows) * 20 <= 80 * model.decoding.beam
    assert len(rows) > 1


def test_n_best_gives_lines_with_number_and_score(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(checkpoint, "--text=the red house .", "--n_best=2", "--beam=3") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [number for number, *_ in rows] == ["1", "1"]
    assert float(rows[0][1]) >= float(rows[1][1])


@pytest.mark.parametrize("suffix", ["png", "json"])
def test_the_alignment_is_written(checkpoint: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"alignment.{suffix}"
    assert run(checkpoint, "--text=the red house .", f"--alignment={out}") == 0
    if suffix == "png":
        assert out.read_bytes().startswith(b"\x89PNG")
        return
    ((found),) = json.loads(out.read_text())
    assert found["source"] == ["the", "red", "house", ".", "</s>"]
    assert len(found["weights"]) == len(found["target"])
    for row in found["weights"]:
        assert len(row) == 5
        assert sum(row) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text=a", "--input=b"], "both given"),
        (["--text=a", "--n_best=9"], "--n_best=9"),
        (["--text=a", "--beam=0"], "--beam=0"),
        (["--text=a", "--beam=1000000"], "a beam from 1 to 1000"),
        (["--text=a", "--alignment=a.gif"], "a.gif"),
        (["--text=a", f"--alignment={__file__}/a.png"], "cannot be written there"),
        (["--input=nothing.txt"], "nothing.txt"),
        ([f"--input={Path(__file__).parent}"], "is a folder; give a file of lines"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    checkpoint: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, *words) == 1
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) <= 3


def test_an_output_that_fails_leaves_nothing(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    """Half a file never carries the final name."""
    out = tmp_path / "out.txt"
    assert run(checkpoint, f"--input={cases / 'latin1.tgt'}", f"--output={out}") == 1
    assert list(tmp_path.iterdir()) == []


def test_t05_t06_training_refuses_or_reports(cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T05, T06 from the command line: unequal files stop before training, blank lines are counted."""
    assert fit("translator", cases, tmp_path, train="short_side") == 1
    said = capsys.readouterr().err
    assert "12" in said
    assert "11" in said
    assert not list(tmp_path.glob("*/*"))
    assert fit("translator", cases, tmp_path, *NETWORKS["translator"], train="blank_lines") == 0
    assert "4 of 12 pairs skipped" in capsys.readouterr().out


def test_scores_are_those_of_the_lines_that_come_out(checkpoint: Path, cases: Path) -> None:
    """What a test reports is the exact match and BLEU of what `translate` gives for the same file."""
    model = experiments.load(checkpoint)
    data = TranslationData(train=[str(cases / "clean.src"), str(cases / "clean.tgt")], tokens="words", cache=None,
                           val=[str(cases / "clean.src"), str(cases / "clean.tgt")],
                           test=[str(cases / "clean.src"), str(cases / "clean.tgt")])  # fmt: skip
    data.use(model.facts)
    data.setup("test")
    found = {}
    for batch in data.test_dataloader():
        for text, row in zip(batch["source_text"], model.search(batch["source"]), strict=True):
            found[text] = row[0].text
    assert list(found.values()) == model.predict(list(found))


def test_a_blind_mechanism_has_no_alignment(
    cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translator, "blind", lambda model: "Blind applies no matrix to the values")
    assert fit("translator", cases, tmp_path, *NETWORKS["translator"]) == 0
    assert "No alignment picture: Blind applies" in capsys.readouterr().out


def test_an_output_never_replaces_what_is_no_plain_file(checkpoint: Path, cases: Path, tmp_path: Path) -> None:
    """A link is followed; a pipe is written to; the input itself is refused."""
    real, link, pipe = tmp_path / "real.txt", tmp_path / "link.txt", tmp_path / "pipe"
    real.write_text("before\n")
    link.symlink_to(real)
    assert run(checkpoint, "--text=the red house .", f"--output={link}") == 0
    assert link.is_symlink()
    assert real.read_text() != "before\n"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run(checkpoint, "--text=the red house .", f"--output={pipe}") == 0
    assert os.read(reader, 1000) == real.read_bytes()
    os.close(reader)
    assert pipe.is_fifo()
    source = tmp_path / "source.txt"
    shutil.copy(cases / "clean.src", source)
    assert run(checkpoint, f"--input={source}", f"--output={source}") == 1
    assert source.read_bytes() == (cases / "clean.src").read_bytes()


def test_a_word_that_a_parser_takes_for_something_else_is_text(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("null", "true", "5", "[house]"):
        assert run(checkpoint, f"--text={word}") == 0
        assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error(checkpoint: Path, cases: Path) -> None:
    words = [sys.executable, "-m", "experiments", "translate", f"--ckpt={checkpoint}", "--beam=1"]
    with (cases / "clean.src").open("rb") as lines:
        writer = subprocess.Popen(words, stdin=lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    said = writer.stderr.read().decode()
    writer.stderr.close()
    assert writer.wait() == 128 + signal.SIGPIPE
    assert "rror" not in said


@pytest.mark.parametrize("attention", ["Linear", "Linformer"])
def test_bahdanau_trains_over_a_memory_that_keeps_no_keys(
    attention: str, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*NETWORKS["translator-bahdanau"], f"--model.attention={attention}"]
    assert fit("translator-bahdanau", cases, tmp_path, *options) == 0
    said = capsys.readouterr().out
    assert f"attention: {attention}(" in said
    assert f"the memory of {attention} keeps no keys" in said
