"""torch.nn.MultiheadAttention's masks, where a boolean True hides, as one mask of ours, where it keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError

WHERE = "MultiHeadAttention()"


def keeping(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    *,
    query: Tensor,
    keys: int,
    appended: int,
) -> tuple[Tensor | None, bool]:
    """The mask and the band for attention(). Appended keys are seen by every row, which a band cannot say.

    Args:
        attn_mask: (Lq, Lk) or (B·H, Lq, Lk), boolean or added.
        key_padding_mask: (B, Lk) or (Lk,), boolean or added.
        causal: whether each row sees the keys up to its own place.
        query: (B, H, Lq, E).
        keys: how many keys the caller gave.
        appended: how many keys were added behind them.
    """
    batch, heads, rows = query.shape[:3]
    parts = []
    if attn_mask is not None:
        parts.append(_attn_mask(attn_mask, batch, heads, rows, keys))
    if key_padding_mask is not None:
        parts.append(_padding(key_padding_mask, batch, keys))
    if appended and causal:
        ones = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
        parts.append(ones.tril())
        causal = False
    if not parts:
        return None, causal
    if all(part.dtype == torch.bool for part in parts):
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        return pad(mask, (0, appended), value=True), causal
    total = sum(_added(part, query) for part in parts)
    assert isinstance(total, Tensor)
    return pad(total, (0, appended)), causal


def _added(keep: Tensor, like: Tensor) -> Tensor:
    if keep.dtype != torch.bool:
        return keep
    return torch.zeros(keep.shape, dtype=like.dtype, device=like.device).masked_fill(~keep, float("-inf"))


def _attn_mask(mask: Tensor, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    if tuple(mask.shape) == (rows, keys):
        return _kept("attn_mask", mask)
    if tuple(mask.shape) == (batch * heads, rows, keys):
        return _kept("attn_mask", mask).unflatten(0, (batch, heads))
    raise InputError(
        f"{WHERE}: `attn_mask` must have shape {(rows, keys)} or {(batch * heads, rows, keys)}, (Lq, Lk) or (B·heads, Lq, Lk); "
        f"got {tuple(mask.shape)}."
    )


def _padding(mask: Tensor, batch: int, keys: int) -> Tensor:
    shape = tuple(mask.shape)
    if shape == (batch, keys) or (batch == 1 and shape == (keys,)):
        return _kept("key_padding_mask", mask).view(batch, 1, 1, keys)
    raise InputError(f"{WHERE}: `key_padding_mask` must have shape {(batch, keys)}, (B, Lk); got {shape}.")


def _kept(name: str, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask
    if mask.is_floating_point():
        return mask
    raise InputError(
        f"{WHERE}: `{name}` must be boolean (True = hidden, as in torch.nn.MultiheadAttention) or floating point "
        f"(added to the logits); got {mask.dtype}. Use {name}.bool()."
    )
