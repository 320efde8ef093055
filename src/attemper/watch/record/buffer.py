"""Shelf: the numbers of many entries in a few blocks of memory.

An entry's own small tensors come into being between a pass's activations, and each would pin a page there for good: a thousand
steps cost a hundred megabytes that way. Here they are copied out, and entries are made again when they are read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...heads import HeadSummary
from .entry import Entry

BLOCK = 1 << 15  # numbers, 256 KiB


class Slot(NamedTuple):
    """Where an entry's numbers are: sums, then peaks, then gradients, one after the other."""

    step: int
    layer: str
    kind: str
    heads: tuple[int, ...]
    columns: tuple[str, ...]
    block: int
    start: int
    width: int  # columns of the sums
    has_gradients: bool


class Shelf:
    """Takes entries in, in order, and gives them back."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.begins: list[int] = []  # the first slot of each step
        self.blocks: dict[int, Tensor] = {}
        self.last, self.used = -1, BLOCK  # the block that is being filled, and how far
        self.shared: dict[Any, Any] = {}

    def put(self, entry: Entry) -> None:
        """Copy an entry's numbers here; this is where a device is waited for."""
        summary = entry.summary
        parts = [summary.sums, summary.peaks, *([] if entry.gradients is None else [entry.gradients])]
        size = sum(part.numel() for part in parts)
        if self.used + size > len(self.blocks.get(self.last, ())):
            self.last += 1
            self.blocks[self.last] = torch.empty(max(BLOCK, size), dtype=torch.float64, device="cpu")
            self.used = 0
        start = self.used
        for part in parts:
            self.blocks[self.last][self.used : self.used + part.numel()].copy_(part.detach().reshape(-1))
            self.used += part.numel()
        place = (entry.step, self._one(entry.layer), entry.kind, self._one(entry.heads), self._one(summary.columns))
        if not self.slots or self.slots[-1].step != entry.step:
            self.begins.append(len(self.slots))
        self.slots.append(Slot(*place, self.last, start, summary.sums.shape[1], entry.gradients is not None))

    def drop(self, keep: int) -> bool:
        """Let go of all but the last steps; whether there were more."""
        more = len(self.begins) - keep
        if more <= 0:
            return False
        cut = self.begins[more] if keep else len(self.slots)
        del self.slots[:cut]
        self.begins = [begin - cut for begin in self.begins[more:]]
        needed = self.slots[0].block if self.slots else self.last
        self.blocks = {number: block for number, block in self.blocks.items() if number >= needed}
        return True

    def _one(self, thing: Any) -> Any:
        """The same names and numbers once, however many entries have them."""
        return self.shared.setdefault(thing, thing)

    def get(self, slot: Slot) -> Entry:
        heads = len(slot.heads)
        numbers = self.blocks[slot.block][slot.start :]
        size = heads * slot.width
        summary = HeadSummary(slot.columns, numbers[:size].view(heads, -1), numbers[size : size + heads])
        rest = numbers[size + heads :]
        gradients = rest[: 6 * heads].view(heads, 6) if slot.has_gradients else None
        return Entry(slot.step, slot.layer, slot.kind, slot.heads, summary, gradients)
