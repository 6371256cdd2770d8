"""Linformer and Nystrom in numbers: slots, sharing, landmarks, the inverse."""

import pytest
import torch
from test_mixed_keys import close, qkv
from torch import Tensor

from attnzoo import Mask, Softmax
from attnzoo.mechanisms.linformer import Linformer
from attnzoo.mechanisms.nystrom import Nystrom


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]


def test_e04_shorter_and_longer_than_built_for() -> None:
    """E04: built for 128; 77 bare equals 77 padded to 128; 129 raises and names both numbers."""
    attn = Linformer(2, 4, max_len=128).eval()
    q, k, v = qkv(129)
    bare = attn(*(x[:, :, :77] for x in (q, k, v)))
    padded = attn(*(x[:, :, :128] for x in (q, k, v)), Mask.from_lengths(torch.tensor([77, 77]), 128))
    close(padded[:, :, :77], bare)
    for call in (lambda: attn(q, k, v), lambda: attn.memory(k, v)):
        with pytest.raises(ValueError, match=r"129 keys came.*max_len=128"):
            call()
    assert attn(q, k[:, :, :9], v[:, :, :9]).shape == (2, 2, 129, 5)  # queries are not projected


def test_linformer_with_one_slot_is_the_same_for_each_query() -> None:
    """Rank 1: the one weight is 1, so o = F V whatever q and k are: 1 v_0 + 2 v_1 + 3 v_2, and no more columns."""
    attn = Linformer(1, 2, rank=1, max_len=4).eval()
    with torch.no_grad():
        attn.value_projection.copy_(torch.tensor([[1.0, 2, 3, 50]]))
    v = torch.tensor([5.0, 7, 11])[None, None, :, None]
    out = attn(torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2), v)
    assert out.flatten().tolist() == [52.0, 52.0, 52.0]
    keep = torch.tensor([[True, False, True]])
    assert attn(torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2), v, Mask(key_keep=keep)).flatten()[0] == 27.0


@pytest.mark.parametrize("sharing", ["headwise", "none", "key_value"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_linformer_whose_slots_are_keys_is_softmax(sharing: str, groups: int) -> None:
    """E = F = the identity on 8 keys: exact attention with scale 1/sqrt(D). Its first two rows: two keys are left."""
    q, k, v = qkv(8, heads=4, groups=groups)
    for rank in (8, 2):
        attn = Linformer(4, 4, rank=rank, sharing=sharing, max_len=8).eval()
        with torch.no_grad():
            for projection in attn.parameters():
                projection.copy_(torch.eye(rank, 8))
        close(attn(q, k, v), Softmax(4, 4)(q, k[:, :, :rank], v[:, :, :rank]))


def test_linformer_sharing() -> None:
    """ "none" is one Linformer a query head; "key_value" has one matrix, which counts once."""
    shared, none, one = (
        Linformer(4, 4, rank=3, sharing=sharing, max_len=8).eval() for sharing in ("headwise", "none", "key_value")
    )
    assert [sum(p.numel() for p in m.parameters()) for m in (shared, none, one)] == [48, 192, 24]
    assert one.key_projection is one.value_projection
    q, k, v = qkv(7, heads=4)
    out = none(q, k, v)
    for h in range(4):
        single = Linformer(1, 4, rank=3, max_len=8).eval()
        with torch.no_grad():
            single.key_projection.copy_(none.key_projection[h])
            single.value_projection.copy_(none.value_projection[h])
        close(out[:, h : h + 1], single(q[:, h : h + 1], *(x[:, h // 2 : h // 2 + 1] for x in (k, v))))


def test_linformer_starts_at_the_scale_of_a_key() -> None:
    """N(0, 1 / max_len): at full length a slot of unit keys has variance 1."""
    attn = Linformer(2, 4, rank=64, max_len=400)
    assert attn.key_projection.std().item() == pytest.approx(0.05, rel=0.05)
    assert attn.value_projection.std().item() == pytest.approx(0.05, rel=0.05)
    assert not torch.equal(attn.key_projection, attn.value_projection)


def test_dropout_falls_on_slots() -> None:
    """Rank 1, dropout 0.5: each query and head has all of it twice, or nothing."""
    attn = Linformer(2, 4, rank=1, dropout=0.5, max_len=64).train()
    q, k, v = qkv(64)
    whole = attn.eval()(q, k, v)
    ratio = attn.train()(q, k, v) / whole
    close(ratio, ratio.round())
    assert ratio.round().unique().tolist() == [0.0, 2.0]
    assert (ratio.round() == ratio.round()[..., :1]).all()


@pytest.mark.parametrize("length", [1, 5, 8])
def test_nystrom_with_a_landmark_for_each_token_is_softmax(length: int) -> None:
    """L = A = R, so L A+ R = A once the iteration has converged; landmarks without a token are not there."""
    attn = Nystrom(2, 4, num_landmarks=8, iterations=20).double().eval()
    q, k, v = (x.double() for x in qkv(length))
    close(attn(q, k, v), Softmax(2, 4)(q, k, v), 1e-6)
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[0, length // 2 :] = False
    mask = Mask(key_keep=keep)
    close(
        attn(q, k, v, mask)[keep[:, None].expand(-1, 2, -1)],
        Softmax(2, 4)(q, k, v, mask)[keep[:, None].expand(-1, 2, -1)],
        1e-6,
    )


def test_nystrom_segments_and_inverse() -> None:
    """7 real tokens in 3 segments of 3, 2, 2, true means, and the pseudo-inverse that torch finds."""
    attn = Nystrom(1, 4, num_landmarks=3, iterations=25).double().eval()
    keep = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0, 1, 1]]).bool()
    q, k, v = (x.double() for x in qkv(10, batch=1, heads=1, groups=1))
    own_q, own_k, own_v = (x[0, 0, keep[0]] for x in (q, k, v))
    middle_q, middle_k = (torch.stack([x[:3].sum(0) / 3, x[3:5].sum(0) / 2, x[5:].sum(0) / 2]) for x in (own_q, own_k))
    left, middle, right = (
        (a @ b.T / 2).softmax(-1) for a, b in ((own_q, middle_k), (middle_q, middle_k), (middle_q, own_k))
    )
    close(attn(q, k, v, Mask(key_keep=keep))[0, 0, keep[0]], left @ torch.linalg.pinv(middle) @ right @ own_v, 1e-7)


@pytest.mark.parametrize("length", [6, 24, 25, 29])
def test_nystrom_means_are_the_same_by_reshape_and_by_count(length: int) -> None:
    """Equal segments are cut by a reshape where nothing is hidden; a mask that hides nothing counts tokens."""
    attn = Nystrom(4, 4, num_landmarks=6).double().eval()
    q, k, v = (x.double() for x in qkv(length, heads=4, groups=2))
    keep = torch.ones(2, length, dtype=torch.bool)
    close(attn(q, k, v), attn(q, k, v, Mask(key_keep=keep)), 1e-12)


def test_nystrom_with_one_landmark() -> None:
    """A = 1: each query gets what the mean query gets; with q = 0 that is the mean of the real values."""
    attn = Nystrom(1, 4, num_landmarks=1).eval()
    q, k, v = qkv(6, heads=1, groups=1)
    mean = Softmax(1, 4)(q.mean(2, keepdim=True), k, v)
    close(attn(q, k, v), mean.expand(-1, -1, 6, -1))
    v = column(1, 2, 50, 6)
    keep = torch.tensor([[True, True, False, True]])
    close(attn(torch.zeros(1, 1, 4, 4), torch.randn(1, 1, 4, 4) * 0, v, Mask(key_keep=keep)), column(3, 3, 3, 3))


def test_nystrom_queries_at_padding_do_not_count() -> None:
    """E2: in self-attention a hidden key hides the query beside it; what stands there, NaN too, moves nothing."""
    attn = Nystrom(2, 4, num_landmarks=2).eval()
    q, k, v = qkv(6)
    keep = torch.tensor([[1, 0, 1, 1, 0, 1], [1] * 6]).bool()
    results = []
    for filler in (0.0, 1e30, torch.nan):
        leaves = [x.clone() for x in (q, k, v)]
        leaves[0][0, :, ~keep[0]] = filler
        leaves = [x.requires_grad_() for x in leaves]
        out = attn(*leaves, Mask(key_keep=keep))
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def test_nystrom_convolution_by_hand() -> None:
    """One kernel a head, over real tokens as if no padding stood between; nothing beyond either end; 0 at first."""
    attn, plain = Nystrom(2, 4, num_landmarks=2, kernel_size=3).eval(), Nystrom(2, 4, num_landmarks=2).eval()
    q, k, _ = qkv(5, batch=1)
    v = column(1, 50, 2, 4, 8).expand(1, 2, -1, 1)
    keep = torch.tensor([[True, False, True, True, True]])
    mask = Mask(key_keep=keep)
    assert torch.equal(attn(q, k, v, mask), plain(q, k, v, mask))
    with torch.no_grad():
        attn.kernel.copy_(torch.tensor([[[10.0, 0, 1]], [[0, 3, 0]]]))
    added = (attn(q, k, v, mask) - plain(q, k, v, mask))[0, :, :, 0]
    close(added, torch.tensor([[2.0, 0, 10 + 4, 20 + 8, 40], [3.0, 0, 6, 12, 24]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_nystrom_in_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """The inverse is found in float32, also under autocast: only the inputs and the output are rounded."""
    attn = Nystrom(2, 8, num_landmarks=16).eval()
    q, k, v = (torch.randn(2, 2, 64, 8).to(dtype) for _ in range(3))
    right = attn(*(x.double() for x in (q, k, v)))
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = attn(q, k, v)
    assert out.dtype == dtype
    close(out.double(), right.to(dtype).double(), 1e-3 if dtype == torch.float16 else 8e-3)


def test_nystrom_is_for_one_whole_sequence() -> None:
    """Queries of another sequence, or some of the queries only, are refused with the reason."""
    attn = Nystrom(2, 4)
    q, k, v = qkv(6)
    with pytest.raises(ValueError, match="means over all queries"):
        attn.memory(k, v)
    with pytest.raises(ValueError, match="means over all queries"):
        attn(q[:, :, :2], k, v)
