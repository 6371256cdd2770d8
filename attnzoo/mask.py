"""What each query may attend to: one meaning for every mechanism and back end.

Letters: B batch, H query heads, T queries, S keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mask(NamedTuple):
    """Which keys each query may attend to. True means *may be attended*, as in torch's SDPA.

    The parts are combined by "and". Terms that are added to the scores are no mask; they go in the
    separate ``bias`` argument of a mechanism.

    Attributes:
        causal: query ``i`` sees keys up to ``i + S - T``: the last query belongs to the last key.
        key_keep: bool [B, S], False at padding. Whatever stands at a key hidden here, NaN included,
            reaches neither an output nor a gradient.
        pair_keep: bool [T, S] or four dimensions [B or 1, H or 1, T, S]. What stands at a key that is
            hidden only here must be finite.
        segments: int [B, T], self-attention over packed sequences: a query sees the keys of its own
            segment only.

    Example:
        >>> Mask.from_lengths(torch.tensor([1, 3]), causal=True).visible(3, 3)[0, 0]
        tensor([[ True, False, False],
                [ True, False, False],
                [ True, False, False]])
    """

    causal: bool = False
    key_keep: Tensor | None = None
    pair_keep: Tensor | None = None
    segments: Tensor | None = None

    @classmethod
    def from_lengths(cls, lengths: Tensor, max_len: int | None = None, causal: bool = False) -> "Mask":
        """Hides what stands at or after each row's length (padding on the right).

        Args:
            lengths: int [B], the number of real keys of each row.
            max_len: S; the longest length if None.
            causal: see ``Mask``.

        Raises:
            ValueError: if a length is negative or above ``max_len``.
        """
        if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.is_floating_point():
            raise ValueError(f"lengths must be an integer tensor [B], got {lengths!r}")
        longest = int(lengths.max()) if lengths.numel() else 0
        size = longest if max_len is None else max_len
        if longest > size or (lengths < 0).any():
            raise ValueError(f"lengths must lie in 0..{size}, got {lengths.tolist()}")
        places = torch.arange(size, device=lengths.device)
        return cls(causal=causal, key_keep=places < lengths[:, None])

    @classmethod
    def from_attention_mask(cls, attention_mask: Tensor, causal: bool = False) -> "Mask":
        """Takes the mask of Hugging Face tokenizers: [B, S], 1 (or True) at real tokens, 0 at padding.

        Raises:
            ValueError: if the mask is not two-dimensional or holds anything but 0 and 1.
        """
        _check_two_dimensions("attention_mask", attention_mask)
        if attention_mask.dtype != torch.bool and not ((attention_mask == 0) | (attention_mask == 1)).all():
            raise ValueError("attention_mask must hold only 0 (padding) and 1 (real token)")
        return cls(causal=causal, key_keep=attention_mask.bool())

    @classmethod
    def from_key_padding_mask(cls, key_padding_mask: Tensor, causal: bool = False) -> "Mask":
        """Takes ``key_padding_mask`` of ``torch.nn.MultiheadAttention``: bool [B, S], True at padding.

        Raises:
            ValueError: if the mask is not two-dimensional or not boolean.
        """
        _check_two_dimensions("key_padding_mask", key_padding_mask)
        _check_boolean("key_padding_mask", key_padding_mask)
        return cls(causal=causal, key_keep=~key_padding_mask)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises ``ValueError`` unless every part fits B, H, T, S and is boolean where it must be."""
        if not isinstance(self.causal, bool):
            raise ValueError(f"mask.causal must be True or False, got {self.causal!r}")
        for name in ("key_keep", "pair_keep", "segments"):
            part = getattr(self, name)
            if part is not None and not isinstance(part, Tensor):
                raise ValueError(f"mask.{name} must be a tensor, got {type(part).__name__}")
        if self.key_keep is not None:
            _check_boolean("mask.key_keep", self.key_keep)
            _check_shape("mask.key_keep", self.key_keep, "[B, S]", (batch, keys))
        if self.pair_keep is not None:
            _check_boolean("mask.pair_keep", self.pair_keep)
            check_pair_shape("mask.pair_keep", self.pair_keep, batch, heads, queries, keys)
        if self.segments is not None:
            if self.segments.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
                raise ValueError(f"mask.segments must be integers [B, T], got {self.segments.dtype}")
            if queries != keys:
                raise ValueError(f"mask.segments is for self-attention, where T equals S; got T={queries} and S={keys}")
            _check_shape("mask.segments", self.segments, "[B, T]", (batch, queries))

    def visible(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor | None:
        """All parts as one bool tensor, [T, S] or [B or 1, H or 1, T, S]; None when nothing is hidden."""
        parts = []
        if self.causal and queries > 1:
            parts.append(causal_pattern(queries, keys, device))
        if self.pair_keep is not None:
            parts.append(self.pair_keep)
        if self.key_keep is not None:
            parts.append(self.key_keep[:, None, None, :])
        if self.segments is not None:
            parts.append(self.segments[:, None, :, None] == self.segments[:, None, None, :])
        if not parts:
            return None
        whole = parts[0]
        for part in parts[1:]:
            whole = whole & part
        return whole

    def rows_with_keys(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Bool [B or 1, H or 1, T]: True where a query sees at least one key; None when all of them do.

        Costs no T x S numbers unless ``pair_keep``, which has so many itself, is given.
        """
        if self.pair_keep is not None:
            visible = self.visible(queries, keys, device)
            assert visible is not None
            return visible.any(-1).reshape((1, 1, queries) if visible.dim() == 2 else visible.shape[:-1])
        if self.segments is not None and self.key_keep is not None:
            return _rows_in_segments(self.segments, self.key_keep, self.causal)[:, None]
        if self.key_keep is not None:
            if not self.causal:
                return self.key_keep.any(-1)[:, None, None].expand(-1, 1, queries)
            seen = torch.cat([self.key_keep.new_zeros(self.key_keep.shape[0], 1), self.key_keep], 1).cumsum(1)
            last = torch.arange(queries, device=device) + keys - queries + 1
            return (seen[:, last.clamp(min=0)] > 0)[:, None]
        if keys == 0 or (self.causal and queries > keys):
            places = torch.arange(queries, device=device) + keys - queries
            return ((places >= 0) & (keys > 0))[None, None]
        return None

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """The place of each token among the *real* tokens of its row (and of its segment).

        Places under padding are some valid place. Returns int64 [T], or [B, T] where rows differ.
        """
        if self.segments is not None:
            return _places_in_segments(self.segments, self.key_keep)
        if self.key_keep is not None:
            return (self.key_keep.long().cumsum(1) - 1).clamp(min=0)
        return torch.arange(length, device=device)


def causal_pattern(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Bool [T, S], True where key ``j <= i + S - T``."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def as_mask(mask: Mask | None) -> Mask:
    """The mask, or one that hides nothing.

    Raises:
        ValueError: for a bare tensor, with the forms that may be meant.
    """
    if mask is None:
        return Mask()
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask must be an attnzoo.Mask, got {type(mask).__name__}: write Mask(pair_keep=...) for [T, S] or "
            f"Mask(key_keep=...) for [B, S], boolean; terms to be added to the scores go in the bias argument"
        )
    return mask


def site_mask(mask: Mask | None, causal: bool | None) -> Mask:
    """The mask of a call at a site that is causal, is not, or leaves it to each call (None).

    Raises:
        ValueError: for a causal mask at a site that was built without.
    """
    mask = as_mask(mask)
    if causal is False and mask.causal:
        raise ValueError("this attention was built with causal=False; leave causal out to decide it in each call")
    return mask._replace(causal=True) if causal else mask


def hide(x: Tensor, key_keep: Tensor | None) -> Tensor:
    """x [B, S, E] with 0 where ``key_keep`` [B, S] is False, NaN or not.

    Raises:
        ValueError: if ``key_keep`` is not boolean or not [B, S].
    """
    if key_keep is None:
        return x
    _check_boolean("mask.key_keep", key_keep)
    _check_shape("mask.key_keep", key_keep, "[B, S]", tuple(x.shape[:2]))
    return x.masked_fill(~key_keep[..., None], 0)


def hide_keys(x: Tensor, key_keep: Tensor | None) -> Tensor:
    """x [B, G, S, D] with 0 where ``key_keep`` [B, S], checked already, is False."""
    return x if key_keep is None else x.masked_fill(~key_keep[:, None, :, None], 0)


def _places_in_segments(segments: Tensor, key_keep: Tensor | None) -> Tensor:
    # Sorted by segment the members of one stand together, so one running count serves all: O(T log T).
    ids, order = segments.sort(dim=1, stable=True)
    real = torch.ones_like(segments) if key_keep is None else key_keep.long().gather(1, order)
    count, first = real.cumsum(1), _first_of_each(ids)
    before = torch.where(first, count - real, 0).cummax(1).values
    places = (count - before - 1).clamp(min=0)
    return torch.zeros_like(places).scatter(1, order, places)


def _rows_in_segments(segments: Tensor, key_keep: Tensor, causal: bool) -> Tensor:
    """Bool [B, T]: whether a real key of the own segment is in sight."""
    ids, order = segments.sort(dim=1, stable=True)
    real = key_keep.long().gather(1, order)
    count, first = real.cumsum(1), _first_of_each(ids)
    if causal:
        seen = count > torch.where(first, count - real, 0).cummax(1).values
    else:
        group = first.long().cumsum(1) - 1
        seen = torch.zeros_like(group).scatter_add(1, group, real).gather(1, group) > 0
    return torch.zeros_like(key_keep).scatter(1, order, seen)


def _first_of_each(ids: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)


def check_pair_shape(name: str, value: Tensor, batch: int, heads: int, queries: int, keys: int) -> None:
    """Raises ``ValueError`` unless ``value`` is [T, S] or [B or 1, H or 1, T, S]."""
    shape = tuple(value.shape)
    if len(shape) == 3:
        raise ValueError(
            f"{name} has three dimensions {shape}, which can be read two ways: write {name}.unsqueeze(1) "
            f"for one [T, S] a sample, or .unsqueeze(0) for one a head"
        )
    fits = (len(shape) == 2 and shape == (queries, keys)) or (
        len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == (queries, keys)
    )
    if not fits:
        raise ValueError(
            f"{name} must be [T, S] = {(queries, keys)} or [B or 1, H or 1, T, S] with B={batch}, H={heads}; "
            f"got {shape}"
        )


def _check_boolean(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a boolean tensor, got {type(value).__name__}")
    if value.dtype != torch.bool:
        raise ValueError(
            f"{name} must be boolean, True where a key may be attended; got {value.dtype}. "
            f"Terms to be added to the scores go in the bias argument"
        )


def _check_two_dimensions(name: str, value: Tensor) -> None:
    if value.dim() != 2:
        raise ValueError(f"{name} must be [B, S], got {tuple(value.shape)}")


def _check_shape(name: str, value: Tensor, letters: str, expected: tuple[int, ...]) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must be {letters} = {expected}, got {tuple(value.shape)}")
