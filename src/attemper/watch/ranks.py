"""Ranks: the entries of a step joined over the processes of a distributed run, head by head, with no object sent."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, distributed, nn

from ..heads import HeadSummary
from .entry import Entry

ALONE = (
    "there are several ranks, but the model that is watched is no DistributedDataParallel: each rank keeps its own rows, "
    "and a file has rank 0's. Watch the wrapped model to join them."
)


def are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first() -> bool:
    """Whether this process writes."""
    return not are_many() or distributed.get_rank() == 0


def shares(model: nn.Module) -> bool:
    """Whether other ranks run the same layers on other data, which is what makes their rows one step."""
    return are_many() and any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules())


def joined(entries: list[Entry]) -> list[Entry] | None:
    """The same entries over all ranks; None when ranks saw different layers, so that there is nothing to join."""
    layout = repr([(entry.place, entry.summary.columns) for entry in entries])
    device = _device(entries)
    if not _agree(layout, device):
        return None
    if not entries:
        return entries
    sums = torch.cat([entry.summary.sums.flatten() for entry in entries])
    peaks = torch.cat([entry.summary.peaks for entry in entries])
    # a rank without a backward adds nothing
    grads = [
        entry.gradients if entry.gradients is not None else sums.new_zeros(len(entry.heads), 6) for entry in entries
    ]
    total = torch.cat([sums, *(part.flatten() for part in grads)]).to(device)
    peaks = peaks.to(device)
    distributed.all_reduce(total, distributed.ReduceOp.SUM)
    distributed.all_reduce(peaks, distributed.ReduceOp.MAX)
    return _split(entries, total, peaks, len(sums))


def _split(entries: list[Entry], total: Tensor, peaks: Tensor, start: int) -> list[Entry]:
    found, place, row, grad = [], 0, 0, start
    for entry in entries:
        heads, width = len(entry.heads), entry.summary.sums.shape[1]
        summary = HeadSummary(
            entry.summary.columns, total[place : place + heads * width].view(heads, width), peaks[row : row + heads]
        )
        gradients = total[grad : grad + heads * 6].view(heads, 6)
        measured = entry.gradients is not None
        found.append(Entry(*entry.place, summary, gradients if measured else None))
        place, row, grad = place + heads * width, row + heads, grad + heads * 6
    return found


def _agree(layout: str, device: torch.device) -> bool:
    # the largest digest and the smallest are the same only where all are
    digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7], "big")
    ends = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    distributed.all_reduce(ends, distributed.ReduceOp.MAX)
    return bool(ends[0] == -ends[1])


def _device(entries: list[Entry]) -> torch.device:
    """Where this process group reduces: NCCL knows only devices, gloo the host."""
    if distributed.get_backend() == "gloo":
        return torch.device("cpu")
    return entries[0].summary.sums.device if entries else torch.device("cuda", torch.cuda.current_device())
