"""Ranks: join the entries of a step over the processes that run the same heads on other data, by all_reduce of tensors.

These are the ranks of the model's DistributedDataParallel, in its process group, or those that fully_shard (FSDP2) shards it
over. If ranks hold different heads, or some are missing, each keeps its own rows. Nothing here hangs or ends a training: ranks
meet first (Meeting), and waiting has an end.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ..._torch_private import default_store, tree_leaves
from ...heads import HeadSummary
from ..attach.modes import without_autograd_and_modes
from .entry import Entry

PATIENCE = timedelta(seconds=30)

OWN = "each rank keeps its own rows, and a file has those of one rank"
ALONE = (
    "there are several ranks, but the watched model is no DistributedDataParallel, and fully_shard does not shard it: each rank "
    "keeps its own rows, and a file has those of rank 0. Watch the wrapped model to join them."
)
SEVERAL = f"the model has DistributedDataParallel modules over different ranks: {OWN}."
PART = (
    "the model spans {size} of {world} ranks: rows are joined over these, and the first of them "
    "writes. Give the ranks of another group, if there is one, another path."
)
DIFFERENT = "ranks measured different layers, so each keeps its own rows."
SPLIT = f"a layer runs a part of its heads on each rank, so nothing is added: {OWN}."
SAME = (
    "every rank was given the same input: either ranks hold different heads, or a DistributedSampler is missing and all ranks "
    f"train on the same data. Nothing is added: {OWN}."
)
LATE = (
    f"not every rank ended step {{step}} within {PATIENCE.total_seconds():.0f} seconds, so this rank keeps its own rows of it, "
    "and of later steps where that happens. Watch the model on every rank, and end each step on all of them: give "
    "watch() the optimizer, or call watch.step() right after its step."
)
FAILED = "ranks could not be joined in step {step}: {error}. From there on each rank keeps its own rows."


def are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Ranks:
    """The ranks of one watch, found when it opens."""

    def __init__(self, model: nn.Module) -> None:
        self.group: ProcessGroup | None = None  # over which rows are joined
        self.first, self.whole = True, True  # whether this rank writes; whether the group is all ranks
        self.sentences: list[str] = []  # warnings for the start
        self.wrappers: list[nn.Module] = []
        self.handles: list[RemovableHandle] = []
        self.inputs: list[Tensor] = []  # a hash of each tensor that the model was given in this step
        self.were_late = False
        self.many = are_many()
        if self.many:
            self._find(model)

    def _find(self, model: nn.Module) -> None:
        self.first = distributed.get_rank() == 0
        wrappers = [part for part in model.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]
        groups = list({id(part.process_group): part.process_group for part in wrappers}.values())
        roots: list[nn.Module] = list(wrappers)
        if not wrappers:
            roots, groups = _sharded(model)
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
        self.group, self.wrappers = group, roots

    def attach(self) -> None:
        """Register hooks that hash the model's inputs: the rows of ranks with the same input are not added."""
        self.handles = [
            wrapper.register_forward_pre_hook(self._hash_inputs, with_kwargs=True, prepend=True)
            for wrapper in self.wrappers
        ]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.inputs = [], []

    def _hash_inputs(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for part in tree_leaves((args, kwargs)):
            if type(part) is Tensor and part.layout is torch.strided and not (part.is_nested or part.is_meta):
                with without_autograd_and_modes(part.device.type):
                    self.inputs.append(_hash(part) * (2 * len(self.inputs) + 1))

    def join(self, step: int, entries: list[Entry], split: bool, warn: Callable[[str], None]) -> list[Entry] | None:
        """The same entries over all ranks; None if they must not be added, with a warning."""
        inputs, self.inputs = self.inputs, []
        if self.group is None:
            return None
        try:
            if not distributed.is_initialized():
                raise RuntimeError("the process group was destroyed before the watch ended")
            if not self.meeting.all_here():
                if not self.were_late:
                    warn(LATE.format(step=step))
                self.were_late = True
                return None
            reason = self._disagreement(entries, inputs, split and self.whole)
            if reason is None:
                return self._sum(entries)
            warn(reason)
        except (RuntimeError, ValueError) as error:  # a rank died, or the network failed
            self.group = None
            warn(FAILED.format(step=step, error=_line(error)))
        return None

    def _disagreement(self, entries: list[Entry], inputs: list[Tensor], split: bool) -> str | None:
        """Why the rows of these ranks must not be added: the same answer on each of them."""
        device = self._device()
        layout = repr([(entry.place, entry.summary.columns) for entry in entries])
        digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7], "big")
        # halved, so that its negative exists; a rank without input differs from all others
        given = sum(part.to(device) for part in inputs) >> 1 if inputs else -1 - distributed.get_rank()
        ends = torch.tensor([digest, -digest, 0, 0, split], dtype=torch.int64, device=device)
        ends[2], ends[3] = given, -given
        distributed.all_reduce(ends, distributed.ReduceOp.MAX, self.group)
        found = ends.tolist()
        # the largest and the smallest are equal only if all are
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
        """The device of this process group's reductions: a GPU for NCCL, the host for gloo."""
        assert self.group is not None
        types = {device.type for device in self.group._device_types}
        if "cpu" in types or not types:
            return torch.device("cpu")
        return torch.device(min(types), torch.accelerator.current_device_index())


def _sharded(model: nn.Module) -> tuple[list[nn.Module], list[ProcessGroup]]:
    """The outermost modules that fully_shard shards, and the group of ranks, if their mesh has one dimension: the data's."""
    from torch.distributed.fsdp import FSDPModule

    every = [part for part in model.modules() if isinstance(part, FSDPModule)]
    inner = {id(below) for part in every for below in part.modules() if below is not part}
    meshes = [getattr(one, "device_mesh", None) for part in every[:1] for one in part.parameters()]
    groups = [mesh.get_group() for mesh in meshes if mesh is not None and mesh.ndim == 1]
    return [part for part in every if id(part) not in inner], groups[:1]


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


def _hash(tensor: Tensor) -> Tensor:
    """One whole number for a tensor, from up to 8,192 of its entries and their places."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 4096)]
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    if sample.is_floating_point():
        sample = sample.float().view(torch.int32)
    places = torch.arange(1, 2 * sample.numel() + 1, 2, device=sample.device)
    return (sample.long() * places).sum() + flat.numel()


def _line(error: Exception) -> str:
    """The first line of an error's message, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


_opened: Counter[str] = Counter()  # meetings of each group so far, by its name: the same number on every rank


class Meeting:
    """Whether every rank of a process group has come to the same point, found out without a collective.

    A collective that one rank does not enter hangs all others, and may pair with another one of the training's. So ranks first
    count themselves in the store of the process group, where waiting has an end. They go on together only if all came.
    Made once per watch, on every rank of the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        name = group.group_name
        self.store = PrefixStore(f"attemper/{name}/{_opened[name]}", default_store())
        _opened[name] += 1
        self.size = group.size()
        self.next = 0
        self.missed: int | None = None  # a point that this rank left before all had come

    def all_here(self) -> bool:
        """Whether all ranks go on together from here: the same answer on each of them, within PATIENCE."""
        if self.missed is not None:
            if self.store.add(str(self.missed), 0) < self.size:
                return False  # the missing rank has not come since: do not wait for it twice
            self.missed = None
        place, self.next = self.next, self.next + 1
        count, answer = self.store.add(str(place), 1), f"{place}/answer"
        if count < self.size:
            with suppress(RuntimeError):  # the time is up
                self.store.wait([answer], PATIENCE)
        # the first answer counts: that of the last rank to come, or of the first to leave
        together = self.store.compare_set(answer, "", "yes" if count == self.size else "no") == b"yes"
        if count < self.size and not together:
            self.missed = place
        if count == self.size and together and place:
            for key in (f"{place - 1}", f"{place - 1}/answer"):  # every rank is past it
                self.store.delete_key(key)
        return together
