"""Exchanged: which attention modules exchange tensors with other ranks while they run: their heads or rows are those of one rank.

The dispatch mode of a full pass sees every collective. Those that gather or average what is the same on all ranks (parameters,
buffers, statistics of a batch) are known by the code that calls them, and left out. A plan keeps what was found for light passes.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from ..._torch_private import process_groups, resolve_process_group
from ..attach.running import CALL, Frame, Pass, python_frames, running, traits
from ..endings import note_exchange

if TYPE_CHECKING:
    from ..call import AttentionCall
    from ..session import Watch

DATA_PARALLEL = re.compile(
    r"torch\.(distributed\.(fsdp|_composable)|nn\.parallel|nn\.modules\.(_functions|batchnorm))\b"
    r"|deepspeed\.runtime\.zero\b|fairscale\.nn\.data_parallel\b|megatron\.core\.distributed\b"
)
"""Names of Python modules whose collectives carry parameters, buffers or statistics, not heads or rows."""
GATHER = re.compile(r"all_?gather")


class Collective(NamedTuple):
    """A collective of a pass."""

    op: str
    ranks: frozenset[int]
    frames: tuple[Frame, ...]  # the modules that it ran in
    after: tuple[bool, ...]  # for each of them, whether an attention call had been counted in it


class Exchange(NamedTuple):
    """What an attention module exchanges with other ranks."""

    modules: tuple[int, ...]  # the ids of the modules around its call, the innermost last
    op: str
    ranks: frozenset[int]
    calls: int  # of attention in it
    gathers: bool  # it only gathers, before its only call: that call has whole heads, and every key of its rows


def follow_collective(func: Any, args: tuple[Any, ...]) -> None:
    """Note a collective that has just run in a full pass."""
    _note(func._schema.name, _ranks_of(args))


def note_collectives_inside(func: Any, before: dict[Any, int]) -> None:
    """Note an op that is not torch's if it called collectives, which no mode sees inside an op; ``before`` are their counts."""
    used = [group for group, count in collective_counts().items() if before.get(group) != count]
    if used:
        _note(func._schema.name, frozenset().union(*map(distributed.get_process_group_ranks, used)))


def exchanged_before(call: AttentionCall) -> bool:
    """Whether ranks exchanged tensors before a call of the running pass, in its module: derivatives of q would do it again."""
    if running.current is None or not running.current.collectives:
        return False
    module = _attention_module(call.frames)
    return any(
        frame is module and not after
        for one in running.current.collectives
        for frame, after in zip(one.frames, one.after, strict=True)
    )


def collectives_so_far() -> object:
    """What every collective changes, whoever calls it: also in a light pass, and inside an op."""
    return 0 if running.current is None else len(running.current.collectives), collective_counts()


def collective_counts() -> dict[Any, int]:
    """How many collectives each process group has run; groups whose backend does not count are left out."""
    found: dict[Any, int] = {}
    if distributed.is_available() and distributed.is_initialized():
        for group in process_groups():
            with suppress(RuntimeError):
                found[group] = group._get_sequence_number_for_group()
    return found


def _note(op: str, ranks: frozenset[int]) -> None:
    current = running.current
    if current is not None and len(ranks) > 1 and not _is_data_parallel():
        frames = tuple(running.frames)
        after = tuple(frame.accounted for frame in frames)
        current.collectives.append(Collective(op, ranks, frames, after))


def tell_exchanges(current: Pass, observers: list[Watch]) -> None:
    """A pass has ended: tell its watches which layers exchange tensors with other ranks."""
    found = _exchanges(current)
    if current.full_pass is not None:
        current.full_pass.exchanges = found
    if current.begun_light is not None:
        found = [*found, *current.begun_light.plan.exchanges]
    for exchange in found:
        for observer in observers:
            known = (observer.names[number] for number in reversed(exchange.modules) if number in observer.names)
            name = next(known, None)
            if name is not None:
                note_exchange(observer, name, exchange)


def _exchanges(current: Pass) -> list[Exchange]:
    """What each attention call of a full pass shows."""
    if not current.collectives:
        return []
    around = [_attention_module(frames) for frames in current.called]
    found = []
    for frames, module in zip(current.called, around, strict=True):
        mine = [
            (one, after)
            for one in current.collectives
            for frame, after in zip(one.frames, one.after, strict=True)
            if frame is module
        ]
        if mine:
            calls = sum(other is module for other in around)
            gathers = calls == 1 and all(GATHER.search(one.op) is not None and not after for one, after in mine)
            ranks = frozenset[int]().union(*(one.ranks for one, _ in mine))
            found.append(Exchange(tuple(id(frame.module) for frame in frames), mine[0][0].op, ranks, calls, gathers))
    return found


def _attention_module(frames: tuple[Frame, ...]) -> Frame:
    """The module of an attention call: the innermost with parameters, or what is named attention around it."""
    place = len(frames) - 1
    while place and next(frames[place].module.parameters(), None) is None:
        place -= 1
    while place and traits(frames[place - 1].module).attends:
        place -= 1
    return frames[place]


def _ranks_of(args: tuple[Any, ...]) -> frozenset[int]:
    """The ranks of a collective's group, which is one of its arguments, or their last string; all ranks if none shows."""
    names = [one for one in args if isinstance(one, str)]
    for one in (*args, *names[-1:]):
        try:
            if isinstance(one, torch.ScriptObject):
                return frozenset(distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(one)))
            if names and one is names[-1]:
                return frozenset(distributed.get_process_group_ranks(resolve_process_group(one)))
        except (RuntimeError, ValueError, LookupError):
            continue  # the operation of a reduction, or no name
    return frozenset(range(distributed.get_world_size()))


def _is_data_parallel() -> bool:
    """Whether data parallelism, or a norm over the batch of all ranks, calls the collective that has just run."""
    for frame in python_frames(sys._getframe(1)):
        if frame.f_code is CALL:
            return False
        if DATA_PARALLEL.match(frame.f_globals.get("__name__", "")) is not None:
            return True
    return False
