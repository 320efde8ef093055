"""Exchanged: which attention modules exchange tensors with other ranks while they run: their heads or rows are those of one rank.

The dispatch mode of a full pass sees every collective. Those that gather or average what is the same on all ranks (parameters,
buffers, statistics of a batch) are known by the code that calls them, and left out. A plan keeps what was found for
intercepted passes.
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
from ..record.ranks import Exchange

if TYPE_CHECKING:
    from ..call import AttentionCall
    from ..observer import Observer

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
        for exchange in running.current.collectives
        for frame, after in zip(exchange.frames, exchange.after, strict=True)
    )


def collectives_so_far() -> object:
    """What every collective changes, whoever calls it: also in an intercepted pass, and inside an op."""
    return 0 if running.current is None else len(running.current.collectives), collective_counts()


def collective_counts() -> dict[Any, int]:
    """How many collectives each process group has run; groups whose backend does not count are left out."""
    counts: dict[Any, int] = {}
    for group in process_groups():
        with suppress(RuntimeError):
            counts[group] = group._get_sequence_number_for_group()
    return counts


def _note(op: str, ranks: frozenset[int]) -> None:
    current = running.current
    if current is not None and len(ranks) > 1 and not _is_data_parallel():
        frames = tuple(running.frames)
        after = tuple(frame.accounted for frame in frames)
        current.collectives.append(Collective(op, ranks, frames, after))


def tell_exchanges(current: Pass, observers: list[Observer]) -> None:
    """A pass has ended: tell its watches which layers exchange tensors with other ranks."""
    exchanges = _exchanges(current)
    if current.full_pass is not None:
        current.full_pass.exchanges = exchanges
    if current.begun_intercepted is not None:
        exchanges = [*exchanges, *current.begun_intercepted.plan.exchanges]
    for exchange in exchanges:
        for observer in observers:
            known = (observer.names[number] for number in reversed(exchange.modules) if number in observer.names)
            name = next(known, None)
            if name is not None:
                observer.add_exchange(name, exchange)


def _exchanges(current: Pass) -> list[Exchange]:
    """What each attention call of a full pass shows."""
    if not current.collectives:
        return []
    around = [_attention_module(frames) for frames in current.called]
    exchanges = []
    for frames, module in zip(current.called, around, strict=True):
        mine = [
            (collective, after)
            for collective in current.collectives
            for frame, after in zip(collective.frames, collective.after, strict=True)
            if frame is module
        ]
        if mine:
            calls = sum(other is module for other in around)
            gathers = calls == 1 and all(
                GATHER.search(collective.op) is not None and not after for collective, after in mine
            )
            ranks = frozenset[int]().union(*(collective.ranks for collective, _ in mine))
            exchanges.append(
                Exchange(tuple(id(frame.module) for frame in frames), mine[0][0].op, ranks, calls, gathers)
            )
    return exchanges


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
    names = [argument for argument in args if isinstance(argument, str)]
    for value in (*args, *names[-1:]):
        try:
            if isinstance(value, torch.ScriptObject):
                return frozenset(distributed.get_process_group_ranks(distributed.ProcessGroup.unbox(value)))
            if names and value is names[-1]:
                return frozenset(distributed.get_process_group_ranks(resolve_process_group(value)))
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
