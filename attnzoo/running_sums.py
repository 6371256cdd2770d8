"""Attention whose keys end up in sums: what Linear and Performer share.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width, R features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attnzoo.bias import Bias
from attnzoo.kernels import prefix
from attnzoo.mask import Mask, as_mask, hide_keys
from attnzoo.mechanism import Mechanism
from attnzoo.state import State, check_new, check_room
from attnzoo.traits import Traits


class SumState(NamedTuple):
    """The keys so far as sums: as large after a million tokens as after one.

    A step makes new sums and leaves the old ones as they were, so a state may be used many times.

    Attributes:
        sums: see ``attnzoo.kernels.prefix.Sums``.
        length: real tokens so far, int64 [B]: the position of the next one.
        used: how many tokens came so far, padding included, the same for each row.
        max_len: how many may come.
        fixed: whether this is a memory, whose keys all came at once.
    """

    sums: prefix.Sums
    length: Tensor
    used: int
    max_len: int
    fixed: bool = False


class FeatureAttention(Mechanism):
    """Normalised linear attention with positive features: o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j (the same).

    A subclass gives the logarithms of its features, in float32 at least: of the keys by ``prepare_keys``, of the
    queries by ``query_features``. What all features of a query have in common cancels and may be left out.
    """

    traits = Traits(pair_keep=False, bias=False, exact=False, linear_memory=True, complexity="T D Dv")
    reasons = {
        "pair_keep": "keys are summed before a query comes, so none can be hidden from one query alone; "
        "causal and key_keep work, Softmax takes pairs and segments",
        "bias": "scores are never made, so nothing can be added to them; Softmax takes a bias",
    }

    def query_features(self, q: Tensor) -> Tensor:
        """[B, H, T, D] -> the logarithms of the features [B, H, T, R]."""
        raise NotImplementedError(f"{type(self).__name__} must define query_features()")

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        rows, keys = self.query_features(q), _hide_features(keys, mask.key_keep)
        with _unrounded(q):
            if mask.causal:
                return self._finish(prefix.causal(rows, keys, v), q)
            return self._finish(prefix.read(rows, prefix.collect(keys, v, prefix.no_sums(keys, v))), q)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how the keys are summed."""
        mask = as_mask(mask)
        if not mask.causal:
            return "plain torch operations: one sum over all keys"
        keys = _hide_features(self.prepare_keys(hide_keys(k, mask.key_keep)), mask.key_keep)
        if prefix.near(keys):
            how = f"features as they are, since no logarithm is beyond {prefix.NEAR:g}"
        else:
            how = "features under running maxima"
        return f"plain torch operations: running sums of the keys, one every {prefix.CHUNK} places, {how}"

    def start(self, keys: Tensor, v: Tensor, max_len: int) -> State:
        return SumState(prefix.no_sums(keys, v), _tokens(keys, None), 0, max_len)

    def remember(self, keys: Tensor, v: Tensor, key_keep: Tensor | None) -> State:
        with _unrounded(keys):
            sums = prefix.collect(_hide_features(keys, key_keep), v, prefix.no_sums(keys, v))
        return SumState(sums, _tokens(keys, key_keep), keys.shape[2], keys.shape[2], fixed=True)

    def advance(
        self, q: Tensor, keys: Tensor, v: Tensor, state: Any, mask: Mask, bias: Bias | None
    ) -> tuple[Tensor, State]:
        (batch, groups, features), width = state.sums.peak.shape, state.sums.total.shape[3] - 1
        check_new(keys, v, (batch, groups, state.used, features), (batch, groups, state.used, width))
        check_room(state.used, keys.shape[2], state.max_len)
        rows, keys = self.query_features(q), _hide_features(keys, mask.key_keep)
        # A mechanism without parameters cannot tell an empty state that it will be used in float64.
        before = prefix.Sums(*(x.to(keys.dtype) for x in state.sums))
        with _unrounded(q):
            out, sums = prefix.scan(rows, keys, v, before), prefix.collect(keys, v, before)
        length = state.length + _tokens(keys, mask.key_keep)
        return self._finish(out, q), SumState(sums, length, state.used + keys.shape[2], state.max_len)

    def recall(self, q: Tensor, state: Any, mask: Mask, bias: Bias | None) -> Tensor:
        with _unrounded(q):
            return self._finish(prefix.read(self.query_features(q), state.sums), q)

    def _finish(self, out: Tensor, q: Tensor) -> Tensor:
        # There are no weights that could be dropped.
        return dropout(out, self.dropout, self.training).to(q.dtype)


def _unrounded(x: Tensor) -> torch.autocast:
    """Keeps autocast away: sums over thousands of keys leave the range and the precision of half a float."""
    return torch.autocast(x.device.type, enabled=False)


def _hide_features(log_k: Tensor, key_keep: Tensor | None) -> Tensor:
    # All features of a hidden key are 0. Those of a key of zeros, which is what comes here, would not be.
    return log_k if key_keep is None else log_k.masked_fill(~key_keep[:, None, :, None], -torch.inf)


def _tokens(keys: Tensor, key_keep: Tensor | None) -> Tensor:
    """Real tokens of each row: int64 [B]."""
    if key_keep is None:
        return torch.full((keys.shape[0],), keys.shape[2], device=keys.device)
    return key_keep.sum(1)
