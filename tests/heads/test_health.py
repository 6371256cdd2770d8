"""Figures of heads against the whole matrix of weights, written out in float64."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnzoo import (
    CATALOGUE,
    Additive,
    DecoderBlock,
    Differential,
    Linformer,
    Local,
    Mask,
    Mechanism,
    MultiheadAttention,
    MultiheadLatentAttention,
    OffsetBias,
    Softmax,
    Traits,
)
from attnzoo.heads.health import Head, Health, ablation, head_health
from attnzoo.heads.sites import capture
from attnzoo.positions import Shaw

FIGURES = ("effective_keys", "unevenness", "sink", "first_token", "distance", "content", "entropy")


def shell(mechanism: Any = Softmax, sharper: float = 3.0, **options: Any) -> MultiheadAttention:
    attn = MultiheadAttention(32, 4, mechanism, **options).eval()
    with torch.no_grad():
        attn.q_proj.weight.mul_(sharper)
        attn.v_proj.bias.normal_()
    return attn


def weights_of(attn: nn.Module, x: Tensor, mask: Mask | None = None) -> Tensor:
    """The matrix of every head, [B, H, T, S], rows summing to 1, by columns of the identity."""
    with capture(attn) as passed, torch.no_grad():
        attn(x, mask=mask)
    whole = passed["attention"][0].call.map().double()
    return whole / whole.sum(-1, keepdim=True)


def figure(health: Health, name: str) -> Tensor:
    return torch.tensor([getattr(entry, name) for entry in health.heads], dtype=torch.float64)


def by_hand(weights: Tensor, visible: Tensor, first: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """The figures from weights [B, H, T, S], what may be seen [B, T, S] and the first real key and length of each."""
    number = visible.sum(-1)
    rows = (number > 1)[:, None].double()
    count = rows.sum((0, 2))
    square = weights.square().sum(-1)
    even = torch.where(visible[:, None], 1 / number.clamp(min=1)[:, None, :, None], 0.0)
    apart = (weights - even).square().sum(-1) * number[:, None]
    mass = (weights * rows[..., None]).sum(2)
    places = torch.arange(weights.shape[3])
    away = (places - places[: weights.shape[2], None]).abs()
    content = torch.zeros(2, weights.shape[1], dtype=torch.float64)
    for length in lengths.unique():
        same = lengths == length
        if same.sum() > 1:
            chosen, kept = weights[same], rows[same]
            content[0] += (chosen.var(0).sum(-1) * kept[0]).sum(-1) * same.sum()
            content[1] += (chosen.square().sum(-1) * kept).sum((0, 2))
    logs = weights.clamp(min=1e-300).log()
    return {
        "effective_keys": count / (square * rows).sum((0, 2)),
        "unevenness": (apart * rows).sum((0, 2)) / count,
        "sink": mass.amax(-1).sum(0) / count,
        "first_token": mass.gather(2, first[:, None, None].expand(-1, mass.shape[1], 1)).sum((0, 2)) / count,
        "distance": ((weights * away).sum(-1) * rows).sum((0, 2)) / count,
        "content": content[0] / content[1],
        "entropy": -((logs * weights).sum(-1) * rows).sum((0, 2)) / count,
    }


@pytest.mark.parametrize("kind", ["whole", "causal", "padded right", "padded left", "causal and padded", "local"])
def test_every_figure_against_the_matrix(kind: str) -> None:
    """With no more keys than twice the columns nothing is estimated; content is a mean over pairs, so two of a length.

    The mask is told in all its forms; what is visible is written down here by itself.
    """
    batch, tokens = 2, 24
    attn, x = shell(functools.partial(Local, window=7) if kind == "local" else Softmax), torch.randn(batch, tokens, 32)
    lengths = torch.full((batch,), tokens)
    keep = torch.ones(batch, tokens, dtype=torch.bool)
    if "padded" in kind:
        lengths = torch.tensor([17, 17])
        keep = torch.arange(tokens) < 17
        keep = (keep.flip(0) if "left" in kind else keep).expand(batch, -1)
    causal = "causal" in kind
    mask = Mask(causal=causal, key_keep=keep if "padded" in kind else None)
    visible = keep[:, None, :] & keep[:, :, None]
    if causal:
        visible = visible & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if kind == "local":
        places = torch.arange(tokens)
        visible = visible & ((places - places[:, None]).abs() <= 3)
    health = head_health(attn, [x], run=lambda batch: attn(batch, mask=mask))
    weights = torch.nan_to_num(weights_of(attn, x, mask))
    expected = by_hand(weights, visible, keep.int().argmax(1), lengths)
    for name in FIGURES:
        if name != "entropy" or kind != "local":
            torch.testing.assert_close(figure(health, name), expected[name], atol=1e-5, rtol=1e-4, msg=name)
    number = visible.sum(-1).double()
    torch.testing.assert_close(figure(health, "visible_keys")[0], number[number > 1].mean(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "Linformer"])
def test_estimates_are_near_the_matrix(name: str) -> None:
    """512 queries, 64 keys, 16 columns, five draws: within 2 % in the mean; rows mixed of 8 exact."""
    attn = shell(CATALOGUE[name], max_len=64, grid=(8, 8), prefix_tokens=0, layer=0)
    x = torch.randn(8, 64, 32)
    weights = weights_of(attn, x)
    everything = torch.ones(8, 64, 64, dtype=torch.bool)
    expected = by_hand(weights, everything, torch.zeros(8, dtype=torch.long), torch.full((8,), 64))
    drawn = [head_health(attn, [x], seed=seed) for seed in range(5)]
    error = torch.stack([figure(health, "effective_keys") / expected["effective_keys"] - 1 for health in drawn])
    assert error.square().mean().sqrt() < (1e-4 if name == "Nystrom" else 0.02)
    assert error.mean().abs() < 0.01
    for exact in ("sink", "first_token", "distance"):
        torch.testing.assert_close(figure(drawn[0], exact), expected[exact], atol=1e-5, rtol=1e-4, msg=exact)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_estimates_where_heads_share_values_and_sequences_end_early(groups: int) -> None:
    """By more passes backward, for the values of a group have room for few columns of each of its heads."""
    attn, x = shell(num_kv_heads=groups), torch.randn(8, 70, 32)
    lengths = torch.tensor([70, 70, 64, 65, 40, 70, 37, 50])
    mask = Mask.from_lengths(lengths, 70)
    keep = mask.key_keep
    assert keep is not None
    visible = keep[:, None, :] & keep[:, :, None]
    expected = by_hand(weights_of(attn, x, mask), visible, torch.zeros(8, dtype=torch.long), lengths)
    drawn = [head_health(attn, [x], run=lambda batch: attn(batch, mask=mask), seed=seed) for seed in range(5)]
    error = torch.stack([figure(health, "effective_keys") / expected["effective_keys"] - 1 for health in drawn])
    assert error.square().mean().sqrt() < 0.03
    torch.testing.assert_close(figure(drawn[0], "sink"), expected["sink"], atol=1e-5, rtol=1e-4)


def test_a_bias_and_grouped_keys_are_read() -> None:
    """Heads of one group are told apart."""
    attn, x = shell(num_kv_heads=2), torch.randn(2, 20, 32)
    bias = OffsetBias(torch.randn(4, 39))
    health = head_health(attn, [x], run=lambda batch: attn(batch, bias=bias))
    with capture(attn) as passed, torch.no_grad():
        attn(x, bias=bias)
    call = passed["attention"][0].call
    k = call.k.repeat_interleave(2, dim=1)
    weights = (call.q @ k.mT / 8**0.5 + bias.dense(20)).double().softmax(-1)
    whole = torch.ones(2, 20, 20, dtype=torch.bool)
    expected = by_hand(weights, whole, torch.zeros(2, dtype=torch.long), torch.full((2,), 20))
    for name in FIGURES:
        torch.testing.assert_close(figure(health, name), expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"sink": True}], ids=str)
def test_entropy_of_every_kind_of_softmax(options: dict[str, Any]) -> None:
    attn, x = shell(functools.partial(Softmax, **options)), torch.randn(2, 20, 32)
    weights = weights_of(attn, x)
    expected = -(weights.log() * weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(figure(head_health(attn, [x]), "entropy"), expected, atol=1e-5, rtol=1e-5)


def test_entropy_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    attn, x = shell(), torch.randn(2, 20, 32)
    mask = Mask(causal=True, segments=torch.arange(20).div(7, rounding_mode="floor").expand(2, -1))
    whole = figure(head_health(attn, [x], run=lambda batch: attn(batch, mask=mask)), "entropy")
    monkeypatch.setattr("attnzoo.heads.entropy.SIZE", 3 * 2 * 4 * 20)
    parts = figure(head_health(attn, [x], run=lambda batch: attn(batch, mask=mask)), "entropy")
    torch.testing.assert_close(parts, whole)
    weights = torch.nan_to_num(weights_of(attn, x, mask))
    rows = (weights > 0).sum(-1) > 1
    expected = -(weights.clamp(min=1e-300).log() * weights).sum(-1)
    torch.testing.assert_close(whole, (expected * rows).sum((0, 2)) / rows.sum((0, 2)), atol=1e-5, rtol=1e-5)


def test_norm_redundancy_and_ablation_by_hand() -> None:
    attn, x = shell(), torch.randn(8, 24, 32)
    attn.out_proj.weight.data[:, :8] *= 3
    loss = lambda batch: (attn(batch).square().sum(), batch.numel())  # noqa: E731
    health = head_health(attn, [x[:5], x[5:]], loss=loss, ablate=True)
    with torch.no_grad():
        heads = attn.attend(x).double()
        slices = attn.out_proj.weight.double().T.unflatten(0, (4, 8))
        parts = torch.einsum("bhtv,hve->hbte", heads, slices).flatten(1, 2)  # Y_h
        norms = parts.norm(dim=-1).mean(1)
        centred = parts - parts.mean(1, keepdim=True)
        cross = torch.stack([torch.stack([(a.T @ b).square().sum() for b in centred]) for a in centred])
        similar = cross / (cross.diagonal()[:, None] * cross.diagonal()).sqrt()
        similar.fill_diagonal_(-1)
        before = attn(x).square().mean()
        rises = []
        for head in range(4):
            changed = attn.attend(x)
            changed[:, head] = changed[:, head].mean((0, 1))
            rises.append(attn.merge(changed).square().mean() - before)
    torch.testing.assert_close(figure(health, "norm"), norms / norms.mean(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(figure(health, "redundancy"), similar.amax(1), atol=1e-6, rtol=1e-5)
    assert figure(health, "nearest").tolist() == similar.argmax(1).tolist()
    torch.testing.assert_close(figure(health, "ablation"), torch.stack(rises).double(), atol=1e-6, rtol=1e-4)
    assert health.loss == pytest.approx(float(before), rel=1e-5)


def test_batches_of_an_iterator_are_gone_over_as_often_as_needed() -> None:
    """For the figures they may be longer than memory; ablation has to see them again for each head."""
    attn, x = shell(), torch.randn(8, 12, 32)
    loss = lambda batch: (attn(batch).square().sum(), batch.numel())  # noqa: E731
    expected = head_health(attn, x.split(4), loss=loss, ablate=True)
    assert head_health(attn, iter(x.split(4)), loss=loss, ablate=True).heads == expected.heads
    heads = [entry.head for entry in expected.heads]
    assert ablation(attn, iter(x.split(4)), loss, heads, expected) == [entry.ablation for entry in expected.heads]
    used = iter(x.split(4))
    health = head_health(attn, used, loss=loss)
    assert figure(health, "sink").tolist() == figure(expected, "sink").tolist()
    with pytest.raises(ValueError, match="an iterator gives its batches only once"):
        ablation(attn, used, loss, heads, health)
    with pytest.raises(ValueError, match="needs batches to measure on, got none"):
        head_health(attn, used, loss=loss)
    with pytest.raises(ValueError, match="give loss= to head_health"):
        ablation(attn, [x], loss, heads, head_health(attn, [x]))


def test_turning_the_basis_of_a_head_hides_no_duplicate() -> None:
    """V and O slice by an orthogonal matrix: the function stays, and so does the redundancy."""
    attn, x = shell(), torch.randn(4, 24, 32)
    with torch.no_grad():
        for weight in (attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight, attn.v_proj.bias):
            weight[24:] = weight[:8]
        attn.q_proj.bias[24:] = attn.q_proj.bias[:8]
        attn.out_proj.weight[:, 24:] = attn.out_proj.weight[:, :8]
        before = attn(x)
        turn, _ = torch.linalg.qr(torch.randn(8, 8))
        attn.v_proj.weight[24:] = turn @ attn.v_proj.weight[24:]
        attn.v_proj.bias[24:] = turn @ attn.v_proj.bias[24:]
        attn.out_proj.weight[:, 24:] = attn.out_proj.weight[:, 24:] @ turn.T
        torch.testing.assert_close(attn(x), before, atol=1e-5, rtol=1e-4)
    health = head_health(attn, [x])
    for head, other in ((0, 3), (3, 0)):
        assert health["attention", head].redundancy == pytest.approx(1, abs=1e-4)
        assert health["attention", head].nearest == other
    assert health["attention", 1].redundancy < 0.5


def test_a_set_in_parts_is_the_set() -> None:
    """Also over processes, whose sums are added up by ``reduce``."""
    attn, x = shell(), torch.randn(8, 24, 32)
    whole = head_health(attn, [x])
    parts = head_health(attn, [x[:2], x[2:4], x[4:]])
    doubled = head_health(attn, [x[:4]], reduce=lambda tensor: tensor * 2)
    once = head_health(attn, [x[:4]])
    for name in (*FIGURES, "norm", "redundancy"):
        torch.testing.assert_close(figure(parts, name), figure(whole, name), atol=1e-5, rtol=1e-4, msg=name)
        torch.testing.assert_close(figure(doubled, name), figure(once, name), msg=name)


def test_cross_attention_has_no_distance_and_says_so() -> None:
    """The decoder's padding is told by the caller, since no mask of the site knows of it."""
    block, x, context = DecoderBlock(32, 4).eval(), torch.randn(3, 10, 32), torch.randn(3, 15, 32)
    real = torch.arange(10) < torch.tensor([10, 4, 7])[:, None]
    run = lambda x: block(x, context, context_mask=Mask.from_lengths(torch.tensor([15, 9, 3])))  # noqa: E731
    health = head_health(block, [x], run=run, queries=lambda site, batch: real)
    cross, own = health["cross_attention", 0], health["attention", 0]
    assert cross.distance is None and "two sequences" in health.notes["cross_attention"]["distance"]
    assert own.distance is not None and "distance" not in health.notes["attention"]
    assert cross.visible_keys == pytest.approx((10 * 15 + 4 * 9 + 7 * 3) / 21, rel=1e-4)
    with torch.no_grad():
        y = block.attention(block.attention_norm(x))
        heads = block.cross_attention.attend(
            block.cross_norm(x + y), context, mask=Mask.from_lengths(torch.tensor([15, 9, 3]))
        )
    expected = heads.transpose(1, 2)[real].double().mean(0)
    torch.testing.assert_close(health.means["cross_attention"], expected, atol=1e-6, rtol=1e-5)


class Halves(nn.Module):
    """A model that calls the public halves of its attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, *context: Tensor, mask: Mask | None = None) -> Tensor:
        return self.attention.merge(self.attention.attend(x, *context, mask=mask))


@pytest.mark.parametrize("kind", ["self", "latent", "cross", "cross of equal lengths"])
def test_the_halves_of_an_attention_are_read_as_the_whole(kind: str) -> None:
    attn = MultiheadLatentAttention(32, 4).eval() if kind == "latent" else shell()
    x, mask = torch.randn(4, 12, 32), Mask.from_lengths(torch.tensor([12, 5, 7, 9]))
    context = (torch.randn(4, 12, 32),) if "cross" in kind else ()
    if kind == "cross":
        x = x[:, :10]
    whole = head_health(attn, [x], run=lambda x: attn(x, *context, mask=mask))
    model = Halves(attn)
    halves = head_health(model, [x], run=lambda x: model(x, *context, mask=mask))
    assert halves.heads == whole.heads and halves.notes == whole.notes
    assert ("distance" in halves.notes["attention"]) == ("cross" in kind)
    assert torch.equal(halves.means["attention"], whole.means["attention"])


def test_a_whole_call_before_steps_is_read_by_itself() -> None:
    attn, x = shell(causal=True), torch.randn(2, 6, 32)

    def run(x: Tensor) -> None:
        attn(x)
        attn.step(x, attn.init_state(2, 6))

    both, once = head_health(attn, [x], run=run), head_health(attn, [x])
    assert "distance" not in both.notes["attention"]
    torch.testing.assert_close(figure(both, "distance"), figure(once, "distance"), atol=1e-5, rtol=1e-5)


def test_steps_on_a_memory_are_read_as_one_call() -> None:
    """As Bahdanau's decoder takes them: the same figures as by whole cross-attention."""

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadAttention(32, 4, Additive)

        def forward(self, x: Tensor, context: Tensor, steps: bool) -> None:
            mask = Mask.from_lengths(torch.tensor([15, 9, 3]))
            if not steps:
                self.attention(x, context, mask=mask)
                return
            memory = self.attention.memory(context, mask=mask)
            for token in x.split(1, dim=1):
                self.attention.step(token, memory, on_memory=True)

    model, x, context = Stepping().eval(), torch.randn(3, 10, 32), torch.randn(3, 15, 32)
    stepped, whole = (head_health(model, [(x, context, steps)]) for steps in (True, False))
    for name in ("norm", "effective_keys", "unevenness", "sink", "first_token", "redundancy"):
        torch.testing.assert_close(figure(stepped, name), figure(whole, name), atol=1e-6, rtol=1e-5, msg=name)
    assert stepped["attention", 0].distance is None
    torch.testing.assert_close(stepped.means["attention"], whole.means["attention"], atol=1e-7, rtol=1e-5)


def test_what_has_no_meaning_is_missing_and_said() -> None:
    x = torch.randn(4, 20, 32)
    linformer = head_health(shell(functools.partial(Linformer, max_len=20)), [x])
    entry = linformer["attention", 0]
    assert [entry.effective_keys, entry.sink, entry.distance, entry.entropy] == [None] * 4
    assert entry.unevenness is not None and entry.redundancy is not None
    assert "either sign" in linformer.notes["attention"]["sink"]
    assert "may be < 0" in head_health(shell(Differential), [x]).notes["attention"]["effective_keys"]
    assert "80 tokens are few for heads of 8: it is too high; give 256" in linformer.notes["attention"]["redundancy"]
    assert "redundancy" not in head_health(shell(), [torch.randn(13, 20, 32)]).notes["attention"]
    single = head_health(MultiheadAttention(8, 1), [x[..., :8]])
    assert single["attention", 0].redundancy is None and "one head" in single.notes["attention"]["redundancy"]
    alone = head_health(shell(functools.partial(Local, window=1)), [x])["attention", 0]
    assert alone.effective_keys is None and alone.sink is None and alone.norm > 0

    class Squared(Mechanism):
        traits = Traits(linear_in_v=False, exact=False)

        def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Any) -> Tensor:
            return v.square()

    other = head_health(MultiheadAttention(32, 4, Squared), [x])
    assert other["attention", 0].effective_keys is None and other["attention", 0].redundancy is not None
    assert "not linear in v" in other.notes["attention"]["effective_keys"]


@pytest.mark.parametrize(
    ("mechanism", "x", "missing", "said"),
    [
        (Softmax, torch.randn(4, 1, 32), {*FIGURES, "visible_keys"}, "no query of a head sees more than one key"),
        (Softmax, torch.randn(4, 3, 32), {"sink"}, "no sequence has 4 queries"),
        (Softmax, torch.randn(1, 9, 32), {"content"}, "no batch has two sequences of one length"),
        (Local, torch.randn(4, 9, 32), {"entropy"}, "not known of Local"),
    ],
    ids=["one token", "three tokens", "one sequence", "no scores"],
)
def test_every_figure_that_is_missing_is_explained(mechanism: Any, x: Tensor, missing: set[str], said: str) -> None:
    health = head_health(shell(mechanism), [x])
    absent = {name for name in (*FIGURES, "visible_keys", "norm") if getattr(health.heads[0], name) is None}
    assert absent == missing
    assert all(said in health.notes["attention"][name] for name in missing)


def test_batches_that_tell_nothing_are_refused() -> None:
    """Means of no tokens are no numbers, with which a head would begin anew; a loss of no samples is not 0."""
    attn, x = shell(), torch.randn(2, 9, 32)
    hidden = Mask(key_keep=torch.zeros(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="nothing but padding went through attention"):
        head_health(attn, [x], run=lambda batch: attn(batch, mask=hidden))
    with pytest.raises(ValueError, match="no batch in which the loss counts anything"):
        head_health(attn, [x], loss=lambda batch: (attn(batch).sum() * 0, 0))
    weighed = head_health(attn, [x], loss=lambda batch: (attn(batch).sum() * 0 + 1, torch.tensor(0.25)))
    assert weighed.loss == 4


def test_shells_of_other_make() -> None:
    """Latent attention, and Shaw's values with a column for each key."""
    x = torch.randn(2, 20, 32)
    for attn in (MultiheadLatentAttention(32, 4).eval(), shell(position=Shaw(8))):
        weights = weights_of(attn, x)
        health = head_health(attn, [x])
        expected = 1 / weights.square().sum(-1).mean((0, 2))
        torch.testing.assert_close(figure(health, "effective_keys"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [list, tuple, dict, collections.OrderedDict, collections.UserDict])
def test_a_batch_of_any_kind_is_given_as_arguments(kind: Callable[..., Any]) -> None:
    """Those of tokenizers of transformers are mappings, and no dicts."""
    attn, x, context = shell(), torch.randn(2, 10, 32), torch.randn(2, 12, 32)
    given = kind([x, context]) if kind in (list, tuple) else kind(x=x, context=context)
    expected = head_health(attn, [x], run=lambda x: attn(x, context))
    assert head_health(attn, [given]).heads == expected.heads


def test_a_model_is_left_as_it_was() -> None:
    attn, x = shell().train(), torch.randn(2, 20, 32)
    attn.q_proj.eval()
    with torch.inference_mode():
        inside = head_health(attn, [x.clone()])
    outside = head_health(attn, [x])
    assert attn.training and not attn.q_proj.training
    assert not attn.out_proj._forward_pre_hooks and not {"attend", "forward"} & set(attn.__dict__)
    assert figure(inside, "sink").tolist() == figure(outside, "sink").tolist()
    with pytest.raises(RuntimeError, match="shape"):
        head_health(attn, [x], run=lambda batch: attn(batch).view(7))
    assert attn.training and not attn.out_proj._forward_pre_hooks and "_attend" not in attn.mechanism.__dict__


def by_wrapper(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return compiled


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [by_wrapper, in_place])
@pytest.mark.parametrize("part", ["shell", "network", "block of a network"])
def test_compiled_code_that_has_run_before_is_read_too(compiled: Callable[..., nn.Module], part: str) -> None:
    attn, x = shell(), torch.randn(4, 20, 32)
    model: nn.Module = attn if part == "shell" else nn.Sequential(attn)
    loss = lambda batch: (model(batch).square().sum(), batch.numel())  # noqa: E731
    expected = head_health(model, [x], loss=loss, ablate=True)
    if part == "block of a network":
        assert isinstance(model, nn.Sequential)
        model[0] = compiled(attn)
    else:
        model = compiled(model)
    with torch.no_grad():
        y = model(x)
    health = head_health(model, [x], loss=loss, ablate=True)
    for name in (*FIGURES, "ablation"):
        torch.testing.assert_close(figure(health, name), figure(expected, name), atol=1e-6, rtol=1e-5, msg=name)
    (site,) = health.means
    assert model.get_submodule("" if site == "attention" else site) is attn
    torch.testing.assert_close(model(x), y)


def test_half_precision_is_read_in_full() -> None:
    attn, x = shell(), torch.randn(2, 40, 32)

    def run(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attn(batch)

    rounded, full = head_health(attn, [x], run=run), head_health(attn, [x])
    for name in ("effective_keys", "sink", "unevenness"):
        torch.testing.assert_close(figure(rounded, name), figure(full, name), atol=0.02, rtol=0.03, msg=name)


def test_what_cannot_be_measured_is_refused() -> None:
    attn, x = shell(), torch.randn(2, 20, 32)
    with pytest.raises(ValueError, match="Linear holds no attention of attnzoo"):
        head_health(nn.Linear(2, 2), [x])
    with pytest.raises(ValueError, match="needs batches"):
        head_health(attn, [])
    with pytest.raises(ValueError, match="needs loss="):
        head_health(attn, [x], ablate=True)
    two = nn.ModuleDict({"used": attn, "unused": shell()})
    with pytest.raises(ValueError, match="no batch went through unused"):
        head_health(two, [x], run=lambda batch: two["used"](batch))


def test_heads_are_ablated_together() -> None:
    """Two of three equal heads cost more than the sum of each."""
    attn, x = shell(), torch.randn(4, 20, 32)
    y = attn(x).detach()
    loss = lambda batch: ((attn(batch) - y).square().sum(), y.numel())  # noqa: E731
    health = head_health(attn, [x], loss=loss)
    heads = [Head("attention", 0), Head("attention", 2)]
    single = ablation(attn, [x], loss, heads, health)
    (both,) = ablation(attn, [x], loss, [heads], health)
    with torch.no_grad():
        changed = attn.attend(x)
        for head in (0, 2):
            changed[:, head] = changed[:, head].mean((0, 1))
        expected = (attn.merge(changed) - y).square().mean()
    assert both == pytest.approx(float(expected), rel=1e-4)
    assert min(single) > 0
