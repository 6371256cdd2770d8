"""The table of mechanisms: names, factories, specs, and refusals that help."""

import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnzoo import (
    CATALOGUE,
    Additive,
    Local,
    Mask,
    Mechanism,
    MultiheadAttention,
    Softmax,
    build,
    from_spec,
    spec,
)
from attnzoo.catalogue import construct
from attnzoo.laws import SITE


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_name_builds_with_no_further_option(name: str) -> None:
    """A name is the class's own; it stands alone and in a shell that knows its place, and does the same there."""
    made = construct(CATALOGUE[name], 2, 4, **SITE)
    assert type(made) is CATALOGUE[name]
    assert type(made).__name__ == name
    attn = MultiheadAttention(8, 2, CATALOGUE[name], **SITE)
    assert type(attn.mechanism) is CATALOGUE[name]
    assert (made.num_heads, made.head_dim) == (attn.mechanism.num_heads, attn.mechanism.head_dim) == (2, 4)


def test_options_reach_the_mechanism() -> None:
    """From a name, and from a partial."""
    local = build("Local", 2, 8, window=5, dropout=0.25)
    assert isinstance(local, Local)
    assert (local.window, local.dropout) == (5, 0.25)
    attn = MultiheadAttention(16, 2, functools.partial(Additive, hidden_dim=3))
    assert attn.mechanism.key_weight.shape == (2, 8, 3)


def test_a_wrong_name_or_option_gets_the_nearest_right_word() -> None:
    """In one line, with what there is."""
    for wrong, right in [("Locl", "Local"), ("softmax", "Softmax"), ("aditive", "Additive")]:
        with pytest.raises(ValueError, match=rf"'{wrong}'\. Did you mean {right}\? There are: .*Softmax") as caught:
            build(wrong, 2, 8)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"Local has no option 'windw'\. Did you mean window\? It has: window"):
        build("Local", 2, 8, windw=5)
    with pytest.raises(ValueError, match=r"Softmax has no option 'window'"):
        MultiheadAttention(16, 2, functools.partial(Softmax, window=5))


def test_what_is_no_factory_is_refused() -> None:
    """A name, a ready-made mechanism, a callable of something else."""
    wrong: list[Any] = ["Local", Local(2, 8), None, lambda heads, width: torch.nn.Linear(heads, width)]
    for factory in wrong:
        with pytest.raises(ValueError, match=r"factory|attnzoo\.Mechanism"):
            MultiheadAttention(16, 2, factory)


def test_a_factory_may_be_any_callable() -> None:
    """A lambda builds as well as a class; only writing it down is refused."""
    attn = MultiheadAttention(16, 2, lambda heads, width: Local(heads, width, window=3))
    assert isinstance(attn.mechanism, Local)
    assert attn.mechanism.window == 3
    with pytest.raises(ValueError, match=r"cannot be written down.*functools\.partial"):
        spec(lambda heads, width: Local(heads, width))


class Mine(Softmax):
    """A mechanism of somebody's own package, in no catalogue."""

    def __init__(self, num_heads: int, head_dim: int, *, sharpness: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim, scale=sharpness, dropout=dropout)


FACTORIES = {
    "class": Softmax,
    "partial": functools.partial(Local, window=5),
    "pair": functools.partial(Local, window=(3, 1), dropout=0.1),
    "nested": functools.partial(functools.partial(Local, window=5), dropout=0.1),
    "own": functools.partial(Mine, sharpness=2.0),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_spec_there_and_back(name: str) -> None:
    """Plain values that JSON holds; what comes back builds the same mechanism."""
    factory = FACTORIES[name]
    plain = spec(factory)
    text = json.dumps(plain)
    again = from_spec(json.loads(text))
    assert json.dumps(spec(again)) == text
    made, expected = again(2, 4), factory(2, 4)
    assert type(made) is type(expected)
    for key, value in vars(expected).items():
        if isinstance(value, int | float | str | tuple):
            assert getattr(made, key) == value
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_a_factory_as_the_command_line_makes_it() -> None:
    """jsonargparse hands over a partial with the class among its arguments and the options as keywords."""

    def instantiate(cls: Callable[..., Mechanism], heads: int, width: int, **options: Any) -> Mechanism:
        return cls(heads, width, **options)

    factory = functools.partial(instantiate, Local, window=7)
    assert spec(factory) == {"class_path": "attnzoo.mechanisms.local.Local", "init_args": {"window": 7}}
    attn = MultiheadAttention(16, 2, factory)
    assert isinstance(attn.mechanism, Local)
    assert attn.mechanism.window == 7
    # The options that were given last are the ones that count.
    outer = functools.partial(instantiate, functools.partial(Local, window=5, dropout=0.1), window=7)
    assert spec(outer)["init_args"] == {"window": 7, "dropout": 0.1}
    made = outer(2, 8)
    assert isinstance(made, Local)
    assert (made.window, made.dropout) == (7, 0.1)


def test_a_spec_without_options() -> None:
    """A bare name of the catalogue, and a path whose init_args were left out because there are none."""
    for path in ("Local", "attnzoo.Local", "attnzoo.mechanisms.local.Local"):
        assert isinstance(from_spec({"class_path": path})(2, 4), Local)
        assert isinstance(from_spec({"class_path": path, "init_args": {}})(2, 4), Local)


def test_a_spec_that_cannot_be_read() -> None:
    """An unknown class, a class that is no mechanism, a spec without a class."""
    for path in ("attnzoo.Locl", "no_such_package.Attention", "Locl"):
        with pytest.raises(ValueError, match=f"cannot import the mechanism {path}"):
            from_spec({"class_path": path, "init_args": {}})
    with pytest.raises(ValueError, match=r"torch\.nn\.Linear is no attnzoo\.Mechanism"):
        from_spec({"class_path": "torch.nn.Linear", "init_args": {}})
    with pytest.raises(ValueError, match="class_path"):
        from_spec({"init_args": {}})


def test_traits_say_what_is_there(kind: type[Mechanism]) -> None:
    """Each denied trait has a reason to be told; a dense one does not promise linear memory."""
    positive = {
        "causal",
        "bidirectional",
        "cross",
        "rectangular",
        "key_keep",
        "pair_keep",
        "bias",
        "streaming",
    }
    for trait in positive | {"grouped", "linear_in_v"}:
        if not getattr(kind.traits, trait):
            assert kind.reasons.get(trait), f"{kind.__name__} denies {trait} without a reason"
    assert kind.traits.complexity


@pytest.mark.traits("causal", "key_keep")
def test_a_state_dict_round_trip_changes_nothing(kind: type[Mechanism], tmp_path: Path) -> None:
    """Weights saved, loaded safely and strictly into another instance."""
    first, second = (MultiheadAttention(8, 2, kind, **SITE).eval() for _ in range(2))
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    x, mask = torch.randn(2, 5, 8), Mask(causal=True, key_keep=torch.rand(2, 5) < 0.7)
    assert torch.equal(second(x, mask=mask), first(x, mask=mask))


AFTERWARDS = """
import sys, torch, attnzoo
from attnzoo import MultiheadAttention, from_spec
from attnzoo.laws import SITE
torch.set_num_threads(1)
for saved in torch.load(sys.argv[1], weights_only=True):
    attn = MultiheadAttention(8, 2, from_spec(saved["spec"]), **SITE).eval()
    attn.load_state_dict(saved["weights"])
    assert torch.equal(attn(saved["x"]), saved["y"]), saved["spec"]
print("equal", attnzoo.__version__)
"""


def test_e09_evaluation_repeats_bit_for_bit(tmp_path: Path) -> None:
    """E09: each mechanism twice in a row, and after save and load in a new process."""
    saved = []
    for cls in CATALOGUE.values():
        attn, x = MultiheadAttention(8, 2, cls, **SITE).eval(), torch.randn(2, 7, 8)
        y = attn(x).detach()
        assert torch.equal(attn(x), y)
        saved.append({"spec": spec(cls), "weights": attn.state_dict(), "x": x, "y": y})
    torch.save(saved, tmp_path / "all.pt")
    command = [sys.executable, "-W", "error", "-c", AFTERWARDS, str(tmp_path / "all.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal")
