"""Multi-head latent attention: another projection shell, whose decoding state is one short vector for each token.

DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
arXiv:2405.04434, section 2.1.

    c_j  = norm(W_dkv x_j)                          [R]         kept while decoding
    r_j  = RoPE(W_kr x_j)                           [P]         kept while decoding, one for all heads
    k_jh = [W_uk_h c_j ; r_j]                       [N + P]
    v_jh = W_uv_h c_j                               [Dv]
    q_ih = [W_uq_h c'_i ; RoPE(W_qr_h c'_i)]        [N + P]     c'_i = norm(W_dq x_i), or x_i itself
    s_ij = q_ih . k_jh / sqrt(N + P) + bias_ij

    R = kv_rank   P = rope_dim   N = nope_dim   Dv = value_dim   B batch   H heads   T tokens   S tokens so far

A step never makes the keys and values of the heads (the "absorbed" form):

    s_ij = [W_uk_h' q_nope ; q_rope] . [c_j ; r_j] / sqrt(N + P)          o_ih = W_uv_h (sum_j a_ij c_j)

which is multi-query attention: one key/value head of width R + P for all H query heads.

Left out: the longer contexts of YaRN, and queries from a latent by default (``q_rank``). Rotary pairs are neighbours,
as in the code of DeepSeek; the norms are RMS norms with a learned weight, as there.
"""

import torch
from torch import Tensor, nn

from attnzoo.bias import Bias
from attnzoo.catalogue import Factory, construct
from attnzoo.checks import at_least, check_tokens
from attnzoo.mask import Mask, as_mask, hide, site_mask
from attnzoo.mechanism import Mechanism
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.positions import Rotary
from attnzoo.state import KVState, real_tokens


class MultiheadLatentAttention(nn.Module):
    """Causal or bidirectional self-attention whose keys and values come from one latent vector a token.

    Decoding keeps ``kv_rank + rope_dim`` numbers for each token, whatever the number of heads.

    Args:
        dim: E, the width of input and output.
        num_heads: H.
        mechanism: a factory of what works between heads of width N + P. Steps need a softmax of q . k over visible
            keys that has no state of its own (``Softmax``, ``Local``, ...), since they run at another width.
        kv_rank: R, the width of the latent of keys and values; 4 N if None, as in the paper.
        q_rank: the width of the latent of the queries; None projects them directly.
        nope_dim: N, the part of q and k without positions; E / H if None.
        rope_dim: P, the part that a rotary position turns, even; about N / 2 if None, as in the paper.
        value_dim: Dv; N if None.
        causal: a fact of the site: True makes every call causal, False refuses causal masks, None leaves it to
            each call.
        max_len: a fact of the site: the longest sequence that will come.
        grid: a fact of the site: the shape that the tokens have, row by row.
        prefix_tokens: a fact of the site: how many tokens stand before the grid.
        layer: a fact of the site: depth from 0.

    Raises:
        ValueError: for sizes that do not fit, and for a mechanism that needs keys of another make.

    Example:
        >>> attn = MultiheadLatentAttention(64, 4, kv_rank=24, rope_dim=8, causal=True).eval()
        >>> x = torch.randn(2, 5, 64)
        >>> first, state = attn.step(x[:, :4], attn.init_state(2, max_len=5))
        >>> last, state = attn.step(x[:, 4:], state)
        >>> torch.allclose(torch.cat([first, last], dim=1), attn(x), atol=1e-5)
        True
        >>> state.k.shape[-1] + state.v.shape[-1]
        32
    """

    NORM_EPS = 1e-6

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: Factory = Softmax,
        *,
        kv_rank: int | None = None,
        q_rank: int | None = None,
        nope_dim: int | None = None,
        rope_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool | None = None,
        max_len: int | None = None,
        grid: tuple[int, ...] | None = None,
        prefix_tokens: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        given = {"nope_dim": nope_dim, "rope_dim": rope_dim, "kv_rank": kv_rank, "q_rank": q_rank}
        at_least(1, "MultiheadLatentAttention", dim=dim, num_heads=num_heads, value_dim=value_dim, **given)
        if nope_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} is no multiple of num_heads={num_heads}; give nope_dim")
        nope = dim // num_heads if nope_dim is None else nope_dim
        rope = max(2, nope // 4 * 2) if rope_dim is None else rope_dim
        rank = 4 * nope if kv_rank is None else kv_rank
        value = nope if value_dim is None else value_dim
        self.num_heads, self.kv_rank, self.q_rank, self.causal = num_heads, rank, q_rank, causal
        self.nope_dim, self.rope_dim, self.value_dim = nope, rope, value
        self.rotary = Rotary(rope)
        facts = {"causal": causal, "max_len": max_len, "grid": grid, "prefix_tokens": prefix_tokens, "layer": layer}
        self.mechanism = construct(mechanism, num_heads, nope + rope, num_kv_heads=num_heads, **facts)
        _check_mechanism(self.mechanism)
        if causal:
            self.mechanism.require("causal", "causal=True")
        self.absorbed: Mechanism | None = None
        if _no_steps(self.mechanism) is None:
            self.absorbed = construct(mechanism, num_heads, rank + rope, num_kv_heads=1, **facts)

        width = num_heads * (nope + rope)
        if q_rank is None:
            self.q_proj: nn.Module = nn.Linear(dim, width, bias=False)
        else:
            q_norm = nn.RMSNorm(q_rank, eps=self.NORM_EPS)
            self.q_proj = nn.Sequential(
                nn.Linear(dim, q_rank, bias=False), q_norm, nn.Linear(q_rank, width, bias=False)
            )
        self.kv_down = nn.Linear(dim, rank, bias=False)
        self.kv_norm = nn.RMSNorm(rank, eps=self.NORM_EPS)
        self.rope_proj = nn.Linear(dim, rope, bias=False)
        self.k_up = nn.Linear(rank, num_heads * nope, bias=False)
        self.v_up = nn.Linear(rank, num_heads * value, bias=False)
        self.out_proj = nn.Linear(num_heads * value, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier uniform weights; norms with a weight of 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def forward(
        self, x: Tensor, *, mask: Mask | None = None, bias: Bias | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """``merge(attend(...))``: [B, T, E] -> [B, T, E].

        Args:
            x: [B, T, E].
            mask: what may be attended; everything if None.
            bias: terms to be added to the scores.
            positions: int [T] or [B, T]; counted among real tokens if None.
        """
        return self.merge(self.attend(x, mask=mask, bias=bias, positions=positions))

    def attend(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """The output of each head before the output projection, [B, H, T, Dv]; arguments as ``forward``.

        ``values`` [T, m] stand in for those of every head.

        Raises:
            ValueError: for shapes that do not fit, and for what the mechanism or the site cannot honour.
        """
        mask = site_mask(mask, self.causal)
        x = self._checked(x, mask)
        positions = mask.positions(x.shape[1], x.device) if positions is None else positions
        nope, rope = self._queries(x, positions)
        latent, rope_key = self._kept(x, positions)
        k = torch.cat([self._split(self.k_up(latent)), rope_key.expand(-1, self.num_heads, -1, -1)], dim=-1)
        v = self._split(self.v_up(latent)) if values is None else values.expand(*k.shape[:2], -1, -1)
        return self.mechanism(torch.cat([nope, rope], dim=-1), k, v, mask, bias)

    def project_values(self, x: Tensor) -> Tensor:
        """The values of each head: [B, T, E] -> [B, H, T, Dv]."""
        return self._split(self.v_up(self.kv_norm(self.kv_down(x))))

    def merge(self, heads: Tensor) -> Tensor:
        """Output projection: [B, H, T, Dv] -> [B, T, E]."""
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def init_state(self, batch_size: int, max_len: int) -> KVState:
        """An empty state for causal self-attention over at most ``max_len`` tokens.

        Returns:
            A state of one head: ``k`` holds the rope keys [B, 1, max_len, P], ``v`` the latents [B, 1, max_len, R].

        Raises:
            ValueError: if the site was built with causal=False, or the mechanism cannot run at another width.
        """
        if self.causal is False:
            raise ValueError("this attention was built with causal=False; decoding by steps is causal")
        if self.absorbed is None:
            raise ValueError(f"MultiheadLatentAttention cannot decode: {_no_steps(self.mechanism)}")
        at_least(0, "MultiheadLatentAttention", batch_size=batch_size, max_len=max_len)
        room = self.kv_down.weight.new_zeros(batch_size, 1, max_len, self.rope_dim + self.kv_rank)
        rope_key, latent = room.detach().split([self.rope_dim, self.kv_rank], dim=-1)
        return KVState(rope_key.contiguous(), latent.contiguous(), None, real_tokens(room[:, :, :0], None), 0)

    def step(
        self, x: Tensor, state: KVState, *, mask: Mask | None = None, bias: Bias | None = None
    ) -> tuple[Tensor, KVState]:
        """Attends from t new tokens [B, t, E]; equals the rows of one causal pass.

        Args:
            x: the new tokens.
            state: from ``init_state`` or the last ``step``; used up by the call.
            mask: ``key_keep`` [B, t] covers the new tokens; ``pair_keep`` all keys so far.
            bias: covers all keys so far.

        Returns:
            [B, t, E] and the next state.

        Raises:
            ValueError: when the state is full, or the arguments do not fit it.
        """
        mask = as_mask(mask)
        if self.absorbed is None:
            raise ValueError(f"MultiheadLatentAttention cannot decode: {_no_steps(self.mechanism)}")
        if mask.segments is not None:
            raise ValueError("MultiheadLatentAttention.step takes no mask.segments: a state is one sequence a row")
        x = self._checked(x, mask)
        positions = state.length[:, None] + mask.positions(x.shape[1], x.device)
        nope, rope = self._queries(x, positions)
        latent, rope_key = self._kept(x, positions)
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (nope, latent, rope_key, state.k, state.v))
        state = state.append(rope_key, latent[:, None], mask.key_keep, copy=tracked)
        rope_keys, latents = state.filled()
        q = torch.cat([nope @ self.k_up.weight.unflatten(0, (self.num_heads, -1)), rope], dim=-1)
        # The mechanism divides by the root of this width; the scores are those of the other one.
        q = q * ((self.kv_rank + self.rope_dim) / (self.nope_dim + self.rope_dim)) ** 0.5
        mask = Mask(causal=True, key_keep=state.kept(), pair_keep=mask.pair_keep)
        heads = self.absorbed(q, torch.cat([latents, rope_keys], dim=-1), latents, mask, bias)
        heads = heads @ self.v_up.weight.unflatten(0, (self.num_heads, -1)).mT
        return self.merge(heads), state

    def _checked(self, x: Tensor, mask: Mask) -> Tensor:
        check_tokens("x", x, self.kv_down)
        return hide(x, mask.key_keep)

    def _queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        nope, rope = self._split(self.q_proj(x)).split([self.nope_dim, self.rope_dim], dim=-1)
        return nope, self.rotary(rope, positions)

    def _kept(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What decoding keeps: latents [B, T, R] and rope keys [B, 1, T, P]."""
        latent = self.kv_norm(self.kv_down(x))
        return latent, self.rotary(self.rope_proj(x)[:, None], positions)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _check_mechanism(mechanism: Mechanism) -> None:
    name = type(mechanism).__name__
    if mechanism.traits.shared_qk:
        raise ValueError(f"{name} makes its keys from the queries; latent attention makes them from the latents")
    if mechanism.qk_parts > 1:
        raise ValueError(
            f"{name} has {mechanism.qk_parts} equal parts in q and k; those of latent attention are split by "
            f"nope_dim and rope_dim already"
        )
    if getattr(mechanism, "scale", None) is not None:
        raise ValueError(f"the scale is 1 / sqrt(nope_dim + rope_dim) here; leave out the scale of {name}")


def _no_steps(mechanism: Mechanism) -> str | None:
    """Why the absorbed form would not be the same attention; None where it is."""
    name, traits = type(mechanism).__name__, mechanism.traits
    if mechanism.state_dict():
        return f"{name} has parameters or buffers of its own, made for one width; Softmax has none"
    if not (traits.exact and traits.linear_in_v):
        return f"{name} is no softmax of q . k, which alone is the same on latents; Softmax is"
    for trait in ("causal", "rectangular", "grouped"):
        if not getattr(traits, trait):
            return f"{name} is not {trait}; Softmax is"
    return None
