"""The benchmark of vision compares what is of one size, and counts the wait for data as it says."""

import pytest

from benchmarks.vision import DEPTH, DIM, Waiting, networks, waiting


def test_the_three_networks_are_of_one_size() -> None:
    """Within the biases of queries, keys and values, and vit-pytorch's two norms around its patches."""
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks().items()}
    slack = 3 * DEPTH * DIM + 4 * DIM
    assert max(counts.values()) - min(counts.values()) <= slack < 0.01 * min(counts.values())


def test_the_wait_is_the_time_before_a_step_as_a_share_of_that_from_step_to_step() -> None:
    times = iter([0.0, 5.0, 6.0, 9.0, 10.0, 13.0, 16.0, 17.0])  # begin and end of four steps
    watch = Waiting(lambda: next(times))
    for _ in range(4):
        watch.on_train_batch_start()
        watch.on_train_batch_end()
    # From 9 on: 1 of 4 and 3 of 4.
    assert watch.share() == pytest.approx(0.5)


@pytest.mark.slow
def test_the_wait_is_measured_in_the_preset() -> None:
    ticks = iter(range(1000))
    assert waiting(3, lambda: float(next(ticks))) == pytest.approx(0.5)
