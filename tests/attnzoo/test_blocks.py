"""Encoder and decoder blocks: residuals, masks on their way, what is returned beside the output."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo import DecoderBlock, EncoderBlock, FeedForward, Local, Mask, Mechanism, MultiheadLatentAttention, reorder
from attnzoo.laws import SITE
from attnzoo.positions import Rotary


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def torch_encoder(block: EncoderBlock, dim: int) -> nn.TransformerEncoderLayer:
    """torch's own layer with the same weights."""
    heads, hidden = block.attention.num_heads, block.feed_forward.layers[0].out_features
    twin = nn.TransformerEncoderLayer(dim, heads, hidden, 0.0, "gelu", norm_first=block.norm_first, batch_first=True)
    attn, first, last = block.attention, block.feed_forward.layers[0], block.feed_forward.layers[-1]
    assert attn.k_proj is not None
    twin.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]),
            "self_attn.in_proj_bias": torch.cat([attn.q_proj.bias, torch.zeros(dim), attn.v_proj.bias]),
            "self_attn.out_proj.weight": attn.out_proj.weight,
            "self_attn.out_proj.bias": attn.out_proj.bias,
            "linear1.weight": first.weight,
            "linear1.bias": first.bias,
            "linear2.weight": last.weight,
            "linear2.bias": last.bias,
            "norm1.weight": block.attention_norm.weight,
            "norm1.bias": block.attention_norm.bias,
            "norm2.weight": block.feed_forward_norm.weight,
            "norm2.bias": block.feed_forward_norm.bias,
        }
    )
    return twin


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_block_is_the_layer_of_torch(norm_first: bool) -> None:
    """Pre-norm and post-norm, causal and not."""
    block = EncoderBlock(8, 2, hidden_dim=12, norm_first=norm_first)
    for norm in (block.attention_norm, block.feed_forward_norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    twin = torch_encoder(block, 8)
    x = torch.randn(2, 5, 8)
    y, aux = block(x)
    close(y, twin(x))
    assert aux.shape == ()
    assert aux.item() == 0
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    close(block(x, mask=Mask(causal=True))[0], twin(x, src_mask=hidden))


def test_m09_padding_in_every_sample(kind: type[Mechanism]) -> None:
    """M09: (2, 6, 8) with the last two padded in both: nothing gets shorter, eval equals train."""
    block = EncoderBlock(8, 2, kind, **SITE)
    x, mask = torch.randn(2, 6, 8), Mask.from_lengths(torch.tensor([4, 4]), max_len=6)
    trained, y = block.train()(x, mask=mask)[0], block.eval()(x, mask=mask)[0]
    assert y.shape == (2, 6, 8)
    close(y[:, :4], trained[:, :4])
    close(y[:, :4], block(x[:, :4])[0])
    assert y[:, 4:].isfinite().all()


def test_m10_samples_do_not_see_each_other(kind: type[Mechanism]) -> None:
    """M10: sample 0 alone and with three others, through both blocks."""
    x, context = torch.randn(4, 5, 8), torch.randn(4, 7, 8)
    encoder = EncoderBlock(8, 2, kind, **SITE).eval()
    close(encoder(x)[0][:1], encoder(x[:1])[0])
    if kind.traits.causal:
        decoder = DecoderBlock(8, 2, kind, **SITE).eval()
        close(decoder(x, context)[0][:1], decoder(x[:1], context[:1])[0])


@pytest.mark.traits("causal")
@pytest.mark.parametrize("norm_first", [True, False])
def test_m03_a_decoder_block_never_looks_ahead(kind: type[Mechanism], norm_first: bool) -> None:
    """M03: change token j; nothing before it moves. The context moves everything."""
    block = DecoderBlock(8, 2, kind, norm_first=norm_first, **SITE).eval()
    x, context = torch.randn(1, 6, 8), torch.randn(1, 4, 8)
    y, aux = block(x, context)
    assert aux.item() == (block.attention.mechanism.penalty() or 0)
    for j in range(6):
        moved = x.clone()
        moved[:, j] += 1
        difference = (block(moved, context)[0] - y).abs().amax(-1)[0]
        assert (difference[:j] == 0).all()
        assert difference[j] > 0
    other = context.clone()
    other[:, 3] += 1
    assert ((block(x, other)[0] - y).abs().amax(-1) > 1e-6).all()


def test_padding_of_the_context_moves_nothing() -> None:
    """What stands in padded places of the encoder's output, NaN included."""
    block = DecoderBlock(8, 2, context_dim=5)
    x, context = torch.randn(2, 3, 8), torch.randn(2, 7, 5)
    mask = Mask.from_lengths(torch.tensor([4, 6]), max_len=7)
    assert mask.key_keep is not None
    dirty = context.masked_fill(~mask.key_keep[..., None], torch.nan).requires_grad_()
    y, _ = block(x, dirty, context_mask=mask)
    close(y[:1], block(x[:1], context[:1, :4])[0])
    y.square().sum().backward()
    assert dirty.grad is not None
    assert dirty.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())


def test_dropout_of_a_block_is_off_in_evaluation() -> None:
    """E10 for blocks: the same bits twice, those of the block without dropout."""
    plain, dropped = EncoderBlock(8, 2).eval(), EncoderBlock(8, 2, dropout=0.5).eval()
    dropped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.equal(dropped(x)[0], plain(x)[0])
    assert not torch.equal(dropped.train()(x)[0], dropped(x)[0])


def test_what_is_told_about_the_site_goes_to_the_attention() -> None:
    """Heads, groups, positions and facts reach the shell; a wrong keyword is not swallowed."""
    block = EncoderBlock(16, 4, functools.partial(Local, window=4), causal=True, num_kv_heads=2, position=Rotary(4))
    assert block.attention.num_kv_heads == 2
    assert isinstance(block.attention.position, Rotary)
    x = torch.randn(1, 6, 16)
    close(block(x)[0][:, :3], block(x[:, :3])[0])
    wrong: dict[str, Any] = {"num_kv_head": 2}
    with pytest.raises(TypeError, match="num_kv_head"):
        EncoderBlock(16, 4, **wrong)
    with pytest.raises(ValueError, match="Local does not take a context"):
        DecoderBlock(16, 4, cross_mechanism=Local)


LATENT = functools.partial(MultiheadLatentAttention, kv_rank=5, rope_dim=2)


def test_another_shell_in_an_encoder_block() -> None:
    """Latent attention around any mechanism, with masks and facts, as if it stood by itself."""
    block = EncoderBlock(8, 2, functools.partial(Local, window=4), shell=LATENT, causal=True, norm_first=False)
    assert isinstance(block.attention, MultiheadLatentAttention)
    assert (block.attention.kv_rank, block.attention.mechanism.window) == (5, 4)
    x, mask = torch.randn(2, 5, 8), Mask(key_keep=torch.arange(5) < torch.tensor([[5], [3]]))
    assert mask.key_keep is not None
    y, aux = block(x, mask=mask)
    real = x.masked_fill(~mask.key_keep[..., None], 0)
    mixed = block.attention_norm(real + block.attention(real, mask=mask))
    close(y, block.feed_forward_norm(mixed + block.feed_forward(mixed)[0]))
    assert aux.item() == 0
    with pytest.raises(TypeError, match="num_kv_heads"):
        EncoderBlock(8, 2, shell=LATENT, num_kv_heads=1)


@pytest.mark.parametrize("norm_first", [True, False])
def test_another_shell_in_a_decoder_block(norm_first: bool) -> None:
    """By steps its state keeps latents alone, and gives what one pass gives; beams are reordered."""
    block = DecoderBlock(8, 2, shell=LATENT, context_dim=5, norm_first=norm_first).eval()
    x, context = torch.randn(3, 6, 8), torch.randn(3, 4, 5)
    whole, _ = block(x, context)
    moved = x.clone()
    moved[:, 4] += 1
    assert torch.equal(block(moved, context)[0][:, :4], whole[:, :4])
    state = block.init_state(context, max_len=6)
    first, state = block.step(x[:, :4], state)
    assert state.past.k.shape[-1] + state.past.v.shape[-1] == 2 + 5
    rows = torch.tensor([2, 0, 0])
    rest, _ = block.step(x[rows, 4:], reorder(state, rows))
    close(first, whole[:, :4])
    close(rest, whole[rows, 4:])


def test_the_feed_forward_works_on_each_token_by_itself() -> None:
    """Tokens in another order give the same rows in that order."""
    net = FeedForward(8, 12)
    x, order = torch.randn(2, 5, 8), torch.tensor([3, 1, 4, 0, 2])
    close(net(x)[0][:, order], net(x[:, order])[0])
    y, aux = net(x)
    close(y, net.layers[2:](nn.functional.gelu(net.layers[0](x))))
    assert aux.item() == 0
    assert FeedForward(8).layers[0].out_features == 32


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 3, 16, dtype=torch.long), r"x must be of floating-point numbers, got torch\.int64"),
        (torch.ones(2, 3, 8), r"x must be \[B, length, 16\], got \(2, 3, 8\)"),
        (torch.ones(3, 16), r"x must be \[B, length, 16\], got \(3, 16\)"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused_before_the_norm(x: Tensor, message: str, norm_first: bool) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderBlock(16, 2, norm_first=norm_first)(x)
    with pytest.raises(ValueError, match=message):
        DecoderBlock(16, 2, norm_first=norm_first)(x, torch.ones(2, 3, 16))


def test_another_norm_may_stand_in_a_block() -> None:
    block = EncoderBlock(16, 2)
    block.attention_norm = nn.RMSNorm(16)  # type: ignore[assignment]
    assert block(torch.ones(2, 3, 16))[0].shape == (2, 3, 16)
