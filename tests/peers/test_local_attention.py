"""lucidrains/local-attention with its exact window, which counts the keys before the query; we count the query too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnzoo import Local, Mask

Check = Callable[..., None]


def theirs(peer: Callable[[str], Any], causal: bool) -> Any:
    return peer("local_attention").LocalAttention(
        window_size=8, causal=causal, exact_windowsize=True, autopad=True, use_rotary_pos_emb=False
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [8, 32, 64])
def test_the_same_window(peer: Callable[[str], Any], close: Check, causal: bool, length: int) -> None:
    q, k, v = torch.randn(3, 2, 2, length, 8)
    ours = Local(2, 8, window=9 if causal else 17)
    close(ours(q, k, v, Mask(causal=causal)), theirs(peer, causal)(q, k, v))


def test_d2_its_filler_is_seen_where_no_mask_is_given(peer: Callable[[str], Any], close: Check) -> None:
    """D2, E02: 30 tokens in windows of 8: the last queries also weigh two keys of zeros; ours never see filler."""
    q, k, v = torch.randn(3, 1, 1, 30, 8)
    ours, other = Local(1, 8, window=17)(q, k, v), theirs(peer, False)(q, k, v)
    assert not torch.allclose(ours[:, :, -1], other[:, :, -1], atol=1e-3)
    right = theirs(peer, False)(q, k, v, mask=torch.ones(1, 30, dtype=torch.bool))
    close(ours, right)


def test_a1_an_empty_row_is_the_mean_of_v_there(peer: Callable[[str], Any], close: Check) -> None:
    """A1: hidden scores are a finite constant there; here the row is 0."""
    q, k, v = torch.randn(3, 1, 1, 8, 8)
    keep = torch.zeros(1, 8, dtype=torch.bool)
    assert theirs(peer, True)(q, k, v, mask=keep).abs().sum() > 0
    assert Local(1, 8, window=9)(q, k, v, Mask(causal=True, key_keep=keep)).count_nonzero() == 0
