"""Laws of who sees whom: the future, padding, batch mates, empty rows."""

import torch
from torch import Tensor

from attnzoo.laws.subject import LawBroken, Subject, must_be_finite, must_equal, parts
from attnzoo.mask import Mask


def future(subject: Subject) -> None:
    """Changing token j moves no output before j; changing the first token moves its own output."""
    module = subject.copy()
    length = min(16, subject.max_len)
    q, k, v = subject.inputs(length)
    mask = Mask(causal=True)
    before = module(q, k, v, mask)
    for j in range(length):
        q2, k2, v2 = (x.clone() for x in (q, k, v))
        for x in (q2, k2, v2):
            x[:, :, j] += 3.0
        after = module(q2, q2 if subject.traits.shared_qk else k2, v2, mask)
        must_equal(after[:, :, :j], before[:, :, :j], 1e-6, f"outputs before token {j} when only it changes")
        if torch.equal(after[:, :, j], before[:, :, j]):
            raise LawBroken(f"output {j} does not move when its own token changes")
    huge = 1e30
    k2, v2 = k.clone(), v.clone()
    k2[:, :, -1], v2[:, :, -1] = huge, huge
    if not subject.traits.shared_qk:
        must_equal(module(q, k2, v2, mask)[:, :, :-1], before[:, :, :-1], 1e-6, "a huge last key, seen from before")


def padding(subject: Subject) -> None:
    """What stands at a hidden key, NaN included, reaches no output and no gradient; cropping gives the same."""
    length = min(9, subject.max_len)
    real = max(1, length - 3)
    for causal in subject.causal_modes():
        for side in ("right", "left"):
            keep = torch.zeros(2, length, dtype=torch.bool)
            own = slice(0, real) if side == "right" else slice(length - real, length)
            keep[:, own] = True
            mask = Mask(causal=causal, key_keep=keep)
            clean = _padded_run(subject, mask, 0.0, own)
            for filler in (float("nan"), float("inf"), 1e30):
                dirty = _padded_run(subject, mask, filler, own)
                for name, a, b in zip(("output", "dq", "dk", "dv"), clean, dirty, strict=True):
                    if not torch.equal(a, b):
                        raise LawBroken(f"{filler} at padding on the {side} reaches the {name} (causal={causal})")
            q, k, v = subject.inputs(length)
            cropped = subject.copy()(q[:, :, own], k[:, :, own], v[:, :, own], Mask(causal=causal))
            must_equal(clean[0], cropped, 1e-5, f"padding on the {side} against cropping (causal={causal})")


def _padded_run(subject: Subject, mask: Mask, filler: float, own: slice) -> list[Tensor]:
    module = subject.copy()
    assert mask.key_keep is not None
    q, k, v = subject.inputs(mask.key_keep.shape[1])
    hidden = ~mask.key_keep[:, None, :, None]
    k, v = k.masked_fill(hidden, filler), v.masked_fill(hidden, filler)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys = leaves[0].masked_fill(hidden, filler) if subject.traits.shared_qk else leaves[1]
    out = module(leaves[0], keys, leaves[2], mask)[:, :, own]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [out.detach(), *gradients]


def batch_mates(subject: Subject) -> None:
    """A sample gives the same alone and beside others."""
    module = subject.copy()
    length = min(9, subject.max_len)
    for causal in subject.causal_modes():
        q, k, v = subject.inputs(length, batch=4)
        q[1:] *= 5
        k = q if subject.traits.shared_qk else k
        together = module(q, k, v, Mask(causal=causal))[:1]
        alone = module(q[:1], k[:1], v[:1], Mask(causal=causal))
        must_equal(together, alone, 1e-5, f"sample 0 among others against alone (causal={causal})")


def empty_rows(subject: Subject) -> None:
    """A query without a visible key gives 0, and every gradient stays finite."""
    length = min(6, subject.max_len)
    cases = []
    if subject.traits.key_keep:
        keep = torch.ones(2, length, dtype=torch.bool)
        keep[1] = False
        cases += [(Mask(causal=causal, key_keep=keep), length, (1, slice(None))) for causal in subject.causal_modes()]
        if subject.traits.causal:
            first = torch.ones(2, length, dtype=torch.bool)
            first[0, 0] = False
            cases.append((Mask(causal=True, key_keep=first), length, (0, slice(0, 1))))
    if subject.traits.pair_keep:
        pairs = torch.ones(length, length, dtype=torch.bool)
        pairs[-1] = False
        cases.append((Mask(causal=subject.causal(), pair_keep=pairs), length, (0, slice(length - 1, None))))
    if subject.traits.causal and subject.traits.rectangular:
        cases.append((Mask(causal=True), 2, (0, slice(0, length - 2))))
    for dtype in (torch.float32, torch.float16):
        for mask, keys, (sample, rows) in cases:
            module = subject.copy(dtype)
            leaves = [x.requires_grad_() for x in subject.inputs(length, keys, dtype=dtype)]
            out = module(*leaves, mask)
            if out[sample, :, rows].count_nonzero():
                raise LawBroken(f"rows without a visible key are not 0 under {parts(mask)} in {dtype}")
            out.float().pow(2).sum().backward()
            must_be_finite(out, f"the output under {parts(mask)} in {dtype}")
            for name, x in [*zip("qkv", leaves, strict=True), *module.named_parameters()]:
                if x.grad is not None:
                    must_be_finite(x.grad, f"the gradient of {name} under {parts(mask)} in {dtype}")


def inputs_unchanged(subject: Subject) -> None:
    """q, k, v, the mask and the bias are left as they were."""
    length = min(7, subject.max_len)
    for mask in subject.masks(length, length):
        module = subject.copy()
        bias = subject.biases(length, length)[:1]
        tensors = [*subject.inputs(length), *(x for x in mask if isinstance(x, Tensor)), *bias]
        copies = [x.clone() for x in tensors if isinstance(x, Tensor)]
        module(*tensors[:3], mask, *bias)
        for x, copy in zip(tensors, copies, strict=True):
            if isinstance(x, Tensor) and not torch.equal(x, copy):
                raise LawBroken(f"an argument was changed in place under {parts(mask)}")
