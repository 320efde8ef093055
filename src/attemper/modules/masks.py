"""torch.nn.MultiheadAttention's masks, where a boolean True hides, as one mask of ours, where it keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import measure
from ..errors import InputError
from .checks import check_mask

WHERE = "MultiHeadAttention()"


def merge_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    *,
    query: Tensor,
    keys: int,
    appended: int,
) -> tuple[Tensor | None, bool]:
    """The mask and the band for attention(). Appended keys are visible to every row, which a band cannot express.

    ``attn_mask`` is (Lq, Lk) or (B·H, Lq, Lk), ``key_padding_mask`` (B, Lk) or (Lk,), both boolean or added; ``query`` is
    (B, H, Lq, E). ``keys`` are those that the caller gave, ``appended`` those added behind them.
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
    mask = _kept("attn_mask", mask)
    if tuple(mask.shape) == (rows, keys):
        return mask
    if tuple(mask.shape) == (batch * heads, rows, keys):
        return mask.unflatten(0, (batch, heads))
    raise InputError(
        f"{WHERE}: `attn_mask` must have shape {(rows, keys)} or {(batch * heads, rows, keys)}, (Lq, Lk) or (B·heads, Lq, Lk); "
        f"got {tuple(mask.shape)}. One mask per sequence is mask.repeat_interleave({heads}, 0)."
    )


def _padding(mask: Tensor, batch: int, keys: int) -> Tensor:
    mask = _kept("key_padding_mask", mask)
    shape = tuple(mask.shape)
    if shape == (batch, keys) or (batch == 1 and shape == (keys,)):
        return mask.view(batch, 1, 1, keys)
    raise InputError(
        f"{WHERE}: `key_padding_mask` must have shape {(batch, keys)}, (B, Lk); got {shape}. "
        "For one per query and key use attn_mask."
    )


def _kept(name: str, mask: Tensor) -> Tensor:
    check_mask(WHERE, name, mask, "hidden, as in torch.nn.MultiheadAttention")
    return ~mask if mask.dtype == torch.bool else mask


def visible_keys(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """How many keys each row sees, broadcastable to (B, H, Lq, 1)."""
    rows, keys = query.shape[2], key.shape[2]
    if mask is None:
        counts = torch.full((rows,), keys, device=query.device)
        if causal:
            counts = torch.arange(1, rows + 1, device=query.device).clamp(max=keys)
        return counts[:, None]
    heads = mask.shape[1] if mask.dim() == 4 else 1
    narrow = [t[:, :1, :, :1].detach().expand(-1, heads, -1, -1) for t in (query, key)]
    return measure(*narrow, mask=mask, causal=causal, signs="visible").visible[..., None]
