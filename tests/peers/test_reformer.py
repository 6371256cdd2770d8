"""LSH attention of reformer-pytorch and of transformers, with the buckets given.

Theirs cuts the sorted sequence into chunks, ours each bucket. Where every bucket fills its chunk both are the same, so
that is what is compared: each token has its bucket written into the coordinate that is largest.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnzoo import LSH, Mask

Check = Callable[..., None]

ROUNDS, BUCKETS, SIZE = 2, 8, 4
LENGTH = BUCKETS * SIZE


def balanced() -> tuple[Tensor, Tensor]:
    """Queries [1, 1, T, 8] and their buckets [rounds, T]: round r reads coordinates 4 r to 4 r + 3 and their signs."""
    q = 0.3 * torch.randn(1, 1, LENGTH, 8)
    buckets = torch.stack([torch.randperm(LENGTH) % BUCKETS for _ in range(ROUNDS)])
    for number in range(ROUNDS):
        for token, bucket in enumerate(buckets[number].tolist()):
            q[0, 0, token, 4 * number + bucket % 4] = 2.0 if bucket < 4 else -2.0
    return q, buckets


def ours() -> LSH:
    module = LSH(1, 8, bucket_size=SIZE, num_buckets=BUCKETS, num_rounds=ROUNDS).eval()
    module.rotations.zero_()
    for number in range(ROUNDS):
        module.rotations[number, 0, 4 * number : 4 * number + 4] = torch.eye(4)
    return module


def theirs(peer: Callable[[str], Any], buckets: Tensor, **options: Any) -> Any:
    module = peer("reformer_pytorch").LSHAttention(
        bucket_size=SIZE, n_hashes=ROUNDS, attend_across_buckets=False, allow_duplicate_attention=False, **options
    )
    given = (buckets + BUCKETS * torch.arange(ROUNDS)[:, None]).reshape(1, -1)
    module.hash_vectors = lambda *_, **__: given
    return module.eval()


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_buckets(peer: Callable[[str], Any], close: Check, causal: bool) -> None:
    """Its scores are over sqrt(D) once more, so its queries are that much longer; its keys have length 1 either way.

    K2: where a token is alone, rounding at -50,000 lets its row sum to 1.002 there; ours sum to 1.
    """
    q, buckets = balanced()
    v = torch.randn(1, 1, LENGTH, 8)
    module, other = ours(), theirs(peer, buckets, causal=causal)
    assert torch.equal(module.buckets(q)[0, 0], buckets)
    long = q[0] * 8**0.5
    sums = other(long, torch.ones(1, LENGTH, 8))[0]
    close(module(q, q, v, Mask(causal=causal))[0], other(long, v[0])[0] / sums)
    close(module(q, q, torch.ones_like(v), Mask(causal=causal)), torch.ones_like(v))
    assert (sums > 1.001).any() == causal


def test_transformers_reformer(peer: Callable[[str], Any], close: Check) -> None:
    """One round; its chunks see across buckets, so each has to be one, and looks at no other. Same scores as ours."""
    config = peer("transformers").ReformerConfig(
        hidden_size=8,
        num_attention_heads=1,
        attention_head_size=8,
        lsh_attn_chunk_length=SIZE,
        lsh_num_chunks_before=0,
        num_hashes=1,
        num_buckets=BUCKETS,
        is_decoder=False,
    )
    module = peer("transformers.models.reformer.modeling_reformer").LSHSelfAttention(config).eval()
    with torch.no_grad():
        module.query_key.weight.copy_(torch.eye(8))
    q, buckets = balanced()
    right = module(q[0], buckets=buckets[:1][None]).hidden_states
    one = LSH(1, 8, bucket_size=SIZE, num_buckets=BUCKETS, num_rounds=1).eval()
    one.rotations.copy_(ours().rotations[:1])
    close(one(q, q, module.value(q[0])[None])[0], right)


def test_e09_it_hashes_anew_in_evaluation(peer: Callable[[str], Any]) -> None:
    """E09: two calls differ there; here they are bit-equal."""
    q, v = torch.randn(2, 1, 2, 32, 8)
    drawn = peer("reformer_pytorch").LSHAttention(bucket_size=4, n_hashes=1).eval()
    assert not torch.allclose(drawn(q[0], v[0])[0], drawn(q[0], v[0])[0], atol=1e-3)
    module = LSH(2, 8, bucket_size=4).eval()
    assert torch.equal(module(q, q, v), module(q, q, v))


def test_d2_a_length_that_its_buckets_do_not_divide(peer: Callable[[str], Any]) -> None:
    """D2: refused there; any length works here."""
    q, v = torch.randn(2, 1, 2, 31, 8)
    with pytest.raises(AssertionError, match="divisible"):
        peer("reformer_pytorch").LSHAttention(bucket_size=4)(q[0], v[0])
    assert LSH(2, 8, bucket_size=4)(q, q, v).isfinite().all()
