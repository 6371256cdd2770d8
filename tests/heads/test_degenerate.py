"""What counts as a degenerate head, check by check, and the planted cases."""

from collections.abc import Sequence

import pytest
import torch

from attnzoo.heads.degenerate import Flagged, Limits, Watch, causes, degenerate
from attnzoo.heads.figures import Head, HeadHealth, Health, with_ablation
from attnzoo.heads.health import ablation, head_health
from benchmarks.planted import KINDS, plant

A, B, C = (Head("attention", number) for number in range(3))


def entry(head: Head, **figures: float | None) -> HeadHealth:
    """A head that is well in all that is not said."""
    well: dict[str, float | None] = {
        "norm": 1.0, "effective_keys": 10.0, "visible_keys": 64.0, "unevenness": 5.4, "sink": 0.2, "first_token": 0.1,
        "distance": 12.0, "content": 0.5, "entropy": 2.0, "redundancy": 0.3, "nearest": 0,
    }  # fmt: skip
    return HeadHealth(head, **{**well, **figures})  # type: ignore[arg-type]


class Checks:
    """A watch, and which heads it asked to be ablated."""

    def __init__(self, **limits: float) -> None:
        self.watch = Watch(Limits(**limits))  # type: ignore[arg-type]
        self.asked: list[list[int]] = []

    def check(self, entries: list[HeadHealth], rises: dict[Head, float], loss: float = 2.0) -> list[Flagged]:
        def ablate(heads: Sequence[Head]) -> list[float]:
            self.asked.append([head.number for head in heads])
            return [rises[head] for head in heads]

        return self.watch.check(Health(entries, {}, loss), ablate)[1]


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"norm": 0.09}, "dead"),
        ({"unevenness": 0.049}, "uniform"),
        ({"sink": 0.951}, "sink"),
        ({"redundancy": 0.951}, "duplicate"),
    ],
)
def test_each_cause_has_its_limit(figures: dict[str, float], cause: str) -> None:
    (name,) = figures
    assert causes(entry(A, **figures)) == (cause,)
    edge = {"norm": 0.1, "unevenness": 0.05, "sink": 0.95, "redundancy": 0.95}[name]
    assert causes(entry(A, **{name: edge})) == ()
    if name != "norm":
        assert causes(entry(A, **{name: None})) == ()


def test_low_entropy_and_places_alone_are_no_cause() -> None:
    assert causes(entry(A, entropy=0.0, content=0.0, effective_keys=1.0, distance=1.0, first_token=0.94)) == ()


def test_a_head_is_flagged_after_three_checks_in_a_row() -> None:
    checks, dead = Checks(), [entry(A, norm=0.01), entry(B)]
    assert checks.check(dead, {A: 0.0}) == []
    assert checks.check(dead, {A: 0.0}) == []
    assert checks.check(dead, {A: 0.002}) == [Flagged(A, ("dead",))]  # a thousandth of the loss of 2
    assert checks.check(dead, {A: 0.0021}) == []  # of use: counted anew
    assert [checks.check(dead, {A: 0.0}) != [] for _ in range(3)] == [False, False, True]
    assert checks.check([entry(A), entry(B)], {}) == []  # no cause: counted anew
    assert checks.check(dead, {A: -1.0}) == []
    assert checks.asked == [[0]] * 8  # B shows no cause, so it was never ablated


def test_a_cause_that_changes_still_counts() -> None:
    checks = Checks()
    checks.check([entry(A, norm=0.01)], {A: 0.0})
    checks.check([entry(A, sink=0.99)], {A: 0.0})
    assert checks.check([entry(A, unevenness=0.0)], {A: 0.0}) == [Flagged(A, ("uniform",))]


def test_at_most_four_are_ablated_and_the_others_take_turns() -> None:
    heads = [Head("attention", number) for number in range(7)]
    checks, entries = Checks(checks=2), [entry(head, norm=0.01) for head in heads]
    flagged = [[one.head.number for one in checks.check(entries, dict.fromkeys(heads, 0.0))] for _ in range(2)]
    assert checks.asked == [[0, 1, 2, 3]] * 2  # who is nearest to being flagged is followed up first
    assert flagged == [[], [0, 1, 2, 3]]
    for head in heads[:4]:
        checks.watch.forget(head)
    checks.check(entries, dict.fromkeys(heads, 0.0))
    assert checks.asked[-1] == [0, 4, 5, 6]  # then who waits longest


def test_spared_heads_take_no_turn() -> None:
    checks, entries = Checks(checks=1, ablations=1), [entry(A, norm=0.0), entry(B, norm=0.0)]
    _, flagged = checks.watch.check(Health(entries, {}, 2.0), lambda heads: [0.0] * len(heads), spared={A})
    assert [one.head for one in flagged] == [B]


def pair(first: float, second: float) -> tuple[list[HeadHealth], dict[Head, float]]:
    entries = [entry(A, redundancy=0.99, nearest=1), entry(B, redundancy=0.99, nearest=0), entry(C)]
    return entries, {A: first, B: second}


@pytest.mark.parametrize(("first", "second", "gone"), [(0.001, 0.0, [B]), (0.0, 0.001, [A]), (0.0, 0.0, [B])])
def test_of_two_duplicates_one_goes(first: float, second: float, gone: list[Head]) -> None:
    checks = Checks(checks=1)
    assert [one.head for one in checks.check(*pair(first, second))] == gone


def test_noise_in_a_pair_of_duplicates_does_not_save_both() -> None:
    checks = Checks()
    checks.check(*pair(0.0005, 0.0))
    checks.check(*pair(0.0, 0.0005))
    assert [one.head for one in checks.check(*pair(0.0, 0.0005))] == [B]


def test_a_duplicate_that_is_of_use_is_left() -> None:
    checks = Checks(checks=1)
    assert checks.check(*pair(0.5, 0.4)) == []
    assert [one.head for one in checks.check(*pair(0.5, 0.0))] == [B]


def test_of_three_duplicates_one_stays() -> None:
    entries = [entry(head, redundancy=1.0, nearest=1 if head == A else 0) for head in (A, B, C)]
    checks = Checks(checks=1)
    assert [one.head for one in checks.check(entries, {A: 0.0, B: 0.0, C: 0.0})] == [B, C]


@pytest.mark.parametrize("number", [8, 16])
def test_a_duplicate_brings_the_other_with_it(number: int) -> None:
    """Turn by turn they never met, and none was ever judged."""
    heads, half = [Head("encoder", at) for at in range(number)], number // 2
    entries = [entry(head, redundancy=0.99, nearest=(head.number + half) % number) for head in heads]
    checks = Checks()
    found = [checks.check(entries, dict.fromkeys(heads, 0.0)) for _ in range(3)]
    assert checks.asked == [[0, 1, half, half + 1]] * 3
    assert [one.head.number for one in found[-1]] == [half, half + 1]


def test_one_check_of_heads_that_were_all_ablated() -> None:
    """Of a pair one is degenerate; limits other than those of checks stay."""
    entries, rises = pair(0.0005, 0.0)
    health = with_ablation(Health(entries, {}, 2.0), [rises.get(one.head, 1.0) for one in entries])
    assert degenerate(health) == [Flagged(B, ("duplicate",))]
    assert degenerate(health, Limits(duplicate=0.995)) == []


def test_a_duplicate_whose_other_was_not_ablated_waits() -> None:
    """Neither flagged nor cleared."""
    checks = Checks(checks=2, ablations=1)
    entries, rises = pair(0.0, 0.0)
    assert [checks.check(entries, rises) for _ in range(4)] == [[]] * 4


def test_a_watch_goes_on_from_its_state() -> None:
    first, second = Checks(), Checks()
    dead = [entry(A, norm=0.01)]
    for _ in range(2):
        first.check(dead, {A: 0.0})
    second.watch.load_state_dict(first.watch.state_dict())
    assert second.check(dead, {A: 0.0}) == [Flagged(A, ("dead",))]


def test_a_watch_needs_a_loss() -> None:
    with pytest.raises(ValueError, match="give loss="):
        Watch().check(Health([entry(A)], {}), lambda heads: [])
    with pytest.raises(ValueError, match="at least 1"):
        Limits(checks=0)


@pytest.mark.parametrize("mechanism", ["Softmax", "Differential", "LSH", "Additive"])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_heads_are_found_and_no_others(mechanism: str, kind: str) -> None:
    """A small part of `make reproduce FIGURE=planted-heads`, with decoys that show a cause and are of use."""
    case = plant(mechanism, kind, seed=1)
    if case is None:
        assert (mechanism, kind) == ("LSH", "sink")
        return
    watch = Watch(Limits(checks=2))
    for seed in range(2):
        health = head_health(case.model, case.batches, loss=case.loss, seed=seed)
        health, flagged = watch.check(
            health, lambda heads, seen=health: ablation(case.model, case.batches, case.loss, heads, seen)
        )
    (one,) = flagged
    assert one.head in case.heads and kind in one.causes
    assert any(causes(health[head]) for head in case.decoy)


def test_the_decoys_would_be_found_without_the_ablation() -> None:
    """What a test by causes alone would call degenerate."""
    case = plant("Softmax", "dead", seed=1)
    assert case is not None
    health = head_health(case.model, case.batches, loss=case.loss)
    shown = {one.head for one in health.heads if causes(one)}
    assert shown == {*case.heads, *case.decoy}
    assert torch.isfinite(torch.tensor([one.norm for one in health.heads])).all()
