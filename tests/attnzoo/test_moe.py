"""Mixture of experts: who works on which token, what is dropped, what is asked of the loss."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attnzoo import DecoderBlock, EncoderBlock, FeedForward, Mask, Mechanism, Softmax
from attnzoo.moe import MixtureOfExperts


def close(out: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def expert(moe: MixtureOfExperts, e: int, token: Tensor) -> Tensor:
    hidden = nn.functional.gelu(token @ moe.up_weight[e] + moe.up_bias[e])
    return hidden @ moe.down_weight[e] + moe.down_bias[e]


def choices(moe: MixtureOfExperts, token: Tensor) -> list[tuple[int, Tensor]]:
    """(expert, gate) of each choice, the better first."""
    p = (moe.router.weight @ token).exp()
    p = p / p.sum()
    best = sorted(range(moe.num_experts), key=lambda e: -p[e].item())[: moe.top_k]
    total = sum(p[e] for e in best) if moe.top_k > 1 else 1.0
    return [(e, p[e] / total) for e in best]


def brute(moe: MixtureOfExperts, x: Tensor, capacity: int | None = None, real: Tensor | None = None) -> Tensor:
    """One token after the other; with a capacity, an expert that has served so many serves no more."""
    served = [0] * moe.num_experts
    real = torch.ones(x.shape[:2], dtype=torch.bool) if real is None else real
    rows = []
    for token, counts in zip(x.flatten(0, 1), real.flatten(), strict=True):
        row = torch.zeros_like(token)
        for e, gate in choices(moe, token) if counts else ():
            served[e] += 1
            if capacity is None or served[e] <= capacity:
                row = row + gate * expert(moe, e, token)
        rows.append(row)
    return torch.stack(rows).view_as(x)


def routed(assigned: list[list[int]], num_experts: int, **options: float) -> tuple[MixtureOfExperts, Tensor]:
    """A module and tokens [1, T, E] of which token t takes the experts ``assigned[t]``, in this order."""
    moe = MixtureOfExperts(num_experts, 6, num_experts=num_experts, top_k=len(assigned[0]), **options)  # type: ignore[arg-type]
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(num_experts))
    x = torch.full((1, len(assigned), num_experts), -1.0)
    for t, experts in enumerate(assigned):
        for rank, e in enumerate(experts):
            x[0, t, e] = 3.0 - rank
    return moe, x


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (4, 2), (5, 3), (4, 4), (9, 2)])
@pytest.mark.parametrize("training", [False, True])
def test_output_and_gradients_are_those_of_the_formula(num_experts: int, top_k: int, training: bool) -> None:
    """In training with room for all."""
    moe = MixtureOfExperts(6, 7, num_experts=num_experts, top_k=top_k, capacity_factor=num_experts / top_k).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    moe.train(training)
    y, right = moe(x)[0], brute(moe, x)
    close(y, right, 1e-12)
    leaves = [x, *moe.parameters()]
    weights = torch.randn_like(y)
    ours = torch.autograd.grad((y * weights).sum(), leaves)
    theirs = torch.autograd.grad((right * weights).sum(), leaves, allow_unused=True)
    for got, expected in zip(ours, theirs, strict=True):
        close(got, torch.zeros_like(got) if expected is None else expected, 1e-10)


def test_all_experts_together_are_the_dense_mixture() -> None:
    """k = X: the mean of all experts, weighted by p."""
    moe = MixtureOfExperts(6, 7, num_experts=4, top_k=4).eval()
    x = torch.randn(2, 5, 6)
    p = (x @ moe.router.weight.T).softmax(-1)
    close(moe(x)[0], sum(p[..., e : e + 1] * expert(moe, e, x) for e in range(4)))


def test_one_expert_is_the_plain_feed_forward() -> None:
    """With the same weights; its gate is 1."""
    plain, moe = FeedForward(6, 7), MixtureOfExperts(6, 7, num_experts=1, top_k=1)
    with torch.no_grad():
        for layer, weight, bias in (
            (plain.layers[0], moe.up_weight, moe.up_bias),
            (plain.layers[-1], moe.down_weight, moe.down_bias),
        ):
            weight[0].copy_(layer.weight.T)
            bias[0].copy_(layer.bias)
    x = torch.randn(2, 5, 6)
    close(moe(x)[0], plain(x)[0])
    close(moe.eval()(x)[0], plain(x)[0])


def test_weights_begin_as_those_of_a_linear_layer() -> None:
    """Within 1 / sqrt of the width that comes in, evenly, in each expert; 4 E wide if not told."""
    moe = MixtureOfExperts(64, num_experts=3)
    assert moe.up_weight.shape == (3, 64, 256)
    for weight, bias, fan_in in ((moe.up_weight, moe.up_bias, 64), (moe.down_weight, moe.down_bias, 256)):
        for e in range(3):
            assert 0.99 * fan_in**-0.5 < weight[e].abs().max() <= fan_in**-0.5
            assert weight[e].std().item() == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.03)
            assert 0.8 * fan_in**-0.5 < bias[e].abs().max() <= fan_in**-0.5


def test_the_router_learns_from_the_task_with_one_choice_too() -> None:
    """The gate of a single choice is p itself; divided by its sum it would be 1, and the router stand still."""
    moe = MixtureOfExperts(6, 7, num_experts=4, top_k=1)
    y, _ = moe(torch.randn(2, 5, 6))
    y.square().sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().max() > 1e-4


# What is asked of the loss.


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("training", [False, True])
def test_balance_is_its_weight_where_routing_is_uniform(top_k: int, training: bool) -> None:
    """Whatever k is, as f counts choices, not tokens."""
    moe = MixtureOfExperts(6, 7, num_experts=4, top_k=top_k, balance_weight=0.3, z_weight=0.0).train(training)
    nn.init.zeros_(moe.router.weight)
    assert moe(torch.randn(2, 5, 6))[1].item() == pytest.approx(0.3)


def test_balance_is_x_times_its_weight_where_one_expert_takes_all() -> None:
    """f and P are 1 for that expert and 0 for the others; two choices for all tokens give half of that."""
    for top_k, expected in ((1, 4.0), (2, 2.0)):
        moe = MixtureOfExperts(4, 7, num_experts=4, top_k=top_k, balance_weight=1.0, z_weight=0.0)
        with torch.no_grad():
            moe.router.weight.copy_(100 * torch.eye(4))
        x = torch.tensor([1.0, 0.9, 0.0, 0.0]).expand(2, 3, 4)
        assert moe(x)[1].item() == pytest.approx(expected, rel=1e-3)


def test_aux_is_balance_and_z_by_their_formulas() -> None:
    """Over all tokens of the batch, before anything is dropped; only P carries a gradient of the balance."""
    moe = MixtureOfExperts(
        6, 7, num_experts=5, top_k=2, capacity_factor=0.5, balance_weight=0.2, z_weight=0.03
    ).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    counts = torch.zeros(5, dtype=torch.float64)
    for token in x.flatten(0, 1):
        for e, _ in choices(moe, token):
            counts[e] += 1
    scores = x.flatten(0, 1) @ moe.router.weight.T
    expected = 0.2 * 5 * (counts / 30 * scores.softmax(-1).mean(0)).sum()
    expected = expected + 0.03 * scores.exp().sum(-1).log().square().mean()
    aux = moe(x)[1]
    close(aux, expected, 1e-12)
    (ours,) = torch.autograd.grad(aux, moe.router.weight)
    (theirs,) = torch.autograd.grad(expected, moe.router.weight)
    close(ours, theirs, 1e-12)


# Capacity.


def test_who_comes_too_late_is_dropped_in_training_only() -> None:
    """Six tokens want expert 0, which serves ceil(1 x 8 / 2) = 4: the last two get nothing."""
    moe, x = routed([[0], [0], [1], [0], [0], [0], [0], [1]], 2, capacity_factor=1.0)
    y, whole = moe(x)[0][0], brute(moe, x)[0]
    dropped = (y == 0).all(-1)
    assert dropped.nonzero().flatten().tolist() == [5, 6]
    close(y[~dropped], whole[~dropped])
    close(moe.eval()(x)[0][0], whole)


def test_the_queue_goes_by_sample_then_token_then_choice() -> None:
    """The same tokens as two samples; and an expert full of second choices turns away a later first one."""
    moe, x = routed([[0], [0], [1], [0], [0], [0], [0], [1]], 2, capacity_factor=1.0)
    close(moe(x.view(2, 4, 2))[0].view(1, 8, 2), moe(x)[0])
    moe, x = routed([[1, 0], [2, 0], [0, 3], [0, 3]], 4, capacity_factor=1.0)  # two choices for each expert
    y = moe(x)[0][0]
    for t, e in ((2, 3), (3, 3)):  # expert 0 has served tokens 0 and 1 by then
        (gate,) = (gate for other, gate in choices(moe, x[0, t]) if other == e)
        close(y[t], gate * expert(moe, e, x[0, t]))
    close(y[:2], brute(moe, x)[0, :2])


@pytest.mark.parametrize(("factor", "top_k"), [(1.25, 2), (0.6, 2), (1.0, 1), (0.1, 3)])
def test_a_tight_capacity_equals_serving_one_by_one(factor: float, top_k: int) -> None:
    """An expert serves ceil(factor k N / X); padding neither counts in N nor waits."""
    moe = MixtureOfExperts(6, 7, num_experts=4, top_k=top_k, capacity_factor=factor)
    for seed in range(5):
        torch.manual_seed(seed)
        x, real = torch.randn(3, 6, 6) + torch.randn(6), torch.rand(3, 6) < 0.7
        for keep in (None, real):
            count = 18 if keep is None else int(real.sum())
            capacity = -(-int(factor * 1000) * top_k * count // 4000)
            close(moe(x, Mask(key_keep=keep))[0], brute(moe, x, capacity, keep))


def test_m03_in_training_no_token_pushes_out_an_earlier_one() -> None:
    """M03 under a tight capacity: what stands later in a sample moves nothing before it."""
    moe = MixtureOfExperts(6, 7, num_experts=4, top_k=2, capacity_factor=0.5)
    x = torch.randn(1, 8, 6)
    before = moe(x)[0]
    assert (before == 0).all(-1).any()
    for j in range(1, 8):
        moved = x.clone()
        moved[:, j:] = torch.randn(1, 8 - j, 6)
        close(moe(moved)[0][:, :j], before[:, :j])


# Padding, batch mates.


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["right", "left", "holes"])
def test_padding_takes_no_part(training: bool, where: str) -> None:
    """Neither in the output, in aux, nor in the capacity, whatever stands there: as if it were cut out."""
    moe = MixtureOfExperts(6, 7, capacity_factor=0.7).train(training)
    tokens, places = torch.randn(5, 6), {"right": range(5), "left": range(3, 8), "holes": (0, 2, 3, 6, 7)}
    keep = torch.zeros(1, 8, dtype=torch.bool)
    keep[0, list(places[where])] = True
    x = torch.full((1, 8, 6), torch.nan)
    x[keep] = tokens
    x.requires_grad_()
    y, aux = moe(x, Mask(key_keep=keep))
    right, right_aux = moe(tokens[None])
    close(y[keep], right[0])
    close(aux, right_aux)
    assert (y[~keep] == 0).all()
    (y.square().sum() + aux).backward()
    assert x.grad is not None
    assert all(g is not None and g.isfinite().all() for g in (x.grad, *(p.grad for p in moe.parameters())))


def test_a_batch_without_a_real_token() -> None:
    """All padding, no samples, no tokens: 0, and gradients that are 0, not missing and not NaN."""
    moe = MixtureOfExperts(6, 7)
    for x, keep in (
        (torch.full((2, 3, 6), torch.nan), torch.zeros(2, 3, dtype=torch.bool)),
        (torch.zeros(0, 3, 6), None),
        (torch.zeros(2, 0, 6), None),
    ):
        moe.zero_grad()
        y, aux = moe(x, Mask(key_keep=keep))
        assert y.shape == x.shape
        assert (y == 0).all()
        assert aux.item() == 0
        (y.sum() + aux).backward()
        assert all(p.grad is not None and (p.grad == 0).all() for p in moe.parameters())


@pytest.mark.parametrize("top_k", [1, 2])
def test_m10_in_evaluation_samples_do_not_see_each_other(top_k: int) -> None:
    """M10: a sample alone and in a crowd that wants the same experts."""
    moe = MixtureOfExperts(6, 7, top_k=top_k, capacity_factor=0.1).eval()
    x = torch.randn(1, 4, 6)
    crowd = torch.cat([x + 0.01 * torch.randn(1, 4, 6) for _ in range(20)] + [x, torch.randn(5, 4, 6)])
    close(moe(crowd)[0][20:21], moe(x)[0])


def test_an_expert_that_nobody_takes_has_a_gradient_of_zero() -> None:
    """Not a missing one, for which DDP would wait."""
    moe, x = routed([[0], [2], [0]], 4)
    moe(x)[0].sum().backward()
    assert moe.up_weight.grad is not None
    assert moe.up_weight.grad.abs().amax((1, 2)).bool().tolist() == [True, False, True, False]


# Precision, cost, tracing.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The router counts in float32: with scores rounded, as many as one token in ten would go elsewhere."""
    moe = MixtureOfExperts(16, 32).eval().to(dtype)
    x = torch.randn(2, 200, 16).to(dtype)
    y, aux = moe(x)
    exact = copy.deepcopy(moe).double()
    right, right_aux = exact(x.double())
    assert y.dtype == dtype
    assert aux.dtype == torch.float32
    close(y.double(), right, 2 * torch.finfo(dtype).eps)
    close(aux.double(), right_aux)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(exact.float()(x.float())[1].double(), right_aux)


def test_dropout_acts_inside_the_experts_in_training_only() -> None:
    """Two calls in training differ; in evaluation the bits are those without dropout."""
    moe = MixtureOfExperts(6, 7, 0.5)
    x = torch.randn(2, 5, 6)
    assert not torch.equal(moe(x)[0], moe(x)[0])
    moe.eval()
    before = moe(x)[0]
    moe.dropout = 0.0
    assert torch.equal(moe(x)[0], before)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("tokens", [1, 512])
def test_work_grows_with_the_choices_and_not_with_the_experts(training: bool, tokens: int) -> None:
    """The router, and plain feed-forwards of 3/2 k tokens and six an expert; for one token, of 2 k."""
    x = torch.randn(1, tokens, 32)
    with FlopCounterMode(display=False) as plain:
        FeedForward(32, 64)(x)
    for num_experts, top_k in ((4, 1), (4, 2), (16, 1), (16, 3)):
        moe = MixtureOfExperts(32, 64, num_experts=num_experts, top_k=top_k).train(training)
        with FlopCounterMode(display=False) as mixed:
            moe(x)
        router = 2 * tokens * 32 * num_experts
        rows = min(1.5 * top_k * tokens + 6 * num_experts, 2 * top_k * tokens)
        assert mixed.get_total_flops() - router <= rows * plain.get_total_flops() / tokens


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_one_graph_for_any_routing(training: bool) -> None:
    """A full graph, which gives the same for tokens that go elsewhere."""
    moe = MixtureOfExperts(6, 7).train(training)
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    mask = Mask.from_lengths(torch.tensor([3, 5]))
    for x in (torch.randn(2, 5, 6), torch.randn(1, 1, 6).expand(2, 5, 6)):
        for ours, right in zip(compiled(x, mask), moe(x, mask), strict=True):
            close(ours, right)


def test_an_exported_program_takes_any_batch() -> None:
    """Traced at three samples, run at one and at seven."""
    moe = MixtureOfExperts(6, 7).eval()
    dynamic = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(moe, (torch.randn(3, 5, 6),), dynamic_shapes=dynamic).module()
    for batch in (1, 7):
        x = torch.randn(batch, 5, 6)
        close(program(x)[0], moe(x)[0])


# In blocks.


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_block_sends_its_mask_and_returns_aux(norm_first: bool) -> None:
    """Padding moves neither the output nor aux, in training."""
    moe = functools.partial(MixtureOfExperts, num_experts=3, capacity_factor=0.7)
    block = EncoderBlock(8, 2, feed_forward=moe, hidden_dim=5, norm_first=norm_first)
    assert block.feed_forward.up_weight.shape == (3, 8, 5)
    x = torch.randn(2, 4, 8)
    padded = torch.cat([torch.full((2, 3, 8), torch.nan), x], dim=1)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[:, :3] = False
    y, aux = block(padded, mask=Mask(key_keep=keep))
    right, right_aux = block(x)
    close(y[:, 3:], right)
    close(aux, right_aux)
    assert aux.item() > 0


def test_a_decoder_block_steps_as_it_runs() -> None:
    """In evaluation, by steps, with experts that take two of four."""
    block = DecoderBlock(8, 2, feed_forward=MixtureOfExperts).eval()
    x, context = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    whole, aux = block(x, context)
    state, rows = block.init_state(context, max_len=5), []
    for t in range(5):
        row, state = block.step(x[:, t : t + 1], state)
        rows.append(row)
    close(torch.cat(rows, dim=1), whole)
    assert aux.item() > 0


class Asking(Softmax):
    """Wants something added to the loss."""

    def penalty(self) -> Tensor:
        return torch.tensor(0.25)


@pytest.mark.parametrize(("own", "cross", "expected"), [(Asking, Softmax, 0.25), (Asking, Asking, 0.5)])
def test_blocks_add_what_mechanisms_ask_for(own: type[Mechanism], cross: type[Mechanism], expected: float) -> None:
    """On top of what the feed-forward asks for."""
    x = torch.randn(2, 5, 8)
    encoder, decoder = EncoderBlock(8, 2, own), DecoderBlock(8, 2, own, cross, feed_forward=MixtureOfExperts)
    assert encoder(x)[1].item() == 0.25
    with_penalty = decoder(x, x)[1]
    decoder.attention.mechanism.penalty = decoder.cross_attention.mechanism.penalty = lambda: None  # type: ignore[method-assign]
    assert (with_penalty - decoder(x, x)[1]).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"top_k": 5}, r"top_k must lie in 1\.\.4, the number of experts; got 5"),
        ({"top_k": 0}, r"top_k must lie in 1\.\.4"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0, got 0.0"),
        ({"balance_weight": -1.0}, "balance_weight must be at least 0, got -1.0"),
        ({"z_weight": -0.1}, "z_weight must be at least 0, got -0.1"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^MixtureOfExperts: {message}"):
        MixtureOfExperts(6, **options)  # type: ignore[arg-type]


def test_a_bare_tensor_is_no_mask() -> None:
    with pytest.raises(ValueError, match=r"mask must be an attnzoo\.Mask"):
        MixtureOfExperts(6)(torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool))  # type: ignore[arg-type]
