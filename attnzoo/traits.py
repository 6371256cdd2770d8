"""What a mechanism can do, as data.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head width, Dv value width.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What a mechanism can do, as data: read by its checks, the laws, the docs table and sweeps.

    Attributes:
        causal: takes ``mask.causal``.
        bidirectional: works without ``mask.causal``.
        cross: keys may come from another sequence than the queries.
        rectangular: T may differ from S.
        key_keep: takes ``mask.key_keep``, and padding then moves nothing.
        pair_keep: takes ``mask.pair_keep`` and ``mask.segments``.
        bias: takes terms to be added to the scores.
        streaming: has ``step``, equal to one causal pass.
        grouped: the number of key/value heads may be a divisor of the number of query heads.
        linear_in_v: the output is linear in v, so ``attention_map`` exists.
        normalised: the weights are >= 0 and each row sums to 1.
        exact: a softmax over all visible keys, no approximation: of q . k / sqrt(D) + bias, or of scores
            whose formula stands in ``attnzoo.reference.FORMULAS``.
        shared_qk: the keys are the queries, so the shell has no key projection.
        linear_memory: never makes a tensor of T x S elements.
        budget: the option that buys accuracy: with more of it the output comes nearer to softmax; None if no
            option does.
        complexity: time, in the letters above.
    """

    causal: bool = True
    bidirectional: bool = True
    cross: bool = True
    rectangular: bool = True
    key_keep: bool = True
    pair_keep: bool = True
    bias: bool = True
    streaming: bool = True
    grouped: bool = True
    linear_in_v: bool = True
    normalised: bool = True
    exact: bool = True
    shared_qk: bool = False
    linear_memory: bool = False
    budget: str | None = None
    complexity: str = "T S D"
