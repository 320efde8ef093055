"""Transfer: the numbers of entries copied to host memory, while their device computes what was asked of it after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .entry import Entry

MOST_WAITING = 8
"""Steps whose numbers may still be on their way to the host. If it waited for each of them, it could not run ahead of its device,
and each delay of the host would also delay the device."""


class Transfer:
    """Copies that were begun when it was made, one from each device.

    ``finish`` waits for them, and for nothing that the device does later.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)
        by_device: dict[torch.device, dict[int, Tensor]] = {}  # by address: many entries may share a block
        for entry in self.entries:
            if not entry.on_host():
                for part in entry.parts():
                    by_device.setdefault(part.device, {})[part.data_ptr()] = part
        self.copies: dict[int, Tensor] = {}  # by the address of what was copied
        for parts in by_device.values():
            flat = [part.detach().reshape(-1).double() for part in parts.values()]
            copies = to_cpu(torch.cat(flat) if len(flat) > 1 else flat[0]).split([len(one) for one in flat])
            for (address, part), copy in zip(parts.items(), copies, strict=True):
                self.copies[address] = copy.view(part.shape)
        self.events = [event_on(device) for device in by_device if device.type == "cuda"]

    @property
    def is_done(self) -> bool:
        """Whether nothing has to be waited for."""
        return are_done(self.events)

    def finish(self) -> list[Entry]:
        """The entries in host memory."""
        for event in self.events:
            event.synchronize()
        return [entry if entry.on_host() else self._moved(entry) for entry in self.entries]

    def _moved(self, entry: Entry) -> Entry:
        summary = entry.summary
        copies = [self.copies[part.data_ptr()] for part in summary.tensors()]
        gradients = None if entry.gradients is None else self.copies[entry.gradients.data_ptr()]
        return Entry(*entry.place, summary.with_tensors(copies), gradients)


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
    """The same entries in host memory, waited for."""
    return Transfer(entries).finish()
