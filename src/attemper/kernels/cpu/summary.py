"""by_head: the rows of a call summed by head in one pass of C; heads.py has the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...heads import ALL_COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT
from ...vitals import SIGNS, Vitals, as_returned
from ..contract import ALL_SIGNS, are_as_written
from . import native
from .native import readable

Room = Callable[[int], tuple[Tensor, int]]
"""Allocates rows for the sums of so many heads: a buffer with the columns ``heads.ALL_COLUMNS``, and the first free row."""


def serves(vitals: Vitals) -> bool:
    """Whether these are all signs of a call in float32, as this kernel writes them."""
    signs = as_returned(vitals)
    return (vitals.measured == SIGNS and foldable(signs) is not None) or are_as_written(vitals, "cpu")


def foldable(signs: Any) -> tuple[int, int, int] | None:
    """(B, H, Lq) of what a forward returned, if it is a block of all signs in float32; None for anything else."""
    return getattr(signs, "foldable", None)


def own_room(heads: int) -> tuple[Tensor, int]:
    """A block for one call alone."""
    return torch.empty(heads, len(ALL_COLUMNS), dtype=torch.float64, device="cpu"), 0


def by_head(vitals: Vitals, keep: Tensor | None, room: Room = own_room) -> tuple[Tensor, int, int]:
    """Sum vitals by head: returns the buffer, the first row that was written, and the number of heads.

    ``keep`` is broadcastable to ``(B, H, Lq)``, and False leaves a row out. No tensors are made of signs that nobody has read.
    """
    signs: Any = as_returned(vitals)
    shape = foldable(signs)
    if shape is not None:
        return fold(signs, shape, keep, room)
    signs = readable((*[getattr(vitals, name) for name in SIGNS], vitals._lse_low))
    return fold(signs, vitals.lse.shape, keep, room)


def fold(signs: Any, shape: Sequence[int], keep: Tensor | None, room: Room) -> tuple[Tensor, int, int]:
    """Sum a block of signs by head, or signs that are tensors already. Arguments and result as in `by_head`."""
    block, first = room(shape[1])
    keep = None if keep is None else keep.expand(shape)
    keep, found = (keep, block) if native.bound else readable((keep, block))
    native.library.fold(signs, keep, found, first, SATURABLE_KEYS, SATURATED_WEIGHT)
    return block, first, shape[1]


def measure_by_head(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | None,
    rows: Tensor | None,
    room: Room,
) -> tuple[Tensor, int, int] | None:
    """Measure a plain call and sum its signs by head; ``rows`` is (B or 1, Lq). None if it is not plain or is in float64."""
    if query.dtype is torch.float64 or not (native.bound and native.library.guard(query, key, None, mask, None)):
        return None
    run = native.library.forward(query, key, None, mask, None, causal, None, scale, None, ALL_SIGNS, True, False)
    if run is None:
        return None
    return fold(run[1], query.shape[:3], None if rows is None else rows[:, None, :], room)
