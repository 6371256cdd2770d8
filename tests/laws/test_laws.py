"""Every mechanism keeps its laws, and every law catches the bug that it is there for."""

import functools

import pytest
from planted import BUGS, Plain
from torch import Tensor

from attnzoo import (
    CATALOGUE,
    LSH,
    AdaptiveSpan,
    Additive,
    Axial,
    BlockSparse,
    Differential,
    Flash,
    GlobalLocal,
    Linear,
    Linformer,
    Local,
    Mask,
    Mechanism,
    MemoryCompressed,
    MoBA,
    Nystrom,
    Performer,
    Softmax,
    Strided,
    check_attention,
)
from attnzoo.bias import Bias
from attnzoo.catalogue import construct
from attnzoo.laws import LAWS, SITE, LawBroken
from attnzoo.laws.subject import Subject
from attnzoo.reference import formula_of

VARIANTS = {
    "Softmax, scale 1": functools.partial(Softmax, scale=1.0),
    "Softmax, math": functools.partial(Softmax, backend="math"),
    "Softmax, plain": functools.partial(Softmax, backend="plain"),
    "Softmax, softcap": functools.partial(Softmax, softcap=1.5),
    "Softmax, sink": functools.partial(Softmax, sink=True),
    "Softmax, scale, softcap and sink": functools.partial(Softmax, scale=1.0, softcap=0.7, sink=True),
    "Flash, softcap": functools.partial(Flash, softcap=2.0),
    "Local, left and right": functools.partial(Local, window=(2, 3)),
    "Local, only itself": functools.partial(Local, window=1),
    "Local, wider than any input": functools.partial(Local, window=301),
    "Additive, width of its own": functools.partial(Additive, hidden_dim=6),
    "Differential, deep": functools.partial(Differential, layer=7),
    "AdaptiveSpan, from nothing": functools.partial(AdaptiveSpan, init_ratio=0.0),
    "AdaptiveSpan, short": functools.partial(AdaptiveSpan, max_span=8, ramp=4, init_ratio=0.25),
    "BlockSparse, random": functools.partial(BlockSparse, layout="random", block_size=2, random_blocks=2),
    "BlockSparse, blocks of 3": functools.partial(BlockSparse, block_size=3),
    "Strided, 3": functools.partial(Strided, stride=3),
    "Strided, fixed": functools.partial(Strided, kind="fixed", stride=5, summary=2),
    "GlobalLocal, random keys": functools.partial(GlobalLocal, window=3, num_global=2, num_random=2),
    "GlobalLocal, wider than any input": functools.partial(GlobalLocal, window=301, num_global=40, num_random=1),
    "Axial, three axes and a prefix": functools.partial(Axial, grid=(4, 2, 16), prefix_tokens=2),
    "Axial, sum": functools.partial(Axial, grid=(32, 4), prefix_tokens=1, combine="sum"),
    "Axial, one axis": functools.partial(Axial, grid=(130,)),
    "MemoryCompressed, nothing compressed": functools.partial(MemoryCompressed, factor=1),
    "LSH, one round": functools.partial(LSH, num_rounds=1),
    "LSH, chunks of one": functools.partial(LSH, bucket_size=1),
    "LSH, three rounds of two buckets": functools.partial(LSH, bucket_size=3, num_buckets=2, num_rounds=3),
    "LSH, chunks longer than any input": functools.partial(LSH, bucket_size=129),
    "MoBA, blocks of one": functools.partial(MoBA, block_size=1),
    "MoBA, odd blocks": functools.partial(MoBA, block_size=3, top_k=2),
    "MoBA, own block alone": functools.partial(MoBA, top_k=1),
    "Linformer, a pair for each head": functools.partial(Linformer, sharing="none", max_len=128),
    "Linformer, E = F": functools.partial(Linformer, sharing="key_value", rank=3, max_len=128),
    "Linear, relu": functools.partial(Linear, feature_map="relu"),
    "Linear, exp": functools.partial(Linear, feature_map="exp"),
    "Performer, few features": functools.partial(Performer, num_features=3, seed=5),
    "Nystrom, convolution": functools.partial(Nystrom, kernel_size=5),
    "Nystrom, few landmarks": functools.partial(Nystrom, num_landmarks=3),
}


COMPILED = {"Local"}
"""Compiling takes as long as all other laws together; the rest is compiled in the slow set."""


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mechanism_keeps_every_law_that_it_claims(name: str) -> None:
    laws = [law for law in LAWS if law != "compiles" or name in COMPILED]
    verdicts = check_attention(construct(CATALOGUE[name], 4, 8, **SITE), laws=laws)
    assert list(verdicts) == laws
    assert sum(verdict == "holds" for verdict in verdicts.values()) >= 13


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CATALOGUE.keys() - COMPILED))
def test_every_other_mechanism_compiles(name: str) -> None:
    assert check_attention(construct(CATALOGUE[name], 4, 8, **SITE), laws=["compiles"]) == {"compiles": "holds"}


QUICK = ["formula", "future", "padding", "empty rows", "streaming", "grouped"]
"""What options can break most easily."""

SOME = (
    "Softmax, scale, softcap and sink", "Local, left and right", "AdaptiveSpan, short", "Strided, fixed",
    "GlobalLocal, random keys", "Axial, sum", "LSH, one round", "Linear, relu",
)  # fmt: skip
"""All variants, by all laws, take two minutes and stand in the slow set."""


@pytest.mark.parametrize("name", SOME)
def test_variants_keep_the_laws_that_options_can_break(name: str) -> None:
    check_attention(VARIANTS[name](4, 8), laws=QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_all_laws(name: str) -> None:
    check_attention(VARIANTS[name](4, 8))


def test_the_plain_mechanism_that_the_bugs_are_planted_in_is_right() -> None:
    check_attention(Plain(4, 8), laws=[law for law in LAWS if law != "compiles"])


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
