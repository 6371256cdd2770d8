"""The study of head diversity: what runs there are, and how two conditions are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnzoo import HeadDiversity
from benchmarks import diversity, examples, head_diversity, timing
from benchmarks.__main__ import main
from benchmarks.head_diversity import STUDY, Run, compare, markdown
from experiments.vision.module import ImageClassifier

PAGE = Path(__file__).parents[2] / "docs" / "studies" / "head-diversity.md"


def test_the_page_tells_how_many_runs_there_are() -> None:
    """4 presets x (2 kinds x 3 weights + control) x 3 seeds + one pair."""
    assert len(STUDY) == len({run.name for run in STUDY}) == 4 * 7 * 3 + 2
    assert f"of {len(STUDY)} runs measured" in PAGE.read_text()
    control = Run("vit", "control", 0)
    assert control.options[0] == "--model.head_diversity=1e-12"
    assert Run("translator-bahdanau", "cka-0.1", 2).options[:4] == [
        "--model.num_heads=4", "--model.head_diversity=0.1", "--model.head_diversity_kind=cka", "--seed_everything=2",
    ]  # fmt: skip


def test_a_difference_is_the_mean_over_examples_and_seeds() -> None:
    """By hand: 2 seeds, 4 examples. The same gap everywhere has no spread; no gap has p = 1."""
    control, treated = [[0.0, 1, 0, 1], [0.0, 0, 0, 1]], [[1.0, 1, 0, 1], [1.0, 0, 1, 0]]
    found = examples.difference(control, treated)
    assert found.mean == pytest.approx((1 + 0 + 0.5 - 0.5) / 4)
    assert found.low < found.mean < found.high
    assert examples.difference([[1.0, 2.0, 3.0]], [[1.5, 2.5, 3.5]]) == (0.5, 0.5, 0.5, 0.0)
    assert examples.difference([[1.0, 2.0]], [[1.0, 2.0]]).p == 1


def test_the_interval_is_that_of_the_normal_law_and_blocks_widen_it() -> None:
    """1,000 gaps: 1.96 standard errors, of single gaps, or of the means of all blocks of 20 neighbours."""
    torch.manual_seed(0)
    gaps = torch.randn(1000).tolist()
    found = examples.difference([[0.0] * 1000], [gaps])
    error = torch.tensor(gaps).std().item() / 1000**0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    alike = torch.randn(100).repeat_interleave(10)
    narrow, wide = (examples.difference([[0.0] * 1000], [alike.tolist()], block) for block in (1, 20))
    means = torch.cat([alike, alike[:19]]).unfold(0, 20, 1).mean(1)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * means.std().item() / 50**0.5, rel=0.05)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def piece(scores: list[float], primary: float, **more: Any) -> dict[str, Any]:
    return {
        "scores": scores, "block": 1, "lines": None, "references": None, "alike": {"projected": 0.1, "cka": 0.2},
        "metrics": {"test/primary": primary, "test/loss": 1 - primary}, **more,
    }  # fmt: skip


def test_only_seeds_that_both_have_are_compared() -> None:
    judged = {
        Run("vit", "control", 0): piece([0.0, 0.0], 0.0),
        Run("vit", "cka-0.1", 0): piece([1.0, 0.0], 0.5),
        Run("vit", "cka-0.1", 1): piece([1.0, 1.0], 1.0),
    }
    control, treated = compare(judged)
    assert control["difference"] is None
    assert (treated["seeds"], treated["paired_seeds"], treated["primary"]) == ([0, 1], [0], 0.75)
    assert treated["difference"]["mean"] == 0.5
    text = markdown([control, treated], 3)
    assert text.startswith("3 of 86 runs measured.")
    assert "| vit | cka-0.1 | 2 | 0.7500 | 0.2500 | +0.5 (" in text


def test_translations_of_the_large_pair_are_compared_by_bleu() -> None:
    """The same words twenty times; one system has one of five wrong in half of the lines."""
    right = [f"the {n} dogs run fast today" for n in range(20)]
    wrong = [line.replace("fast", "slow") if n % 2 else line for n, line in enumerate(right)]
    control, treated, p = examples.bleu_difference(wrong, right, right)
    assert control < treated == pytest.approx(100)
    assert p < 0.01
    pair = {
        Run(head_diversity.LARGE, name, 0): piece([1.0] * 20, 0.5, lines=lines, references=right)
        for name, lines in (("control", wrong), ("projected-0.03", right))
    }
    assert compare(pair)[1]["bleu"] == (control, treated, p)


def test_likeness_is_measured_in_evaluation_and_leaves_the_model_there() -> None:
    """By the kind that is asked for, whatever the model was trained with; twice the same."""
    model = ImageClassifier(dim=16, depth=2, num_heads=2, head_diversity=1e-12, dropout=0.5)
    model.facts = {"image_size": [8, 8], "channels": 1, "classes": ["a", "b"], "mean": [0.3], "std": [0.4]}
    model.configure_model()

    class Data:
        def test_dataloader(self) -> list[dict[str, torch.Tensor]]:
            generator = torch.Generator().manual_seed(0)
            pixels = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8, generator=generator)
            return [{"image": pixels, "label": torch.zeros(6, dtype=torch.long)}]

    found = [examples.alike(model, Data(), kind) for kind in ("projected", "cka", "projected")]  # type: ignore[arg-type]
    assert found[0] == found[2] != found[1]
    assert all(0 < value < 1 for value in found)
    assert not any(module.training for module in model.modules())
    assert set(examples.judge(model, Data()).scores) <= {0.0, 1.0}  # type: ignore[arg-type]
    plain = ImageClassifier(dim=16, depth=2, num_heads=2)
    plain.facts = model.facts
    plain.configure_model()
    assert not [module for module in plain.modules() if isinstance(module, HeadDiversity)]
    with pytest.raises(ValueError, match=r"train it with --model\.head_diversity"):
        examples.alike(plain, Data(), "cka")  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", ["diversity", "head-diversity"])
def test_what_a_figure_does_not_know_ends_it(figure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(figure, ["--kinds=ckaa"] if figure == "diversity" else ["--only=vitt"])
    assert "ckaa" in (said := capsys.readouterr().err) or "vitt" in said


def test_what_it_costs_is_measured_in_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step in turn with the same one without; here with steps that count up a clock instead."""
    clock = [0.0]

    def network(*_: Any, head_diversity: float = 0.0, **__: Any) -> Any:
        def once() -> None:
            clock[0] += 1.04 if head_diversity else 1.0

        return once

    monkeypatch.setattr(timing.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(diversity, "classifier", network)
    monkeypatch.setattr(diversity, "translator", network)
    monkeypatch.setattr(diversity, "batches", lambda count: [])
    assert diversity.measure(tmp_path, ["--pairs=5", "--kinds=projected"]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["steps"]
    assert set(rows) == {f"{name}, projected" for name in ("vit-cifar10-cpu", "translator-multi30k")}
    for row in rows.values():
        assert row["times"] == pytest.approx(1.04)
        assert row["upper95"] == pytest.approx(1.04)
