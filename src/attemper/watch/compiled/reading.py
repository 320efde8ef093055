"""TallyWatch: the watch of an instrumented model. It attaches nothing, and reads the tallies of a step in one transfer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...heads import COLUMNS, HeadSummary
from ...operation.listen import TALLY
from ...operation.tally import CALLS, DESCRIPTIONS, GRADES, KINDS, NUMBER, PEAK, CallDescription, kind_by_lengths
from ...vitals import Vitals
from ..attach.dynamo import is_compiled
from ..attach.names import named_modules
from ..call import Facts
from ..passes import LEFT_OUT
from ..record.entry import LayerSums
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

    def __enter__(self) -> Watch:
        self._tallies = tallies(self.model)
        mine = {id(tally) for tally in self._tallies.values()}
        if any(id(tally) in mine for other in OPEN for tally in other._tallies.values()):
            raise InputError(
                "watch(): another watch of this instrumented model is open, and a tally has one reader. Close that one first, "
                "or use its record."
            )
        self._empty()
        super().__enter__()
        OPEN.add(self)
        return self

    def step(self) -> None:
        """End the current step, and measure the next one if it is due."""
        if self._open:
            self._read()
        super().step()

    def rows(self, keep: Tensor | None) -> None:
        raise InputError(
            "watch.rows(): an instrumented model adds its rows up inside the graph, where only its masks show padding. Pass the "
            "model an attention mask, or take the instruments off with attemper.instrument(model).remove()."
        )

    def _attach(self) -> None:
        self._empty()
        self._measuring = True
        if self._ranks is not None:
            self._ranks.attach()

    def _detach(self) -> None:
        self._measuring = False
        if self._ranks is not None:
            self._ranks.detach()

    def _close(self) -> None:
        OPEN.discard(self)
        super()._close()

    def _drop_unfinished(self, ended_well: bool) -> None:
        self._read()
        super()._drop_unfinished(ended_well)

    def _close_step(self, join: bool) -> None:
        self._read()
        super()._close_step(join)
        self._empty()

    def _empty(self) -> None:
        """Begin from zero. Other steps may have added their calls meanwhile."""
        with torch.no_grad():
            for tally in self._tallies.values():
                tally.zero_()
        self._is_read = False

    def _read(self) -> None:
        """Take over what the calls of a measured step added, unless that was done."""
        if not self._measuring or self._is_read:
            return
        self._is_read = True
        for name, tally in _on_host(self._tallies).items():
            calls = [int(tally[:, grade, 0, CALLS].sum()) for grade in range(GRADES)]
            grades = self._passes.take_grades(name, calls)
            if sum(calls) > sum(calls[grade] for grade in grades):
                self._note(LEFT_OUT)
            for kind, slots in zip(KINDS, tally, strict=True):
                self._take(name, kind, [slots[grade] for grade in sorted(grades) if slots[grade, 0, CALLS]])

    def _check_end(self, was_measuring: bool) -> None:
        if not self._passes.begun:  # no step was measured: did the model run at all?
            self._passes.begun = max((int(t[..., 0, CALLS].sum()) for t in _on_host(self._tallies).values()), default=0)
        super()._check_end(was_measuring)

    def _take(self, name: str, kind: str, slots: list[Tensor]) -> None:
        """Add the calls of a layer and kind to the step; of each grade that counts there is one slot."""
        summary = None
        for slot in slots:
            call = DESCRIPTIONS[int(slot[0, NUMBER])]
            own = slot[: call.shape[1]]
            part = HeadSummary((*COLUMNS, "peak"), own[:, : len(COLUMNS)], own[:, PEAK])
            summary = part if summary is None else summary.merge(part)
            facts = facts_of(call)
            if kind == "cross" and facts.queries > 1:
                self._note(CROSS_PADDING)
            self._sums.calls += int(slot[0, CALLS])
        if summary is not None:
            place = (name, kind, facts.heads)
            self._sums.layers[place] = LayerSums(facts, _with_signs(summary, self.signs))


def _on_host(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory: one transfer from each device."""
    by_device: dict[torch.device, list[str]] = {}
    for name, tally in found.items():
        by_device.setdefault(tally.device, []).append(name)
    copied: dict[str, Tensor] = {}
    for names in by_device.values():
        numbers = torch.cat([found[name].detach().reshape(-1) for name in names]).cpu()
        parts = numbers.split([found[name].numel() for name in names])
        copied |= {name: part.view(found[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: copied[name] for name in found}


def _with_signs(summary: HeadSummary, signs: tuple[str, ...]) -> HeadSummary:
    """Only what a watch with these signs has."""
    row = torch.zeros((1, 1, 1), device="cpu")
    columns = Vitals(**dict.fromkeys(signs, row)).by_head().columns
    places = [COLUMNS.index(name) for name in columns if name != "peak"]
    peaks = summary.peaks if "peak" in columns else torch.full_like(summary.peaks, float("-inf"))
    return HeadSummary(columns, summary.sums[:, places], peaks)


def facts_of(call: CallDescription) -> Facts:
    """The facts that a watch keeps of a call."""
    batch, heads, queries = call.shape
    causal, window = band(call.left, call.right)
    given: dict[str, Any] = {
        name: getattr(call, name)
        for name in ("route", "dtype", "kv_heads", "head_dim", "keys", "scale", "masked", "dropout", "softcap")
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
