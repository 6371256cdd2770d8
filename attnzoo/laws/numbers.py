"""Laws of numbers: the formula, gradients, precision, memory, repetition."""

import copy
import inspect
import io
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnzoo.bias import Bias, OffsetBias
from attnzoo.kernels.sdpa import dense
from attnzoo.laws.subject import LawBroken, Subject, must_be_finite, must_equal, parts
from attnzoo.mask import Mask
from attnzoo.record import attention_map


def shapes(subject: Subject) -> None:
    """Every length from 1 up, any value width, every precision: [B, H, T, Dv] of the same kind, finite."""
    for length in subject.lengths():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            q, k, v = subject.inputs(length, value_dim=3, dtype=dtype)
            out = subject.copy(dtype)(q, k, v, Mask(causal=subject.causal()))
            if out.shape != (*q.shape[:3], 3) or out.dtype != dtype or out.device != q.device:
                raise LawBroken(f"T={length} in {dtype} gives {tuple(out.shape)} in {out.dtype}")
            must_be_finite(out, f"the output at T={length} in {dtype}")


def formula(subject: Subject) -> None:
    """Outputs and gradients equal the float64 formula, for every mask and bias that is claimed."""
    assert subject.formula is not None
    for queries, keys in subject.sizes():
        masks = subject.masks(queries, keys) if queries <= 8 else [Mask(causal=c) for c in subject.causal_modes()]
        for mask in masks:
            biases: list[Bias | None] = [None]
            if queries <= 8 and (mask.key_keep is not None or len(masks) < 3):
                biases += subject.biases(queries, keys)
            for bias in biases:
                _compare(subject, queries, keys, mask, bias)


def _compare(subject: Subject, queries: int, keys: int, mask: Mask, bias: Bias | None) -> None:
    assert subject.formula is not None
    what = f"T={queries}, S={keys}, {parts(mask)}"
    results = []
    for exact in (False, True):
        module = subject.copy(torch.float64 if exact else torch.float32)
        leaves = [x.requires_grad_() for x in subject.inputs(queries, keys, value_dim=5)]
        q, k, v = leaves
        k = q if subject.traits.shared_qk else k
        terms = None if bias is None else _leaf(bias)
        if exact:
            out = subject.formula(module, q.double(), k.double(), v.double(), mask, terms)
        else:
            out = module(q, k, v, mask, terms)
        if out.requires_grad:  # not so for the formula where every row is empty
            (out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        asked = [*leaves, *([] if terms is None else [_values(terms)]), *module.parameters()]
        results.append((out.detach(), [x.grad for x in asked]))
    (got, gradients), (right, right_gradients) = results
    must_equal(got, right, 1e-5, f"output at {what}")
    for number, (a, b) in enumerate(zip(gradients, right_gradients, strict=True)):
        zero = torch.zeros(())
        a, b = zero.expand_as(b) if a is None and b is not None else a, b
        if a is not None:
            must_equal(a, torch.zeros_like(a) if b is None else b, 2e-5, f"gradient {number} at {what}")


def _leaf(bias: Bias) -> Bias:
    if isinstance(bias, OffsetBias):
        return OffsetBias(bias.values.clone().requires_grad_())
    return bias.clone().requires_grad_()


def _values(bias: Bias) -> Tensor:
    return bias.values if isinstance(bias, OffsetBias) else bias


def gradients(subject: Subject) -> None:
    """gradcheck in float64, and no gradient that is zero throughout."""
    length = min(5, subject.max_len)
    module = subject.copy(torch.float64)
    q, k, v = (x.requires_grad_() for x in subject.inputs(length, batch=1, value_dim=2, dtype=torch.float64))
    for causal in subject.causal_modes():
        shared = subject.traits.shared_qk

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal, shared: bool = shared) -> Tensor:
            return module(q, q if shared else k, v, Mask(causal=causal))

        inputs = (q, k, v) if not shared else (q, k.detach(), v)
        # Along random directions, which takes a tenth of the time; the law of the formula holds each number to its own.
        if not torch.autograd.gradcheck(call, inputs, raise_exception=False, fast_mode=True):
            raise LawBroken(f"gradcheck fails (causal={causal})")
        if length > 1:
            leaves = [*(x for x in inputs if x.requires_grad), *module.parameters()]
            found = torch.autograd.grad(call(q, k, v).pow(2).sum(), leaves, allow_unused=True)
            if any(x is None or not x.count_nonzero() for x in found):
                raise LawBroken(f"an input or a parameter gets no gradient (causal={causal})")


def low_precision(subject: Subject) -> None:
    """The error in bfloat16 is at most twice, in gradients three times, that of plain bfloat16 arithmetic."""
    assert subject.formula is not None
    length = min(128, subject.max_len)
    mask = Mask(causal=subject.causal())

    def run(dtype: torch.dtype, by_formula: bool) -> list[Tensor]:
        module = subject.copy(dtype)
        q, k, v = (x.to(dtype).requires_grad_() for x in subject.inputs(length, batch=1, dtype=torch.bfloat16))
        keys = q if subject.traits.shared_qk else k
        assert subject.formula is not None
        out = subject.formula(module, q, keys, v, mask, None) if by_formula else module(q, keys, v, mask)
        out.float().pow(2).sum().backward()
        # With shared keys k is q, or a copy of it, as the precision has it.
        return [out, *(x.grad for x in ((q, v) if subject.traits.shared_qk else (q, k, v)) if x.grad is not None)]

    right = run(torch.float64, True)
    plain = [(a.double() - b).abs().mean() for a, b in zip(run(torch.bfloat16, True), right, strict=True)]
    ours = [(a.double() - b).abs().mean() for a, b in zip(run(torch.bfloat16, False), right, strict=True)]
    for number, (error, allowed) in enumerate(zip(ours, plain, strict=True)):
        # Whole numbers of roundings differ between two right programs; 1e-4 is far below one of them here.
        if not error <= (3 if number else 2) * allowed + 1e-4:
            name = f"gradient {number}" if number else "output"
            raise LawBroken(f"bfloat16 {name}: mean error {error:.2g}, plain arithmetic has {allowed:.2g}")


def repeats(subject: Subject) -> None:
    """In evaluation the same input gives the same bits: twice, after save and load, and without dropout."""
    module = subject.copy()
    module.dropout = 0.5
    length = min(33, subject.max_len)
    q, k, v = subject.inputs(length)
    mask = Mask(causal=subject.causal())
    once = module(q, k, v, mask)
    torch.rand(3)
    if not torch.equal(once, module(q, k, v, mask)):
        raise LawBroken("two calls in evaluation differ")
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    fresh = copy.deepcopy(module)
    for x in (*fresh.parameters(), *fresh.buffers()):
        x.data.zero_()
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    if not torch.equal(once, fresh(q, k, v, mask)):
        raise LawBroken("the output changes after save and load")
    module.dropout = 0.0
    if not torch.equal(once, module(q, k, v, mask)):
        raise LawBroken("dropout acts in evaluation")
    module.train().dropout = 0.5
    if torch.equal(once, module(q, k, v, mask)):
        raise LawBroken("dropout does nothing in training")


def linear_in_v(subject: Subject) -> None:
    """f(a v + b w) = a f(v) + b f(w), and the map times v is the output."""
    module = subject.copy(torch.float64)
    length = min(9, subject.max_len)
    q, k, v = subject.inputs(length, dtype=torch.float64)
    w = subject.inputs(length, dtype=torch.float64, seed=9)[2]
    mask = Mask(causal=subject.causal())
    mixed = module(q, k, 2 * v - 3 * w, mask)
    must_equal(mixed, 2 * module(q, k, v, mask) - 3 * module(q, k, w, mask), 1e-9, "f(2v - 3w)")
    must_equal(attention_map(module, q, k, mask) @ v, module(q, k, v, mask), 1e-9, "the attention map times v")


def normalised(subject: Subject) -> None:
    """Weights are >= 0 and each row sums to 1 over the keys."""
    length = min(9, subject.max_len)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        q, k, _ = subject.inputs(length, dtype=dtype)
        weights = attention_map(subject.copy(dtype), q, k, Mask(causal=subject.causal())).float()
        if weights.min() < 0:
            raise LawBroken(f"a weight is {weights.min():.3g}")
        must_equal(weights.sum(-1), torch.ones(weights.shape[:-1]), tolerance, f"sums of the rows in {dtype}")


def budget(subject: Subject) -> None:
    """Over 20 seeds, four times the budget comes at least a tenth nearer to softmax."""
    name = subject.traits.budget
    assert name is not None
    cls = type(subject.mechanism)
    known = inspect.signature(cls).parameters
    options = {option: getattr(subject.mechanism, option) for option in known if hasattr(subject.mechanism, option)}
    length = min(64, subject.max_len)
    mask = Mask(causal=subject.causal())
    errors = []
    for amount in (options[name], 4 * options[name]):
        total = 0.0
        for seed in range(20):
            drawn = {"seed": seed} if "seed" in known else {}
            module = cls(**{**options, name: amount, **drawn}).eval()
            q, k, v = subject.inputs(length, seed=seed)
            total += (module(q, k, v, mask) - dense(q, k, v, mask, None)).abs().mean().item()
        errors.append(total / 20)
    if not errors[1] <= max(0.9 * errors[0], 1e-6):
        raise LawBroken(f"{name} {options[name]} is off from softmax by {errors[0]:.3g}, 4 times it by {errors[1]:.3g}")


class _Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made inside it has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def linear_memory(subject: Subject) -> None:
    """Twice the length makes no tensor more than 2.5 times as large, forward and backward."""
    largest = []
    # Long enough to tell T from T x S apart; a mechanism that is built for a length cannot pass it.
    longest = getattr(subject.mechanism, "max_len", None) or (2048 if subject.max_len >= 128 else subject.max_len)
    for length in (longest // 2, longest):
        q, k, v = (x.requires_grad_() for x in subject.inputs(length, batch=1))
        with _Largest() as seen:
            subject.copy(training=True)(q, k, v, Mask(causal=subject.causal())).sum().backward()
        largest.append(seen.elements)
    if largest[1] > 2.5 * largest[0]:
        raise LawBroken(f"the largest tensor grows from {largest[0]} to {largest[1]} elements at twice the length")


def compiles(subject: Subject) -> None:
    """One graph, without a break, gives the same numbers."""
    length = min(17, subject.max_len)
    module = subject.copy()
    for mask in subject.masks(length, length):
        q, k, v = subject.inputs(length)
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        try:
            got = compiled(q, k, v, mask)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise LawBroken(f"no full graph: {str(error).splitlines()[0]}") from error
        must_equal(got, module(q, k, v, mask), 1e-5, "the compiled module")
