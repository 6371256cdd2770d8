"""Laws of decoding and of heads: steps, memories, groups, refusals."""

import torch

from attnzoo.laws.subject import LawBroken, Subject, must_equal
from attnzoo.mask import Mask
from attnzoo.state import reorder


def streaming(subject: Subject) -> None:
    """Any chunking through ``step`` equals one causal pass, with padding on the left and rows reordered too."""
    length = min(12, subject.max_len)
    module = subject.copy()
    q, k, v = subject.inputs(length, batch=3, value_dim=5)
    keep = torch.ones(3, length, dtype=torch.bool)
    keep[1, : length // 3] = False
    for key_keep in [None, keep] if subject.traits.key_keep else [None]:
        whole = module(q, k, v, Mask(causal=True, key_keep=key_keep))
        for chunk in (1, 2, 5, length):
            state = module.init_state(3, length, value_dim=5)
            parts = []
            for start in range(0, length, chunk):
                part = slice(start, start + chunk)
                mask = Mask(key_keep=None if key_keep is None else key_keep[:, part])
                out, state = module.step(q[:, :, part], k[:, :, part], v[:, :, part], state, mask)
                parts.append(out)
            padded = "" if key_keep is None else ", padded on the left"
            must_equal(torch.cat(parts, 2), whole, 1e-5, f"chunks of {chunk} against one pass{padded}")
            real = torch.full((3,), length) if key_keep is None else key_keep.sum(1)
            if not torch.equal(state.length, real):
                raise LawBroken(f"the state counts {state.length.tolist()} tokens, there are {real.tolist()}")
    if length > 1:
        _reordered(subject)


def _reordered(subject: Subject) -> None:
    length = min(12, subject.max_len)
    module = subject.copy()
    q, k, v = subject.inputs(length, batch=3)
    rows = torch.tensor([2, 0, 0])
    state = module.init_state(3, length)
    _, state = module.step(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], state)
    last = [x[rows][:, :, -1:] for x in (q, k, v)]
    out, _ = module.step(last[0], last[1], last[2], reorder(state, rows))
    whole = module(q, k, v, Mask(causal=True))
    must_equal(out, whole[rows][:, :, -1:], 1e-5, "a step after the rows were reordered")


def memory(subject: Subject) -> None:
    """``memory`` and ``step`` equal cross-attention, in any chunks of queries, padding included."""
    module = subject.copy()
    q, k, v = subject.inputs(6, min(9, subject.max_len), value_dim=5)
    keep = torch.ones(2, k.shape[2], dtype=torch.bool)
    keep[1, 2:] = False
    for key_keep in [None, keep] if subject.traits.key_keep else [None]:
        whole = module(q, k, v, Mask(key_keep=key_keep))
        for chunk in (1, 4):
            state = module.memory(k, v, Mask(key_keep=key_keep))
            parts = []
            for start in range(0, 6, chunk):
                out, state = module.step(q[:, :, start : start + chunk], None, None, state)
                parts.append(out)
            must_equal(torch.cat(parts, 2), whole, 1e-5, f"a memory, {chunk} queries at a time")


def grouped(subject: Subject) -> None:
    """Fewer key/value heads equal the same ones repeated in blocks."""
    module = subject.copy()
    length = min(9, subject.max_len)
    heads = subject.mechanism.num_heads
    for groups in (g for g in range(1, heads) if heads % g == 0):
        for causal in subject.causal_modes():
            q, k, v = subject.inputs(length, groups=groups)
            repeated = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
            right = module(q, *repeated, Mask(causal=causal))
            must_equal(module(q, k, v, Mask(causal=causal)), right, 1e-5, f"{groups} key/value heads for {heads}")


def refusals(subject: Subject) -> None:
    """What the traits deny raises ``ValueError`` with the mechanism's name; so do masks that can be misread."""
    module = subject.copy()
    traits = subject.traits
    length = min(4, subject.max_len)
    q, k, v = subject.inputs(length)
    heads = subject.mechanism.num_heads
    mode = subject.causal()
    keep, pairs = torch.ones(2, length, dtype=torch.bool), torch.ones(length, length, dtype=torch.bool)
    attempts = {
        "causal": (traits.causal, lambda: module(q, k, v, Mask(causal=True))),
        "bidirectional": (traits.bidirectional, lambda: module(q, k, v, Mask())),
        "rectangular": (traits.rectangular, lambda: module(q[:, :, :1], k, v, Mask(causal=mode))),
        "key_keep": (traits.key_keep, lambda: module(q, k, v, Mask(mode, key_keep=keep))),
        "pair_keep": (traits.pair_keep, lambda: module(q, k, v, Mask(mode, pair_keep=pairs))),
        "bias": (traits.bias, lambda: module(q, k, v, Mask(mode), torch.zeros(length, length))),
        "streaming": (traits.streaming, lambda: module.init_state(2, length)),
        "cross": (traits.cross, lambda: module.memory(k, v)),
        "grouped": (traits.grouped or heads == 1, lambda: module(q, k[:, :1], v[:, :1], Mask(mode))),
        "float mask": (False, lambda: module(q, k, v, Mask(mode, pair_keep=pairs.float()))),
        "integer mask": (False, lambda: module(q, k, v, Mask(mode, key_keep=keep.long()))),
        "mask of three dimensions": (False, lambda: module(q, k, v, Mask(mode, pair_keep=pairs.expand(2, -1, -1)))),
        "boolean bias": (False, lambda: module(q, k, v, Mask(mode), pairs)),
        "wrong number of heads": (False, lambda: module(q[:, :1].expand(-1, heads + 1, -1, -1), k, v, Mask(mode))),
    }
    for name, (claimed, call) in attempts.items():
        try:
            call()
        except ValueError as error:
            if claimed:
                raise LawBroken(f"{name} is claimed, but raises: {error}") from error
        else:
            if not claimed:
                raise LawBroken(f"{name} is not supported, but nothing is raised")
