"""What the benchmark computes, apart from the machine's speed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnzoo import CATALOGUE
from benchmarks import costs, runs, speed
from benchmarks.__main__ import main
from benchmarks.memory import LiveBytes
from benchmarks.timing import exponent, ratio, rounds, spread


def test_growth_is_the_power_of_the_length() -> None:
    lengths = [1024, 2048, 8192]
    assert exponent(lengths, [3e-6 * length**2 for length in lengths]) == pytest.approx(2)
    assert exponent(lengths, [5.0 * length for length in lengths]) == pytest.approx(1)


def test_a_ratio_is_the_median_over_pairs_and_its_bound_lies_below() -> None:
    found = ratio([1.0, 2.0, 1.0, 1.0, 1.0], [3.0, 2.0, 4.0, 3.0, 3.0])
    assert found["ratio"] == 3
    assert 1 <= found["lower95"] <= 3
    assert ratio([1.0] * 9, [2.0] * 9) == {"ratio": 2, "lower95": 2}


def test_spread_has_the_quartiles() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3, "q1": 2, "q3": 4, "min": 1, "max": 5}


def test_calls_run_in_turn_and_once_to_warm_up() -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    measured = list(rounds({"a": note("a"), "b": note("b")}, 3))
    assert seen == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert all(set(times) == {"a", "b"} and min(times.values()) >= 0 for times in measured)


def test_live_bytes_are_those_alive_at_once() -> None:
    """Two tensors of 4,000 bytes one after the other are 4,000, beside each other 8,000; views are none."""
    with LiveBytes() as seen:
        first = torch.zeros(1000)
        del first
        second = torch.zeros(1000)
        second.view(10, 100).add_(1)
    assert seen.peak == 4000
    with LiveBytes() as seen:
        kept = [torch.zeros(1000), torch.zeros(1000)]
    assert seen.peak == 8000
    assert len(kept) == 2


def test_live_bytes_see_what_is_saved_for_the_backward_pass() -> None:
    x = torch.zeros(1000, requires_grad=True)
    with LiveBytes() as kept:
        x.exp().exp().sum().backward()
    with LiveBytes() as freed, torch.no_grad():
        x.exp().exp().sum()
    assert kept.peak > freed.peak


@pytest.mark.parametrize("name", [name for name, case in speed.CASES.items() if case.mechanism in CATALOGUE])
def test_every_case_of_the_benchmark_runs(name: str) -> None:
    """Forward, backward and decoding, at 64 tokens."""
    case = speed.CASES[name]
    for mode, call in speed.MODES.items():
        if name in speed.cases_for(mode, 64, []):
            call(case, 64)()


def test_every_mechanism_is_measured() -> None:
    assert {case.mechanism for case in speed.CASES.values()} >= set(CATALOGUE)


@pytest.mark.parametrize("name", speed.CASES)
def test_work_by_formula_is_what_torch_counts(name: str) -> None:
    """Blocks cover more than a pattern needs, and SDPA's plain form all pairs of a causal square; never less."""
    case = speed.CASES[name]
    module = speed.build(case, 512)
    ratio = costs.counted(module, 512, case.causal) / costs.flops(module, 512, case.causal)
    exact = {"Softmax", "Flash, dropout 0.1", "Additive", "Axial", "MemoryCompressed 4", "Linformer 256", "Linear"}
    assert 0.95 <= ratio <= (1.02 if name in exact else 2.6)


@pytest.mark.parametrize(
    "name", [name for name, case in speed.CASES.items() if CATALOGUE[case.mechanism].traits.streaming]
)
def test_states_are_as_large_as_the_formula_says(name: str) -> None:
    module = speed.build(speed.CASES[name], 512)
    assert costs.held(module, 512) == pytest.approx(costs.state_bytes(module, 512), rel=0.01)


def test_a_bench_of_some_keeps_apart_what_was_measured_otherwise(tmp_path: Path) -> None:
    """Its own folder, so the full table stays; other rounds are other pieces."""
    for count in (2, 3):
        assert speed.measure(tmp_path, ["--only=Local", "--lengths=64", f"--rounds={count}"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["Local"]
    pieces = {path.name: json.loads(path.read_text()) for path in (tmp_path / "Local" / "pieces").iterdir()}
    assert len(pieces["training-64-2-wall.json"]["seconds"]["Local 257"]) == 2
    assert len(pieces["decoding-64-3-wall.json"]["seconds"]["Local 257"]) == 3
    result = json.loads((tmp_path / "Local" / "result.json").read_text())
    assert set(result["training"]) == {"Local 257", "Local 256 causal"}
    assert (tmp_path / "Local" / "speed.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "figure", ["speed", "mechanisms", "peers", "digits", "import", "numbers", "multi30k", "translation"]
)
def test_what_a_figure_does_not_know_ends_it(figure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(figure, ["--only=Locl"])
    assert "Locl" in capsys.readouterr().err


def test_a_run_whose_time_is_over_before_it_began_is_not_done(tmp_path: Path) -> None:
    assert runs.train("vit", tmp_path, ["--run.wandb=false"], minutes=0.001) is None
