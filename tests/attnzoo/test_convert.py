"""Attentions of other libraries as ours: the same outputs, with every mask; what differs is refused by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo import Mask
from attnzoo.convert import convert
from attnzoo.heads.health import Head, head_health
from attnzoo.heads.prune import prune_heads
from attnzoo.swap import adopt

NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
"""Theirs takes a fast path through them, and says so."""


def randomised(module: nn.Module) -> nn.Module:
    """Biases and gains that are not 0 and 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 10}, {"batch_first": False}], ids=str)
@torch.no_grad()
def test_torch_attention(options: dict[str, Any]) -> None:
    theirs = randomised(nn.MultiheadAttention(16, 4, **{"batch_first": True, **options}))
    x, context = torch.randn(2, 5, 16), torch.randn(2, 7, options.get("kdim", 16))
    first = options.get("batch_first", True)
    arguments = [x, context, context] if first else [part.transpose(0, 1) for part in (x, context, context)]
    hidden = torch.arange(7) >= torch.tensor([[7], [4]])
    expected, _ = theirs(*arguments, key_padding_mask=hidden)
    got = convert(theirs)(x, context, mask=Mask.from_key_padding_mask(hidden))
    torch.testing.assert_close(got, expected if first else expected.transpose(0, 1), atol=1e-6, rtol=1e-5)
    arguments[2] = arguments[1]  # as one tensor
    torch.testing.assert_close(
        adopt(theirs)(*arguments, key_padding_mask=hidden, need_weights=False)[0], expected, atol=1e-6, rtol=1e-5
    )


@NESTED
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("masked", ["none", "bool", "float", "bias", "3d", "padding", "causal"])
@torch.no_grad()
def test_a_torch_encoder_keeps_its_outputs_with_every_mask(masked: str, nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    theirs = randomised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested))
    ours, x = adopt(theirs), torch.randn(3, 6, 16)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    named: dict[str, Any] = {
        "none": {},
        "bool": {"mask": future},
        "float": {"mask": torch.zeros(6, 6).masked_fill(future, -torch.inf)},
        "bias": {"mask": torch.randn(6, 6)},
        "3d": {"mask": torch.randn(6, 6, 6)},
        "padding": {"src_key_padding_mask": torch.arange(6) >= torch.tensor([[6], [3], [5]])},
        "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True},
    }[masked]
    # Their fast path takes numbers for a mask, and gives NaN.
    torch.backends.mha.set_fastpath_enabled(masked not in ("bias", "3d"))
    try:
        expected, got = theirs(x, **named), ours(x, **named)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    real = ~named["src_key_padding_mask"] if masked == "padding" else torch.ones(3, 6, dtype=torch.bool)
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-4)


@NESTED
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("part", ["layer", "encoder", "transformer"])
def test_no_part_of_torch_takes_its_fast_path_past_our_attention(part: str, grad: bool) -> None:
    whole = randomised(nn.Transformer(16, 2, 2, 1, 32, batch_first=True))
    theirs = {"layer": whole.encoder.layers[0], "encoder": whole.encoder, "transformer": whole}[part]
    ours, x = adopt(theirs), torch.randn(3, 6, 16)
    hidden = torch.arange(6) >= torch.tensor([[6], [3], [5]])
    inputs = (x, torch.randn(3, 4, 16)) if part == "transformer" else (x,)
    given = {"src_key_padding_mask": hidden}
    if part == "transformer":
        given["memory_key_padding_mask"] = hidden
    with torch.set_grad_enabled(grad):
        expected, got = theirs(*inputs, **given), ours(*inputs, **given)
    real = torch.ones(3, 4, dtype=torch.bool) if part == "transformer" else ~hidden
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-4)
    health = head_health(ours, [inputs], run=lambda batch: ours(*batch, **given))
    own = next(entry for entry in health.heads if "multihead_attn" not in entry.head.site)
    assert own.visible_keys == pytest.approx((36 + 9 + 25) / 14, rel=1e-4)  # padding is no query


@torch.no_grad()
def test_a_torch_decoder_and_its_memory() -> None:
    theirs = randomised(nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 1))
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = theirs(x, memory, tgt_mask=mask)
    torch.testing.assert_close(adopt(theirs)(x, memory, tgt_mask=mask), expected, atol=1e-5, rtol=1e-4)
    health = head_health(adopt(theirs), [(x, memory)])
    assert "two sequences" in health.notes["layers.0.multihead_attn.shell"]["distance"]


@torch.no_grad()
def test_a_mask_for_each_head_fits_the_heads_that_are_left() -> None:
    ours = adopt(randomised(nn.MultiheadAttention(16, 4, batch_first=True)))
    x, keep = torch.randn(2, 5, 16), torch.rand(2, 4, 5, 5) < 0.5
    keep[..., 0] = True
    run = lambda x: ours(x, x, x, attn_mask=~keep.flatten(0, 1))[0]  # noqa: E731
    health = head_health(ours, [x], run=run)
    heads = ours.shell.attend(x, mask=Mask(pair_keep=keep))
    prune_heads(ours, [Head("shell", 1)], health.means)
    assert ours.num_heads == 3
    with pytest.raises(ValueError, match="attn_mask of 8 maps does not fit 2 sequences of 3 heads"):
        run(x)
    left = ours.shell.merge(heads[:, [0, 2, 3]])
    keep = keep[:, [0, 2, 3]]
    torch.testing.assert_close(run(x), left, atol=1e-5, rtol=1e-4)


class Residual(nn.Module):
    """A layer around an attention that it is given, under two names."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = self.again = attention

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.again(x, x, x, need_weights=False)[0]


def test_an_attention_in_several_places_stays_one() -> None:
    """In two layers, under two names of a layer, and in a layer that stands twice."""
    attention = randomised(nn.MultiheadAttention(16, 4, batch_first=True))
    first, second = Residual(attention), Residual(attention)
    theirs, x = nn.Sequential(first, second, first).eval(), torch.randn(2, 5, 16)
    ours = adopt(theirs)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-4)
    assert ours[0] is ours[2]
    assert len({id(module) for layer in ours for module in (layer.attention, layer.again)}) == 1
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) - 16  # bias of keys
    health = head_health(ours, [x])
    assert [entry.head.number for entry in health.heads] == [0, 1, 2, 3]


@torch.no_grad()
def test_a_timm_vit() -> None:
    timm = pytest.importorskip("timm")
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    theirs = randomised(timm.models.VisionTransformer(**options))
    images = torch.randn(3, 3, 16, 16)
    ours = adopt(theirs)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-4)
    health = head_health(ours, [images])
    assert [entry.head.site for entry in health.heads] == [f"blocks.{n}.attn.shell" for n in (0, 1) for _ in range(4)]
    assert all(1 <= entry.effective_keys <= 17 for entry in health.heads)


@pytest.mark.parametrize(
    "options", [{"qk_norm": True}, {"gated": True}, {"attn_head_dim": 6, "dim_out": 12}, {"qkv_bias": True}], ids=str
)
@torch.no_grad()
def test_options_of_timms_attention(options: dict[str, Any]) -> None:
    layers = pytest.importorskip("timm.layers")
    norm = {"norm_layer": layers.RmsNorm} if "qk_norm" in options else {}
    theirs = randomised(layers.Attention(16, 4, **options, **norm))
    x = torch.randn(2, 5, 16)
    keep = torch.rand(2, 1, 5, 5) > 0.3
    keep[..., 0] = True
    expected = theirs(x, attn_mask=keep)
    torch.testing.assert_close(adopt(theirs)(x, attn_mask=keep), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(convert(theirs)(x), theirs(x), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_an_attention_of_sam_without_positions_takes_a_grid() -> None:
    theirs = randomised(pytest.importorskip("timm.models.vision_transformer_sam").Attention(16, 4))
    x = torch.randn(2, 3, 4, 16)
    torch.testing.assert_close(adopt(theirs)(x), theirs(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra", "DistilBert", "ViT"])
@torch.no_grad()
def test_an_encoder_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if family == "ViT":
        config = transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
        )
        inputs: dict[str, Tensor] = {"pixel_values": torch.randn(2, 3, 16, 16)}
    elif family == "DistilBert":
        config = transformers.DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
        inputs = {"input_ids": torch.randint(3, 50, (2, 9))}
    else:
        config = getattr(transformers, f"{family}Config")(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            embedding_size=32, max_position_embeddings=40,
        )  # fmt: skip
        inputs = {"input_ids": torch.randint(3, 50, (2, 9))}
    theirs = randomised(getattr(transformers, f"{family}Model")(config))
    if "input_ids" in inputs:
        inputs["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    ours = adopt(theirs)
    expected, got = theirs(**inputs).last_hidden_state, ours(**inputs).last_hidden_state
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(expected[..., 0]).bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-4)
    health = head_health(ours, [inputs])
    assert len(health.heads) == 8
    if "attention_mask" in inputs:
        assert health.heads[0].visible_keys == pytest.approx((81 + 25) / 14, rel=1e-4)  # padding is no query


def test_each_part_of_an_adopted_model_keeps_its_mode() -> None:
    """Such as a part that is frozen in evaluation while the rest is trained."""
    frozen, trained = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
    frozen.eval()
    ours = adopt(nn.ModuleList([frozen, trained]))
    modes = [{module.training for module in layer.modules()} for layer in ours]
    assert modes == [{False}, {True}] and ours.training
    assert not adopt(nn.MultiheadAttention(16, 2).eval()).training


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_frozen_stays_so(grad: bool) -> None:
    theirs = nn.MultiheadAttention(16, 2)
    theirs.in_proj_weight.requires_grad_(False)
    theirs.out_proj.bias.requires_grad_(False)
    with torch.set_grad_enabled(grad):
        ours = convert(theirs)
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.bias"}


def test_a_conversion_keeps_mode_and_precision_and_leaves_the_model_alone() -> None:
    theirs = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True).double().train()
    before = copy.deepcopy(theirs.state_dict())
    ours = convert(theirs)
    assert ours.training and ours.q_proj.weight.dtype == torch.float64
    assert ours.mechanism.dropout == 0.1
    with torch.no_grad():
        ours.q_proj.weight.zero_()
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())
