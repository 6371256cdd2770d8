"""Softmax over keys that the input itself selects: by hash, or by block. What is selected is found in float64."""

import math

import torch
from torch import Tensor

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.lsh import LSH
from attnzoo.mechanisms.moba import MoBA
from attnzoo.reference.rows import visible_pairs, weighted_sum

Place = tuple[int, int]
"""Bucket, and chunk within it."""


def lsh(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """A softmax in each round, joined by their log-sum-exp; the own value where no round shows another key."""
    assert isinstance(mechanism, LSH)
    batch, heads, queries, _ = q.shape
    length = k.shape[2]
    seen = visible_pairs(mask, batch, heads, queries, length, q.device)
    rows = []
    for b in range(batch):
        kept = [mask.key_keep is None or bool(mask.key_keep[b, j]) for j in range(length)]
        for h in range(heads):
            units = torch.stack([_unit(key) for key in k[b, h]])
            rounds = [_places(k[b, h], turn[h], kept, mechanism.bucket_size) for turn in mechanism.rotations]
            for i in range(queries):
                own = i + length - queries
                if not kept[own]:
                    rows.append(v.new_zeros(v.shape[-1]))
                    continue
                terms = _terms(bias, b, h, i, queries, v.new_zeros(length))
                may = seen[b, h, i] & (terms > -math.inf) & (torch.arange(length, device=q.device) != own)
                others = may.nonzero()[:, 0].tolist()
                met = [[j for j in others if _near(places[own], places[j])] for places in rounds]
                outs, sums = [], []
                for keys in filter(None, met):
                    times = v.new_tensor([sum(j in other for other in met) for j in keys])
                    scores = units[keys] @ q[b, h, i] + terms[keys] - times.log()
                    outs.append(scores.softmax(0) @ v[b, h, keys])
                    sums.append(scores.logsumexp(0))
                if outs:
                    rows.append(torch.stack(sums).softmax(0) @ torch.stack(outs))
                else:
                    rows.append(v[b, h, own] if terms[own] > -math.inf else v.new_zeros(v.shape[-1]))
    return torch.stack(rows).view(batch, heads, queries, v.shape[-1])


def _places(keys: Tensor, rotation: Tensor, kept: list[bool], size: int) -> list[Place]:
    """For each key its bucket, and the chunk of that bucket which it lies in; hidden ones are in none."""
    members: dict[int, int] = {}
    found = []
    for key, real in zip(keys.detach().double(), kept, strict=True):
        if not real:
            found.append((-1, -1))
            continue
        turned = (_unit(key) @ rotation.double()).tolist()
        signed = turned + [-x for x in turned]
        bucket = signed.index(max(signed))
        found.append((bucket, members.get(bucket, 0) // size))
        members[bucket] = members.get(bucket, 0) + 1
    return found


def _near(query: Place, key: Place) -> bool:
    return query[0] == key[0] and query[1] - key[1] in (0, 1)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm() if x.count_nonzero() else x


def _terms(bias: Bias | None, b: int, h: int, i: int, queries: int, zeros: Tensor) -> Tensor:
    """What a bias adds to the scores of one query, [S]."""
    if bias is None:
        return zeros
    if isinstance(bias, OffsetBias):
        return bias.values[h, queries - 1 - i :][: len(zeros)].to(zeros.dtype)
    dense = bias if bias.dim() == 4 else bias[None, None]
    return dense[b % dense.shape[0], h % dense.shape[1], i].to(zeros.dtype)


def moba(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax of q . k / sqrt(D) + bias over the visible keys of the own block and of the best others."""
    assert isinstance(mechanism, MoBA)
    batch, heads, queries, width = q.shape
    length, share, size = k.shape[2], heads // k.shape[1], mechanism.block_size
    pattern = torch.zeros(batch, heads, queries, length, dtype=torch.bool)
    for b in range(batch):
        real = [j for j in range(length) if mask.key_keep is None or mask.key_keep[b, j]]
        blocks = [real[start : start + size] for start in range(0, len(real), size)]
        for h in range(heads):
            keys = k[b, h // share].detach().double()
            means = [keys[block].mean(0) for block in blocks]
            for i in range(queries):
                before = [j for j in real if j <= i + length - queries]
                own = max(len(before) - 1, 0) // size
                others = [c for c in range(len(blocks)) if c < own or (c > own and not mask.causal)]
                others.sort(key=lambda c: -float(q[b, h, i].detach().double() @ means[c]))
                for c in [own, *others[: mechanism.top_k - 1]] if blocks else []:
                    pattern[b, h, i, blocks[c]] = True

    def score(head: int, query: Tensor, key: Tensor) -> Tensor:
        return key @ query / math.sqrt(width)

    return weighted_sum(score, q, k, v, mask, bias, pattern)
