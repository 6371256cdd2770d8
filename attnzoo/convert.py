"""Attentions of torch, timm and transformers as ours: weights copied, outputs equal.

What is recognised, by the names of its parts, so that none of these libraries is needed:

    torch         nn.MultiheadAttention, without bias_k, bias_v and add_zero_attn
    timm          Attention of its Vision Transformers: qkv, q_norm, k_norm, gate, proj
    transformers  the self-attention of BERT, RoBERTa, ELECTRA, DistilBERT, ViT and DeiT

A bias of the keys adds the same to all scores of a query, which a softmax does not see: it is left out. Behind a norm
of the keys it would be seen, and is refused.

Letters: H heads, D head width, E width.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attnzoo.headwise import QKNorm, QKNormForm
from attnzoo.mechanisms.softmax import Softmax
from attnzoo.multihead import MultiheadAttention

BERT = ("BertAttention", "RobertaAttention", "ElectraAttention", "XLMRobertaAttention")
"""Classes of transformers with ``self.query, key, value`` and ``output.dense``."""

NAMES = {
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "ViTAttention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "DeiTAttention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""Other classes of transformers -> names of their four projections."""

TIMM = ("qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop", "num_heads", "head_dim", "scale")
"""What timm's Attention has."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
BEHIND = ("proj_drop", "output.dropout", "output.LayerNorm")
"""Parts behind the output projection, which are not converted."""


class Projections(NamedTuple):
    """What an attention of another library is made of.

    Attributes:
        num_heads: H.
        weights: of queries, keys, values and output.
        biases: of the same; those of keys are not used.
        dropout: of the attention weights.
    """

    num_heads: int
    weights: tuple[Tensor, Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    dropout: float


def convertible(module: nn.Module) -> bool:
    """Whether ``convert`` knows this kind of module."""
    return isinstance(module, nn.MultiheadAttention) or _is_timm(module) or _is_transformers(module)


def convert(module: nn.Module) -> MultiheadAttention:
    """The same attention as ours, in the mode, precision and place of the module; what is frozen stays so.

    Ours takes the batch first, also where ``nn.MultiheadAttention`` has ``batch_first=False``.

    Args:
        module: one that ``convertible`` names. Dropout behind the output projection is no part of it.

    Raises:
        ValueError: for another kind of module, and for what our shell does not have, by name: among others hooks,
            parametrizations, and layers of other packages in the place of linear ones.

    Example:
        >>> theirs = nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> torch.allclose(convert(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
        True
    """
    _check_parts(module)
    with torch.enable_grad():  # or parts of a weight would look frozen
        if isinstance(module, nn.MultiheadAttention):
            shell = _shell(_of_torch(module))
        elif _is_timm(module):
            shell = _of_timm(module)
        elif _is_transformers(module):
            shell = _shell(_of_transformers(module))
        else:
            raise ValueError(
                f"{type(module).__name__} is no attention that is known here: nn.MultiheadAttention, timm's "
                f"Attention, or {', '.join((*BERT, *NAMES))} of transformers"
            )
    return shell.train(module.training)


def _check_parts(module: nn.Module) -> None:
    """Raises ``ValueError`` for what copied weights would leave behind."""
    for name, part in module.named_modules():
        where, kind = name or "the attention", type(part)
        if name in BEHIND:
            continue
        if any(getattr(part, hooks) for hooks in HOOKS):
            raise ValueError(f"{where} ({kind.__name__}) has hooks, which ours would not call; remove them first")
        if parametrize.is_parametrized(part):
            raise ValueError(f"{where} is parametrized; parametrize.remove_parametrizations makes its weights plain")
        weight = getattr(part, "weight", None)
        if name and isinstance(weight, Tensor) and weight.dim() == 2 and kind.forward is not nn.Linear.forward:
            raise ValueError(f"{where} is a {kind.__module__}.{kind.__name__}, nn.Linear is known here")


def _of_torch(module: nn.MultiheadAttention) -> Projections:
    if type(module).forward is not nn.MultiheadAttention.forward:
        raise ValueError(
            f"{type(module).__name__} has a forward of its own, nn.MultiheadAttention's alone is known here"
        )
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise ValueError(
            "nn.MultiheadAttention with bias_k, bias_v or add_zero_attn adds keys, which ours has no part for"
        )
    if module.kdim != module.vdim:
        raise ValueError(f"ours reads keys and values from one context; kdim={module.kdim}, vdim={module.vdim} are two")
    if module.in_proj_weight is not None:
        q, k, v = module.in_proj_weight.chunk(3)
    else:
        q, k, v = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    out = module.out_proj
    in_bias = module.in_proj_bias
    of_q, of_k, of_v = (None, None, None) if in_bias is None else in_bias.chunk(3)
    return Projections(module.num_heads, (q, k, v, out.weight), (of_q, of_k, of_v, out.bias), module.dropout)


def _is_transformers(module: nn.Module) -> bool:
    name = type(module).__name__
    parts = ("self", "output") if name in BERT else NAMES.get(name, ())
    return bool(parts) and all(hasattr(module, part) for part in parts)


def _of_transformers(module: Any) -> Projections:
    name = type(module).__name__
    if name in BERT:
        inner, out = module.self, module.output.dense
        linears = [inner.query, inner.key, inner.value, out]
        heads, dropout = inner.num_attention_heads, inner.dropout.p
        kind = getattr(inner, "position_embedding_type", "absolute")
        if kind != "absolute":
            raise ValueError(f"{name} with position_embedding_type={kind!r} adds terms of its own to the scores")
        if getattr(inner, "is_decoder", False) or getattr(module, "is_cross_attention", False):
            raise ValueError(f"{name} of a decoder keeps a cache of its own; encoders are known here")
    else:
        linears = [getattr(module, part) for part in NAMES[name]]
        heads = module.n_heads if name == "DistilBertSelfAttention" else module.num_attention_heads
        dropout = module.dropout.p if name == "DistilBertSelfAttention" else module.attention_dropout
    (q, k, v, o) = linears
    weights, biases = (q.weight, k.weight, v.weight, o.weight), (q.bias, k.bias, v.bias, o.bias)
    return Projections(heads, weights, biases, dropout)


def _is_timm(module: nn.Module) -> bool:
    return type(module).__name__ == "Attention" and all(hasattr(module, part) for part in TIMM)


def _check_timm(module: nn.Module) -> None:
    """Raises ``ValueError`` for what others of that name and these parts have beside them."""
    own = {**vars(module), **module._parameters, **module._buffers, **module._modules}
    known = {*vars(nn.Module()), *TIMM, "norm", "gate", "attn_dim", "fused_attn"}
    on = {name for name, value in own.items() if value is not None and value is not False and name[0] != "_"}
    others = on - known
    if others:
        raise ValueError(
            f"the Attention of {type(module).__module__} has {', '.join(sorted(others))}, which ours has not; that of "
            f"timm.layers is known here"
        )


def _of_timm(module: Any) -> MultiheadAttention:
    _check_timm(module)
    qkv, proj = module.qkv, module.proj
    if not isinstance(module.scale, float) or module.scale != module.head_dim**-0.5:
        raise ValueError(f"this Attention has scale={module.scale}, ours divides scores by the root of the head width")
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        raise ValueError("timm's Attention with scale_norm has a norm over all heads, which ours has not")
    gate = getattr(module, "gate", None)
    if gate is not None and gate.bias is not None and bool(gate.bias.any()):
        raise ValueError("the gate of this timm Attention has a bias, ours has none")
    weights, biases = qkv.weight.chunk(3), (None, None, None) if qkv.bias is None else qkv.bias.chunk(3)
    form = _norm_form(module.q_norm, module.k_norm)
    if form is not None and biases[1] is not None and bool(biases[1].any()):
        raise ValueError("behind a norm of the keys the bias of the keys is seen; our key projection has none")
    found = Projections(module.num_heads, (*weights, proj.weight), (*biases, proj.bias), module.attn_drop.p)
    shell = _shell(found, qk_norm=form, gate=None if gate is None else "elementwise")
    for ours, theirs in ((shell.q_norm, module.q_norm), (shell.k_norm, module.k_norm)):
        if ours is not None:
            _copy_norm(ours, theirs)
    if gate is not None and shell.gate is not None:
        _copy(shell.gate.proj.weight, gate.weight)
    return shell


def _norm_form(q_norm: nn.Module, k_norm: nn.Module) -> QKNormForm | None:
    forms: list[QKNormForm | None] = []
    for norm in (q_norm, k_norm):
        name = type(norm).__name__
        forms.append(None if isinstance(norm, nn.Identity) else "layer" if name.startswith("LayerNorm") else "rms")
        if forms[-1] == "rms" and "rms" not in name.lower():
            raise ValueError(f"{name} is no norm of queries and keys that ours has: LayerNorm, RMSNorm")
        bias = getattr(norm, "bias", None)
        if bias is not None and bool(bias.any()):
            raise ValueError(f"{name} of queries or keys has a bias, ours has a gain alone")
    if forms[0] != forms[1]:
        raise ValueError(f"queries have the norm {forms[0]}, keys {forms[1]}; ours has one kind for both")
    return forms[0]


def _copy_norm(ours: QKNorm, theirs: Any) -> None:
    assert ours.weight is not None
    if theirs.weight is not None:
        _copy(ours.weight, theirs.weight)
    ours.EPS = theirs.eps  # of this norm alone


def _shell(found: Projections, **options: Any) -> MultiheadAttention:
    q, k, _, out = found.weights
    shell = MultiheadAttention(
        q.shape[1],
        found.num_heads,
        functools.partial(Softmax, dropout=found.dropout),
        head_dim=q.shape[0] // found.num_heads,
        context_dim=k.shape[1],
        out_dim=out.shape[0],
        **options,
    ).to(q)
    assert shell.k_proj is not None
    linears = (shell.q_proj, shell.k_proj, shell.v_proj, shell.out_proj)
    for linear, weight, bias in zip(linears, found.weights, found.biases, strict=True):
        _copy(linear.weight, weight)
        if linear.bias is None:
            continue
        if bias is None:
            linear.register_parameter("bias", None)  # as they have it
        else:
            _copy(linear.bias, bias)
    return shell


def _copy(ours: Tensor, theirs: Tensor) -> None:
    with torch.no_grad():
        ours.copy_(theirs)
    ours.requires_grad_(theirs.requires_grad)
