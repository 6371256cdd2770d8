"""Reading what happens inside: every call of every mechanism, and the matrix that a mechanism applies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias, OffsetBias
from attnzoo.mask import Mask, as_mask
from attnzoo.mechanism import Mechanism


class Call(NamedTuple):
    """One call of one mechanism, as ``record`` keeps it: detached from the graph.

    Attributes:
        mechanism: the module that was called.
        q: [B, H, T, D].
        k: the prepared keys [B, G, S, width]; the keys themselves for most mechanisms.
        v: [B, G, S, Dv].
        mask: what may be attended.
        bias: terms added to the scores, or None.
        heads: the output of each head [B, H, T, Dv].

    Example:
        >>> from attnzoo import MultiheadAttention
        >>> attn = MultiheadAttention(8, 2).eval()
        >>> with record(attn) as sites:
        ...     y = attn(torch.randn(1, 5, 8))
        >>> call = sites["attention"][0]
        >>> call.q.shape, call.map().sum(-1).allclose(torch.ones(1, 2, 5))
        (torch.Size([1, 2, 5, 4]), True)
    """

    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    bias: Bias | None
    heads: Tensor

    def map(self, queries: Tensor | None = None) -> Tensor:
        """The attention map of this call, [B, H, T or len(queries), S]; see ``attention_map``."""
        with torch.no_grad():
            return _map(self.mechanism, self.q, self.k, self.mask, self.bias, queries)


@contextmanager
def record(model: nn.Module, *, skip_unreadable: bool = False) -> Iterator[dict[str, list[Call]]]:
    """Keeps every call of every mechanism in ``model`` while the context is open. Costs nothing when closed.

    Args:
        model: any module that holds mechanisms, in evaluation mode.
        skip_unreadable: leave steps out whose state keeps no keys, such as causal ones of ``Linear``, instead of
            refusing. Steps on a memory that was made inside the context are read for every mechanism.

    Yields:
        Site name -> its calls, in order. The name is the path of the module that holds the mechanism.

    Raises:
        ValueError: if the model is in training mode, or holds no mechanism.

    Example:
        >>> from attnzoo import MultiheadAttention
        >>> attn = MultiheadAttention(8, 2).eval()
        >>> with record(attn) as sites:
        ...     y = attn(torch.randn(1, 5, 8))
        >>> sites["attention"][0].map().shape
        torch.Size([1, 2, 5, 5])
    """
    mechanisms = {name: module for name, module in model.named_modules() if isinstance(module, Mechanism)}
    if not mechanisms:
        raise ValueError(f"{type(model).__name__} holds no attnzoo mechanism, so there is nothing to record")
    if model.training:
        raise ValueError("record() reads a model in evaluation: call model.eval() first")
    sites: dict[str, list[Call]] = {}
    outer = {
        mechanism: {name: mechanism.__dict__[name] for name in SHADOWED if name in mechanism.__dict__}
        for mechanism in mechanisms.values()
    }
    try:
        for path, mechanism in mechanisms.items():
            site = path.removesuffix(".mechanism") if path not in ("", "mechanism") else "attention"
            sites[site] = []
            # Shadows the method on this one object for the time of the context, so nothing is paid when off.
            mechanism.__dict__["_attend"] = _listen(mechanism, sites[site])
            memories: dict[int, Memory] = {}
            mechanism.__dict__["remember"] = _keep_memory(mechanism, memories)
            for name in ("advance", "recall"):
                mechanism.__dict__[name] = _hear_step(mechanism, name, sites[site], memories, skip_unreadable)
        yield sites
    finally:
        for mechanism, shadows in outer.items():
            for name in SHADOWED:
                mechanism.__dict__.pop(name, None)
            mechanism.__dict__.update(shadows)


SHADOWED = ("_attend", "remember", "advance", "recall")


class Memory(NamedTuple):
    """What a state of fixed keys was made of, and the state itself, so that no other one gets its id."""

    state: Any
    keys: Tensor
    v: Tensor
    key_keep: Tensor | None


def _keep_memory(mechanism: Mechanism, memories: dict[int, Memory]) -> Callable[..., Any]:
    remember = mechanism.remember

    def keeping(keys: Tensor, v: Tensor, key_keep: Tensor | None) -> Any:
        state = remember(keys, v, key_keep)
        memories[id(state)] = Memory(state, keys.detach(), v.detach(), key_keep)
        return state

    return keeping


def _hear_step(
    mechanism: Mechanism, name: str, calls: list[Call], memories: dict[int, Memory], skip_unreadable: bool
) -> Callable[..., Any]:
    """A step whose state keeps no keys passes the listener by: it is read by what a memory was made of, or refused."""
    method = getattr(mechanism, name)

    def heard(q: Tensor, *args: Any) -> Any:
        before = len(calls)
        result = method(q, *args)
        if len(calls) > before:
            return result
        state, mask, bias = args[-3:]
        memory = memories.get(id(state))
        if memory is not None:
            mask = Mask(key_keep=memory.key_keep, pair_keep=mask.pair_keep)
            call = Call(mechanism, q.detach(), memory.keys, memory.v, mask, _detach(bias), result.detach())
            calls.append(call)
        elif not skip_unreadable:
            raise ValueError(
                f"record() cannot read a step of {type(mechanism).__name__}, whose state keeps no keys; "
                f"give it the whole sequence at once"
            )
        return result

    return heard


def _listen(mechanism: Mechanism, calls: list[Call]) -> Callable[..., Tensor]:
    attend = mechanism._attend

    def listening(q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        heads = attend(q, keys, v, mask, bias)
        q, keys, v = q.detach(), keys.detach(), v.detach()
        calls.append(Call(mechanism, q, keys, v, mask, _detach(bias), heads.detach()))
        return heads

    return listening


def _detach(bias: Bias | None) -> Bias | None:
    if isinstance(bias, OffsetBias):
        return OffsetBias(bias.values.detach())
    return None if bias is None else bias.detach()


def attention_map(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    mask: Mask | None = None,
    bias: Bias | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """The matrix that a mechanism applies to v, found by feeding it the columns of the identity.

    It comes from the code that really runs, in evaluation, whatever the back end.

    Args:
        mechanism: any mechanism that is linear in v.
        q: [B, H, T, D].
        k: [B, G, S, D].
        mask: what may be attended.
        bias: terms to be added to the scores.
        queries: int64 indices of the rows wanted, so that a long sequence needs no T x S numbers; all if None.

    Returns:
        [B, H, T or len(queries), S]; rows sum to 1 where the mechanism is normalised, to 0 without a key.

    Raises:
        ValueError: if the mechanism is not linear in v.

    Example:
        >>> from attnzoo import Local
        >>> q = torch.zeros(1, 1, 4, 8)
        >>> attention_map(Local(1, 8, window=2), q, q, Mask(causal=True))[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    mask = as_mask(mask)
    mechanism.check_call(q, k, k, mask, bias)
    hidden = k if mask.key_keep is None else k.masked_fill(~mask.key_keep[:, None, :, None], 0)
    return _map(mechanism, q, mechanism.prepare_keys(hidden), mask, bias, queries)


def _map(
    mechanism: Mechanism, q: Tensor, keys: Tensor, mask: Mask, bias: Bias | None, queries: Tensor | None
) -> Tensor:
    mechanism.require("linear_in_v", "attention_map")
    batch, length, width = q.shape[0], keys.shape[2], mechanism.head_dim
    if length == 0:
        return q.new_zeros(*q.shape[:2], q.shape[2] if queries is None else len(queries), 0)
    training = mechanism.training
    mechanism.eval()
    try:
        parts = []
        for start in range(0, length, width):
            columns = min(width, length - start)
            v = q.new_zeros(batch, keys.shape[1], length, width)
            v[:, :, start + torch.arange(columns), torch.arange(columns)] = 1
            if mask.key_keep is not None:
                v = v.masked_fill(~mask.key_keep[:, None, :, None], 0)
            # By the class, past the listener of record(): a map is no call of the model.
            part = type(mechanism)._attend(mechanism, q, keys, v, mask, bias)[..., :columns]
            parts.append(part if queries is None else part[:, :, queries])
        return torch.cat(parts, dim=-1)
    finally:
        mechanism.train(training)
