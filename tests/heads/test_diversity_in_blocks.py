"""Head diversity where it is used: in blocks, around every mechanism, in the networks of the three experiments."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnzoo import (
    CATALOGUE,
    DecoderBlock,
    DiversityKind,
    EncoderBlock,
    HeadDiversity,
    Mask,
    MultiheadLatentAttention,
    Softmax,
    Traits,
    record,
)
from attnzoo.heads.diversity import li_cosine, li_position, projected
from attnzoo.laws import SITE
from attnzoo.positions import Rotary, Shaw
from experiments.forecasting.network import ForecastNetwork
from experiments.listops.network import ListOpsEncoder
from experiments.training.optim import Optim
from experiments.training.ramp import DiversityRamp
from experiments.translation.bahdanau import Bahdanau
from experiments.translation.embedding import Words
from experiments.translation.transformer import Transformer
from experiments.vision.network import PictureFacts, VisionTransformer

KINDS: tuple[DiversityKind, ...] = get_args(DiversityKind)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_aux_is_the_weight_times_the_mean_over_the_attentions() -> None:
    """Two blocks with three attentions share one object: each adds a third, and the sum is weight x mean, once."""
    diversity = HeadDiversity(0.3)
    encoder, decoder = (kind(16, 4, head_diversity=diversity) for kind in (EncoderBlock, DecoderBlock))
    x, context = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    aux = encoder(x)[1] + decoder(x, context)[1]
    inside = decoder.attention_norm(x)
    heads = [
        (encoder.attention, encoder.attention.attend(encoder.attention_norm(x))),
        (decoder.attention, decoder.attention.attend(inside)),
    ]
    x = x + decoder.attention(inside)
    heads.append((decoder.cross_attention, decoder.cross_attention.attend(decoder.cross_norm(x), context)))
    values = [projected(each, attention.out_proj.weight) for attention, each in heads]
    assert aux.item() == pytest.approx(0.3 * sum(value.item() for value in values) / 3, rel=1e-5)
    aux.backward()
    for attention, _ in heads:
        assert attention.q_proj.weight.grad.count_nonzero() > 0
        assert attention.out_proj.weight.grad.count_nonzero() > 0


def test_it_moves_no_output_and_leaves_no_trace() -> None:
    """The same numbers with and without, and the same names in a checkpoint."""
    block = EncoderBlock(16, 4, head_diversity=HeadDiversity(0.3))
    plain = EncoderBlock(16, 4)
    plain.load_state_dict(block.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(block(x)[0], plain(x)[0])
    assert list(HeadDiversity(0.3).parameters()) == []


@pytest.mark.parametrize("way", ["evaluation", "weight 0", "share 0"])
def test_off_is_off(way: str) -> None:
    """No term, nothing drawn from the generator, nothing computed."""
    diversity = HeadDiversity(0.0 if way == "weight 0" else 0.3)
    block = EncoderBlock(16, 4, head_diversity=diversity)
    if way == "evaluation":
        block.eval()
    if way == "share 0":
        diversity.move(0.0)
    diversity.register_forward_hook(lambda *_: pytest.fail("it was called"))
    before = torch.get_rng_state()
    assert block(torch.zeros(20, 40, 16))[1].item() == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_share_moves_the_weight() -> None:
    diversity = HeadDiversity(0.4)
    block = EncoderBlock(16, 4, head_diversity=diversity)
    x = torch.randn(2, 5, 16)
    whole = block(x)[1].item()
    diversity.move(0.25)
    assert block(x)[1].item() == pytest.approx(whole / 4)
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        diversity.move(1.5)


@pytest.mark.parametrize(
    ("options", "named"),
    [((-1.0,), "from 0 up, got -1"), ((float("nan"),), "got nan"), ((0.1, "ckaa"), "one of projected, cka")],
)
def test_what_makes_no_sense_is_refused_by_name(options: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"head_diversity.*{named}"):
        HeadDiversity(*options)


class _Crooked(Softmax):
    traits = Traits(linear_in_v=False)


@pytest.mark.parametrize("kind", ["overlap", "li_position"])
def test_a_mechanism_that_has_no_weights_is_refused_by_name(kind: DiversityKind) -> None:
    """When the block is built; what needs no weights takes it."""
    with pytest.raises(ValueError, match=rf"_Crooked does not take head_diversity_kind={kind}, where projected serves"):
        EncoderBlock(16, 4, _Crooked, head_diversity=HeadDiversity(0.1, kind))
    EncoderBlock(16, 4, _Crooked, head_diversity=HeadDiversity(0.1, "li_subspace"))


def value_of(block: EncoderBlock, x: Tensor, mask: Mask | None = None) -> float:
    """What a block at weight 1 adds for its heads."""
    return (block(x, mask=mask)[1] - (block.attention.mechanism.penalty() or 0)).item()


@pytest.mark.parametrize("name", CATALOGUE)
def test_kinds_of_weights_and_values_are_those_of_the_map(name: str) -> None:
    """Every mechanism, with padding: what `attention_map` reads of a recorded call, put into the formula."""
    x, keep = torch.randn(2, 12, 16), torch.arange(12) < torch.tensor([[12], [9]])
    mask = Mask(key_keep=keep)
    block = EncoderBlock(16, 4, CATALOGUE[name], head_diversity=HeadDiversity(1.0, "li_position"), **SITE)
    with record(block.eval()) as sites:
        block(x, mask=mask)
    (call,) = sites["attention"]
    torch.manual_seed(3)  # LSH draws its rounds
    weights = call.map()
    block.train()
    torch.manual_seed(3)
    assert value_of(block, x, mask) == pytest.approx(li_position(weights, keep).item(), rel=1e-4)
    assert block.head_diversity is not None
    block.head_diversity.kind = "li_subspace"
    assert value_of(block, x, mask) == pytest.approx(li_cosine(call.v, keep).item(), rel=1e-5)
    block.head_diversity.kind = "overlap"
    drawn = []
    for _ in range(40):
        drawn.append(value_of(block, x, mask))
    both = torch.einsum("bhts,bgts->hg", *(2 * [weights.masked_fill(~keep[:, None, :, None], 0).double()]))
    alike = (both / (both.diagonal()[:, None] * both.diagonal()).sqrt()).triu(1).abs().sum().item() / 6
    assert sum(drawn) / len(drawn) == pytest.approx(alike, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [{"num_kv_heads": 2}, {"shell": MultiheadLatentAttention}, {"position": Shaw(4)}, {"position": Rotary(4)},
     {"gate": "head", "head_norm": True, "qk_norm": "rms"}],
    ids=["grouped", "latent", "shaw", "rotary", "gate"],
)  # fmt: skip
def test_options_of_the_shell(kind: DiversityKind, options: dict[str, Any]) -> None:
    """Grouped heads, latent attention, positions, gates: a number in [0, 1] that has gradients."""
    block = EncoderBlock(16, 4, head_diversity=HeadDiversity(1.0, kind), **options)
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    _, aux = block(torch.randn(2, 6, 16), mask=Mask(key_keep=keep))
    assert 0 < aux.item() <= 1
    aux.backward()
    assert sum(p.grad.abs().sum().item() for p in block.attention.parameters() if p.grad is not None) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_a_decoder_that_causality_hides_takes_no_part(kind: DiversityKind) -> None:
    """Targets are padded on the right without a mask; ``real`` tells. Other padding, or none, gives the same."""
    block = DecoderBlock(16, 4, head_diversity=HeadDiversity(1.0, kind))
    x, context = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    real = torch.arange(6) < torch.tensor([[4], [4]])
    other = torch.where(real[..., None], x, 100.0)
    found = []
    for given in (x, other):
        torch.manual_seed(1)
        found.append(block(given, context, real=real)[1].item())
    assert found[0] == found[1] > 0
    if kind != "overlap":  # its signs are drawn for each key
        assert block(x[:, :4], context)[1].item() == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["projected", "cka", "overlap"])
def test_in_a_graph_it_gives_the_same_and_a_move_makes_no_other_graph(kind: DiversityKind) -> None:
    block = EncoderBlock(16, 4, head_diversity=HeadDiversity(1.0, kind))
    assert block.head_diversity is not None
    ramp = DiversityRamp()
    block.head_diversity.register_forward_hook(ramp._hear)  # what listens in training
    x, keep = torch.randn(2, 6, 16), torch.arange(6) < torch.tensor([[6], [4]])
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=count, fullgraph=True)
    for share in (1.0, 0.5, 0.25):
        block.head_diversity.move(share)
        torch.manual_seed(2)
        expected = block(x, mask=Mask(key_keep=keep))[1]
        torch.manual_seed(2)
        assert compiled(x, mask=Mask(key_keep=keep))[1].item() == pytest.approx(expected.item(), rel=1e-5)
    assert len(graphs) == 1
    assert ramp._heard[1] == 6


def test_a_copy_of_a_model_has_a_term_of_its_own() -> None:
    """One for all blocks of the copy, as in the model, which it no longer moves."""
    model = torch.nn.ModuleList([EncoderBlock(16, 4, head_diversity=d) for d in 2 * [HeadDiversity(0.3)]])
    twin = copy.deepcopy(model)
    twin[0].head_diversity.move(0.0)
    x = torch.randn(1, 5, 16)
    assert model[1](x)[1].item() > 0
    assert twin[1](x)[1].item() == 0


# The networks of the experiments.

DIGITS = PictureFacts(8, 8, 1, 10, mean=[0.3], std=[0.4])
WORDS = Words(24, 24, joint=True)
SOURCE = torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 0, 0]])
TARGET = torch.tensor([[1, 7, 8, 9], [1, 9, 0, 0]])
LABELS = torch.tensor([[7, 8, 9, 2], [9, 2, 0, 0]])


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mechanism_trains_one_step_of_a_vit(name: str) -> None:
    """A term of the loss, one update, parameters that are finite."""
    for kind in ("projected", "overlap"):
        model = VisionTransformer(
            DIGITS, attention=CATALOGUE[name], dim=16, depth=1, num_heads=2, patch_size=4,
            head_diversity=1.0, head_diversity_kind=kind,
        )  # fmt: skip
        optimizer = Optim().optimizer(model)
        logits, aux = model(torch.rand(3, 1, 8, 8))
        penalty = model.blocks[0].attention.mechanism.penalty()
        assert 0 <= aux.item() - (0 if penalty is None else penalty.item()) <= 1
        (logits.square().mean() + aux).backward()
        optimizer.step()
        assert all(p.grad is not None and p.isfinite().all() for p in model.parameters())


def networks(kind: DiversityKind, weight: float) -> dict[str, tuple[Any, tuple[Any, ...], int]]:
    """Network, what it is called with, how many attentions it has."""
    more: dict[str, Any] = {"head_diversity": weight, "head_diversity_kind": kind}
    sizes = {"dim": 16, "num_heads": 4, "hidden_dim": 16}
    return {
        "vit": (VisionTransformer(DIGITS, **sizes, depth=2, **more), (torch.rand(2, 1, 8, 8),), 2),
        "transformer": (
            Transformer(WORDS, **sizes, encoder_depth=1, decoder_depth=2, dropout=0.0, **more),
            (TARGET, SOURCE), 5,
        ),
        "bahdanau": (Bahdanau(WORDS, **sizes, dropout=0.0, **more), (TARGET, SOURCE), 1),
        "forecaster": (
            ForecastNetwork(lookback=12, horizon=4, patch_size=3, **sizes, depth=3, **more),
            (torch.randn(2, 1, 12), torch.zeros(2, 4, 0)), 3,
        ),
        "listops": (
            ListOpsEncoder(
                15, 10, 8, attention=Softmax, position="learned", **sizes, depth=2, dropout=0.0, **more
            ),
            (torch.tensor([[3, 4, 5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]]),), 2,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("which", ["vit", "transformer", "bahdanau", "forecaster", "listops"])
@pytest.mark.parametrize("kind", ["projected", "overlap", "li_subspace"])
def test_networks_return_the_mean_over_their_attentions(which: str, kind: DiversityKind) -> None:
    """Heard by a hook, unweighed; the last thing that a network returns is the weight times their mean."""
    network, inputs, sites = networks(kind, 0.2)[which]
    heard: list[float] = []
    network.get_submodule("head_diversity" if which == "bahdanau" else term_of(network)).register_forward_hook(
        lambda module, given, out: heard.append(out.item())
    )
    aux = network(*inputs)[-1]
    assert len(heard) == sites
    assert all(0 < value <= 1 for value in heard)
    assert aux.item() == pytest.approx(0.2 * sum(heard) / sites, rel=1e-5)
    assert network.eval()(*inputs)[-1].item() == 0
    plain = networks(kind, 0.0)[which][0]
    assert set(plain.state_dict()) == set(network.state_dict())


def term_of(network: torch.nn.Module) -> str:
    return next(name for name, module in network.named_modules() if isinstance(module, HeadDiversity))


@pytest.mark.parametrize("which", ["transformer", "bahdanau"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_of_sentences_takes_no_part(which: str, kind: DiversityKind) -> None:
    """More padding on either side of a pair: the same aux. Labels tell better than targets, which have EOS in them."""
    network, _, _ = networks(kind, 1.0)[which]
    found = []
    for more in (0, 3):
        source, target, labels = (torch.nn.functional.pad(x, (0, more)) for x in (SOURCE, TARGET, LABELS))
        torch.manual_seed(0)
        found.append([network(target, source)[-1].item(), network(target, source, labels=labels)[-1].item()])
    tolerance = 0.2 if kind == "overlap" else 1e-4  # its signs are drawn for each key
    assert found[0] == pytest.approx(found[1], rel=tolerance)


def test_bahdanau_gives_what_its_shell_attends_to() -> None:
    """The heads of all steps, of a mechanism that picks up a memory, against one call for given queries."""
    network = Bahdanau(WORDS, dim=8, hidden_dim=16, num_heads=4, dropout=0.0, head_diversity=1.0)
    queries: list[Tensor] = []
    recall = network.attention.recall
    network.attention.recall = lambda x, memory: (queries.append(x), recall(x, memory))[1]  # type: ignore[method-assign]
    _, aux = network(TARGET, SOURCE)
    annotations, mask, _ = network.encode(SOURCE)
    heads = network.attention.attend(torch.cat(queries, 1), annotations, mask=mask)
    assert aux.item() == pytest.approx(
        projected(heads, network.attention.out_proj.weight, TARGET != 0).item(), rel=1e-5
    )


def test_a_branch_without_heads_is_refused() -> None:
    options: dict[str, Any] = {"lookback": 12, "horizon": 4, "branch": "dlinear"}
    ForecastNetwork(**options)
    with pytest.raises(ValueError, match=r"--model\.head_diversity is 0\.1, but --model\.branch=dlinear has no heads"):
        ForecastNetwork(**options, head_diversity=0.1)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize("kind", ["projected", "cka", "overlap", "li_output", "li_subspace"])
def test_no_kind_but_one_needs_weights(kind: DiversityKind) -> None:
    """Around a mechanism that makes no T x S numbers none are made, forward and backward."""
    block = EncoderBlock(8, 2, CATALOGUE["Linear"], head_diversity=HeadDiversity(1.0, kind), hidden_dim=8)
    with Largest() as seen:
        block(torch.randn(1, 2000, 8))[1].backward()
    assert seen.numbers < 2000 * 200
