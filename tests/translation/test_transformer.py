"""The Transformer and its parts: embeddings, sites, losses, gradients."""

from __future__ import annotations

import functools
from typing import Any, get_args

import pytest
import torch
from networks import KINDS, WORDS, gradients, loss_of, network, sources, transformer
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo import CATALOGUE, AdaptiveSpan, Additive, Axial, Linear, Linformer, Local, Mechanism, Nystrom, Softmax
from attnzoo.positions import PositionName
from experiments.translation.embedding import Words
from experiments.translation.sites import NEEDS
from experiments.translation.tokens import BOS, EOS, PAD
from experiments.translation.transformer import Transformer

APART = Words(24, 19, joint=False)


def able(kind: str) -> list[str]:
    return [n for n, c in CATALOGUE.items() if all(getattr(c.traits, trait) for trait in NEEDS[kind])]


def copying() -> nn.Module:
    """All branches of the decoder say nothing and positions are left out, so its logits point at its own input."""
    model = transformer(position="none")
    with torch.no_grad():
        for block in model.decoder:
            for last in (block.attention.out_proj, block.cross_attention.out_proj, block.feed_forward.layers[-1]):
                last.weight.zero_()
                last.bias.zero_()
        model.words.target_table.weight.copy_(torch.eye(24, 16) * 4)
        model.words.target_table.weight[16:] = -torch.eye(8, 16) * 4
    return model


def in_torch(model: Transformer, source: Tensor, target: Tensor, norm_first: bool) -> Tensor:
    """The logits of torch's own layers with these weights, without padding."""

    def attention(name: str, own: nn.Module) -> dict[str, Tensor]:
        bias = torch.cat([own.q_proj.bias, torch.zeros(16), own.v_proj.bias])
        return {
            f"{name}.in_proj_weight": torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]),
            f"{name}.in_proj_bias": bias,
            f"{name}.out_proj.weight": own.out_proj.weight,
            f"{name}.out_proj.bias": own.out_proj.bias,
        }

    def layer(kind: type[nn.Module], block: nn.Module) -> nn.Module:
        twin = kind(16, 2, 24, 0.0, "gelu", norm_first=norm_first, batch_first=True).eval()
        parts = {"linear1": block.feed_forward.layers[0], "linear2": block.feed_forward.layers[-1]}
        norms = [block.attention_norm, block.feed_forward_norm]
        weights = attention("self_attn", block.attention)
        if kind is nn.TransformerDecoderLayer:
            norms.insert(1, block.cross_norm)
            weights |= attention("multihead_attn", block.cross_attention)
        for name, part in (*parts.items(), *((f"norm{n}", norm) for n, norm in enumerate(norms, 1))):
            weights |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        twin.load_state_dict(weights)
        return twin

    def embedded(tokens: Tensor) -> Tensor:
        angle = torch.arange(tokens.shape[1])[:, None] / 10000 ** (torch.arange(8) / 8)
        return table[tokens] * 4 + torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

    table = model.words.target_table.weight
    x, y = embedded(source), embedded(target)
    for block in model.encoder:
        x = layer(nn.TransformerEncoderLayer, block)(x)
    x = F.layer_norm(x, (16,)) if norm_first else x
    future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    for block in model.decoder:
        y = layer(nn.TransformerDecoderLayer, block)(y, x, tgt_mask=future)
    return (F.layer_norm(y, (16,)) if norm_first else y) @ table.T


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_network_is_that_of_torchs_layers(norm_first: bool) -> None:
    """Sentences of other lengths in one batch, each as by torch without padding; pre-norm and post-norm."""
    model, source = transformer(norm_first=norm_first), sources(6, 3)
    target = torch.randint(4, 24, (2, 5))
    with torch.no_grad():
        found, _ = model(target, source)
        for row, length in enumerate((6, 3)):
            expected = in_torch(model, source[row : row + 1, :length], target[row : row + 1], norm_first)
            torch.testing.assert_close(found[row : row + 1], expected, atol=1e-4, rtol=0)


def test_buckets_of_t5_look_back_alone_in_the_decoder() -> None:
    model = transformer(position="t5")
    assert all(block.attention.position.bidirectional for block in model.encoder)
    assert not any(block.attention.position.bidirectional for block in model.decoder)


def test_t03_the_decoder_is_asked_for_what_comes_next() -> None:
    """Target [BOS, a, b, EOS]: [BOS, a, b] goes in, [a, b, EOS] is right, and a copy of the input is not."""
    model, target = copying(), torch.tensor([[BOS, 7, 9, EOS]])
    given, labels = target[:, :-1], target[:, 1:]
    assert torch.equal(model(given, sources(4))[0].argmax(-1), given)
    shifted, _ = model(given, sources(4), labels=labels)
    unshifted, _ = model(given, sources(4), labels=given)
    assert unshifted.plain / 3 < 0.1
    assert shifted.plain / 3 > 3


@pytest.mark.parametrize("kind", KINDS)
def test_t04_what_stands_behind_the_end_moves_neither_loss_nor_gradients(kind: str) -> None:
    """Targets [BOS, a, EOS, PAD, PAD] and [BOS, a, b, c, EOS]."""
    model, source = network(kind), sources(5, 3)
    target = torch.tensor([[BOS, 5, EOS, PAD, PAD], [BOS, 6, 7, 8, EOS]])
    labels = target[:, 1:]
    loss = loss_of(model, source, target[:, :-1], labels)
    first, _ = model(target[:1, :2], source[:1], labels=labels[:1, :2])
    second, _ = model(target[1:, :4], source[1:, :3], labels=labels[1:])
    both, _ = model(target[:, :-1], source, labels=labels)
    assert int(both.count) == int(first.count) + int(second.count) == 6
    assert float(both.plain) == pytest.approx(float(first.plain + second.plain), abs=1e-4)
    changed = target[:, :-1].clone()
    changed[0, 2:] = torch.tensor([9, 17])
    other = loss_of(model, source, changed, labels)
    assert torch.equal(loss, other)
    for before, after in zip(gradients(model, loss), gradients(model, other), strict=True):
        torch.testing.assert_close(before, after, atol=0, rtol=0)


def reaches_everything(model: nn.Module, target_size: int = 24) -> None:
    source, target = sources(6, 4), torch.randint(4, target_size, (2, 7))
    found = gradients(model, loss_of(model, source, target[:, :-1], target[:, 1:]))
    for (name, _), gradient in zip(model.named_parameters(), found, strict=True):
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("words", [WORDS, APART])
def test_a_gradient_reaches_every_parameter(kind: str, tied: bool, words: Words) -> None:
    reaches_everything(network(kind, words, tied=tied), words.target_size)


@pytest.mark.parametrize("position", get_args(PositionName))
def test_a_gradient_reaches_every_parameter_with_any_position(position: PositionName) -> None:
    model = transformer(position=position, num_heads=4, num_kv_heads=2, dim=16)
    for parameter in (p for n, p in model.named_parameters() if "position" in n):
        parameter.requires_grad_(False)  # of a table by offset most rows are not in sight
    source, target = sources(6, 4), torch.randint(4, 24, (2, 7))
    loss_of(model, source, target[:, :-1], target[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("position", get_args(PositionName))
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_every_position_tells_places_apart_except_none(position: PositionName, side: str) -> None:
    """Two words that change places move what comes out elsewhere, unless nothing says where they stand."""
    model, source, target = transformer(position=position), sources(7), torch.tensor([[BOS, 5, 6, 7, 8, 9]])
    swapped = source[:, [0, 4, 2, 3, 1, 5, 6]], target[:, [0, 2, 1, 3, 4, 5]]
    with torch.no_grad():
        if side == "encoder":
            before, after = (model.encode(x)[0][:, 6] for x in (source, swapped[0]))
        else:
            before, after = (model(x, source)[0][:, 5] for x in (target, swapped[1]))
    # Two causal blocks tell places apart without any encoding; one query over a set does not.
    blind = position == "none" and side == "encoder"
    assert ((before - after).abs().max() < 1e-5) == blind


@pytest.mark.parametrize("name", able("encoder"))
def test_every_mechanism_serves_in_the_encoder_without_further_options(name: str) -> None:
    model = transformer(encoder_attention=CATALOGUE[name], decoder_attention=Softmax).train()
    loss = loss_of(model, sources(9, 4, 0), torch.randint(4, 24, (3, 5)), torch.randint(4, 24, (3, 5)))
    assert all(g is not None and g.isfinite().all() for g in gradients(model, loss))


@pytest.mark.parametrize("name", able("decoder"))
def test_every_mechanism_that_can_serve_does_so_on_both_sides(name: str) -> None:
    model = transformer(attention=CATALOGUE[name]).train()
    loss = loss_of(model, sources(9, 4), torch.randint(4, 24, (2, 5)), torch.randint(4, 24, (2, 5)))
    assert all(g is not None and g.isfinite().all() for g in gradients(model, loss))
    kinds = {type(block.attention.mechanism) for block in (*model.encoder, *model.decoder)}
    assert kinds == {CATALOGUE[name]}


@pytest.mark.parametrize("name", able("cross"))
def test_every_mechanism_that_can_cross_stands_between_the_two(name: str) -> None:
    model = transformer(cross_attention=CATALOGUE[name]).train()
    loss = loss_of(model, sources(9, 4, 0), torch.randint(4, 24, (3, 5)), torch.randint(4, 24, (3, 5)))
    assert all(g is not None and g.isfinite().all() for g in gradients(model, loss))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("decoder", "cross") for name in CATALOGUE if name not in able(kind)]
)
def test_a_mechanism_that_cannot_serve_is_refused_before_training(kind: str, name: str) -> None:
    """With the site, the reason, what could serve, and at the decoder the option that keeps it in the encoder."""
    with pytest.raises(ValueError) as caught:
        transformer(**{f"{kind}_attention": CATALOGUE[name]})
    text = str(caught.value)
    assert f"{name} cannot serve at {kind}.0: " in text
    assert any(reason in text for reason in CATALOGUE[name].reasons.values())
    assert all(other in text for other in able(kind))
    assert (f"--model.encoder_attention={name}" in text) == (kind == "decoder")
    assert len(text.splitlines()) == 3
    if kind == "decoder":
        transformer(encoder_attention=CATALOGUE[name])


def test_a_partial_of_a_mechanism_that_cannot_serve_is_refused_alike() -> None:
    def as_on_the_command_line(cls: type[Mechanism], heads: int, width: int, **options: Any) -> Mechanism:
        return cls(heads, width, **options)

    for factory in (functools.partial(Linformer, rank=4), functools.partial(as_on_the_command_line, Linformer, rank=4)):
        with pytest.raises(ValueError, match=r"Linformer cannot serve at decoder\.0.*"):
            transformer(attention=factory)


def test_a_factory_that_does_not_show_its_class_is_refused_with_the_name_of_the_site() -> None:
    with pytest.raises(ValueError, match=r"decoder\.0.*Nystrom does not take causal=True"):
        transformer(decoder_attention=lambda heads, width: Nystrom(heads, width))
    with pytest.raises(ValueError, match=r"Axial cannot serve at decoder\.0.*"):
        transformer(decoder_attention=lambda heads, width: Axial(heads, width, grid=(8, 8)))


def test_what_a_mechanism_itself_refuses_names_the_site() -> None:
    with pytest.raises(ValueError, match=r"encoder\.1: Local: window=4 is even"):
        transformer(attention_at={"encoder.1": functools.partial(Local, window=4)})
    with pytest.raises(ValueError, match=r"decoder\.0.*Linear does not take a relative bias"):
        transformer(decoder_attention=Linear, position="alibi")


def test_single_sites_can_have_a_mechanism_of_their_own() -> None:
    options = {"encoder.1": functools.partial(Local, window=5), "decoder.0": Linear, "cross.1": Additive}
    model = transformer(attention_at=options, encoder_attention=Nystrom)
    found = [type(block.attention.mechanism) for block in (*model.encoder, *model.decoder)]
    assert found == [Nystrom, Local, Linear, Softmax]
    assert [type(block.cross_attention.mechanism) for block in model.decoder] == [Softmax, Additive]


@pytest.mark.parametrize("name", ["encoder.2", "cross.9", "decoder", "1", "encoder.-1"])
def test_a_site_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"site '{name}'; there are encoder.0 to encoder.1, decoder.0 to decoder.1"):
        transformer(attention_at={name: Softmax})


def test_a_given_length_for_cross_attention_is_kept() -> None:
    model = transformer(cross_attention=functools.partial(Linformer, max_len=40))
    assert model.decoder[0].cross_attention.mechanism.max_len == 40
    assert transformer(cross_attention=Linformer).decoder[0].cross_attention.mechanism.max_len == 64


def test_what_a_mechanism_adds_to_the_loss_comes_out() -> None:
    model = transformer(attention=AdaptiveSpan)
    terms = [block.attention.mechanism.penalty() for block in (*model.encoder, *model.decoder)]
    _, aux = model(torch.randint(4, 24, (1, 3)), sources(4))
    assert aux.item() == pytest.approx(sum(term.item() for term in terms))
    assert aux.item() > 0


def test_dropout_acts_in_training_alone() -> None:
    model, source, target = transformer(dropout=0.5), sources(6), torch.randint(4, 24, (1, 5))
    assert torch.equal(model(target, source)[0], model(target, source)[0])
    model.train()
    assert not torch.equal(model(target, source)[0], model(target, source)[0])


def test_t14_a_source_without_a_word_is_read() -> None:
    model, source, target = transformer(), sources(0, 5), torch.randint(4, 24, (2, 4))
    logits, _ = model(target, source)
    torch.testing.assert_close(logits[1:], model(target[1:], source[1:])[0], atol=1e-5, rtol=0)
    assert all(g is not None and g.isfinite().all() for g in gradients(model, logits.sum()))


@pytest.mark.parametrize("name", ["dim", "encoder_depth", "decoder_depth", "num_heads", "num_kv_heads", "hidden_dim"])
def test_sizes_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"--model\.{name} is 0; it must be at least 1"):
        transformer(**{name: 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, r"--model\.dropout is 1\.0"),
        ({"num_heads": 3}, r"--model\.dim=16 is no multiple of --model\.num_heads=3"),
        ({"position": "rope_2d"}, r"--model\.position is 'rope_2d'; it must be one of none, sinusoidal"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer(**options)
