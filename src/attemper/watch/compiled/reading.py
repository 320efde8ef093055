"""TallyWatch: the watch of an instrumented model. It attaches nothing, and reads the tallies of a step in one transfer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from functools import cache
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch_private import _foreach_zero_
from ...errors import InputError
from ...heads import ALL_COLUMNS, COLUMNS, BlockSummary, HeadSummary
from ...operation.listen import TALLY
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
from ..attach.dynamo import is_compiled
from ..attach.names import named_modules
from ..call import Facts
from ..endings import surviving
from ..passes import LEFT_OUT, ONLY_OTHERS
from ..record.record import Record, locked
from ..record.sums import LayerSums
from ..record.transfer import MOST_WAITING, are_done, event_on, to_cpu
from ..routes.attemper import band
from ..session import Watch
from .find import way_of
from .instrument import instrument, tallies

CROSS_PADDING = (
    "padded queries of cross-attention are counted: a compiled graph does not show which sequence they belong to."
)
OPEN: weakref.WeakSet[TallyWatch] = weakref.WeakSet()
"""The watches that are open. A tally has one reader, who empties it."""


def class_of_watch(model: nn.Module, replace: bool, by_ops: bool) -> type[Watch]:
    """The class of a model's watch. With `replace`, a compiled model is instrumented, and stays so.

    `by_ops`: the watch needs the ops of the model, which a compiled graph hides.
    """
    if by_ops:
        return Watch
    modules = named_modules(model)
    found = any(TALLY in module.__dict__ for module in modules)
    if replace and not found and any(map(is_compiled, modules)) and "interface" in map(way_of, modules):
        instrument(model)
        found = True
    return TallyWatch if found else Watch


class TallyWatch(Watch):
    """A watch of a model that has tallies: steps, passes and the record are as in any other."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.RLock()  # another thread may read the record, which takes over what a step left
        self._pending: deque[tuple[int, TallyCopies]] = deque()  # steps that ended, and what is being copied of each

    def __enter__(self) -> Watch:
        self._tallies = tallies(self.model)
        if not self._tallies:
            raise InputError(
                "watch(): the model was instrumented when this watch was made, and is not any more. Make another one with "
                "attemper.watch(model)."
            )
        mine = {id(tally) for tally in self._tallies.values()}
        if any(id(tally) in mine for other in OPEN for tally in other._tallies.values()):
            raise InputError(
                "watch(): another watch of this instrumented model is open, and a tally has one reader. Close that one first, "
                "or use its record."
            )
        self._layout = TallyLayout(self._tallies)
        self._pending.clear()
        self._kept: list[Tensor] | None = None  # the tallies as a pause found them
        self._is_taken = False  # whether the step that the end of the block ends was taken over
        self._chosen: ChosenSlots | None = None  # of the last step, if the next one may have the same
        self._empty()
        super().__enter__()
        OPEN.add(self)
        return self

    def step(self, number: int | None = None) -> None:
        with surviving(self), self._lock:
            super().step(number)

    @property
    @locked
    def record(self) -> Record:
        """What was measured up to the last step that ended; with ``keep``, the last steps of it, and a note."""
        self._finish()
        return super().record

    def rows(self, keep: Tensor | None) -> None:
        raise InputError(
            "watch.rows(): an instrumented model adds its rows up inside the graph, where only its masks show padding. Pass the "
            "model an attention mask, or take the instruments off with attemper.instrument(model).remove()."
        )

    def _attach(self) -> None:
        self._measuring, self._kept = True, None
        if not self._paused:
            self._connect()

    def _detach(self) -> None:
        self._measuring, self._kept = False, None
        if self._ranks is not None:
            self._ranks.detach()

    def _connect(self) -> None:
        """Begin from zero, or go on from where a pause began."""
        if self._kept is None:
            self._empty()
        else:
            with torch.no_grad():
                for tally, kept in zip(self._tallies.values(), self._kept, strict=True):
                    tally.copy_(kept)
            self._kept = None
        if self._ranks is not None:
            self._ranks.attach()

    def _disconnect(self) -> None:
        self._kept = [tally.clone() for tally in self._tallies.values()]
        if self._ranks is not None:
            self._ranks.detach()

    @locked
    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._paused:
                self.resume()
            self._finish()
            found = TallyCopies(self._layout).finish()
            if self._measuring:
                self._take_over(found)
                self._is_taken = True
            elif not self._passes.begun:  # no step was measured: did the model run at all?
                ran = (sum(slot.calls for slot in slots) for slots in found.slots(found.counted()).values())
                self._passes.begun = max(map(int, ran), default=0)
        except BaseException:
            self._close()
            raise
        super().__exit__(error_type, error, trace)

    def _close(self) -> None:
        OPEN.discard(self)
        super()._close()

    def _close_step(self, join: bool) -> None:
        """Begin to copy a step. It is taken over when a later one ends, so that nothing waits for the device."""
        if self._is_taken:
            super()._close_step(join)
            return
        self._pending.append((self._step, TallyCopies(self._layout)))
        self._empty()
        many = self._ranks is not None and bool(self._ranks.groups)
        self._finish(0 if self._journal is not None or many else MOST_WAITING)

    def _finish(self, most: int = 0) -> None:
        """Take over the steps that were copied, and wait for others until no more than so many are missing."""
        now = self._step
        try:
            while self._pending and (len(self._pending) > most or are_done(self._pending[0][1].events)):
                self._step, copies = self._pending.popleft()
                self._take_over(copies.finish())
                if self._passes.left_out and not self._sums.layers:
                    self._warn(ONLY_OTHERS)
                super()._close_step(join=True)
        finally:
            self._step = now

    def _drop_step(self) -> None:
        super()._drop_step()
        self._empty()

    def _empty(self) -> None:
        """Begin from zero. Other steps may have added their calls meanwhile."""
        with torch.no_grad():
            _foreach_zero_(list(self._tallies.values()))

    def _take_over(self, found: TallyRows) -> None:
        """Add up what the calls of a step added to the tallies."""
        while FAILED:
            self.add_unmeasured("", FAILED.pop())
        counted = found.counted()
        if self._chosen is None or not torch.equal(self._chosen.counted, counted):
            self._chosen = self._choose(found, counted)
        chosen = self._chosen
        self._passes.grades = dict(chosen.grades)
        if self._passes.left_out or len({*chosen.grades.values()}) > 1:
            self._chosen = None  # with passes of several grades, what counts may depend on the steps before
        self._sums.calls += chosen.calls
        block = found.rows[chosen.rows, : PEAK + 1]
        first = 0
        for name, kind, ran in chosen.layers:
            parts = []
            for facts in ran:
                parts.append(BlockSummary(ALL_COLUMNS, block, first, facts.heads))
                first += facts.heads
            summary = _with_signs(parts[0].merge(*parts[1:]), self.signs)
            self._sums.layers[name, kind, tuple(range(ran[-1].heads))] = LayerSums(ran[-1], summary)

    def _choose(self, found: TallyRows, counted: Tensor) -> ChosenSlots:
        """What counts of a step, by its passes."""
        layers: list[tuple[str, str, list[TallySlot]]] = []
        for name, slots in found.slots(counted).items():
            calls = [int(sum([slot.calls for slot in slots if slot.grade == grade])) for grade in range(GRADES)]
            grades = self._passes.take_grades(name, calls)
            if sum(calls) > sum([calls[grade] for grade in grades]):
                self._note(LEFT_OUT)
            for kind in KINDS:
                ran = [slot for slot in slots if slot.kind == kind and slot.grade in grades]
                if ran:
                    layers.append((name, kind, ran))
                if kind == "cross" and any(slot.facts.queries > 1 for slot in ran):
                    self._note(CROSS_PADDING)
        rows = [row for _, _, ran in layers for slot in ran for row in range(slot.first, slot.first + slot.facts.heads)]
        return ChosenSlots(
            counted,
            [(name, kind, [slot.facts for slot in ran]) for name, kind, ran in layers],
            torch.tensor(rows, dtype=torch.int64, device="cpu"),
            sum([int(slot.calls) for _, _, ran in layers for slot in ran]),
            dict(self._passes.grades),
        )


class ChosenSlots(NamedTuple):
    """What counts of a step. The next step has the same, if it added as many calls of the same descriptions."""

    counted: Tensor
    layers: list[tuple[str, str, list[Facts]]]  # layer, kind, the facts of each slot
    rows: Tensor  # of the heads of all slots
    calls: int
    grades: dict[str, int]  # of the passes


class TallyLayout:
    """Where the rows of all tallies are, one for each kind, grade and head, if they are put below one another.

    Tallies are copied and read together: a few ops for each of them would take a millisecond of each step.
    """

    def __init__(self, found: dict[str, Tensor]) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tally in found.items():
            by_device.setdefault(tally.device, {})[name] = tally
        self.parts = {device: [tally.view(-1, WIDTH) for tally in mine.values()] for device, mine in by_device.items()}
        below = [(name, tally.shape[2]) for mine in by_device.values() for name, tally in mine.items()]
        first, firsts = 0, {}
        for name, heads in below:
            firsts[name] = (first, heads)
            first += len(KINDS) * GRADES * heads
        self.places: list[tuple[str, str, int, int]] = []  # layer, kind, grade, first row
        for name in found:
            first, heads = firsts[name]
            for number, (kind, grade) in enumerate((kind, grade) for kind in KINDS for grade in range(GRADES)):
                self.places.append((name, kind, grade, first + number * heads))
        self.firsts = torch.tensor([first for *_, first in self.places], dtype=torch.int64, device="cpu")


class TallyCopies:
    """Copies of tallies in host memory, begun when it was made, one from each device; ``finish`` waits for them alone."""

    def __init__(self, layout: TallyLayout) -> None:
        self.layout = layout
        self.copies = [to_cpu(torch.cat(parts)) for parts in layout.parts.values()]
        self.events = [event_on(device) for device in layout.parts if device.type == "cuda"]

    def finish(self) -> TallyRows:
        for event in self.events:
            event.synchronize()
        return TallyRows(self.copies[0] if len(self.copies) == 1 else torch.cat(self.copies), self.layout)


class TallySlot(NamedTuple):
    """The calls of a layer, of one kind and grade."""

    kind: str
    grade: int
    calls: float
    facts: Facts  # of the last one
    first: int  # row of its heads


class TallyRows(NamedTuple):
    """The rows of all tallies in host memory."""

    rows: Tensor  # (rows, WIDTH)
    layout: TallyLayout

    def counted(self) -> Tensor:
        """How many calls were added of each layer, kind and grade, and the number of the last one's description."""
        return self.rows[self.layout.firsts, CALLS : NUMBER + 1]

    def slots(self, counted: Tensor) -> dict[str, list[TallySlot]]:
        """By layer, those of all kinds and grades that have calls."""
        found: dict[str, list[TallySlot]] = {}
        for (name, kind, grade, first), (calls, number) in zip(self.layout.places, counted.tolist(), strict=True):
            if calls:
                slot = TallySlot(kind, grade, calls, facts_of(DESCRIPTIONS[int(number)]), first)
                found.setdefault(name, []).append(slot)
        return found


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
def facts_of(call: CallDescription) -> Facts:
    """The facts that a watch keeps of a call."""
    batch, heads, queries = call.shape
    causal, window = band(call.left, call.right)
    given: dict[str, Any] = {
        name: getattr(call, name)
        for name in (
            "route",
            "dtype",
            "kv_heads",
            "head_dim",
            "keys",
            "scale",
            "masked",
            "biased",
            "dropout",
            "softcap",
        )
    }
    return Facts(
        **given,
        kind=call.kind or kind_by_lengths(queries, call.keys),
        batch=batch,
        heads=heads,
        queries=queries,
        causal=causal is not False,
        window=window if call.route == "attemper" else call.window,
        declared=call.declared,
        implementation=call.implementation or None,
    )
