"""Mechanisms that mix keys before the softmax: what padding leaves is cropped first, then each row by its formula."""

import torch
from torch import Tensor

from attnzoo.bias import Bias
from attnzoo.mask import Mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.linformer import Linformer
from attnzoo.mechanisms.memory_compressed import MemoryCompressed
from attnzoo.mechanisms.nystrom import Nystrom


def linformer(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """softmax(q (E K)^T / sqrt(D)) F V over the real keys of each sample."""
    assert isinstance(mechanism, Linformer)
    e, f = mechanism.key_projection.to(q.dtype), mechanism.value_projection.to(q.dtype)
    heads, share = q.shape[1], q.shape[1] // k.shape[1]
    outputs = []
    for b in range(q.shape[0]):
        real = _real_keys(mask, b, k)
        for h in range(heads):
            own_e, own_f = (x[h] if mechanism.sharing == "none" else x for x in (e, f))
            keys, values = k[b, h // share, real], v[b, h // share, real]
            slot_keys = own_e[:, : len(real)] @ keys
            slot_values = own_f[:, : len(real)] @ values
            for query in q[b, h]:
                outputs.append(_attended(query, slot_keys, slot_values) if real else v.new_zeros(v.shape[-1]))
    return torch.stack(outputs).view(*q.shape[:3], v.shape[-1])


def memory_compressed(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Softmax over compressed blocks; causal, over those before the own block and the own block's single keys."""
    assert isinstance(mechanism, MemoryCompressed)
    key_kernel, value_kernel = mechanism.key_kernel.to(q.dtype), mechanism.value_kernel.to(q.dtype)
    c, heads, share = mechanism.factor, q.shape[1], q.shape[1] // k.shape[1]
    queries, length = q.shape[2], k.shape[2]
    outputs = []
    for b in range(q.shape[0]):
        real = _real_keys(mask, b, k)
        for h in range(heads):
            keys, values = k[b, h // share], v[b, h // share]
            blocks = [real[start : start + c] for start in range(0, len(real), c)]
            block_keys = [_sum([keys[j] @ key_kernel[h, r] for r, j in enumerate(block)]) for block in blocks]
            block_values = [_sum([values[j] * value_kernel[h, r] for r, j in enumerate(block)]) for block in blocks]
            for i in range(queries):
                if mask.causal:
                    seen = [j for j in real if j <= i + length - queries]
                    over = max(0, len(seen) - 1) // c
                    own = seen[over * c :]
                else:
                    over, own = len(blocks), []
                sees = block_keys[:over] + [keys[j] for j in own]
                gives = block_values[:over] + [values[j] for j in own]
                if sees:
                    outputs.append(_attended(q[b, h, i], torch.stack(sees), torch.stack(gives)))
                else:
                    outputs.append(v.new_zeros(v.shape[-1]))
    return torch.stack(outputs).view(*q.shape[:3], v.shape[-1])


def nystrom(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
    """Three softmax matrices, the middle one inverted by the paper's iteration, and the convolution of v."""
    assert isinstance(mechanism, Nystrom)
    heads, share = q.shape[1], q.shape[1] // k.shape[1]
    queries, scale = q.shape[2], q.shape[-1] ** -0.5
    outputs = []
    for b in range(q.shape[0]):
        real = _real_keys(mask, b, k)
        count = min(mechanism.num_landmarks, len(real))
        segments = [
            [j for place, j in enumerate(real) if place * count // len(real) == number] for number in range(count)
        ]
        for h in range(heads):
            keys, values = k[b, h // share], v[b, h // share]
            asked = [q[b, h, i] if i in real else torch.zeros_like(q[b, h, i]) for i in range(queries)]
            if not real:
                outputs.append(v.new_zeros(queries, v.shape[-1]))
                continue
            middle_q = torch.stack([_sum([q[b, h, j] for j in own]) / len(own) for own in segments])
            middle_k = torch.stack([_sum([keys[j] for j in own]) / len(own) for own in segments])
            left = torch.stack([(middle_k @ query * scale).softmax(0) for query in asked])
            middle = torch.stack([(middle_k @ query * scale).softmax(0) for query in middle_q])
            right = torch.stack([(keys[real] @ query * scale).softmax(0) for query in middle_q])
            z = middle.T / (middle.sum(0).max() * middle.sum(1).max())
            one = torch.eye(count, dtype=q.dtype)
            for _ in range(mechanism.iterations):
                z = 0.25 * z @ (13 * one - middle @ z @ (15 * one - middle @ z @ (7 * one - middle @ z)))
            rows = list(left @ (z @ (right @ values[real])))
            if mechanism.kernel is not None:
                kernel = mechanism.kernel[h, 0].to(q.dtype)
                for place, j in enumerate(real):
                    for tap, weight in enumerate(kernel):
                        other = place + tap - len(kernel) // 2
                        if 0 <= other < len(real):
                            rows[j] = rows[j] + weight * values[real[other]]
            outputs.append(torch.stack(rows))
    return torch.stack(outputs).view(*q.shape[:3], v.shape[-1])


def _real_keys(mask: Mask, sample: int, k: Tensor) -> list[int]:
    keep = mask.key_keep
    return [j for j in range(k.shape[2]) if keep is None or bool(keep[sample, j])]


def _attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (keys @ query / query.shape[-1] ** 0.5).softmax(0) @ values


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
