"""How blockwise cuts a problem: blocks of heads, tiles of rows and keys, and the masks of one tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import HIDDEN_BIAS, Problem

# Scores held at a time, and the side of a tile. On a CPU larger ones fall out of L2 and smaller ones pay more for starting
# the threads of each operation; a GPU wants fewer, larger launches.
CPU_TILE = (1 << 19, 256)
GPU_TILE = (1 << 23, 1024)

# Weights below exp(FLOOR) of a row's largest are treated as exp(FLOOR): they cannot change a sum in that dtype, and keeping
# them and their squares normal avoids denormal arithmetic, which is up to a hundred times slower on a CPU.
FLOOR = {torch.float32: -43.0, torch.float64: -350.0}

# Stands for -inf where a weight of 0 multiplies it, which would make NaN; far enough from overflow to be scaled.
LOWEST = -1e30


class Heads(NamedTuple):
    """A block of key/value heads: whole batch entries, or some heads of one entry, so that it flattens to one axis."""

    batch: slice
    group: slice
    flat: slice


class Tile(NamedTuple):
    """What band and mask make of one tile, each broadcastable to (batch, group, repeat, rows, keys)."""

    outside: Tensor | None  # True where the band shuts a key out
    bias: Tensor | None  # additive mask
    keep: Tensor | None  # boolean mask
    visible: Tensor | None  # False where a key does not count as visible, for any of the three reasons

    @property
    def open(self) -> bool:
        """Every row sees every key, unchanged."""
        return self.visible is None


OPEN = Tile(None, None, None, None)


class Plan:
    """The cut of one problem. It depends on shapes and device alone, so forward and backward draw the same dropout."""

    def __init__(self, problem: Problem) -> None:
        self.batch, self.heads, self.rows, _ = problem.query.shape
        self.groups, self.keys = problem.key.shape[1:3]
        self.repeat = self.heads // self.groups if self.groups else 1
        self.left, self.right = problem.left, problem.right
        self.mask = None if problem.mask is None else split_heads(problem.mask, self.groups, self.repeat)

        budget, side = CPU_TILE if problem.query.device.type == "cpu" else GPU_TILE
        pairs = max(1, self.batch * self.groups)
        self.row_step = max(1, min(self.rows, side // self.repeat))
        self.key_step = max(1, min(self.keys, side))
        block = budget // (self.row_step * self.repeat * self.key_step)
        if block > pairs:
            # few heads: wider tiles, not higher ones, which would hold more of what a causal band shuts out
            self.key_step = max(1, min(self.keys, budget // (pairs * self.repeat * self.row_step)))
            self.row_step = max(1, min(self.rows, budget // (pairs * self.repeat * self.key_step)))
        self.block = max(1, min(block, pairs))
        if self.block >= self.groups > 0:
            self.block -= self.block % self.groups

    def head_blocks(self) -> Iterator[Heads]:
        if not self.groups:
            return
        if self.block >= self.groups:
            entries = self.block // self.groups
            for b in range(0, self.batch, entries):
                stop = min(self.batch, b + entries)
                yield Heads(slice(b, stop), slice(0, self.groups), slice(b * self.groups, stop * self.groups))
            return
        for b in range(self.batch):
            for g in range(0, self.groups, self.block):
                stop = min(self.groups, g + self.block)
                yield Heads(slice(b, b + 1), slice(g, stop), slice(b * self.groups + g, b * self.groups + stop))

    def row_tiles(self) -> Iterator[slice]:
        for i in range(0, self.rows, self.row_step):
            yield slice(i, min(self.rows, i + self.row_step))

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        """The tiles that the band lets any of these rows see."""
        first = 0 if self.left is None else max(0, rows.start - self.left)
        last = self.keys if self.right is None else min(self.keys, rows.stop + self.right)
        for j in range(first, last, self.key_step):
            yield slice(j, min(last, j + self.key_step))

    def tile(self, heads: Heads, rows: slice, keys: slice, dtype: torch.dtype, device: torch.device) -> Tile:
        band = self._band(rows, keys, device)
        outside = None if band is None else ~band
        if self.mask is None:
            return OPEN if band is None else Tile(outside, None, None, band)
        part = narrow(self.mask, heads, rows, keys)
        part = part.expand(*part.shape[:-1], keys.stop - keys.start)
        if part.dtype == torch.bool:
            return Tile(outside, None, part, part if band is None else band & part)
        bias = part.to(dtype)
        visible = bias > HIDDEN_BIAS
        return Tile(outside, bias, None, visible if band is None else band & visible)

    def visible(self, device: torch.device) -> Tensor:
        """How many keys the band lets each row see, (Lq,) int32."""
        i = torch.arange(self.rows, device=device)
        first = torch.zeros_like(i) if self.left is None else (i - self.left).clamp(min=0)
        last = torch.full_like(i, self.keys) if self.right is None else (i + self.right + 1).clamp(max=self.keys)
        return (last - first).clamp(min=0).to(torch.int32)

    def _band(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        inside_left = self.left is None or keys.start >= rows.stop - 1 - self.left
        inside_right = self.right is None or keys.stop - 1 <= rows.start + self.right
        if inside_left and inside_right:
            return None
        i = torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1)
        j = torch.arange(keys.start, keys.stop, device=device)
        inside = torch.ones((), dtype=torch.bool, device=device)
        if self.left is not None and not inside_left:
            inside = inside & (j >= i - self.left)
        if self.right is not None and not inside_right:
            inside = inside & (j <= i + self.right)
        return inside


def narrow(mask: Tensor, heads: Heads, rows: slice, keys: slice) -> Tensor:
    """The part of a (B, G, R, Lq, Lk) mask that falls on a tile; dimensions of size 1 stay."""
    cuts = (heads.batch, heads.group, slice(None), rows, keys)
    return mask[tuple(slice(None) if size == 1 else cut for size, cut in zip(mask.shape, cuts, strict=True))]


def split_heads(mask: Tensor, groups: int, repeat: int) -> Tensor:
    """(B, H, Lq, Lk) → (B, G, R, Lq, Lk); a mask shared by all heads keeps size 1 in both."""
    return mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (groups, repeat))
