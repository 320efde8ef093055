"""Transfer: the numbers of entries copied to host memory, while their device computes what was asked of it after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .entry import Entry, EntryBuffer, moved

MOST_WAITING = 8
"""Steps whose numbers may still be on their way to the host. If it waited for each of them, it could not run ahead of its device,
and each delay of the host would also delay the device."""


class Transfer:
    """Copies that were begun when it was made, one from each device.

    ``wait`` waits for them, and for nothing that the device does later.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = list(entries)
        # by id: many entries may share a block
        self.on_host = {id(part): part for entry in self.entries for part in entry.parts()}
        by_device: dict[torch.device, list[Tensor]] = {}
        for part in self.on_host.values():
            if not is_on_host(part):
                by_device.setdefault(part.device, []).append(part)
        for parts in by_device.values():
            flat = [part.detach().reshape(-1).double() for part in parts]
            copies = to_cpu(torch.cat(flat) if len(flat) > 1 else flat[0]).split([len(one) for one in flat])
            self.on_host |= {id(part): copy.view(part.shape) for part, copy in zip(parts, copies, strict=True)}
        self.events = [event_on(device) for device in by_device if device.type == "cuda"]

    @property
    def is_done(self) -> bool:
        """Whether nothing has to be waited for."""
        return are_done(self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()

    def finish(self) -> list[Entry]:
        """The entries in host memory."""
        self.wait()
        return [Entry(*entry.place, *moved(entry.summary, entry.gradients, self.on_host)) for entry in self.entries]

    def put_into(self, buffer: EntryBuffer) -> None:
        """Keep the numbers in a buffer."""
        self.wait()
        buffer.put(self.entries, self.on_host)


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
    """The same entries in host memory, waited for."""
    return Transfer(entries).finish()
