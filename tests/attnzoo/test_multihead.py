"""The projection shell: heads and groups, cross-attention, widths, parity with torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attnzoo import Mask, Mechanism, MultiheadAttention, attention_map, record
from attnzoo.laws import SITE

Brute = Callable[..., Tensor]


def close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def torch_twin(attn: MultiheadAttention, dim: int, context_dim: int | None = None) -> nn.MultiheadAttention:
    """torch's own module with the same weights; its bias of the keys is 0, since ours has none."""
    width = dim if context_dim is None else context_dim
    twin = nn.MultiheadAttention(dim, attn.num_heads, kdim=width, vdim=width, batch_first=True)
    assert attn.k_proj is not None
    with torch.no_grad():
        if width == dim:
            twin.in_proj_weight.copy_(torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]))
        else:
            twin.q_proj_weight.copy_(attn.q_proj.weight)
            twin.k_proj_weight.copy_(attn.k_proj.weight)
            twin.v_proj_weight.copy_(attn.v_proj.weight)
        twin.in_proj_bias.copy_(torch.cat([attn.q_proj.bias, torch.zeros(dim), attn.v_proj.bias]))
        twin.out_proj.weight.copy_(attn.out_proj.weight)
        twin.out_proj.bias.copy_(attn.out_proj.bias)
    return twin


def with_biases(attn: MultiheadAttention) -> MultiheadAttention:
    for projection in (attn.q_proj, attn.v_proj, attn.out_proj):
        nn.init.normal_(projection.bias)
    return attn


@pytest.mark.parametrize("train", [False, True])
def test_self_attention_is_that_of_torch(train: bool) -> None:
    """Outputs, weights for each head, and gradients, under padding and a mask for each pair."""
    attn = with_biases(MultiheadAttention(12, 3)).train(train)
    twin = torch_twin(attn, 12).train(train)
    x = torch.randn(2, 6, 12, requires_grad=True)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    # torch reads both of its masks the other way round: True means hidden there.
    for mask, theirs in [
        (Mask(), {}),
        (Mask(causal=True), {"attn_mask": ~causal}),
        (Mask(key_keep=keep), {"key_padding_mask": ~keep}),
        (Mask(causal=True, key_keep=keep), {"attn_mask": ~causal, "key_padding_mask": ~keep}),
        (Mask(pair_keep=causal.fliplr()), {"attn_mask": ~causal.fliplr()}),
    ]:
        # Our shell hides padded tokens as queries too; torch leaves them in, so only real rows compare.
        real = keep if mask.key_keep is not None else torch.ones_like(keep)
        y, expected = attn(x, mask=mask)[real], twin(x, x, x, need_weights=False, **theirs)[0][real]
        close(y, expected)
        ours, twins = (torch.autograd.grad(z.square().sum(), x)[0] for z in (y, expected))
        close(ours, twins)
    weights = twin(x, x, x, average_attn_weights=False)[1]
    with record(attn.eval()) as sites:
        attn(x)
    close(sites["attention"][0].map(), weights)


def test_cross_attention_is_that_of_torch() -> None:
    """A context of another width and length."""
    attn = with_biases(MultiheadAttention(12, 3, context_dim=5))
    twin = torch_twin(attn, 12, 5)
    x, context = torch.randn(2, 4, 12), torch.randn(2, 7, 5)
    keep = torch.rand(2, 7) < 0.7
    keep[:, 0] = True
    expected = twin(x, context, context, key_padding_mask=~keep, need_weights=False)[0]
    close(attn(x, context, mask=Mask(key_keep=keep)), expected)


def test_where_torch_gives_nan_we_give_the_bias() -> None:
    """M02, A1: a row without a key. In torch's module it is NaN; here it is the output projection's bias."""
    attn = with_biases(MultiheadAttention(8, 2))
    twin = torch_twin(attn, 8)
    x = torch.randn(2, 3, 8)
    keep = torch.tensor([[True, True, True], [False, False, False]])
    theirs = twin(x, x, x, key_padding_mask=~keep, average_attn_weights=False)[0]
    assert theirs[1].isnan().all()
    y = attn(x, mask=Mask(key_keep=keep))
    close(y[0], theirs[0])
    assert torch.equal(y[1], attn.out_proj.bias.expand(3, 8))


def test_m09_the_output_is_as_long_as_the_input(kind: type[Mechanism]) -> None:
    """M09: columns that are padding in every sample stay; eval equals train without dropout."""
    attn = MultiheadAttention(8, 2, kind, **SITE)
    x = torch.randn(2, 6, 8)
    mask = Mask.from_lengths(torch.tensor([4, 4]), max_len=6)
    trained = attn.train()(x, mask=mask)
    y = attn.eval()(x, mask=mask)
    assert y.shape == (2, 6, 8)
    assert y.isfinite().all()
    close(y[:, :4], trained[:, :4])
    close(y[:, :4], attn(x[:, :4]))


def test_m10_samples_do_not_see_each_other(kind: type[Mechanism]) -> None:
    """M10: sample 0 alone and with three others."""
    attn = MultiheadAttention(8, 2, kind, **SITE).eval()
    x = torch.randn(4, 5, 8)
    close(attn(x)[:1], attn(x[:1]))
    close(attn(x * torch.tensor([1.0, 9, 9, 9]).view(4, 1, 1))[:1], attn(x)[:1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_j3_a_batch_of_mixed_lengths_equals_the_singles(kind: type[Mechanism], side: str) -> None:
    """J3: each sample as if it were alone, padded on either side."""
    attn = MultiheadAttention(8, 2, kind, **SITE).eval()
    lengths = [1, 4, 7, 2]
    singles = [torch.randn(1, n, 8) for n in lengths]
    x, keep = torch.randn(4, 7, 8), torch.zeros(4, 7, dtype=torch.bool)
    places = [slice(7 - n, 7) if side == "left" else slice(0, n) for n in lengths]
    for row, (place, single) in enumerate(zip(places, singles, strict=True)):
        x[row, place], keep[row, place] = single[0], True
    for causal in [False] * kind.traits.bidirectional + [True] * kind.traits.causal:
        y = attn(x, mask=Mask(causal=causal, key_keep=keep))
        for row, (place, single) in enumerate(zip(places, singles, strict=True)):
            close(y[row : row + 1, place], attn(single, mask=Mask(causal=causal)))


@pytest.mark.traits("grouped")
def test_m11_groups_in_the_shell(kind: type[Mechanism]) -> None:
    """M11: with the key/value projections of each group repeated, full heads give the same."""
    grouped = MultiheadAttention(16, 4, kind, num_kv_heads=2, **SITE)
    full = MultiheadAttention(16, 4, kind, **SITE)
    weights = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight", "v_proj.bias"):
        weights[name] = weights[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    x = torch.randn(2, 6, 16)
    mask = Mask(causal=kind.traits.causal)
    close(grouped(x, mask=mask), full(x, mask=mask))


def test_m11_value_heads_land_where_they_belong() -> None:
    """M11: 4 query heads over value heads of 1 and 2 give [1, 1, 2, 2]."""
    attn = MultiheadAttention(4, 4, num_kv_heads=2)
    with torch.no_grad():
        attn.v_proj.weight.zero_()
        attn.v_proj.bias.copy_(torch.tensor([1.0, 2.0]))
    assert attn.attend(torch.randn(1, 3, 4))[0, :, 0, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.traits("cross", "linear_in_v")
def test_m12_and_j2_weights_for_each_head(kind: type[Mechanism]) -> None:
    """M12, J2: (2, 4, 5, 7); heads differ; rows sum to 1, and to 0 where there is no key."""
    attn = MultiheadAttention(16, 4, kind, **SITE).eval()
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1] = False
    with record(attn) as sites:
        attn(torch.randn(2, 5, 16), torch.randn(2, 7, 16), mask=Mask(key_keep=keep))
    weights = sites["attention"][0].map()
    assert weights.shape == (2, 4, 5, 7)
    assert (weights[1] == 0).all()
    for head in range(1, 4):
        assert not torch.allclose(weights[0, head], weights[0, 0], atol=1e-4)
    if attn.mechanism.traits.normalised:
        assert (weights >= 0).all()
        close(weights[0].sum(-1), torch.ones(4, 5))


def test_f3_every_width_is_free(brute: Brute) -> None:
    """F3: head, value, context and output widths have nothing to do with each other."""
    attn = MultiheadAttention(6, 2, head_dim=5, value_dim=3, context_dim=4, out_dim=7)
    x, context = torch.randn(2, 3, 6), torch.randn(2, 9, 4)
    heads = attn.attend(x, context)
    assert heads.shape == (2, 2, 3, 3)
    assert attn.k_proj is not None
    q, k, v = (
        p(y).unflatten(-1, (2, -1)).transpose(1, 2)
        for p, y in ((attn.q_proj, x), (attn.k_proj, context), (attn.v_proj, context))
    )
    close(heads.double(), brute(attn.mechanism, q, k, v))
    y = attn(x, context)
    assert torch.equal(y, attn.merge(heads))
    assert y.shape == (2, 3, 7)


def test_k3_the_scale_is_that_of_the_head() -> None:
    """K3: scores are divided by the root of the head's width, for one head and for eight, not of dim."""
    for num_heads in (1, 8):
        attn = MultiheadAttention(16, num_heads, bias=False)
        with torch.no_grad():
            for projection in (attn.q_proj, attn.k_proj):
                assert projection is not None
                projection.weight.copy_(torch.eye(16))
        x = torch.stack([torch.ones(16), torch.zeros(16)])[None]
        with record(attn.eval()) as sites:
            attn(x)
        # The first token's score with itself: D / sqrt(D), with the second one: 0.
        expected = torch.tensor([(16 / num_heads) ** 0.5, 0.0]).softmax(0)
        close(sites["attention"][0].map()[0, :, 0], expected.expand(num_heads, 2))


def test_heads_come_before_width() -> None:
    """Head h is made by rows h D .. (h + 1) D of a projection, as everywhere else."""
    attn = MultiheadAttention(4, 2)
    x = torch.randn(1, 3, 4)
    before = attn.attend(x)
    with torch.no_grad():
        attn.v_proj.weight[2:] += 1
    after = attn.attend(x)
    assert torch.equal(after[:, 0], before[:, 0])
    assert not torch.allclose(after[:, 1], before[:, 1])


def test_the_key_projection_has_no_bias() -> None:
    """Its gradient would be 0 always: softmax does not see it."""
    attn = MultiheadAttention(8, 2)
    assert attn.k_proj is not None
    assert attn.k_proj.bias is None
    assert all(p.bias is not None for p in (attn.q_proj, attn.v_proj, attn.out_proj))
    bare = MultiheadAttention(8, 2, bias=False)
    assert [name for name, _ in bare.named_parameters() if "bias" in name] == []


def test_a_site_that_is_not_causal_refuses_causal_masks() -> None:
    """What was built as a fact is no wish of a call: causal=False refuses, None leaves it open, True needs no word."""
    x = torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match=r"built with causal=False; leave causal out to decide it in each call"):
        MultiheadAttention(8, 2, causal=False)(x, mask=Mask(causal=True))
    told, asked = MultiheadAttention(8, 2, causal=True), MultiheadAttention(8, 2)
    told.load_state_dict(asked.state_dict())
    keep = torch.tensor([[1, 1, 0, 1, 1]]).bool()
    close(told(x, mask=Mask(key_keep=keep)), asked(x, mask=Mask(causal=True, key_keep=keep)))


def test_the_map_of_the_shell_is_the_map_of_its_mechanism() -> None:
    """K2: weights sum to one over the keys, and applied to v they are the output of the heads."""
    attn = MultiheadAttention(8, 2).eval()
    with record(attn) as sites:
        heads = attn.attend(torch.randn(2, 5, 8), mask=Mask(causal=True))
    call = sites["attention"][0]
    weights = attention_map(attn.mechanism, call.q, call.k, Mask(causal=True))
    close(weights @ call.v, heads)
    close(weights.sum(-1), torch.ones(2, 2, 5))
