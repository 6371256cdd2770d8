"""Attention whose keys end up in sums: what Linear and Performer share.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width, R features.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import dropout

from attnzoo.bias import Bias
from attnzoo.kernels import streamed
from attnzoo.kernels.precision import full_precision
from attnzoo.kernels.prefix import CHUNK, Sums
from attnzoo.mask import Mask, as_mask, hide_keys
from attnzoo.mechanism import Mechanism
from attnzoo.state import State, check_new, check_room, real_tokens
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

    sums: Sums
    length: Tensor
    used: int
    max_len: int
    fixed: bool = False


class FeatureAttention(Mechanism):
    """Normalised linear attention with positive features: o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j (the same).

    A subclass gives the logarithms of its features, in float32 at least. What all features of a query have in common
    cancels and may be left out.
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

    def key_features(self, k: Tensor) -> Tensor:
        """[B, G, S, D] -> the logarithms of the features [B, G, S, R]."""
        raise NotImplementedError(f"{type(self).__name__} must define key_features()")

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        with full_precision(q):
            if mask.causal:
                return self._finish(streamed.causal(self._maps, q, keys, v, mask.key_keep), q)
            return self._finish(streamed.read(self._maps, q, self._collect(keys, v, mask.key_keep)), q)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how the keys are summed."""
        mask = as_mask(mask)
        if not mask.causal:
            return "plain torch operations: one sum over all keys"
        if k.device.type == "cpu" and streamed.near(self.key_features(hide_keys(k, mask.key_keep))):
            how = f"features as they are, since no logarithm is beyond {streamed.NEAR:g}"
        else:
            how = "features under running maxima"
        return f"plain torch operations: running sums of the keys, one every {CHUNK} places, {how}"

    def start(self, keys: Tensor, v: Tensor, max_len: int) -> State:
        return SumState(streamed.no_sums(self._maps, keys, v), real_tokens(keys, None), 0, max_len)

    def remember(self, keys: Tensor, v: Tensor, key_keep: Tensor | None) -> State:
        with full_precision(keys):
            sums = self._collect(keys, v, key_keep)
        return SumState(sums, real_tokens(keys, key_keep), keys.shape[2], keys.shape[2], fixed=True)

    def advance(
        self, q: Tensor, keys: Tensor, v: Tensor, state: Any, mask: Mask, bias: Bias | None
    ) -> tuple[Tensor, State]:
        (batch, groups, features), width = state.sums.peak.shape, state.sums.total.shape[3] - 1
        none = self.key_features(keys[:, :, :0])
        check_new(none, v, (batch, groups, state.used, features), (batch, groups, state.used, width))
        check_room(state.used, keys.shape[2], state.max_len)
        # A mechanism without parameters cannot tell an empty state that it will be used in float64.
        before = Sums(*(x.to(none.dtype) for x in state.sums))
        with full_precision(q):
            out, sums = streamed.scan(self._maps, q, keys, v, mask.key_keep, before)
        length = state.length + real_tokens(keys, mask.key_keep)
        return self._finish(out, q), SumState(sums, length, state.used + keys.shape[2], state.max_len)

    def recall(self, q: Tensor, state: Any, mask: Mask, bias: Bias | None) -> Tensor:
        with full_precision(q):
            return self._finish(streamed.read(self._maps, q, state.sums), q)

    @property
    def _maps(self) -> streamed.Maps:
        assert next(self.parameters(), None) is None, (
            "features are made outside of autograd: no parameter gets a gradient"
        )
        return streamed.Maps(self.query_features, self.key_features, tuple(self.buffers()))

    def _collect(self, k: Tensor, v: Tensor, key_keep: Tensor | None) -> Sums:
        return streamed.collect(self._maps, k, v, key_keep, streamed.no_sums(self._maps, k, v))

    def _finish(self, out: Tensor, q: Tensor) -> Tensor:
        # There are no weights that could be dropped.
        return dropout(out, self.dropout, self.training).to(q.dtype)
