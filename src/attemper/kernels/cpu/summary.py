"""by_head: the rows of a call summed by head in one pass of C; heads.py has the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...vitals import SIGNS, Vitals
from ..contract import are_as_written
from . import native


def serves(vitals: Vitals) -> bool:
    """Whether these are all signs of a call in float32, as this kernel writes them."""
    return are_as_written(vitals, "cpu")


def by_head(vitals: Vitals, keep: Tensor | None, saturable_keys: int, saturated_weight: float) -> tuple[Tensor, Tensor]:
    """The sums of each head, (H, columns) as in ``heads.COLUMNS``, and its peak, (H,), of vitals that this serves.

    ``keep`` is broadcastable to ``(B, H, Lq)``, and False leaves a row out. A row that sees ``saturable_keys`` or more is
    saturated if its top weight is above ``saturated_weight``.
    """
    batch, heads, rows = vitals.lse.shape
    # sums and peaks in one block of memory: one small allocation fewer among the activations of a pass
    found = torch.empty(heads * (native.FOLD_COLUMNS + 1), dtype=torch.float64, device="cpu")
    sums, peaks = found[heads:].view(heads, -1), found[:heads]
    kept: tuple[int, ...] = (0, 0, 0, 0)
    if keep is not None:
        keep = keep.expand(batch, heads, rows)
        kept = (keep.data_ptr(), *keep.stride())
    addresses = [getattr(vitals, name).data_ptr() for name in SIGNS]
    addresses.append(0 if vitals._lse_low is None else vitals._lse_low.data_ptr())
    native.fold(
        *addresses, *kept, batch, heads, rows, sums.data_ptr(), peaks.data_ptr(), saturable_keys, saturated_weight
    )
    return sums, peaks
