"""ListOps as an experiment: its data, its network, and the row of the most frequent answer."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch

from attnzoo import Local, Softmax
from experiments import load
from experiments.__main__ import main
from experiments.listops import ListOpsClassifier, ListOpsData
from experiments.listops.expressions import SYMBOLS, value
from experiments.listops.module import Majority

SMALL = ["--data.train_count=64", "--data.val_count=16", "--data.test_count=50", "--data.max_length=32"]


def data(**changes: int) -> ListOpsData:
    made = ListOpsData(**{"train_count": 40, "val_count": 10, "test_count": 20, "max_length": 32, **changes})
    made.setup("fit")
    return made


def test_no_expression_is_in_two_parts_and_labels_are_right() -> None:
    made = data()
    rows = []
    for loader, count in ((made.train_dataloader(), 40), (made.val_dataloader(), 10), (made.test_dataloader(), 20)):
        found = [(row, int(label)) for tokens, labels in loader for row, label in zip(tokens, labels, strict=True)]
        assert len(found) == count
        for row, label in found:
            assert row.shape == (32,)
            symbols = [SYMBOLS[number] for number in row if number > 0]
            assert value(symbols) == label
            assert 16 - 3 <= len(symbols) <= 32
            rows.append(tuple(symbols))
    assert len(set(rows)) == 70


def test_the_same_seed_makes_the_same_expressions() -> None:
    first, again, other = data(), data(), data(split_seed=1)
    (one,), (two,), (three,) = (list(made.test_dataloader()) for made in (first, again, other))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[0], three[0])


def test_the_majority_row_answers_what_is_most_frequent_in_training() -> None:
    made = data()
    counts = collections.Counter(int(label) for _, labels in made.train_dataloader() for label in labels)
    answer = made.facts["majority"]
    assert counts[answer] == max(counts.values())
    metric = Majority(10, 3)
    metric.update(torch.eye(10)[:5], torch.tensor([3, 1, 3, 3, 9]))
    assert float(metric.compute()) == pytest.approx(0.6)


@pytest.mark.parametrize("attention", [Softmax, Local])
def test_padding_never_moves_an_answer(attention: type) -> None:
    """The same expression in a longer model with the same weights."""
    model = ListOpsClassifier(attention=attention, position="rope", dim=16, depth=1, num_heads=2)
    model.facts = data().facts
    model.configure_model()
    assert model.network is not None
    model.eval()
    tokens = torch.tensor([[11, 3, 12, 4, 5, 15, 15]])
    wide = torch.nn.functional.pad(tokens, (0, 25))
    with torch.no_grad():
        assert torch.allclose(model.network(tokens)[0], model.network(wide)[0], atol=1e-6)


def test_a_run_keeps_the_row_and_its_checkpoint_answers(tmp_path: Path) -> None:
    words = [
        "--config=listops",
        *SMALL,
        "--trainer.max_epochs=1",
        f"--run.root={tmp_path}",
        "--run.wandb=false",
        "--run.samples=0",
        "--head_monitor.every=1",
    ]
    assert main(["fit", *words]) == 0
    (folder,) = tmp_path.glob("listops/*")
    assert (folder / "figures" / "heads.csv").stat().st_size > 0
    from experiments.comparing.compare import MAJORITY, rows
    from experiments.comparing.grouping import groups
    from experiments.comparing.reading import find

    (group,) = groups(find(str(tmp_path)))
    (run,) = group.variants[0].runs.values()
    majority = run.results["metrics"]["test/majority"]
    assert [MAJORITY, "", f"{majority:.4f}", ""] in [[cell.text for cell in row[:4]] for row in rows(group)]
    model = load(folder / "checkpoints" / "best.ckpt")
    found = model.predict("[MAX 2 [MIN 7 4 ] ]")  # type: ignore[operator]
    assert found.shape == (10,)
    assert float(found.sum()) == pytest.approx(1.0)
    for wrong in ("[ADD 1 2 ]", "", "1 " * 33):
        with pytest.raises(ValueError):
            model.predict(wrong)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.max_length=8"], "--data.max_length is 8"),
        (["--data.test_count=0"], "--data.test_count is 0"),
        (["--model.depth=0"], "--model.depth is 0"),
        (["--model.dropout=1"], "--model.dropout is 1"),
    ],
)
def test_wrong_sizes_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "fit",
                "--config=listops",
                *SMALL[:3],
                f"--run.root={tmp_path}",
                "--run.wandb=false",
                "--run.samples=0",
                *options,
            ]
        )
        == 1
    )
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("listops/*"))


@pytest.mark.slow
def test_a_model_is_exported_with_its_symbols(tmp_path: Path) -> None:
    words = [f"--run.root={tmp_path}", "--run.wandb=false", "--run.samples=0", "--trainer.max_steps=2", *SMALL]
    assert main(["fit", "--config=listops", *words]) == 0
    (ckpt,) = tmp_path.glob("*/*/checkpoints/last.ckpt")
    assert main(["export", f"--ckpt={ckpt}", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "symbols.txt").read_text().split() == list(SYMBOLS)
    assert (tmp_path / "model.onnx").is_file()
