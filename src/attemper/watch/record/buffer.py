"""Buffer: the numbers of entries in host memory, and on their way there while their device goes on to compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...heads import BlockSummary, HeadSummary
from .entry import Entry

MOST_WAITING = 8
"""Steps whose numbers may still be on their way to the host. If it waited for each of them, it could not run ahead of its device,
and each delay of the host would also delay the device."""
BLOCK = 1 << 15  # numbers, 256 KiB


class Transfer:
    """Copies that were begun when it was made, one from each device.

    ``wait`` waits for them, and for nothing that the device does later.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)
        self.on_host: dict[int, Tensor] = {}  # by id: many entries may share a block
        for entry in self.entries:
            for part in entry.summary.tensors():
                self.on_host[id(part)] = part
            if entry.gradients is not None:
                self.on_host[id(entry.gradients)] = entry.gradients
        by_device: dict[torch.device, list[Tensor]] = {}
        for part in self.on_host.values():
            if not is_on_host(part):
                by_device.setdefault(part.device, []).append(part)
        for parts in by_device.values():
            flat = [part.detach().reshape(-1).double() for part in parts]
            copies = to_cpu(torch.cat(flat) if len(flat) > 1 else flat[0]).split([len(tensor) for tensor in flat])
            self.on_host |= {id(part): copy.view(part.shape) for part, copy in zip(parts, copies, strict=True)}
        self.events = [event_on(device) for device in by_device if device.type == "cuda"]

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()

    def finish(self) -> list[Entry]:
        """The entries in host memory."""
        self.wait()
        return [Entry(*entry.place, *moved(entry.summary, entry.gradients, self.on_host)) for entry in self.entries]


def is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu  # tests without a GPU replace this function


def to_cpu(tensor: Tensor) -> Tensor:
    """A copy that a CUDA device makes when it comes to it."""
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


def event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def are_done(events: Sequence[torch.cuda.Event]) -> bool:
    return all(event.query() for event in events)


def to_host(entries: Sequence[Entry]) -> list[Entry]:
    """Copy entries to host memory, and wait for the copy."""
    return Transfer(entries).finish()


def moved(
    summary: HeadSummary, gradients: Tensor | None, on_host: Mapping[int, Tensor]
) -> tuple[HeadSummary, Tensor | None]:
    """The numbers of an entry in host memory, where `on_host` has each of their tensors, by the id that it has now."""
    summary = summary.with_tensors([on_host[id(part)] for part in summary.tensors()])
    return summary, None if gradients is None else on_host[id(gradients)]


def row_of(width: int, has_scores: bool, has_gradients: bool) -> int:
    """How many numbers of a head are kept: sums, peak, the peak of its scores, gradients."""
    return width + 1 + has_scores + (6 if has_gradients else 0)


class Slot(NamedTuple):
    """Where an entry's numbers are in a buffer: for each head its sums, then its peaks, then its gradients."""

    step: int
    layer: str
    kind: str
    heads: tuple[int, ...]
    columns: tuple[str, ...]
    block: int
    start: int
    width: int  # columns of the sums
    has_scores: bool
    has_gradients: bool

    @property
    def row(self) -> int:
        return row_of(self.width, self.has_scores, self.has_gradients)


class EntryBuffer:
    """The numbers of many entries in a few blocks of host memory; entries are made again when they are read.

    An entry's own small tensors are allocated between a pass's activations, and each would pin a page there: 1,000 steps would
    cost 100 MB.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.begins: list[int] = []  # the first slot of each step
        self.blocks: dict[int, Tensor] = {}
        self.last, self.used = -1, BLOCK  # the block that is being filled, and how far
        self.shared: dict[Any, Any] = {}

    def put(self, entries: Sequence[Entry], on_host: Mapping[int, Tensor]) -> None:
        """Copy the numbers of entries into the buffer, those of a shared block at once. `on_host` as in `moved`."""
        placed: dict[int, tuple[int, int]] = {}  # where the blocks of these entries are
        shared_once = self.shared.setdefault  # one object for equal names and tuples, however many entries have them
        for step, layer, kind, heads, summary, gradients in entries:
            place = (
                step,
                shared_once(layer, layer),
                kind,
                shared_once(heads, heads),
                shared_once(summary.columns, summary.columns),
            )
            if isinstance(summary, BlockSummary) and gradients is None:
                block = summary.block
                if id(block) not in placed:
                    number, start = placed[id(block)] = self._room(block.numel())
                    self._numbers(number, start, block.shape).copy_(on_host[id(block)].detach())
                number, start = placed[id(block)]
                row = len(summary.columns)
                slot = Slot(*place, number, start + summary.first * row, row - 1, False, False)
            else:
                summary, gradients = moved(summary, gradients, on_host)
                sums, peaks, has_scores = summary.sums.detach(), summary.peaks.detach(), summary.has_scores
                width, has_gradients = sums.shape[1], gradients is not None
                number, start = self._room(len(heads) * row_of(width, has_scores, has_gradients))
                slot = Slot(*place, number, start, width, has_scores, has_gradients)
                numbers = self._numbers(slot.block, slot.start, (len(heads), slot.row))
                numbers[:, : slot.width], numbers[:, slot.width] = sums, peaks
                if has_scores:
                    numbers[:, slot.width + 1] = summary.largest_scores.detach()
                if gradients is not None:
                    numbers[:, slot.width + 1 + has_scores :] = gradients.detach()
            if not self.slots or self.slots[-1].step != step:
                self.begins.append(len(self.slots))
            self.slots.append(slot)

    def _room(self, size: int) -> tuple[int, int]:
        """A block of memory and the first of so many free numbers in it."""
        if self.used + size > len(self.blocks.get(self.last, ())):
            self.last += 1
            self.blocks[self.last] = torch.empty(max(BLOCK, size), dtype=torch.float64, device="cpu")
            self.used = 0
        self.used += size
        return self.last, self.used - size

    def _numbers(self, block: int, start: int, shape: Sequence[int]) -> Tensor:
        return self.blocks[block][start : start + shape[0] * shape[1]].view(*shape)

    def drop(self, keep: int) -> bool:
        """Keep the last steps only; whether there were more."""
        more = len(self.begins) - keep
        if more <= 0:
            return False
        cut = self.begins[more] if keep else len(self.slots)
        del self.slots[:cut]
        self.begins = [begin - cut for begin in self.begins[more:]]
        # later steps are in later blocks, but not the slots of one step
        oldest = self.slots[: self.begins[1] if len(self.begins) > 1 else None]
        needed = min([slot.block for slot in oldest], default=self.last)
        self.blocks = {number: block for number, block in self.blocks.items() if number >= needed}
        return True

    def get(self, slot: Slot) -> Entry:
        numbers = self._numbers(slot.block, slot.start, (len(slot.heads), slot.row))
        scores = numbers[:, slot.width + 1] if slot.has_scores else None
        summary = HeadSummary(slot.columns, numbers[:, : slot.width], numbers[:, slot.width], scores)
        gradients = numbers[:, slot.width + 1 + slot.has_scores :] if slot.has_gradients else None
        return Entry(slot.step, slot.layer, slot.kind, slot.heads, summary, gradients)
