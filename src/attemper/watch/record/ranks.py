"""Ranks: the entries of a step joined over the processes that run the same heads on other data, with no object sent.

Those are the ranks of the model's DistributedDataParallel, in its own process group. What says that ranks hold other heads, or
are not all there, keeps their rows apart; nothing here hangs or ends a training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ..._torch_private import tree_leaves
from ...heads import HeadSummary
from ..call import without_autograd_and_modes
from .entry import Entry
from .meeting import PATIENCE, Meeting

OWN = "each rank keeps its own rows, and a file has those of one rank"
ALONE = (
    "there are several ranks, but the model that is watched is no DistributedDataParallel: each rank keeps its own rows, "
    "and a file has rank 0's. Watch the wrapped model to join them."
)
SEVERAL = f"the model has DistributedDataParallel modules over different ranks: {OWN}."
PART = (
    "the model's DistributedDataParallel spans {size} of {world} ranks: rows are joined over these, and the first of them "
    "writes. Give the ranks of another group, if there is one, another path."
)
DIFFERENT = "ranks saw different layers, so each keeps its own rows."
SPLIT = f"a layer runs a part of its heads on each rank, so nothing is added: {OWN}."
SAME = (
    "every rank was given the same input: either ranks hold different heads of it, or a DistributedSampler is missing and all "
    f"train on the same data. Nothing is added: {OWN}."
)
LATE = (
    f"not every rank came to the end of step {{step}} within {PATIENCE.total_seconds():.0f} seconds, so its rows are this rank's "
    "own, and so are others where that happens. Watch the model on every rank, and end each step on all of them: give "
    "watch() the optimizer, or call watch.step() right after its step."
)
FAILED = "ranks could not be joined in step {step}: {error}. From there on each rank keeps its own rows."


def are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Ranks:
    """The ranks of one watch, found when it opens."""

    def __init__(self, model: nn.Module) -> None:
        self.group: ProcessGroup | None = None  # that rows are joined over
        self.first, self.whole = True, True  # whether this rank writes; whether the group is all ranks
        self.sentences: list[str] = []  # what is to be said of them at the start
        self.wrappers: list[nn.Module] = []
        self.handles: list[RemovableHandle] = []
        self.inputs: list[Tensor] = []  # a number for each that the model was given in this step
        self.were_late = False
        if are_many():
            self._find(model)

    def _find(self, model: nn.Module) -> None:
        self.first = distributed.get_rank() == 0
        wrappers = [part for part in model.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]
        groups = list({id(part.process_group): part.process_group for part in wrappers}.values())
        if len(groups) != 1:
            self.sentences.append(SEVERAL if groups else ALONE)
            return
        group, world = groups[0], distributed.get_world_size()
        self.first, self.whole = distributed.get_rank(group) == 0, group.size() == world
        if not self.whole:
            self.sentences.append(PART.format(size=group.size(), world=world))
        if group.size() == 1:
            return
        try:
            self.meeting = Meeting(group)
        except (RuntimeError, ValueError, AttributeError) as error:  # a process group that was made without a store
            self.sentences.append(FAILED.format(step=0, error=_line(error)))
            return
        self.group, self.wrappers = group, list(wrappers)

    def listen(self) -> None:
        """Look at what the model is given: ranks with the same input have no rows to add."""
        self.handles = [
            wrapper.register_forward_pre_hook(self._look, with_kwargs=True, prepend=True) for wrapper in self.wrappers
        ]

    def rest(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.inputs = [], []

    def _look(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for part in tree_leaves((args, kwargs)):
            if type(part) is Tensor and part.layout is torch.strided and not (part.is_nested or part.is_meta):
                with without_autograd_and_modes(part.device.type):
                    self.inputs.append(_mark(part) * (2 * len(self.inputs) + 1))

    def join(self, step: int, entries: list[Entry], split: bool, say: Callable[[str], None]) -> list[Entry] | None:
        """The same entries over all ranks; None where they are not to be added, which is said."""
        inputs, self.inputs = self.inputs, []
        if self.group is None:
            return None
        try:
            if not distributed.is_initialized():
                raise RuntimeError("the process group was destroyed before the watch ended")
            if not self.meeting.all_here():
                if not self.were_late:
                    say(LATE.format(step=step))
                self.were_late = True
                return None
            reason = self._disagreement(entries, inputs, split and self.whole)
            if reason is None:
                return self._sum(entries)
            say(reason)
        except (RuntimeError, ValueError) as error:  # a rank that died, a network that is gone
            self.group = None
            say(FAILED.format(step=step, error=_line(error)))
        return None

    def _disagreement(self, entries: list[Entry], inputs: list[Tensor], split: bool) -> str | None:
        """Why the rows of these ranks are not to be added, the same answer on each of them."""
        device = self._device()
        layout = repr([(entry.place, entry.summary.columns) for entry in entries])
        digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7], "big")
        # halved, so that it has a negative; a rank that was given nothing differs from all others
        given = sum(part.to(device) for part in inputs) >> 1 if inputs else -1 - distributed.get_rank()
        ends = torch.tensor([digest, -digest, 0, 0, split], dtype=torch.int64, device=device)
        ends[2], ends[3] = given, -given
        distributed.all_reduce(ends, distributed.ReduceOp.MAX, self.group)
        found = ends.tolist()
        # the largest and the smallest are the same only where all are
        if found[0] != -found[1]:
            return DIFFERENT
        if found[4]:
            return SPLIT
        return SAME if entries and found[2] == -found[3] else None

    def _sum(self, entries: list[Entry]) -> list[Entry]:
        if not entries:
            return entries
        device = self._device()
        sums = torch.cat([entry.summary.sums.flatten() for entry in entries])
        peaks = torch.cat([entry.summary.peaks for entry in entries])
        # a rank without a backward adds nothing
        grads = [
            entry.gradients if entry.gradients is not None else sums.new_zeros(len(entry.heads), 6) for entry in entries
        ]
        measured = peaks.new_tensor([entry.gradients is not None for entry in entries])
        total = torch.cat([sums, *(part.flatten() for part in grads)]).to(device)
        largest = torch.cat([peaks, measured]).to(device)
        distributed.all_reduce(total, distributed.ReduceOp.SUM, self.group)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, self.group)
        return _split(entries, total, largest[: len(peaks)], largest[len(peaks) :].tolist(), len(sums))

    def _device(self) -> torch.device:
        """Where this process group reduces: NCCL knows only devices, gloo the host."""
        assert self.group is not None
        kinds = {device.type for device in self.group._device_types}
        if "cpu" in kinds or not kinds:
            return torch.device("cpu")
        return torch.device(min(kinds), torch.accelerator.current_device_index())


def _split(entries: list[Entry], total: Tensor, peaks: Tensor, measured: list[float], start: int) -> list[Entry]:
    found, place, row, grad = [], 0, 0, start
    for entry, has_gradients in zip(entries, measured, strict=True):
        heads, width = len(entry.heads), entry.summary.sums.shape[1]
        summary = HeadSummary(
            entry.summary.columns, total[place : place + heads * width].view(heads, width), peaks[row : row + heads]
        )
        gradients = total[grad : grad + heads * 6].view(heads, 6)
        found.append(Entry(*entry.place, summary, gradients if has_gradients else None))
        place, row, grad = place + heads * width, row + heads, grad + heads * 6
    return found


def _mark(tensor: Tensor) -> Tensor:
    """One whole number for a tensor, made of up to 8,192 of its entries and their places: equal where they are."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 4096)]
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    if sample.is_floating_point():
        sample = sample.float().view(torch.int32)
    places = torch.arange(1, 2 * sample.numel() + 1, 2, device=sample.device)
    return (sample.long() * places).sum() + flat.numel()


def _line(error: Exception) -> str:
    """The first line of what torch says, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
