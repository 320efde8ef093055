"""Slices: which heads of its module a call computes, if it computes some at a time, as the memory of its queries shows."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

MOST = 4096  # matrices of one call that are looked at


def is_split_over_ranks() -> bool:
    """Whether other ranks may compute the other heads."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def heads_at(query: Tensor, heads: int, matrix: Tensor) -> tuple[int, ...] | None:
    """The heads that each item of ``(B, h, Lq, Lk)`` has, the same for all items; None: not known."""
    found = heads_in(query, heads)
    if found is None or len(found) != matrix.shape[0] * matrix.shape[1]:
        return None
    some = tuple(dict.fromkeys(found))
    return some if found == some * (len(found) // len(some)) else None


def heads_in(query: Tensor, heads: int) -> tuple[int, ...] | None:
    """The head of each matrix of ``(…, Lq, E)``, a view of the queries of so many heads; None: its memory does not show it.

    Heads are cut from tokens, (B, L, H, E), or lie one after another, (B, H, L, E).
    """
    if query.dim() < 2:
        return None
    *lead, length, width = query.shape
    step, size = query.stride(-2), query.untyped_storage().nbytes() // query.element_size()
    if length < 2 or (width > 1 and query.stride(-1) != 1) or query[..., 0, 0].numel() > MOST:
        return None
    each = width if step == heads * width else length * width if step == width else 0
    if not each or size % (heads * length * width):
        return None
    starts = [
        query.storage_offset() + sum(place * stride for place, stride in zip(places, query.stride(), strict=False))
        for places in product(*map(range, lead))
    ]
    if any(start % each for start in starts):
        return None
    return tuple(start // each % heads for start in starts)
