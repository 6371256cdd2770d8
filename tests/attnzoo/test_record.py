"""record() and attention_map(): what is read is what ran, and nothing is paid when off."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnzoo import (
    DecoderBlock,
    EncoderBlock,
    Local,
    Mask,
    Mechanism,
    MultiheadAttention,
    OffsetBias,
    Softmax,
    attention_map,
    record,
)
from attnzoo.positions import RelativeBias

Make = Callable[..., Mechanism]
Draw = Callable[..., tuple[Tensor, ...]]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.traits("linear_in_v", "rectangular", "causal", "bias", "key_keep", "pair_keep")
@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (9, 9), (3, 11)])
def test_a2_the_map_times_v_is_the_output(make: Make, random_qkv: Draw, queries: int, keys: int) -> None:
    """A2, J2: over more keys than a head is wide, with every part of a mask; rows sum to 1 or 0."""
    attn = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(queries, keys))
    mask = Mask(True, torch.rand(2, keys) < 0.7, torch.rand(2, 2, queries, keys) < 0.7)
    bias = torch.randn(2, 1, queries, keys)
    weights = attention_map(attn, q, k, mask, bias)
    assert weights.shape == (2, 2, queries, keys)
    close(weights @ v, attn(q, k, v, mask, bias))
    visible = mask.visible(queries, keys)
    assert visible is not None
    assert (weights.masked_select(~visible) == 0).all()
    if attn.traits.normalised:
        sums = weights.sum(-1)
        close(sums, (sums > 0.5).float())
        assert (weights >= 0).all()


@pytest.mark.traits("linear_in_v", "grouped")
def test_maps_of_grouped_heads(make: Make, random_qkv: Draw) -> None:
    """A16: a map for each query head, though keys are shared."""
    attn = make(4, 4)
    q, k, v = (x.detach() for x in random_qkv(6, 6, heads=4, groups=2))
    weights = attention_map(attn, q, k)
    assert weights.shape == (2, 4, 6, 6)
    close(weights @ v.repeat_interleave(2, dim=1), attn(q, k, v))


@pytest.mark.traits("linear_in_v")
def test_maps_of_some_queries(make: Make, random_qkv: Draw) -> None:
    """Rows that were asked for, in the order they were asked for."""
    attn = make(2, 4)
    q, k, _ = (x.detach() for x in random_qkv(9, 9))
    rows = torch.tensor([8, 0, 3])
    assert torch.equal(attention_map(attn, q, k, queries=rows), attention_map(attn, q, k)[:, :, rows])


@pytest.mark.traits("linear_in_v")
def test_maps_are_those_of_evaluation(make: Make, random_qkv: Draw) -> None:
    """Dropout has no part in a map, and the mode is left as it was."""
    attn = make(2, 4, dropout=0.5)
    q, k, _ = (x.detach() for x in random_qkv(6, 6))
    expected = attention_map(attn, q, k)
    assert torch.equal(attention_map(attn.train(), q, k), expected)
    assert attn.training


class _Squares(Softmax):
    """Not linear in v, and says so."""

    traits = Softmax.traits.__class__(linear_in_v=False)


def test_no_map_where_there_is_none(random_qkv: Draw) -> None:
    """A denied trait raises, by the name of the mechanism."""
    q, k, _ = random_qkv(3, 3)
    with pytest.raises(ValueError, match="_Squares does not take attention_map"):
        attention_map(_Squares(2, 4), q, k)


class Model(nn.Module):
    """Three sites, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = EncoderBlock(8, 2, Local)
        self.decoder = DecoderBlock(8, 2, position=RelativeBias(2))

    def forward(self, x: Tensor) -> Tensor:
        context = self.encoder(self.encoder(x)[0])[0]
        y: Tensor = self.decoder(x[:, :3], context)[0]
        return y


def test_every_call_of_every_site() -> None:
    """B8: by the path of the site, in the order of the calls, and the output stays bit for bit the same."""
    model, x = Model().eval(), torch.randn(2, 5, 8)
    quiet = model(x)
    with record(model) as sites:
        loud = model(x)
    assert torch.equal(quiet, loud)
    assert {name: len(calls) for name, calls in sites.items()} == {
        "encoder.attention": 2,
        "decoder.attention": 1,
        "decoder.cross_attention": 1,
    }
    assert sites["encoder.attention"][1].mechanism is model.encoder.attention.mechanism
    own, cross = sites["decoder.attention"][0], sites["decoder.cross_attention"][0]
    assert own.mask.causal
    assert isinstance(own.bias, OffsetBias)
    assert own.q.shape == (2, 2, 3, 4)
    assert cross.k.shape == (2, 2, 5, 4)
    close(own.map() @ own.v, own.heads)
    close(cross.map() @ cross.v, cross.heads)
    close(cross.map(torch.tensor([2])), cross.map()[:, :, 2:])
    model(x)
    assert len(sites["encoder.attention"]) == 2


def test_what_is_recorded_hangs_on_no_graph() -> None:
    """Tensors that are read keep no activations alive; the output keeps its gradient."""
    model, x = Model().eval(), torch.randn(2, 5, 8)
    with record(model) as sites:
        y = model(x)
    assert y.requires_grad
    for calls in sites.values():
        for call in calls:
            bias = call.bias.values if isinstance(call.bias, OffsetBias) else call.bias
            for tensor in (call.q, call.k, call.v, call.heads, bias):
                assert tensor is None or not tensor.requires_grad
    y.sum().backward()
    assert model.encoder.attention.q_proj.weight.grad is not None


@pytest.mark.traits("streaming", "linear_in_v")
def test_steps_are_calls_too(kind: type[Mechanism]) -> None:
    """What was read at a step stays as it was when the next step writes to the state."""
    attn = MultiheadAttention(8, 2, kind, causal=True).eval()
    x = torch.randn(1, 4, 8)
    state = attn.init_state(1, 4)
    if not hasattr(state, "k"):
        with record(attn), pytest.raises(ValueError, match=f"cannot read a step of {kind.__name__}.*keeps no keys"):
            attn.step(x, state)
        return
    with record(attn) as sites:
        for t in range(4):
            _, state = attn.step(x[:, t : t + 1], state)
    with record(attn) as whole:
        attn(x)
    rows = [call.map() for call in sites["attention"]]
    assert [row.shape[-1] for row in rows] == [1, 2, 3, 4]
    expected = whole["attention"][0].map()
    for t, row in enumerate(rows):
        close(row[:, :, 0], expected[:, :, t, : t + 1])


@pytest.mark.traits("cross", "linear_in_v", "key_keep")
def test_steps_on_a_memory_are_calls_whatever_it_keeps(make: Make, random_qkv: Draw) -> None:
    """The map is that of the whole keys, padding left out, also where a state holds mixtures or sums of them."""
    mechanism = make(2, 4)
    q, k, v = (x.detach() for x in random_qkv(3, 7))
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    with record(mechanism) as sites:
        state = mechanism.memory(k, v, Mask(key_keep=keep))
        outputs = [mechanism.step(part, None, None, state)[0] for part in q.split(1, dim=2)]
    calls = sites["attention"]
    assert len(calls) == 3
    expected = attention_map(mechanism, q, k, Mask(key_keep=keep))
    for t, call in enumerate(calls):
        close(call.heads, outputs[t])
        close(call.map(), expected[:, :, t : t + 1])
    with record(mechanism, skip_unreadable=True) as later:
        mechanism.step(q, None, None, state)
    assert len(later["attention"]) == int(hasattr(state, "k"))


def test_maps_inside_the_context_are_not_calls() -> None:
    """Reading while recording adds nothing to what is read, so a loop over the calls ends."""
    attn = MultiheadAttention(8, 2).eval()
    with record(attn) as sites:
        attn(torch.randn(1, 3, 8))
        call = sites["attention"][0]
        call.map()
        attention_map(attn.mechanism, call.q, call.k)
        assert len(sites["attention"]) == 1


def test_records_nest() -> None:
    """The inner one sees its own time, the outer one all of it, and nothing is left behind."""
    attn = MultiheadAttention(8, 2).eval()
    x = torch.randn(1, 3, 8)
    with record(attn) as outer:
        attn(x)
        with record(attn) as inner:
            attn(x)
        attn(x)
    assert len(inner["attention"]) == 1
    assert len(outer["attention"]) == 3
    attn(x)
    assert len(outer["attention"]) == 3


def test_an_exception_inside_ends_the_recording() -> None:
    """The error comes through, and the model is as it was before."""
    attn = MultiheadAttention(8, 2).eval()
    before = set(vars(attn.mechanism))
    with pytest.raises(ValueError, match=r"no fault of"), record(attn) as sites:
        raise ValueError("no fault of record()")
    attn(torch.randn(1, 3, 8))
    assert sites["attention"] == []
    assert set(vars(attn.mechanism)) == before


def test_what_cannot_be_recorded_is_refused() -> None:
    """A model in training, and one without any mechanism."""
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"), record(MultiheadAttention(8, 2)):
        pass
    with pytest.raises(ValueError, match="Linear holds no attnzoo mechanism"), record(nn.Linear(2, 2).eval()):
        pass
