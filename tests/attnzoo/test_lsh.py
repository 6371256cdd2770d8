"""LSH attention against its definition, written out pair by pair, and against what can be worked out by hand."""

import math

import pytest
import torch
from tensors_made import Made
from torch import Tensor

from attnzoo import Mask, MultiheadAttention, OffsetBias, attention_map, check_attention
from attnzoo.mechanisms.lsh import LSH
from attnzoo.positions import Rotary
from attnzoo.reference.selected import lsh as formula


def met_pairs(attn: LSH, k: Tensor, keep: Tensor | None = None) -> Tensor:
    """Bool [B, H, rounds, T, T]: in which rounds a query finds a key, itself included, by the words of the header."""
    batch, heads, length, _ = k.shape
    found = torch.zeros(batch, heads, attn.num_rounds, length, length, dtype=torch.bool)
    turned = torch.einsum("bhtd,rhdn->bhrtn", k.detach().double(), attn.rotations.double())
    buckets = torch.cat([turned, -turned], -1).argmax(-1)
    for b, h, r in torch.cartesian_prod(*(torch.arange(n) for n in found.shape[:3])).tolist():
        members: dict[int, list[int]] = {}
        for t in range(length):
            if keep is None or keep[b, t]:
                members.setdefault(int(buckets[b, h, r, t]), []).append(t)
        for bucket in members.values():
            chunks = [bucket[n : n + attn.bucket_size] for n in range(0, len(bucket), attn.bucket_size)]
            for before, chunk in zip([[], *chunks], chunks, strict=False):
                for t in chunk:
                    found[b, h, r, t, before + chunk] = True
    return found


def brute(attn: LSH, q: Tensor, v: Tensor, mask: Mask | None = None, bias: Tensor | None = None) -> Tensor:
    """One softmax over everything that any round has found; itself where that is nothing else."""
    mask = mask or Mask()
    q, v = q.detach().double(), v.detach().double()
    length = q.shape[2]
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT
    if bias is not None:
        scores = scores + bias.detach().double()
    seen = met_pairs(attn, q, mask.key_keep).any(2)
    if mask.causal:
        seen &= torch.ones(length, length).tril().bool()
    own = torch.eye(length, dtype=torch.bool)
    others = seen & ~own & (scores > -math.inf)
    seen = torch.where(others.any(-1, keepdim=True), others, seen & own & (scores > -math.inf))
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0)
    return weights @ v


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=1e-5)


def signs(*rounds: tuple[float, ...], bucket_size: int = 8) -> LSH:
    """One head with two buckets a round: the sides of the plane through 0 that is normal to the vector given."""
    attn = LSH(1, len(rounds[0]), num_rounds=len(rounds), num_buckets=2, bucket_size=bucket_size).eval()
    attn.rotations.copy_(torch.tensor(rounds, dtype=torch.float32)[:, None, :, None])
    return attn


def tokens(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)[None, None]


@pytest.mark.parametrize("causal", [False, True])
def test_d2_and_e02_every_length_equals_the_definition(causal: bool) -> None:
    """D2, E02: T from 1 to 40 over chunks of 3; no length is rounded, and none falls back to full attention."""
    attn = LSH(2, 4, bucket_size=3, num_buckets=4)
    for length in range(1, 41):
        q, v = torch.randn(2, 2, length, 4), torch.randn(2, 2, length, 3)
        mask = Mask(causal=causal)
        close(attn(q, q, v, mask), brute(attn, q, v, mask))


def test_d2_a_short_input_is_hashed_too() -> None:
    """D2: three tokens that no hash puts together see themselves alone, although one chunk could hold them all."""
    attn = LSH(1, 2, num_buckets=4, num_rounds=1).eval()
    attn.rotations.copy_(torch.eye(2)[None, None])
    q, v = tokens((1, 0), (0, 1), (-1, 0)), torch.randn(1, 1, 3, 5)
    assert torch.equal(attn(q, q, v), v)


@pytest.mark.parametrize("rounds", [1, 3])
def test_masks_and_bias_equal_the_definition(rounds: int) -> None:
    """Padding with holes, a bias for each pair, terms of -inf, and all of it causal."""
    attn = LSH(2, 4, bucket_size=2, num_buckets=2, num_rounds=rounds)
    q, v, bias = torch.randn(2, 2, 13, 4), torch.randn(2, 2, 13, 4), torch.randn(2, 2, 13, 13)
    bias[torch.rand(bias.shape) < 0.3] = -math.inf
    keep = torch.rand(2, 13) < 0.7
    for mask in (Mask(), Mask(True), Mask(key_keep=keep), Mask(True, key_keep=keep)):
        close(attn(q, q, v, mask, bias), brute(attn, q, v, mask, bias))


def test_a_bias_by_offset_equals_the_dense_one() -> None:
    attn, bias = LSH(2, 4, bucket_size=2, num_buckets=2), OffsetBias(torch.randn(2, 21))
    q, v = torch.randn(2, 2, 11, 4), torch.randn(2, 2, 11, 4)
    close(attn(q, q, v, None, bias), attn(q, q, v, None, bias.dense(11)))
    close(attn(q, q, v, None, bias), brute(attn, q, v, None, bias.dense(11)))


def test_a_key_that_two_rounds_meet_counts_once() -> None:
    """By hand: query (1, 1) meets (2, 1) in both rounds and (-1, 2) in the second one alone."""
    attn = signs((1, 0), (0, 1))
    q, v = tokens((1, 1), (2, 1), (-1, 2)), torch.tensor([[[[9.0], [1.0], [0.0]]]])
    near, far = math.exp(3 / math.sqrt(5)), math.exp(1 / math.sqrt(5))
    assert attn(q, q, v)[0, 0, 0, 0].item() == pytest.approx(near / (near + far), abs=1e-6)


def test_the_same_round_again_changes_nothing() -> None:
    """Four equal rounds give what one gives: what they meet again counts once."""
    one, four = LSH(2, 4, bucket_size=3, num_rounds=1).eval(), LSH(2, 4, bucket_size=3, num_rounds=4).eval()
    four.rotations.copy_(one.rotations.expand_as(four.rotations))
    q, v = torch.randn(2, 2, 30, 4), torch.randn(2, 2, 30, 4)
    close(four(q, q, v), one(q, q, v))


def test_rounds_join_as_in_the_paper() -> None:
    """A softmax for each round over s - log N, the rounds joined by their log-sum-exp (section 2, multi-round)."""
    attn = LSH(1, 4, bucket_size=4, num_buckets=2, num_rounds=3)
    q, v = torch.randn(1, 1, 20, 4).double(), torch.randn(1, 1, 20, 4).double()
    met = met_pairs(attn, q)[0, 0] & ~torch.eye(20, dtype=torch.bool)
    scores = (q @ (q / q.norm(dim=-1, keepdim=True)).mT)[0, 0] - met.sum(0).clamp(min=1).log()
    scores = scores.expand(3, -1, -1).masked_fill(~met, -math.inf)
    assert met.any(-1).all(), "each query must meet a key in each round, or the formula below has no meaning"
    right = (scores.logsumexp(-1).softmax(0)[..., None] * (scores.softmax(-1) @ v[0, 0])).sum(0)
    close(attn.double()(q, q, v)[0, 0], right, atol=1e-12)


def test_the_own_key_is_seen_only_when_nothing_else_is() -> None:
    """Three tokens on one side, one on the other: weight 0 on itself, and 1 where it is alone."""
    weights = attention_map(signs((1, 0)), *[tokens((1, 2), (2, 1), (1, 0), (-1, 1))] * 2)[0, 0]
    assert (weights.diagonal()[:3] == 0).all()
    assert (weights[:3, :3].sum(-1) - 1).abs().max() < 1e-6
    assert weights[3].tolist() == [0, 0, 0, 1]
    first = attention_map(signs((1, 0)), *[tokens((1, 2), (2, 1))] * 2, Mask(causal=True))[0, 0]
    assert first.tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("causal", [False, True])
def test_a_chunk_and_the_one_before(causal: bool) -> None:
    """Ten tokens in one bucket, chunks of 3: keys of the own chunk and of the last one; the first does not wrap."""
    q = tokens(*[(1.0, 0.1 * t) for t in range(10)])
    seen = attention_map(signs((1, 0), bucket_size=3), q, q, Mask(causal=causal))[0, 0] > 0
    for i in range(10):
        right = [j for j in range(10) if i // 3 - j // 3 in (0, 1) and j != i and (j < i or not causal)]
        assert seen[i].nonzero()[:, 0].tolist() == (right or [i])


def test_padding_takes_no_place_in_a_chunk() -> None:
    """One bucket, chunks of one token: the last token sees the first across five hidden ones."""
    q, v = tokens(*[(1.0, 0.1 * t) for t in range(7)]), torch.randn(1, 1, 7, 2)
    mask = Mask(key_keep=torch.tensor([[1, 0, 0, 0, 0, 0, 1]]).bool())
    out = signs((1, 0), bucket_size=1)(q, q, v, mask)
    close(out[0, 0, 6], v[0, 0, 0])
    assert (out[0, 0, 1:6] == 0).all()
    dirty = q.clone()
    dirty[:, :, 1:6] = torch.nan
    assert torch.equal(signs((1, 0), bucket_size=1)(dirty, dirty, v, mask), out)


@pytest.mark.parametrize("causal", [False, True])
def test_e2_padded_equals_cropped(causal: bool) -> None:
    """E2, J3: rows of 20, 13 and 6 real tokens, left, right and with holes, give what each gives alone."""
    attn = LSH(2, 4, bucket_size=2)
    q, v = torch.randn(3, 2, 20, 4), torch.randn(3, 2, 20, 4)
    keep = torch.ones(3, 20, dtype=torch.bool)
    keep[1, :7] = False
    keep[2, torch.randperm(20)[:14]] = False
    out = attn(q, q, v, Mask(causal=causal, key_keep=keep))
    for b in range(3):
        alone = q[b : b + 1, :, keep[b]]
        close(out[b : b + 1, :, keep[b]], attn(alone, alone, v[b : b + 1, :, keep[b]], Mask(causal=causal)))
    assert (out.masked_select(~keep[:, None, :, None]) == 0).all()


def test_m03_no_later_token_moves_a_chunk() -> None:
    """M03: a token that changes bucket shifts the ranks of others; nothing before it moves by one bit."""
    attn = LSH(2, 4, bucket_size=2, num_buckets=4)
    q, v = torch.randn(1, 2, 40, 4), torch.randn(1, 2, 40, 4)
    clean = attn(q, q, v, Mask(causal=True))
    for j in range(40):
        other, values = q.clone(), v.clone()
        other[:, :, j] *= -1
        values[:, :, j] += 1
        moved = attn(other, other, values, Mask(causal=True)) != clean
        assert not moved[:, :, :j].any()
        assert moved[:, :, j].any()


def test_what_comes_after_a_prefix_changes_nothing_in_it() -> None:
    """The hash does not depend on the length: causal outputs of a prefix are those of the whole."""
    attn = LSH(2, 4, bucket_size=2)
    q, v = torch.randn(1, 2, 40, 4), torch.randn(1, 2, 40, 4)
    whole = attn(q, q, v, Mask(causal=True))
    for length in (1, 7, 16, 33):
        close(attn(q[:, :, :length], q[:, :, :length], v[:, :, :length], Mask(causal=True)), whole[:, :, :length])


def test_steps_equal_one_pass_in_the_shell() -> None:
    """B1: token by token with rotary positions, rows padded on the left; the shell has no key projection."""
    attn = MultiheadAttention(16, 2, LSH, position=Rotary(8), causal=True).eval()
    assert attn.k_proj is None
    x, keep = torch.randn(2, 14, 16), torch.ones(2, 14, dtype=torch.bool)
    keep[1, :5] = False
    whole = attn(x, mask=Mask(key_keep=keep))
    state, parts = attn.init_state(2, 14), []
    for t in range(14):
        out, state = attn.step(x[:, t : t + 1], state, mask=Mask(key_keep=keep[:, t : t + 1]))
        parts.append(out)
    close(torch.cat(parts, 1), whole)


def test_a_step_reads_a_bias_over_all_keys_so_far() -> None:
    attn, bias = LSH(2, 4, num_buckets=2), torch.randn(12, 12)
    q, v = torch.randn(2, 2, 12, 4), torch.randn(2, 2, 12, 4)
    state, parts = attn.init_state(2, 12), []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        part = slice(start, stop)
        out, state = attn.step(q[:, :, part], q[:, :, part], v[:, :, part], state, None, bias[part, :stop])
        parts.append(out)
    close(torch.cat(parts, 2), brute(attn, q, v, Mask(causal=True), bias))


def clustered(seed: int) -> Tensor:
    """64 tokens around 8 centres."""
    draw = torch.Generator().manual_seed(seed)
    centres = 3 * torch.nn.functional.normalize(torch.randn(8, 16, generator=draw), dim=-1)
    return (centres.repeat(8, 1) + 0.3 * torch.randn(64, 16, generator=draw))[None, None]


def test_d5_clustered_keys() -> None:
    """D5: over 10 seeds outputs follow full attention, and more of the heaviest keys are found with more rounds."""
    correlation, recall = [], []
    for rounds in (1, 2, 4, 8):
        likeness, hits = 0.0, 0.0
        for seed in range(10):
            q = clustered(seed)
            v = torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(seed))
            attn = LSH(1, 16, num_rounds=rounds, num_buckets=8, seed=seed).eval()
            scores = q @ torch.nn.functional.normalize(q, dim=-1).mT
            full = scores.masked_fill(torch.eye(64, dtype=torch.bool), -math.inf).softmax(-1)
            likeness += torch.corrcoef(torch.stack([attn(q, q, v).flatten(), (full @ v).flatten()]))[0, 1].item()
            found = attention_map(attn, q, q) > 0
            hits += found.gather(-1, full.topk(7, dim=-1).indices).double().mean().item()
        correlation.append(likeness / 10)
        recall.append(hits / 10)
    assert correlation == sorted(correlation)
    assert recall == sorted(recall)
    assert recall[0] > 0.3  # a random pattern of as many keys finds 7 of 63 times 7
    assert recall[3] > 0.9
    assert correlation[3] > 0.95


def test_more_rounds_come_nearer_to_all_other_keys() -> None:
    """The limit of many rounds: softmax of q . k / |k| over every other key."""
    q, v = torch.randn(1, 2, 48, 8), torch.randn(1, 2, 48, 8)
    scores = q @ torch.nn.functional.normalize(q, dim=-1).mT
    full = scores.masked_fill(torch.eye(48, dtype=torch.bool), -math.inf).softmax(-1) @ v
    errors = [(LSH(2, 8, num_rounds=n).eval()(q, q, v) - full).abs().mean().item() for n in (2, 8, 32, 128)]
    assert errors[1] < 0.6 * errors[0]
    assert errors[2] < 0.4 * errors[1]
    assert errors[3] < 0.4 * errors[2]


def test_e09_evaluation_repeats() -> None:
    """E09: twice the same bits, also by a module that was built from another seed and given the weights."""
    attn = LSH(2, 4, seed=3, layer=1).eval()
    q, v = torch.randn(1, 2, 24, 4), torch.randn(1, 2, 24, 4)
    out = attn(q, q, v)
    assert torch.equal(attn(q, q, v), out)
    other = LSH(2, 4, seed=7).eval()
    assert not torch.equal(other(q, q, v), out)
    other.load_state_dict(attn.state_dict())
    assert torch.equal(other(q, q, v), out)


def test_e09_hashes_come_from_seed_and_layer_alone() -> None:
    """E09: the global generator is neither read nor moved; layers, heads and rounds have hashes of their own."""
    before = torch.get_rng_state()
    attn = LSH(2, 4, layer=1)
    q = torch.zeros(1, 2, 5, 4)
    attn(q, q, q)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(LSH(2, 4, layer=1).rotations, attn.rotations)
    assert not torch.equal(LSH(2, 4, layer=2).rotations, attn.rotations)
    assert not torch.equal(attn.rotations[0], attn.rotations[1])
    assert not torch.equal(attn.rotations[:, 0], attn.rotations[:, 1])
    assert torch.equal(LSH(2, 4, num_rounds=5, layer=1).rotations[:2], attn.rotations)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_keeps_its_buckets(dtype: torch.dtype) -> None:
    """What half precision rounds is the input, not the hash; autocast has no say in it."""
    attn = LSH(2, 16, num_buckets=64, num_rounds=4)
    k = torch.randn(4, 2, 200, 16).to(dtype)
    expected = attn.buckets(k.double())
    assert torch.equal(attn.buckets(k), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attn.buckets(k.float()), expected)
    assert torch.equal(attn.to(dtype).buckets(k), expected)


def test_autocast_leaves_scores_alone() -> None:
    attn = LSH(2, 8)
    q, v = torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = attn(q, q, v)
    assert torch.equal(out, attn(q, q, v))


@pytest.mark.parametrize("last", [torch.nan, torch.inf])
def test_j3_a_head_does_not_look_into_the_one_before(last: float) -> None:
    """J3: all chunks lie in one row; NaN at the end of a head reaches neither outputs nor gradients of the others."""
    attn = LSH(3, 4, bucket_size=4, num_buckets=2)
    results = []
    for filler in (0.0, last):
        torch.manual_seed(0)
        q, v = torch.randn(2, 3, 21, 4), torch.randn(2, 3, 21, 4)
        q[0, 1], v[0, 1] = (filler, filler) if filler else (q[0, 1], v[0, 1])
        leaves = [x.requires_grad_() for x in (q, v)]
        out = attn(q, q, v)
        results.append([x.flatten(0, 1) for x in (out, *torch.autograd.grad(out.sum(), leaves))])
    others = torch.tensor([0, 2, 3, 4, 5])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean[others], dirty[others])


def test_tiny_huge_and_zero_keys() -> None:
    """Only the direction of a key counts, however long it is; a key of 0 has none, and its gradient is finite."""
    attn = LSH(1, 4, num_buckets=2)
    q, v = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    for size in (1e-30, 1e30):
        k = q.clone()
        k[:, :, 4:] *= size
        assert torch.equal(attn.buckets(k), attn.buckets(q))
        close(attn(q, k, v), attn(q, q, v))
    q[:, :, 3] = 0
    q.requires_grad_()
    out = attn(q, q, v)
    out.square().sum().backward()
    assert out.isfinite().all()
    assert q.grad is not None
    assert q.grad.abs().max() < 1e3


@pytest.mark.parametrize("extra", ["nothing", "padding", "offset bias"])
def test_e08_memory_grows_with_the_length_alone(extra: str) -> None:
    """E08: from T=2048 to T=4096 the largest tensor, forward and back, doubles at most by a little more."""
    peaks = []
    for length in (2048, 4096):
        q, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(2))
        mask = Mask(causal=True, key_keep=torch.rand(1, length) < 0.8 if extra == "padding" else None)
        bias = OffsetBias(torch.zeros(1, 2 * length - 1, requires_grad=True)) if extra == "offset bias" else None
        with Made() as seen:
            LSH(1, 4)(q, q, v, mask, bias).sum().backward()
        peaks.append(seen.elements)
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 4096 * 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_size": 0}, "LSH: bucket_size must be at least 1, got 0"),
        ({"num_rounds": -1}, "LSH: num_rounds must be at least 1, got -1"),
        ({"num_buckets": 0}, "LSH: num_buckets must be an even number from 2 up, got 0"),
        ({"num_buckets": 7}, "LSH: num_buckets must be an even number from 2 up, got 7"),
    ],
)
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LSH(2, 4, **options)


def test_c4_what_is_denied_raises_with_a_reason() -> None:
    """C4: pairs, segments, other keys, groups."""
    attn, x = LSH(2, 4), torch.randn(1, 2, 5, 4)
    for mask in (Mask(pair_keep=torch.ones(5, 5).bool()), Mask(segments=torch.zeros(1, 5).long())):
        with pytest.raises(ValueError, match=r"LSH.*mask\.(pair_keep|segments).*a place in its bucket"):
            attn(x, x, x, mask)
    with pytest.raises(ValueError, match="LSH.*3 queries for 5 keys.*its keys are its queries"):
        attn(x[:, :, 2:], x, x)
    with pytest.raises(ValueError, match="LSH.*memory.*its keys are its queries"):
        attn.memory(x, x)
    with pytest.raises(ValueError, match="LSH.*num_kv_heads=1.*each head has its own"):
        MultiheadAttention(8, 2, LSH, num_kv_heads=1)


def test_the_laws_hold_for_other_options() -> None:
    """Those of which options decide; tests/laws runs all laws on the default."""
    attn = LSH(2, 4, bucket_size=3, num_buckets=2, num_rounds=3)
    check_attention(attn, formula=formula, laws=["formula", "future", "padding", "streaming", "linear in v"])
