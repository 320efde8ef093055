"""Ranks: join the entries of a step over the processes that run the same heads on other data, by all_reduce of tensors.

These are the ranks of the model's DistributedDataParallel, in its process group, or those that fully_shard (FSDP2) shards it
over, with their replicas (HSDP). If ranks hold different heads, or some are missing, each keeps its own rows. Nothing here
hangs or ends a training: ranks meet first (Meeting), and waiting has an end.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

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
TENSOR = (
    "parallelize_module cuts weights of the model over ranks (tensor parallel), so that each rank runs other heads: each rank "
    "keeps the rows of its own heads, counted from 0, and a file has those of rank 0. Read watch.record on every rank."
)
SEVERAL = f"the model has DistributedDataParallel modules over different ranks: {OWN}."
PART = (
    "the model spans {size} of {world} ranks: rows are joined over these, and the first of them "
    "writes. Give the ranks of another group, if there is one, another path."
)
DIFFERENT = "ranks measured different layers, so each keeps its own rows."
SPLIT = f"a layer runs a part of its heads, rows or keys on each rank, so nothing is added: {OWN}."
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


class DataRanks(NamedTuple):
    """The ranks that run the same heads on other data."""

    groups: list[ProcessGroup]  # a reduction over one after the other is one over all members
    members: list[int]

    @classmethod
    def of_group(cls, group: ProcessGroup) -> DataRanks:
        return cls([group], distributed.get_process_group_ranks(group))

    @classmethod
    def of_shards(cls, parameter: Tensor) -> DataRanks | None:
        """Those that fully_shard gave a parameter to; None if it is no shard.

        The mesh begins with the ranks that shard it, or with its replicas and these. Behind them are those that hold other heads.
        """
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None:
            return None
        placements: Any = getattr(parameter, "placements", ())
        dims = 2 if mesh.ndim > 1 and placements[0].is_replicate() else 1
        mine = mesh.mesh[(slice(None),) * dims + tuple(mesh.get_coordinate()[dims:])]
        return cls([mesh.get_group(dim) for dim in range(dims)], mine.flatten().tolist())


def cut_over_heads(model: nn.Module) -> str | None:
    """The name of a parameter that ranks hold different rows of for good: tensor parallel. None if there is none."""
    from torch.distributed.fsdp import FSDPModule

    shards = {id(weight) for part in model.modules() if isinstance(part, FSDPModule) for weight in part.parameters()}
    for name, parameter in model.named_parameters():
        placements = list(getattr(parameter, "placements", ()))
        if id(parameter) in shards and placements:  # the first are those of fully_shard
            placements = placements[2:] if placements[0].is_replicate() else placements[1:]
        if any(weight.is_shard() for weight in placements):
            return name
    return None


def are_many() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class Exchange(NamedTuple):
    """What an attention module exchanges with other ranks."""

    modules: tuple[int, ...]  # the ids of the modules around its call, the innermost last
    op: str
    ranks: frozenset[int]
    calls: int  # of attention in it
    gathers: bool  # it only gathers, before its only call: that call has whole heads, and every key of its rows


class Ranks:
    """The ranks of one watch, found when it opens; before that, this one alone."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.groups: list[ProcessGroup] = []  # over which rows are joined, one after the other
        self.first, self.whole = True, True  # whether this rank writes; whether the group is all ranks
        self.sentences: list[str] = []  # warnings for the start
        self.wrappers: list[nn.Module] = []
        self.handles: list[RemovableHandle] = []
        self.inputs: list[Tensor] = []  # a hash of each tensor that the model was given in this step
        self.were_late, self.tensor_parallel = False, False
        self.members: frozenset[int] = frozenset()  # the ranks whose rows are joined
        self.split = False  # whether a layer ran a part of its heads, wherever the others ran
        self.apart = False  # whether these ranks themselves run different parts of a layer
        self.many = model is not None and are_many()
        if model is not None and self.many:
            self._find(model)

    def _find(self, model: nn.Module) -> None:
        self.first = distributed.get_rank() == 0
        wrappers = [part for part in model.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]
        groups = {id(part.process_group): part.process_group for part in wrappers}.values()
        data_ranks, roots = [DataRanks.of_group(group) for group in groups], list[nn.Module](wrappers)
        if not wrappers:
            roots, data_ranks = _sharded(model)
        if len(data_ranks) != 1:
            self.tensor_parallel = not data_ranks and cut_over_heads(model) is not None
            self.sentences.append(SEVERAL if data_ranks else TENSOR if self.tensor_parallel else ALONE)
            return
        (data,) = data_ranks
        size, world = len(data.members), distributed.get_world_size()
        self.first, self.whole = distributed.get_rank() == data.members[0], size == world
        if not self.whole:
            self.sentences.append(PART.format(size=size, world=world))
        if size == 1:
            return
        try:
            self.meeting = Meeting(data.members)
        except (RuntimeError, ValueError, AttributeError) as error:  # a process group that was made without a store
            self.sentences.append(FAILED.format(step=0, error=_line(error)))
            return
        self.groups, self.wrappers, self.members = data.groups, roots, frozenset(data.members)

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
        for part in tree_leaves((args, kwargs)) if self.groups else ():
            if type(part) is Tensor and part.layout is torch.strided and not (part.is_nested or part.is_meta):
                with without_autograd_and_modes(part.device.type):
                    self.inputs.append(_hash(part) * (2 * len(self.inputs) + 1))

    def makes_whole(self, exchange: Exchange) -> bool:
        """Whether the sum over ranks has every row of a layer, with all its keys, though the ranks exchange tensors in it."""
        if exchange.gathers:
            return exchange.ranks <= self.members
        self.apart |= len(exchange.ranks & self.members) > 1
        return False

    def join(self, step: int, entries: list[Entry], warn: Callable[[str], None]) -> list[Entry] | None:
        """Add the entries of all ranks. If they must not be added, warn and return None."""
        inputs, self.inputs = self.inputs, []
        if not self.groups:
            return None
        try:
            if not distributed.is_initialized():
                raise RuntimeError("the process group was destroyed before the watch ended")
            if not self.meeting.all_here():
                if not self.were_late:
                    warn(LATE.format(step=step))
                self.were_late = True
                return None
            reason = self._disagreement(entries, inputs, self.apart or (self.split and self.whole))
            if reason is None:
                return self._sum(entries)
            warn(reason)
        except (RuntimeError, ValueError) as error:  # a rank died, or the network failed
            self.groups = []
            warn(FAILED.format(step=step, error=_line(error)))
        return None

    def _disagreement(self, entries: list[Entry], inputs: list[Tensor], split: bool) -> str | None:
        """Why the rows of these ranks must not be added: the same answer on each of them."""
        device = device_of(self.groups[0])
        layout = repr([(entry.place, entry.summary.columns) for entry in entries])
        digest = int.from_bytes(hashlib.sha256(layout.encode()).digest()[:7], "big")
        # halved, so that its negative exists; a rank without input differs from all others
        given = sum(part.to(device) for part in inputs) >> 1 if inputs else -1 - distributed.get_rank()
        ends = torch.tensor([digest, -digest, 0, 0, split], dtype=torch.int64, device=device)
        ends[2], ends[3] = given, -given
        self._reduce(ends, distributed.ReduceOp.MAX)
        largest = ends.tolist()
        # the largest and the smallest are equal only if all are
        if largest[0] != -largest[1]:
            return DIFFERENT
        if largest[4]:
            return SPLIT
        return SAME if entries and largest[2] == -largest[3] else None

    def _sum(self, entries: list[Entry]) -> list[Entry]:
        if not entries:
            return entries
        device = device_of(self.groups[0])
        sums = torch.cat([entry.summary.sums.flatten() for entry in entries])
        peaks = torch.cat([part for item in entries for part in (item.summary.peaks, item.summary.largest_scores)])
        # a rank without a backward adds nothing
        grads = [
            entry.gradients if entry.gradients is not None else sums.new_zeros(len(entry.heads), 6) for entry in entries
        ]
        measured = peaks.new_tensor([entry.gradients is not None for entry in entries])
        total = torch.cat([sums, *(part.flatten() for part in grads)]).to(device)
        largest = torch.cat([peaks, measured]).to(device)
        self._reduce(total, distributed.ReduceOp.SUM)
        self._reduce(largest, distributed.ReduceOp.MAX)
        return _split(entries, total, largest[: len(peaks)], largest[len(peaks) :].tolist(), len(sums))

    def _reduce(self, tensor: Tensor, operation: distributed.ReduceOp.RedOpType) -> None:
        for group in self.groups:
            distributed.all_reduce(tensor, operation, group)


def device_of(group: ProcessGroup) -> torch.device:
    """The device of a group's reductions: a GPU for NCCL, the host for gloo."""
    types = {device.type for device in group._device_types}
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(min(types), torch.accelerator.current_device_index())


def _sharded(model: nn.Module) -> tuple[list[nn.Module], list[DataRanks]]:
    """The outermost modules that fully_shard shards, and their ranks."""
    from torch.distributed.fsdp import FSDPModule

    every = [part for part in model.modules() if isinstance(part, FSDPModule)]
    inner = {id(below) for part in every for below in part.modules() if below is not part}
    data_ranks = [DataRanks.of_shards(parameter) for part in every[:1] for parameter in part.parameters()]
    return [part for part in every if id(part) not in inner], [ranks for ranks in data_ranks if ranks is not None][:1]


def _split(entries: list[Entry], total: Tensor, peaks: Tensor, measured: list[float], start: int) -> list[Entry]:
    entries_of, place, row, grad = [], 0, 0, start
    for entry, has_gradients in zip(entries, measured, strict=True):
        heads, width = len(entry.heads), entry.summary.sums.shape[1]
        sums = total[place : place + heads * width].view(heads, width)
        summary = HeadSummary(entry.summary.columns, sums, *peaks[row : row + 2 * heads].split(heads))
        gradients = total[grad : grad + heads * 6].view(heads, 6)
        entries_of.append(Entry(*entry.place, summary, gradients if has_gradients else None))
        place, row, grad = place + heads * width, row + 2 * heads, grad + heads * 6
    return entries_of


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


_opened: Counter[str] = Counter()  # meetings of the same ranks so far: the same number on each of them


class Meeting:
    """Whether all of some ranks have come to the same point, found out without a collective.

    A collective that one rank does not enter hangs all others, and may pair with another one of the training's. So ranks first
    count themselves in the default store, where waiting has an end. They go on together only if all came.
    Made once per watch, on every one of the ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        name = "-".join(map(str, ranks))
        self.store = PrefixStore(f"attemper/{name}/{_opened[name]}", default_store())
        _opened[name] += 1
        self.size = len(ranks)
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
