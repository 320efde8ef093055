"""Transfer: the numbers of entries copied to host memory, while their device computes what was asked of it after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...heads import HeadSummary
from .entry import Entry

SPARSE = 4
"""Memory that is so many times as large as what is read of it is not copied whole."""


class Transfer:
    """Copies that were begun when it was made, one from each device.

    ``finish`` waits for them, and for nothing that the device does later.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)
        by_device: dict[torch.device, list[Tensor]] = {}
        for entry in self.entries:
            if not entry.on_host():
                parts = [part.detach() for part in entry.parts()]
                by_device.setdefault(parts[0].device, []).extend(parts)
        self.copies: dict[int, Tensor] = {}  # by the address of the memory, or the part, that was copied
        for parts in by_device.values():
            most = SPARSE * sum(part.nbytes for part in parts)
            flat = dict(_flat(part, most) for part in parts)
            whole = torch.cat(list(flat.values())) if len(flat) > 1 else next(iter(flat.values()))
            copies = to_cpu(whole).split([len(one) for one in flat.values()])
            self.copies |= dict(zip(flat, copies, strict=True))
        self.events = [event_on(device) for device in by_device if device.type == "cuda"]

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for."""
        return not self.events

    def finish(self) -> list[Entry]:
        """The entries in host memory."""
        for event in self.events:
            event.synchronize()
        return [entry if entry.on_host() else self._moved(entry) for entry in self.entries]

    def _moved(self, entry: Entry) -> Entry:
        sums, peaks, *rest = map(self._copy, entry.parts())
        summary = HeadSummary(entry.summary.columns, sums, peaks)
        return replace(entry, summary=summary, gradients=rest[0] if rest else None)

    def _copy(self, part: Tensor) -> Tensor:
        own, shared = part.data_ptr(), part.untyped_storage().data_ptr()
        if own in self.copies and self.copies[own].numel() == part.numel():
            return self.copies[own].view(part.shape)
        copy = self.copies[shared]
        return copy.as_strided(part.shape, part.stride(), copy.storage_offset() + part.storage_offset())


def _flat(part: Tensor, most: int) -> tuple[int, Tensor]:
    """All of the memory that a part shares with others, up to so many bytes, or the part alone; and its address.

    A whole step lies in one memory where kernels/triton/summary.py has written it.
    """
    memory = part.untyped_storage()
    if part.dtype == torch.float64 and part.nbytes < memory.nbytes() <= most:
        return memory.data_ptr(), part.as_strided((memory.nbytes() // part.element_size(),), (1,), 0)
    return part.data_ptr(), part.reshape(-1).double()


def to_cpu(tensor: Tensor) -> Tensor:
    """A copy that a CUDA device makes when it comes to it."""
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


def event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def to_host(entries: Sequence[Entry]) -> list[Entry]:
    """The same entries in host memory, waited for."""
    return Transfer(entries).finish()
