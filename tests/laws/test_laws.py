"""Every mechanism keeps its laws, and every law catches the bug that it is there for."""

import functools

import pytest
from planted import BUGS, Plain
from torch import Tensor

from attnzoo import CATALOGUE, Additive, Local, Mask, Mechanism, Softmax, check_attention
from attnzoo.bias import Bias
from attnzoo.catalogue import construct
from attnzoo.laws import LAWS, SITE, LawBroken
from attnzoo.laws.subject import Subject
from attnzoo.reference import formula_of

VARIANTS = {
    "Softmax, scale 1": functools.partial(Softmax, scale=1.0),
    "Softmax, math": functools.partial(Softmax, backend="math"),
    "Local, left and right": functools.partial(Local, window=(2, 3)),
    "Local, only itself": functools.partial(Local, window=1),
    "Local, wider than any input": functools.partial(Local, window=301),
    "Additive, width of its own": functools.partial(Additive, hidden_dim=6),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mechanism_keeps_every_law_that_it_claims(name: str) -> None:
    verdicts = check_attention(construct(CATALOGUE[name], 4, 8, **SITE))
    assert list(verdicts) == list(LAWS)
    assert sum(verdict == "holds" for verdict in verdicts.values()) >= 14


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_the_laws(name: str) -> None:
    check_attention(VARIANTS[name](4, 8), laws=[law for law in LAWS if law != "compiles"])


def test_the_plain_mechanism_that_the_bugs_are_planted_in_is_right() -> None:
    check_attention(Plain(4, 8))


@pytest.mark.parametrize(("broken", "law"), BUGS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_planted_bug_is_caught_by_the_law_meant_for_it(broken: type[Mechanism], law: str) -> None:
    mechanism = broken(4, 8)
    with pytest.raises(LawBroken):  # what the law saw, no error of another kind
        LAWS[law].check(Subject(mechanism, formula_of(mechanism), max_len=128))


def test_every_law_has_a_bug_that_it_catches() -> None:
    assert {law for _, law in BUGS} == set(LAWS)


def test_an_unknown_law_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"no law named 'futur'.*future"):
        check_attention(Softmax(2, 4), laws=["futur"])


def test_all_broken_laws_are_reported_together() -> None:
    class Wrong(Softmax):
        def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
            return v.mean(2, keepdim=True).expand(-1, -1, q.shape[2], -1)

    with pytest.raises(LawBroken, match=r"breaks 2 law\(s\)[\s\S]*formula[\s\S]*future"):
        check_attention(Wrong(2, 4), laws=["formula", "future", "shapes"])
