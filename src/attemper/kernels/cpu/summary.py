"""fold: the rows of a call into the sums of a HeadSummary, in one pass over them; heads.py is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...heads import COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT, HeadSummary
from ...vitals import SIGNS, Vitals
from . import native


def serves(vitals: Vitals) -> bool:
    """Whether these are all signs of a call in float32, as this kernel writes them."""
    signs = vitals.__dict__  # and, among them, what rounding took from lse
    return len(vitals.measured) == len(SIGNS) and all(
        sign.device.type == "cpu"
        and sign.dim() == 3
        and sign.is_contiguous()
        and sign.dtype == (torch.int32 if name == "visible" else torch.float32)
        for name, sign in signs.items()
    )


def by_head(vitals: Vitals, keep: Tensor | None) -> HeadSummary:
    """``vitals.by_head(keep)`` to rounding, for vitals that this serves.

    Args:
        vitals: all signs of one call, ``(B, H, Lq)``.
        keep: boolean, broadcastable to ``(B, H, Lq)``; False leaves a row out.
    """
    batch, heads, rows = vitals.lse.shape
    # sums and peaks beside each other: a small block fewer among the activations of a pass
    found = torch.empty(heads * (len(COLUMNS) + 1), dtype=torch.float64, device="cpu")
    sums, peaks = found[heads:].view(heads, -1), found[:heads]
    kept: tuple[int, ...] = (0, 0, 0, 0)
    if keep is not None:
        keep = keep.expand(batch, heads, rows)
        kept = (keep.data_ptr(), *keep.stride())
    places = [getattr(vitals, name).data_ptr() for name in SIGNS]
    places.append(0 if vitals._lse_low is None else vitals._lse_low.data_ptr())
    sizes = (batch, heads, rows, sums.data_ptr(), peaks.data_ptr(), SATURABLE_KEYS)
    native.fold((*places, *kept, *sizes), SATURATED_WEIGHT)
    return HeadSummary((*COLUMNS, "peak"), sums, peaks)
