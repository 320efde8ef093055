"""Compiled: the calls of an instrumented model, as the tallies of its modules have them, read in one transfer for each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch_private import _foreach_zero_
from ...errors import InputError
from ...heads import ALL_COLUMNS, COLUMNS, BlockSummary, HeadSummary
from ...operation.tally import (
    CALLS,
    DESCRIPTIONS,
    FAILED,
    GRADES,
    KINDS,
    NUMBER,
    PEAK,
    WIDTH,
    CallDescription,
    kind_by_lengths,
)
from ...vitals import Vitals
from ..call import CallInfo
from ..observer import LEFT_OUT, Observer
from ..record.buffer import are_done, event_on, to_cpu
from ..record.sums import LayerSums
from ..routes.attemper import band
from ..source import Source
from .instrument import tallies

CROSS_PADDING = (
    "padded queries of cross-attention are counted: a compiled graph does not show which sequence they belong to."
)
OPEN: weakref.WeakSet[Compiled] = weakref.WeakSet()
"""The sources that are open. A tally has one reader, who empties it."""


class Compiled(Source):
    """The calls of an instrumented model, which its graph has added to the tallies of its modules. Nothing is attached to it."""

    refuses_rows = (
        "watch.rows(): an instrumented model adds its rows up inside the graph, where only its masks show padding. Pass the "
        "model an attention mask, or take the instruments off with attemper.instrument(model).remove()."
    )

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.tallies: list[Tensor] = []  # while it is open
        self.kept: list[Tensor] | None = None  # the tallies as a pause found them
        self.counts = False  # whether a step is measured
        self.chosen: ChosenSlots | None = None  # of the last step, if the next one may have the same

    def open(self) -> None:
        copies = tallies(self.observer.model)
        if not copies:
            raise InputError(
                "watch(): the model was instrumented when this watch was made, and is not any more. Make another one with "
                "attemper.watch(model)."
            )
        mine = {id(tally) for tally in copies.values()}
        if any(id(tally) in mine for other in OPEN for tally in other.tallies):
            raise InputError(
                "watch(): another watch of this instrumented model is open, and a tally has one reader. Close that one first, "
                "or use its record."
            )
        self.tallies, self.layout = [*copies.values()], TallyLayout(copies)
        self.kept = self.chosen = None
        self.forget()
        OPEN.add(self)

    def start(self) -> None:
        self.counts = True
        if self.kept is None:
            self.forget()
        else:
            self._put_back(self.kept)

    def pause(self) -> None:
        self.kept = [tally.clone() for tally in self.tallies]

    def stop(self) -> None:
        self.counts, self.kept = False, None

    def _put_back(self, saved: list[Tensor]) -> None:
        """Forget the calls since a pause."""
        with torch.no_grad():
            for tally, before in zip(self.tallies, saved, strict=True):
                tally.copy_(before)
        self.kept = None

    def collect(self, goes_on: bool) -> TallyCopies:
        """Begin to copy a step. It is taken over when a later one ends, so that nothing waits for the device."""
        is_paused = self.kept is not None
        if self.kept is not None:
            self._put_back(self.kept)
        copies = TallyCopies(self.layout, self.take_over if self.counts else self.count_passes)
        self.forget()
        if is_paused:
            self.pause()
        return copies

    def forget(self) -> None:
        """Begin from zero. Other steps may have added their calls meanwhile."""
        if self.tallies:
            with torch.no_grad():
                _foreach_zero_(self.tallies)

    def close(self) -> None:
        OPEN.discard(self)
        self.tallies = []

    def count_passes(self, copies: TallyCopies) -> None:
        """Find out whether the model ran at all, in steps that were not measured."""
        passes = self.observer.passes
        if not passes.begun:
            ran = (sum(slot.calls for slot in slots) for slots in copies.slots().values())
            passes.begun = max(map(int, ran), default=0)

    def take_over(self, copies: TallyCopies) -> None:
        """Add up what the calls of a step added to the tallies."""
        observer = self.observer
        while FAILED:
            observer.add_unmeasured("", FAILED.pop())
        if self.chosen is None or not torch.equal(self.chosen.counted, copies.counted):
            self.chosen = self._choose(copies)
        chosen = self.chosen
        observer.passes.grades = dict(chosen.grades)
        if observer.passes.left_out or len({*chosen.grades.values()}) > 1:
            self.chosen = None  # with passes of several grades, what counts may depend on the steps before
        observer.sums.calls += chosen.calls
        block = copies.rows[chosen.rows, : PEAK + 1]
        first = 0
        for name, kind, ran in chosen.layers:
            parts = []
            for info in ran:
                parts.append(BlockSummary(ALL_COLUMNS, block, first, info.heads))
                first += info.heads
            summary = _with_signs(parts[0].merge(*parts[1:]), observer.signs)
            observer.sums.layers[name, kind, tuple(range(ran[-1].heads))] = LayerSums(ran[-1], summary)

    def _choose(self, copies: TallyCopies) -> ChosenSlots:
        """What counts of a step, by its passes."""
        observer = self.observer
        layers: list[tuple[str, str, list[TallySlot]]] = []
        for name, slots in copies.slots().items():
            calls = [int(sum([slot.calls for slot in slots if slot.grade == grade])) for grade in range(GRADES)]
            grades = observer.passes.take_grades(name, calls)
            if sum(calls) > sum([calls[grade] for grade in grades]):
                observer.note(LEFT_OUT)
            for kind in KINDS:
                ran = [slot for slot in slots if slot.kind == kind and slot.grade in grades]
                if ran:
                    layers.append((name, kind, ran))
                if kind == "cross" and any(slot.info.queries > 1 for slot in ran):
                    observer.note(CROSS_PADDING)
        rows = [row for _, _, ran in layers for slot in ran for row in range(slot.first, slot.first + slot.info.heads)]
        return ChosenSlots(
            copies.counted,
            [(name, kind, [slot.info for slot in ran]) for name, kind, ran in layers],
            torch.tensor(rows, dtype=torch.int64, device="cpu"),
            sum([int(slot.calls) for _, _, ran in layers for slot in ran]),
            dict(observer.passes.grades),
        )


class ChosenSlots(NamedTuple):
    """What counts of a step. The next step has the same, if it added as many calls of the same descriptions."""

    counted: Tensor
    layers: list[tuple[str, str, list[CallInfo]]]  # layer, kind, the info of each slot
    rows: Tensor  # of the heads of all slots
    calls: int
    grades: dict[str, int]  # of the passes


class TallyLayout:
    """Where the rows of all tallies are, one for each kind, grade and head, if they are put below one another.

    Tallies are copied and read together: a few ops for each of them would take a millisecond of each step.
    """

    def __init__(self, tallies: dict[str, Tensor]) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tally in tallies.items():
            by_device.setdefault(tally.device, {})[name] = tally
        self.parts = {device: [tally.view(-1, WIDTH) for tally in mine.values()] for device, mine in by_device.items()}
        below = [(name, tally.shape[2]) for mine in by_device.values() for name, tally in mine.items()]
        first, firsts = 0, {}
        for name, heads in below:
            firsts[name] = (first, heads)
            first += len(KINDS) * GRADES * heads
        self.places: list[tuple[str, str, int, int]] = []  # layer, kind, grade, first row
        for name in tallies:
            first, heads = firsts[name]
            for number, (kind, grade) in enumerate((kind, grade) for kind in KINDS for grade in range(GRADES)):
                self.places.append((name, kind, grade, first + number * heads))
        self.firsts = torch.tensor([first for *_, first in self.places], dtype=torch.int64, device="cpu")


class TallySlot(NamedTuple):
    """The calls of a layer, of one kind and grade."""

    kind: str
    grade: int
    calls: float
    info: CallInfo  # of the last one
    first: int  # row of its heads


class TallyCopies:
    """Copies of tallies in host memory, begun when it was made, one from each device; ``take_over`` waits for them alone."""

    rows: Tensor  # (rows, WIDTH), when they have arrived
    counted: (
        Tensor  # how many calls were added of each layer, kind and grade, and the number of the last one's description
    )

    def __init__(self, layout: TallyLayout, take: Callable[[TallyCopies], None]) -> None:
        self.layout, self.take = layout, take
        self.copies = [to_cpu(torch.cat(parts)) for parts in layout.parts.values()]
        self.events = [event_on(device) for device in layout.parts if device.type == "cuda"]

    @property
    def is_done(self) -> bool:
        return are_done(self.events)

    def take_over(self) -> None:
        for event in self.events:
            event.synchronize()
        self.rows = self.copies[0] if len(self.copies) == 1 else torch.cat(self.copies)
        self.counted = self.rows[self.layout.firsts, CALLS : NUMBER + 1]
        self.take(self)

    def slots(self) -> dict[str, list[TallySlot]]:
        """By layer, those of all kinds and grades that have calls."""
        slots: dict[str, list[TallySlot]] = {}
        for (name, kind, grade, first), (calls, number) in zip(self.layout.places, self.counted.tolist(), strict=True):
            if calls:
                slot = TallySlot(kind, grade, calls, info_of(DESCRIPTIONS[int(number)]), first)
                slots.setdefault(name, []).append(slot)
        return slots


def _with_signs(summary: HeadSummary, signs: tuple[str, ...]) -> HeadSummary:
    """Only what a watch with these signs has."""
    columns = _columns_of(signs)
    if columns == summary.columns:
        return summary
    places = [COLUMNS.index(name) for name in columns if name != "peak"]
    peaks = summary.peaks if "peak" in columns else torch.full_like(summary.peaks, float("-inf"))
    return HeadSummary(columns, summary.sums[:, places], peaks)


@cache
def _columns_of(signs: tuple[str, ...]) -> tuple[str, ...]:
    row = torch.zeros((1, 1, 1), device="cpu")
    return Vitals(**dict.fromkeys(signs, row)).by_head().columns


@cache
def info_of(call: CallDescription) -> CallInfo:
    """The info that a watch keeps of a call."""
    given = call._asdict()
    left, right, (batch, heads, queries) = (given.pop(name) for name in ("left", "right", "shape"))
    causal, window = band(left, right)
    given["kind"] = call.kind or kind_by_lengths(queries, call.keys)
    given["window"] = window if call.route == "attemper" else call.window
    given["implementation"] = call.implementation or None
    return CallInfo(**given, batch=batch, heads=heads, queries=queries, causal=causal is not False)
