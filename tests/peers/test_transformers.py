"""transformers' Longformer and BigBird on the same weights."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo import BlockSparse, GlobalLocal, Mask

Check = Callable[..., None]


def heads_of(theirs: Any, x: Tensor) -> list[Tensor]:
    return [layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (theirs.query, theirs.key, theirs.value)]


def test_longformer(peer: Callable[[str], Any], close: Check) -> None:
    """Its window of 8 reaches 4 to either side: 9 keys here. Global tokens get the same projections as the rest."""
    config = peer("transformers").LongformerConfig(
        hidden_size=32, num_attention_heads=4, attention_window=[8], attention_probs_dropout_prob=0.0
    )
    theirs = peer("transformers.models.longformer.modeling_longformer").LongformerSelfAttention(config, 0).eval()
    for name in ("query", "key", "value"):
        getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    x = torch.randn(2, 40, 32)
    for global_tokens in (1, 3):
        kind = torch.zeros(2, 40)
        kind[:, :global_tokens] = 10000
        kind[1, 30:] = -10000
        right = theirs(
            x, attention_mask=kind, is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=True
        )[0]
        module = GlobalLocal(4, 8, window=9, num_global=global_tokens)
        keep = kind >= 0
        ours = module(*heads_of(theirs, x), Mask(key_keep=keep)).transpose(1, 2).flatten(2)
        close(ours[keep], right[keep])


def bigbird(peer: Callable[[str], Any], random_blocks: list[list[list[int]]]) -> Any:
    config = peer("transformers").BigBirdConfig(
        hidden_size=32, num_attention_heads=4, block_size=4, num_random_blocks=1, max_position_embeddings=64
    )
    theirs = peer("transformers.models.big_bird.modeling_big_bird").BigBirdBlockSparseAttention(config, seed=0)
    theirs._bigbird_block_rand_mask_with_head = lambda **_: random_blocks
    return theirs.eval()


def called(theirs: Any, x: Tensor) -> Tensor:
    blocks = torch.ones(1, 12, 4)
    band = torch.ones(1, 1, 8, 4, 12)
    ones = torch.ones(1, 1, 48, 1)
    return theirs(x, band, ones, ones.mT, blocks, blocks)[0]


def layout(random_blocks: list[list[list[int]]]) -> list[list[list[int]]]:
    """What the paper says, block by block: window of three, first and last seen by all and seeing all, and random."""
    found = []
    for head in range(4):
        rows = [[1] * 12]
        for row in range(1, 11):
            seen = {0, 11, row - 1, row, row + 1, *random_blocks[head][row - 1]}
            rows.append([int(column in seen) for column in range(12)])
        found.append([*rows, [1] * 12])
    return found


def test_bigbird(peer: Callable[[str], Any], close: Check) -> None:
    """With random blocks that lie outside of the window: any layout can be written down here."""
    random_blocks = [[[(row + 4 + head) % 8 + 1] for row in range(10)] for head in range(4)]
    for head in range(4):
        for row in range(10):
            while abs(random_blocks[head][row][0] - (row + 1)) < 2:
                random_blocks[head][row][0] = random_blocks[head][row][0] % 10 + 1
    theirs = bigbird(peer, random_blocks)
    x = torch.randn(1, 48, 32)
    module = BlockSparse(4, 8, block_size=4, layout=layout(random_blocks))
    close(module(*heads_of(theirs, x)).transpose(1, 2).flatten(2), called(theirs, x))


def test_e09_its_random_blocks_vanish_in_evaluation(peer: Callable[[str], Any], close: Check) -> None:
    """In evaluation all of them are block 0, which then counts twice; here those of training stay."""
    theirs = bigbird(peer, [[[0]] * 10] * 4)
    x = torch.randn(1, 48, 32)
    without = BlockSparse(4, 8, block_size=4, layout=layout([[[]] * 10] * 4))
    assert not torch.allclose(called(theirs, x), without(*heads_of(theirs, x)).transpose(1, 2).flatten(2), atol=1e-3)
    drawn = functools.partial(BlockSparse, 4, 8, block_size=4, layout="random", random_blocks=2, seed=3)
    module = drawn()
    q, k, v = heads_of(theirs, x)
    close(module.train()(q, k, v), module.eval()(q, k, v), 0.0)
    close(drawn().eval()(q, k, v), module(q, k, v), 0.0)
