"""Attentions of other libraries that ours cannot be: each is refused by the name of what ours has not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo.convert import convert, convertible
from attnzoo.swap import adopt


def with_ones(module: nn.Module) -> nn.Module:
    """Biases that are not 0."""
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def test_a_weight_that_others_hold_too_is_refused() -> None:
    one, other = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))
    other.out_proj.weight = one.out_proj.weight
    with pytest.raises(ValueError, match=r"0: out_proj\.weight is held by another module as well"):
        adopt(nn.Sequential(one, other))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_rel_pos": True, "input_size": (4, 4)}, "has rel_pos_h, rel_pos_w, use_rel_pos, which ours has not"),
        ({"rope": nn.Linear(1, 1)}, "has rope, which"),
    ],
    ids=str,
)
def test_positions_inside_an_attention_of_sam_are_refused(options: dict[str, Any], named: str) -> None:
    models = pytest.importorskip("timm.models.vision_transformer_sam")
    with pytest.raises(ValueError, match=f"the Attention of timm.models.vision_transformer_sam {named}"):
        adopt(nn.Sequential(models.Attention(16, 4, **options)))


@pytest.mark.parametrize(
    "path",
    [
        "layers.AttentionRope",
        "layers.DiffAttention",
        "models.beit.Attention",
        "models.nest.Attention",
        "models.vision_transformer_relpos.RelPosAttention",
        "models.volo.Attention",
    ],
)
def test_other_attentions_of_timm_are_not_taken_for_it(path: str) -> None:
    module, _, name = path.rpartition(".")
    theirs = getattr(pytest.importorskip(f"timm.{module}"), name)(32, num_heads=4)
    assert not convertible(theirs)
    with pytest.raises(ValueError, match="holds no attention that is known"):
        adopt(theirs)


def test_what_is_put_into_an_attention_of_timm_is_refused() -> None:
    layers = pytest.importorskip("timm.layers")
    changed = layers.Attention(16, 4)
    changed.scale = 0.3
    with pytest.raises(ValueError, match=r"has scale=0\.3"):
        convert(changed)
    learned = layers.Attention(16, 4)
    learned.temperature = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="has temperature, which ours has not"):
        convert(learned)


def test_another_class_of_a_known_name_is_not_taken_for_it() -> None:
    class ViTAttention(nn.Linear):
        """As many have one of that name, made of other parts."""

    assert not convertible(ViTAttention(2, 2))

    class Cosine(nn.MultiheadAttention):
        """Its own computation on the same weights."""

        def forward(self, *args: Any, **named: Any) -> Any:
            return super().forward(*(nn.functional.normalize(part, dim=-1) for part in args), **named)

    with pytest.raises(ValueError, match="Cosine has a forward of its own"):
        adopt(nn.Sequential(Cosine(16, 4)))


def test_what_ours_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="add_zero_attn"):
        convert(nn.MultiheadAttention(16, 4, add_zero_attn=True))
    with pytest.raises(ValueError, match="kdim=8, vdim=9"):
        convert(nn.MultiheadAttention(16, 4, kdim=8, vdim=9))
    with pytest.raises(ValueError, match="Linear is no attention that is known"):
        convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="holds no attention that is known"):
        adopt(nn.Linear(2, 2))
    layers = pytest.importorskip("timm.layers")
    normed = {"norm_layer": nn.LayerNorm}
    with pytest.raises(ValueError, match="scale_norm"):
        convert(layers.Attention(16, 4, scale_norm=True, **normed))
    with pytest.raises(ValueError, match="bias of the keys is seen"):
        convert(with_ones(layers.Attention(16, 4, qk_norm=True, qkv_bias=True, norm_layer=layers.RmsNorm)))
    with pytest.raises(ValueError, match="has a bias, ours has a gain"):
        convert(with_ones(layers.Attention(16, 4, qk_norm=True, **normed)))
    assert not convertible(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ({"key_padding_mask": torch.tensor([[0, 0, 1], [0, 1, 1]])}, "key_padding_mask is torch.int64"),
        ({"key_padding_mask": torch.zeros(3, 2, dtype=torch.bool)}, r"must be \[2, S\] here, got \(3, 2\)"),
        ({"attn_mask": torch.zeros(3, 3, dtype=torch.uint8)}, "attn_mask is torch.uint8"),
        ({"is_causal": True}, "give attn_mask as well"),
    ],
    ids=str,
)
def test_masks_that_torch_refuses_are_refused(masks: dict[str, Any], said: str) -> None:
    """They hid nothing, or other keys than were meant."""
    theirs, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 3, 16)
    with pytest.raises((AssertionError, RuntimeError)):
        theirs(x, x, x, **masks)
    with pytest.raises(ValueError, match=said):
        adopt(theirs)(x, x, x, **masks)


def test_a_mask_of_numbers_for_timm_is_refused() -> None:
    layers = pytest.importorskip("timm.layers")
    with pytest.raises(ValueError, match="the mask is torch.int64"):
        adopt(layers.Attention(16, 4))(torch.randn(2, 3, 16), attn_mask=torch.ones(3, 3).long())


class LowRank(nn.Module):
    """A trained addition to a linear layer, as adapters are built."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1


def test_what_a_copy_of_the_weights_would_lose_is_refused() -> None:
    hooked = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    hooked.self_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"the attention \(MultiheadAttention\) has hooks"):
        adopt(hooked)
    normed = nn.MultiheadAttention(16, 2)
    nn.utils.parametrizations.spectral_norm(normed.out_proj)
    with pytest.raises(ValueError, match="out_proj is parametrized"):
        convert(normed)
    adapted = pytest.importorskip("timm.layers").Attention(16, 2)
    adapted.proj = LowRank(adapted.proj)
    with pytest.raises(ValueError, match="proj is a .*LowRank, nn.Linear is known"):
        convert(adapted)
