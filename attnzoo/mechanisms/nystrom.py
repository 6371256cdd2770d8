"""Nystrom attention: softmax attention through a few landmarks.

Xiong et al. 2021, "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention", arXiv:2102.03902.

    ql, kl = means of the real queries and keys over M segments of the sequence
    L = softmax(q kl^T / sqrt(D))   A = softmax(ql kl^T / sqrt(D))   R = softmax(ql k^T / sqrt(D))
    o = L A+ R v  ( + a depthwise convolution of v along the sequence )

    A+, the pseudo-inverse, by iteration:   Z <- Z (13 - A Z (15 - A Z (7 - A Z))) / 4
    from Z = A^T / (largest column sum of A), for each sample and head by itself; the rows of A sum to 1

    q [B, H, T, D]   k [B, G, T, D]   v [B, G, T, Dv]   ->   out [B, H, T, Dv];   M = num_landmarks

The n real tokens of a row fall into min(M, n) segments, token r of them into segment r min(M, n) div n: no two differ
by more than one token, none is empty, and each mean divides by its true count. Landmarks that a short row lacks are
hidden in L and leave A and A+ exactly 0. Queries at padding count as 0. Half precision is computed in float32
throughout, under autocast too: A+ has large entries of both signs that cancel, so it enlarges each rounding before it.

Deviations: the paper wants M to divide T. The convolution, whose kernel the paper takes for granted, is an option
here; it runs over the real tokens only, packed, and starts at 0: an untrained module is the approximation alone.
Queries and keys must be of the same sequence: a query's output hangs on the other queries through their means, so
the result would change with the queries asked for, and key_keep would not say which of them are padding.

Use it when long sequences are read whole and something near to softmax is wanted: time and memory grow with T M, and
more landmarks come nearer.

Not when anything is generated (the means mix the future in), across two sequences, or when T is no more than a few
times M, where Softmax is exact and faster. Weights may be negative and rows need not sum to 1.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from attnzoo.bias import Bias
from attnzoo.kernels.packing import front, take
from attnzoo.kernels.precision import full_precision
from attnzoo.kernels.sdpa import fused
from attnzoo.kernels.softmax import masked_softmax
from attnzoo.mask import Mask, hide_keys
from attnzoo.mechanism import Mechanism, at_least, whole
from attnzoo.traits import Traits


class Nystrom(Mechanism):
    """Softmax attention approximated through M landmarks: time and memory O(T M).

    Args:
        num_heads: H.
        head_dim: D.
        num_landmarks: M, how many segment means stand for the sequence.
        iterations: steps towards the pseudo-inverse of the landmarks' own attention.
        kernel_size: width, odd, of the convolution of v that is added to the output; None leaves it out.
        dropout: share of the weights of queries over landmarks dropped in training.

    Raises:
        ValueError: for ``num_landmarks`` or ``iterations`` below 1, or an even ``kernel_size``.

    Example:
        >>> q = k = v = torch.randn(1, 2, 50, 8)
        >>> Nystrom(2, 8, num_landmarks=6)(q, k, v).shape
        torch.Size([1, 2, 50, 8])
    """

    traits = Traits(
        causal=False,
        cross=False,
        rectangular=False,
        pair_keep=False,
        bias=False,
        streaming=False,
        normalised=False,
        exact=False,
        linear_memory=True,
        budget="num_landmarks",
        complexity="T M D",
    )
    reasons = {
        "causal": "its landmarks are means over segments, the future among them; Local and MemoryCompressed are causal",
        "streaming": "steps are causal, and its landmarks mix the future in; MemoryCompressed has steps",
        "cross": "its landmarks are means over all queries, of which none may be padding; Linformer can cross",
        "rectangular": "its landmarks are means over all queries, so each query of the sequence must be there; "
        "Softmax takes any of them",
        "pair_keep": "a landmark mixes keys, so none can be hidden from one query alone; Softmax and Local can hide it",
        "bias": "the scores belong to landmarks, not to keys; Softmax and Local take a bias",
    }

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_landmarks: int = 8,
        iterations: int = 6,
        kernel_size: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, dropout=dropout)
        at_least(1, "Nystrom", num_landmarks=num_landmarks, iterations=iterations)
        whole("Nystrom", kernel_size=kernel_size)
        if kernel_size is not None and (kernel_size < 1 or kernel_size % 2 == 0):
            raise ValueError(f"Nystrom: kernel_size must be odd, so that it has a middle, or None; got {kernel_size}")
        self.num_landmarks = num_landmarks
        self.iterations = iterations
        self.kernel_size = kernel_size
        self.kernel = None if kernel_size is None else nn.Parameter(torch.zeros(num_heads, 1, kernel_size))

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, mask: Mask, bias: Bias | None) -> Tensor:
        with full_precision(q):
            half = q.dtype in (torch.float16, torch.bfloat16)
            # A query at padding is a token of the sequence as well, and must not reach the means; NaN times 0 would.
            wide_q, wide_keys, wide_v = (x.float() if half else x for x in (hide_keys(q, mask.key_keep), keys, v))
            return self._through_landmarks(wide_q, wide_keys, wide_v, mask.key_keep).to(q.dtype)

    def _through_landmarks(self, q: Tensor, keys: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        share = q.shape[1] // keys.shape[1]
        # Segments that are all as long, with nothing hidden, are summed by a reshape: their matrix is mostly zeros.
        step = q.shape[2] // self.num_landmarks if keep is None and q.shape[2] % self.num_landmarks == 0 else 1
        averaging, held = self._segments(q[:, :, ::step], keep)
        parts = (q, keys) if step == 1 else (x.unflatten(2, (-1, step)).sum(3) for x in (q, keys))
        # Expanded, since ONNX would take a batch of 1 here for that of all that follows.
        averaging = (averaging / step).expand(q.shape[0], -1, -1)
        middle_q, middle_k = (torch.einsum("bms,bhsd->bhmd", averaging, x) for x in parts)
        middle_k = middle_k.repeat_interleave(share, dim=1)
        held = held[:, None, None]
        scores = middle_q @ middle_k.mT * self.head_dim**-0.5
        inverse = _pseudo_inverse(masked_softmax(scores, held & held.mT), self.iterations)

        right = fused(middle_q, keys, v, None if keep is None else keep[:, None, None])
        dropout = self.dropout if self.training else 0.0
        out = fused(q, middle_k, inverse @ right, held, dropout=dropout)
        return out if self.kernel is None else out + self._convolved(v, self.kernel, keep)

    def _segments(self, q: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """What each token counts in the mean of each segment, [B or 1, M, T]; which segments exist, [B or 1, M]."""
        real = torch.ones(1, q.shape[2], dtype=torch.bool, device=q.device) if keep is None else keep
        place, count = real.cumsum(1) - 1, real.sum(1, keepdim=True)
        number = torch.arange(self.num_landmarks, device=q.device)
        segment = place * count.clamp(max=self.num_landmarks) // count.clamp(min=1)
        member = (segment[:, None] == number[:, None]) & real[:, None]
        size = member.sum(-1, keepdim=True)
        return member.to(q.dtype) / size.clamp(min=1), size[..., 0] > 0

    def _convolved(self, v: Tensor, kernel: Tensor, keep: Tensor | None) -> Tensor:
        """Each head's kernel along its real tokens, packed for that time: [B, G, T, Dv] -> [B, H, T, Dv]."""
        v = v.repeat_interleave(self.num_heads // v.shape[1], dim=1)
        order = None if keep is None else front(keep)
        if order is not None:
            v = take(v, order)
        out = conv2d(v, kernel.to(v.dtype)[..., None], padding=(kernel.shape[-1] // 2, 0), groups=self.num_heads)
        return out if order is None else hide_keys(take(out, order.argsort(1)), keep)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, bias: Bias | None = None) -> str:
        """Says how many landmarks stand for how many tokens."""
        return (
            f"SDPA from and to {self.num_landmarks} landmarks that stand for {k.shape[2]} tokens, in float32 at least"
        )


def _pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Of each matrix [..., M, M], whose rows sum to 1 or are 0 throughout, as columns of the same number then are."""
    # The largest column sum is at least 1, so this divides by less only where a row has no token at all.
    z = a.mT / a.sum(-2).amax(-1).clamp(min=1)[..., None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z
