"""Models of other libraries with our attention in them, so that what reads ours reads theirs.

Letters: B batch, H heads, T queries, S keys, E width.
"""

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.convert import BERT, convert, convertible
from attnzoo.mask import Mask


def adopt(model: nn.Module) -> nn.Module:
    """A copy of a model in which every attention that ``convert`` knows is ours; it computes the same.

    Rows of padding alone come out otherwise, for ours takes them for 0. An attention that stands in several places
    stays one. Attention weights, where a model asks for them, come back as None: ``record`` and ``attention_map`` give
    them.

    Args:
        model: such as a timm ViT, an encoder of transformers, ``nn.TransformerEncoder``, or a bare attention.

    Raises:
        ValueError: if there is no attention that is known, or one has what ours has not, or shares a weight with
            another module.

    Example:
        >>> from attnzoo.heads.health import head_health
        >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> health = head_health(adopt(nn.TransformerEncoder(layer, 2)), [torch.randn(4, 12, 16)])
        >>> [entry.head for entry in health.heads][:1]
        [Head(site='layers.0.self_attn.shell', number=0)]
    """
    adopted = copy.deepcopy(model)
    places = adopted.named_modules(remove_duplicate=False)
    found = [(path, module) for path, module in places if convertible(module)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no attention that is known here: nn.MultiheadAttention, timm's Attention, "
            f"or that of BERT, RoBERTa, ELECTRA, DistilBERT, ViT or DeiT in transformers"
        )
    _check_ties(adopted, found)
    doors = {module: _door(module).train(module.training) for _, module in found}
    for path, module in found:
        if not path:
            return doors[module]
        parent, _, name = path.rpartition(".")
        setattr(adopted.get_submodule(parent), name, doors[module])
    for module in adopted.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # or it reads the weights of its first attention, past the door
    return adopted


class TorchDoor(nn.Module):
    """Takes the calls of ``nn.MultiheadAttention``."""

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.shell = convert(module)
        self.leading_batch = module.batch_first
        # What layers of torch ask before they take a fast path of their own, past any module: they must not.
        self.batch_first, self.in_proj_bias, self._qkv_same_embed_dim = module.batch_first, None, False
        self.embed_dim = module.embed_dim

    @property
    def num_heads(self) -> int:
        """Heads of the shell, which may be pruned."""
        return self.shell.num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As there; the weights are None.

        Raises:
            ValueError: for keys and values from two tensors, a mask that does not fit, and ``is_causal`` without one.
        """
        if key is not value:
            raise ValueError("this attention reads keys and values from one context; give the same tensor for both")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal only tells that attn_mask is causal, as in torch; give attn_mask as well")
        single = query.dim() == 2
        x, context = (
            part[None] if single else part if self.leading_batch else part.transpose(0, 1) for part in (query, key)
        )
        mask, bias = _torch_masks(key_padding_mask, attn_mask, x.shape[0], self.num_heads)
        y = self.shell(x, None if query is key else context, mask=mask, bias=bias)
        return (y[0] if single else y if self.leading_batch else y.transpose(0, 1)), None


class TimmDoor(nn.Module):
    """Takes the calls of timm's ``Attention``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.shell, self.proj_drop = convert(module), module.proj_drop

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As there; that of SAM is given tokens as a grid."""
        mask, bias = _attend_mask(attn_mask, len(x))
        y = self.shell(x.flatten(1, -2), mask=mask._replace(causal=is_causal), bias=bias)
        return self.proj_drop(y).unflatten(1, x.shape[1:-1])  # type: ignore[operator]


class BertDoor(nn.Module):
    """Takes the calls of an attention of transformers; BERT's has a residual and a norm behind it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.shell = convert(module)
        self.dropout, self.norm = None, None
        if type(module).__name__ in BERT:
            behind: Any = module.output
            self.dropout, self.norm = behind.dropout, getattr(behind, "LayerNorm", None)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        """As there; the weights are None."""
        mask, bias = _attend_mask(attention_mask, len(hidden_states))
        y = self.shell(hidden_states, mask=mask, bias=bias)
        if self.dropout is None or self.norm is None:
            return y, None
        return self.norm(self.dropout(y) + hidden_states), None


def _check_ties(model: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
    """Raises ``ValueError`` for a weight of an attention that another module holds, since ours are copies."""
    held = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    for path, module in found:
        for name, weight in module.named_parameters():
            if held[id(weight)] > 1:
                raise ValueError(
                    f"{path or type(module).__name__}: {name} is held by another module as well, and would not be any "
                    f"more; share the whole attention, or give each a weight of its own"
                )


def _door(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.MultiheadAttention):
        return TorchDoor(module)
    return TimmDoor(module) if hasattr(module, "qkv") else BertDoor(module)


def _torch_masks(padding: Tensor | None, pairs: Tensor | None, batch: int, heads: int) -> tuple[Mask, Tensor | None]:
    """Masks of torch, where True is hidden and numbers are added to the scores."""
    mask, bias = Mask(), None
    if padding is not None:
        _check_kind("key_padding_mask", padding)
        padding = padding[None] if padding.dim() == 1 else padding
        if padding.shape[:-1] != (batch,):
            raise ValueError(f"key_padding_mask must be [{batch}, S] here, got {tuple(padding.shape)}")
        if padding.is_floating_point() and not bool(((padding == 0) | (padding == -torch.inf)).all()):
            raise ValueError("key_padding_mask adds numbers to the scores; give them by attn_mask")
        hidden = padding if padding.dtype == torch.bool else padding == -torch.inf
        mask = mask._replace(key_keep=~hidden)
    if pairs is not None:
        _check_kind("attn_mask", pairs)
        if pairs.dim() == 3:
            if len(pairs) != batch * heads:
                raise ValueError(f"attn_mask of {len(pairs)} maps does not fit {batch} sequences of {heads} heads")
            pairs = pairs.unflatten(0, (batch, heads))
        if pairs.dtype == torch.bool:
            return mask._replace(pair_keep=~pairs), None
        if bool(((pairs == 0) | (pairs == -torch.inf)).all()):
            return mask._replace(pair_keep=pairs == 0), None
        bias = pairs
    return mask, bias


def _attend_mask(pairs: Tensor | None, batch: int) -> tuple[Mask, Tensor | None]:
    """A mask of timm or transformers, True where a key may be attended, or numbers added to the scores.

    Where it is the same for every query it is one of padding.
    """
    if pairs is None:
        return Mask(), None
    _check_kind("the mask", pairs)
    if pairs.dtype != torch.bool:
        low = pairs <= torch.finfo(pairs.dtype).min / 2
        if not bool((low | (pairs == 0)).all()):
            return Mask(), pairs
        pairs = ~low
    if pairs.dim() == 4 and pairs.shape[1] == 1 and bool((pairs == pairs[:, :, :1]).all()):
        return Mask(key_keep=pairs[:, 0, 0].expand(batch, -1)), None
    return Mask(pair_keep=pairs), None


def _check_kind(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} is {mask.dtype}, and 1 can be read two ways; give it as bool, or as terms to be added"
        )
