"""Mixture-of-experts feed-forward: several networks, of which each token takes the best few.

Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer",
arXiv:1701.06538; Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961 (one expert a token, load balance);
Zoph et al. 2022, "ST-MoE", arXiv:2202.08906 (z-loss).

    r = x W_r,  p = softmax(r)                            router, in float32
    y = sum over the k experts e of largest p_e of  g_e FFN_e(x)
    g = p of these k, divided by their sum for k >= 2; for k = 1 it is p itself, or the router would not learn

    balance = balance_weight X sum_e f_e P_e              f_e: share of the N k choices that fell on e; no gradient
                                                          P_e: mean of p_e over the tokens
    z       = z_weight mean (log sum_e exp r_e)^2
    aux     = balance + z

Shapes: N real tokens of the batch, E width of the model, X experts, k choices of a token, W width inside an expert.
f counts choices, so ``balance`` is ``balance_weight`` where all experts are equally likely, whatever k is.

In training an expert serves ceil(capacity_factor k N / X) choices at most. They come first served in the order of
the batch - sample by sample, token by token, a token's better choice first - and one that comes too late adds 0: the
residual around the layer carries the token on. The gates of a token are those from before. GShard and Switch serve
all first choices before any second one; then a later token could push out an earlier one, and a decoder would look
ahead. A ``capacity_factor`` of X / k drops nothing. In evaluation nothing is ever dropped, so that no sample depends
on the others in its batch.

Left out: the noise on the router and the losses of the 2017 paper, the jitter of Switch, experts on several devices.

Use it when the model shall hold more than its time allows: the parameters grow with X, the time with k; and when the
tokens of a batch are many for each expert.

Not when memory is what is short, since all X experts are held, with their gradients and moments; or when batches are
so small that an expert sees a handful of tokens a step.
"""

import torch
from torch import Tensor, nn

from attnzoo.checks import at_least, number, whole
from attnzoo.kernels.precision import full_precision
from attnzoo.mask import Mask, as_mask, hide

BLOCKS = 2
"""How many blocks an expert fills where the choices are spread evenly. Fewer leave more rows of the blocks empty, more
copy the weights more often; of 1, 2, 4 and 8, measured with small and large experts, 2 has the mildest worst case."""


class MixtureOfExperts(nn.Module):
    """X feed-forwards, of which each token takes the k that a router rates best. Stands in for ``FeedForward``.

    Args:
        dim: E.
        hidden_dim: W; 4 E if None.
        dropout: after the GELU of an expert.
        num_experts: X.
        top_k: k, how many experts a token takes.
        capacity_factor: in training, how many choices an expert serves, as a multiple of its even share.
        balance_weight: of the term that spreads the tokens over the experts.
        z_weight: of the term that keeps the router's scores small.

    Raises:
        ValueError: for sizes below 1, more choices than experts, and weights that are negative.

    Example:
        >>> y, aux = MixtureOfExperts(8, num_experts=4, top_k=2)(torch.randn(2, 5, 8))
        >>> y.shape, aux.shape
        (torch.Size([2, 5, 8]), torch.Size([]))
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        *,
        num_experts: int = 4,
        top_k: int = 2,
        capacity_factor: float = 1.25,
        balance_weight: float = 0.01,
        z_weight: float = 0.001,
    ) -> None:
        super().__init__()
        width = 4 * dim if hidden_dim is None else hidden_dim
        name = "MixtureOfExperts"
        at_least(1, name, dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)
        whole(name, top_k=top_k)
        number(name, capacity_factor=capacity_factor, balance_weight=balance_weight, z_weight=z_weight, dropout=dropout)
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"MixtureOfExperts: top_k must lie in 1..{num_experts}, the number of experts; got {top_k}"
            )
        if not capacity_factor > 0:
            raise ValueError(f"MixtureOfExperts: capacity_factor must be above 0, got {capacity_factor}")
        for name, weight in (("balance_weight", balance_weight), ("z_weight", z_weight)):
            if not weight >= 0:
                raise ValueError(f"MixtureOfExperts: {name} must be at least 0, got {weight}")
        if not 0 <= dropout < 1:
            raise ValueError(f"MixtureOfExperts: dropout must lie in [0, 1), got {dropout}")
        self.num_experts, self.top_k, self.capacity_factor = num_experts, top_k, capacity_factor
        self.balance_weight, self.z_weight, self.dropout = balance_weight, z_weight, dropout
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up_weight = nn.Parameter(torch.empty(num_experts, dim, width))
        self.up_bias = nn.Parameter(torch.empty(num_experts, width))
        self.down_weight = nn.Parameter(torch.empty(num_experts, width, dim))
        self.down_bias = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as ``nn.Linear`` begins: uniform, within 1 / sqrt of the width that comes in."""
        self.router.reset_parameters()
        for weight, bias in ((self.up_weight, self.up_bias), (self.down_weight, self.down_bias)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are biases, which their shape does not tell."""
        return {"up_bias", "down_bias"}

    def extra_repr(self) -> str:
        """Sizes and options."""
        names = ("num_experts", "top_k", "capacity_factor", "balance_weight", "z_weight", "dropout")
        width = f"{self.up_weight.shape[1]}, hidden_dim={self.up_weight.shape[2]}"
        return ", ".join([width, *(f"{name}={getattr(self, name)}" for name in names)])

    def forward(self, x: Tensor, mask: Mask | None = None) -> tuple[Tensor, Tensor]:
        """Sends each token through its experts.

        Args:
            x: [B, T, E].
            mask: tells by its ``key_keep`` which tokens are real. Padding takes no part in routing, in the two terms
                of aux or in the capacity, whatever stands there.

        Returns:
            [B, T, E], 0 at padding; and aux, the two terms of these tokens, to be added to the loss in training.
        """
        keep = as_mask(mask).key_keep
        tokens = hide(x, keep).flatten(0, 1)
        real = tokens.new_ones(tokens.shape[0], dtype=torch.bool) if keep is None else keep.flatten()
        scores = self._scores(tokens)
        chances = scores.softmax(-1)
        gates, chosen = chances.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        takes = ((chosen[..., None] == torch.arange(self.num_experts, device=x.device)) & real[:, None, None]).long()
        y = self._experts(tokens, gates, chosen.flatten(), takes.flatten(0, 1))
        return y.view_as(x), self._aux(scores, chances, takes.sum((0, 1)), real)

    def _scores(self, tokens: Tensor) -> Tensor:
        # Rounded to half precision, near experts would trade places and the exponentials be far off.
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with full_precision(tokens):
            return nn.functional.linear(tokens.to(dtype), self.router.weight.to(dtype))

    def _aux(self, scores: Tensor, chances: Tensor, counts: Tensor, real: Tensor) -> Tensor:
        share = real.to(scores.dtype) / real.sum().clamp(min=1)  # of each token in a mean over the real ones
        f = counts.to(scores.dtype) / counts.sum().clamp(min=1)
        balance = self.num_experts * (f * (chances * share[:, None]).sum(0)).sum()
        z = (scores.logsumexp(-1).square() * share).sum()
        return self.balance_weight * balance + self.z_weight * z

    def _experts(self, tokens: Tensor, gates: Tensor, chosen: Tensor, takes: Tensor) -> Tensor:
        """Lays the chosen tokens into blocks of one expert each, and weighs what comes out.

        How many tokens an expert gets is known to no one beforehand, and to ask would break the graph and wait for
        the device. The number of blocks that are enough for any choice is known: each expert leaves at most one of
        its own unfilled. So sizes are fixed, and no more than 3/2 N k + 6 X rows are worked on.

        Args:
            tokens: [N, E], padding included.
            gates: [N, k].
            chosen: expert of each choice, [N k].
            takes: 1 where a choice falls on an expert, [N k, X]; 0 throughout for padding.
        """
        rows, experts = takes.shape
        size = rows // (BLOCKS * experts) + 2  # 1 would be a case of its own to torch.export
        blocks = (BLOCKS + 1) * experts
        # An exported program has no fixed batch, so nothing may be decided by its size.
        if not torch.compiler.is_exporting():
            blocks = min(blocks, rows)
        before = takes.cumsum(0)
        rank = (before * takes).sum(1) - 1  # place in the queue of its expert, from 0; -1 for padding
        served = rank >= 0
        if self.training:
            served &= rank < (takes.sum() * (self.capacity_factor / experts)).ceil()
        ends = ((takes.sum(0) + size - 1) // size).cumsum(0)  # the block behind the last of each expert
        start = torch.cat([ends.new_zeros(1), ends[:-1]])
        nowhere = blocks * size
        place = torch.where(served, start[chosen] * size + rank, nowhere)

        # Places that nobody takes hold a row of zeros, which stands behind the last token.
        number = torch.arange(rows, device=tokens.device) // self.top_k
        source = torch.full((nowhere + 1,), tokens.shape[0], device=tokens.device).scatter(0, place, number)[:-1]
        inside = nn.functional.pad(tokens, (0, 0, 0, 1)).index_select(0, source).view(blocks, size, tokens.shape[1])
        owner = (torch.arange(blocks, device=tokens.device)[:, None] >= ends).sum(1).clamp(max=experts - 1)
        up, up_bias, down, down_bias = (
            x.index_select(0, owner) for x in (self.up_weight, self.up_bias, self.down_weight, self.down_bias)
        )
        hidden = nn.functional.gelu(torch.baddbmm(up_bias[:, None], inside, up))
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        out = torch.baddbmm(down_bias[:, None], hidden, down).view(nowhere, tokens.shape[1])
        out = nn.functional.pad(out, (0, 0, 0, 1)).index_select(0, place).view(*gates.shape, tokens.shape[1])
        return (out * gates[..., None]).sum(1).to(tokens.dtype)
