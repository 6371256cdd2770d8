"""The network: it starts at its base, and each option does what it says."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from attnzoo import Local, Softmax
from attnzoo.positions import PositionName
from experiments.forecasting.drawing import attention_figure
from experiments.forecasting.network import ForecastNetwork, InstanceNorm, normaliser
from experiments.forecasting.patches import Tokens
from experiments.training import pictures
from experiments.training.optim import split_parameters

SIZES: dict[str, Any] = {
    "lookback": 20, "horizon": 5, "columns": 3, "targets": 2, "features": 4, "season": 4, "dim": 8, "num_heads": 2,
    "depth": 2, "patch_size": 4,
}  # fmt: skip


def network(**options: Any) -> ForecastNetwork:
    made = ForecastNetwork(**{**SIZES, **options})
    made.baselines.ridge.weight.normal_()
    return made


def moved(made: ForecastNetwork) -> ForecastNetwork:
    """With a branch that does something, as after training."""
    for parameter in made.branch.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def window(count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 20), torch.randn(count, 5, 4)


@pytest.mark.parametrize("branch", ["transformer", "dlinear"])
@pytest.mark.parametrize("base", ["ridge", "seasonal", "last"])
def test_before_training_it_is_its_base(base: str, branch: str) -> None:
    past, calendar = window()
    made = network(base=base, branch=branch)
    forecast, quantiles, _, _, aux = made(past, calendar)
    torch.testing.assert_close(forecast, getattr(made.baselines, base)(past[:, :2]))
    assert (quantiles, float(aux)) == (None, 0.0)


@pytest.mark.parametrize("tokens", get_args(Tokens))
@pytest.mark.parametrize("position", get_args(PositionName))
def test_every_position_and_kind_of_token(position: str, tokens: str) -> None:
    past, calendar = window()
    made = network(position=position, tokens=tokens, patch_size=6, stride=4, quantiles=[0.1, 0.9])
    forecast, quantiles, _, _, aux = made(past, calendar)
    assert (forecast.shape, quantiles.shape) == ((3, 2, 5), (3, 2, 5, 2))
    (forecast.sum() + quantiles.sum() + aux).backward()
    moved(made)(past, calendar)[0].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_patches_end_at_the_last_value_and_repeat_the_first() -> None:
    made = network(patch_size=6, stride=4, position="none")
    past = torch.arange(20.0).expand(1, 3, 20)
    (first, *_, last) = made.branch._cut(past)[0].tolist()
    assert last == [14, 15, 16, 17, 18, 19]
    assert first == [0, 0, 0, 1, 2, 3]


def test_patches_of_a_target_see_that_target_alone() -> None:
    past, calendar = window()
    other = past.clone()
    other[:, 1:] = torch.randn(3, 2, 20)
    for tokens, apart in (("patch", True), ("mixed", False), ("channel", False)):
        made = moved(network(tokens=tokens))
        same = torch.equal(made(past, calendar)[0][:, 0], made(other, calendar)[0][:, 0])
        assert same == apart, tokens


def test_inputs_are_seen_where_tokens_hold_all_columns() -> None:
    past, calendar = window()
    other = past.clone()
    other[:, 2] += torch.randn(3, 20)
    for tokens in ("mixed", "channel"):
        made = moved(network(tokens=tokens))
        assert not torch.allclose(made(past, calendar)[0], made(other, calendar)[0])


def test_the_calendar_is_seen() -> None:
    past, calendar = window()
    made = moved(network())
    assert not torch.allclose(made(past, calendar)[0], made(past, torch.randn_like(calendar))[0])


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_weighs_the_branch_in_use_and_not_in_training(share: float) -> None:
    past, calendar = window()
    made = moved(network())
    made.share.fill_(share)
    parts = made(past, calendar)
    torch.testing.assert_close(made(past, calendar)[0], parts.base + share * parts.branch)
    torch.testing.assert_close(made.train()(past, calendar)[0], parts.base + parts.branch)


@pytest.mark.parametrize("tokens", get_args(Tokens))
def test_a_window_higher_and_wider_is_forecast_higher_and_wider(tokens: str) -> None:
    past, calendar = window()
    made = moved(network(tokens=tokens))
    plain = made(past, calendar)[0]
    torch.testing.assert_close(made(7 * past + 3, calendar)[0], 7 * plain + 3, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", get_args(InstanceNorm))
@pytest.mark.parametrize("level", [0.0, 42.0, 1e6])
def test_f10_a_flat_window_has_the_divisor_1(kind: Any, level: float) -> None:
    past = torch.full((2, 3, 20), level)
    mean, std = normaliser(past, kind)
    assert (std == 1).all()
    torch.testing.assert_close((past - mean) / std * std + mean, past)
    forecast, *_ = network(instance_norm=kind, base="last")(past, torch.zeros(2, 5, 4))
    torch.testing.assert_close(forecast, torch.full((2, 2, 5), level))


def test_quantiles_are_in_order_in_use_and_do_not_pull_at_the_forecast() -> None:
    past, calendar = window()
    made = network(quantiles=[0.1, 0.5, 0.9])
    with torch.no_grad():
        made.spread.copy_(torch.tensor([3.0, -1.0, 2.0]).expand(5, 3))
    made(past, calendar)[1].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in made.branch.parameters())
    _, quantiles, *_ = made.eval()(past, calendar)
    assert (quantiles.diff(dim=-1) > 0).all()
    assert made.spread in set(split_parameters(made)[1]), "the spread does not decay"


def test_other_mechanisms_for_single_blocks() -> None:
    made = network(attention_at={"1": Local})
    kinds = [type(block.attention.mechanism) for block in made.branch.blocks]
    assert kinds == [Softmax, Local]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 21}, r"--model\.patch_size=21 .*stride <= patch_size <= --data\.lookback=20"),
        ({"stride": 5}, r"--model\.stride=5"),
        ({"dim": 9}, r"--model\.dim=9 is no multiple of --model\.num_heads=2"),
        ({"depth": 0}, r"--model\.depth is 0; it must be at least 1"),
        ({"dropout": 1.0}, r"--model\.dropout is 1\.0"),
        ({"position": "rope_2d"}, r"--model\.position is 'rope_2d'; it must be one of none, "),
        ({"attention_at": {"2": Local}}, r"--model\.attention_at has block '2'; there are blocks 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(**options)


def test_a_map_of_too_many_tokens_is_not_drawn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    past, calendar = window()
    made, batch = network(), {"past": past[:1], "calendar": calendar[:1]}
    assert attention_figure(made, batch) is not None
    monkeypatch.setattr(pictures, "LONGEST_MAP", 2)
    with caplog.at_level("INFO", "experiments"):
        assert attention_figure(made, batch) is None
    assert "tokens would take too long; up to 2 are drawn" in caplog.text
