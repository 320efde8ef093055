"""Slices: which heads of its module a call computes, if it computes some at a time, as the memory of its queries shows."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...attach.running import Frame
from ...attach.storages import address
from .layout import called_with, named_heads

if TYPE_CHECKING:
    from ...call import AttentionCall

MOST = 4096  # matrices of one call that are looked at


class InMemory(NamedTuple):
    """Where the entries of a tensor are in its storage, which it does not keep alive."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int  # of the storage, in entries

    @classmethod
    def of(cls, tensor: Tensor) -> InMemory:
        size = int(tensor.untyped_storage().nbytes()) // tensor.element_size()
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), size)

    @property
    def starts(self) -> list[int]:
        """The first entry of each matrix of ``(…, L, E)``."""
        strides = self.stride[:-2]
        return [
            self.offset + sum(place * stride for place, stride in zip(places, strides, strict=True))
            for places in product(*map(range, self.shape[:-2]))
        ]


class Copy(NamedTuple):
    """A tensor that was made entry by entry, as q times a number is, and what it was made of."""

    source: InMemory
    made: InMemory


def copy_of(source: Tensor, result: Tensor, before: Copy | None) -> Copy | None:
    """How an op copied `source`, which may be a copy itself, entry by entry to memory of its own; None if it did not."""
    addresses = {address(source), address(result)}
    if source.shape != result.shape or 0 in addresses or len(addresses) < 2:
        return None
    place = InMemory.of(source)
    return Copy(before.source if before is not None and before.made == place else place, InMemory.of(result))


def heads_beside(frames: tuple[Frame, ...], heads: int) -> int | None:
    """How many heads the module declares, if a call computes fewer of them and no other rank could compute the rest."""
    named = named_heads(frames)
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return named if named is not None and heads < named and not ranks else None


def find_slices(call: AttentionCall) -> None:
    """Keep which heads of its module a call on (B, h, Lq, E) computes, if it computes some at a time."""
    call.module_heads = heads_beside(call.frames, call.info.heads)
    if call.module_heads is not None:
        some = heads_at(call.query, call.module_heads, call.info.batch * call.info.heads, call.frames)
        known = some is not None and len(some) == call.info.heads
        call.some_heads, call.heads_known = (some if known else None), call.heads_known and known


def heads_at(
    query: Tensor, heads: int, matrices: int, frames: tuple[Frame, ...], copied: Copy | None = None
) -> tuple[int, ...] | None:
    """The heads that each item of a call on so many matrices has, the same for all items; None: not known."""
    chosen = _heads_in(query, heads, called_with(frames), copied)
    if chosen is None or len(chosen) != matrices:
        return None
    some = tuple(dict.fromkeys(chosen))
    return some if chosen == some * (len(chosen) // len(some)) else None


def _heads_in(query: Tensor, heads: int, called: tuple[int, int] | None, copied: Copy | None) -> tuple[int, ...] | None:
    """The head of each matrix of ``(…, Lq, E)``, a view of the queries of so many heads; None: its memory does not show it.

    Heads are cut from tokens, (B, L, H, E), or lie one after another, (B, H, L, E).
    """
    if query.dim() < 2 or prod(query.shape[:-2]) > MOST:
        return None
    where = InMemory.of(query)
    starts = where.starts
    if copied is not None and copied.made.shape[-2:] == where.shape[-2:] and prod(copied.made.shape[:-2]) <= MOST:
        before = dict(zip(copied.made.starts, copied.source.starts, strict=True))
        if not all(start in before for start in starts):
            return None
        where, starts = copied.source, [before[start] for start in starts]
    length, width = where.shape[-2:]
    step = where.stride[-2]
    if length < 2 or (width > 1 and where.stride[-1] != 1) or where.size == len(starts) * length * width:
        return None  # or it is all of its memory: not a part of the queries of all heads
    whole = called is None or called[1] == length  # or some queries at a time
    each = width if step == heads * width else length * width if step == width and whole else 0
    if not each or where.size % (heads * length * width) or any(start % each for start in starts):
        return None
    return tuple(start // each % heads for start in starts)
