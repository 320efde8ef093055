"""Sums: the calls of a step, by pass, layer and kind, until the step closes into one entry per layer."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from ... import kernels
from ...heads import ALL_COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT, BlockSummary, HeadSummary
from ..attach.gradients import GradientHooks
from ..attach.names import is_in
from ..call import AttentionCall, CallInfo, Summary, UnfoldedRows
from .entry import Entry

MOST_KEPT = 256 << 20
"""Bytes of rows on a GPU that a step keeps before it folds them."""

MOST_ROWS = 1 << 12
"""Heads of calls whose sums are written into one block of host memory."""

SPARSE = 4
"""A block of sums that is more than so many times as large as what is used of it is not kept whole."""


@dataclass
class LayerSums:
    """A layer in one pass, or in the passes of a step."""

    info: CallInfo
    summary: HeadSummary | None = None
    unfolded: list[UnfoldedRows] = field(default_factory=list)
    gradients: list[GradientHooks] = field(default_factory=list)  # one for each pass

    def add(self, summary: HeadSummary | None) -> None:
        if self.summary is None or summary is None:
            self.summary = self.summary or summary
        else:
            self.summary = self.summary.merge(summary)

    def join(self, later: LayerSums) -> None:
        """Add the same layer in a later pass."""
        self.info = later.info
        self.add(later.summary)
        self.unfolded += later.unfolded
        self.gradients += later.gradients

    def close_hooks(self) -> Tensor | None:
        """Remove the hooks; returns the sums of the gradients."""
        sums_of_hooks = [sums for hooks in self.gradients if (sums := hooks.close()) is not None]
        return sum(sums_of_hooks[1:], sums_of_hooks[0]) if sums_of_hooks else None


LayersByPlace = dict[tuple[str, str, tuple[int, ...]], LayerSums]
"""By layer, kind and heads."""


class StepAccumulator:
    """Sums the calls of a step, by layer and kind. Micro-batches and threads add up; nothing is read back from a device.

    The calls of a pass are kept apart until it ends: those of one that raises are dropped if the step goes on without it.
    Sums that are written on a CPU share a block, which is allocated once in a step and copied into the record at once.
    """

    def __init__(self, gradients: bool) -> None:
        self.wants_gradients = gradients
        self.lock = threading.Lock()
        self.layers: LayersByPlace = {}  # in the passes that ended
        self.running: dict[int, LayersByPlace] = {}  # in the pass that a thread runs
        self.failed: dict[int, LayersByPlace] = {}  # in passes of a thread that raised
        self.local: set[str] = set()  # layers whose heads, rows or keys are those of one rank
        self.calls = 0  # since the watch began
        self.kept = 0  # bytes of rows on GPUs that are not folded yet
        self.blocks: list[Tensor] = []  # of this step, in host memory
        self.rows = self.rows_before = 0  # how many rows of blocks were given away in this step, and in the one before
        self.used = self.free = 0  # how many rows of the last block were given away, and are left
        self.failures: dict[str, str] = {}  # layers whose gradients could not be measured in the last closed step

    def room(self, heads: int) -> tuple[Tensor, int]:
        """A block, and the first of its rows where the sums and peaks of a call's heads may be written."""
        with self.lock:
            if not self.blocks or heads > self.free:
                self.free = max(heads, min(self.rows_before - self.rows, MOST_ROWS))
                self.blocks.append(torch.empty(self.free, len(ALL_COLUMNS), dtype=torch.float64, device="cpu"))
                self.used = 0
            first = self.used
            self.used += heads
            self.free -= heads
            self.rows += heads
            return self.blocks[-1], first

    def add(self, name: str, info: CallInfo, summary: Summary, call: AttentionCall | None = None) -> None:
        """Add a call to its layer; `call` where its gradients are wanted."""
        place = (name, info.kind, (call.some_heads if call is not None else None) or _all(info.heads))
        with self.lock:
            layers = self.running.setdefault(threading.get_ident(), {})
            layer = layers.get(place)
            if layer is None:
                layer = layers[place] = LayerSums(info)
            layer.info = info
            if call is not None and call.some_heads is not None:
                layer.info = replace(info, heads=call.module_heads or info.heads)
            if summary is not None:
                self.calls += 1
                if isinstance(summary, UnfoldedRows):
                    layer.unfolded.append(summary)
                    self.kept += summary.size
                    if self.kept > MOST_KEPT:
                        self._fold([layer for layers in self._all() for layer in layers.values()])
                elif layer.summary is None:
                    layer.summary = summary
                else:
                    layer.summary = layer.summary.merge(summary)
            if self.wants_gradients and call is not None:
                if not layer.gradients:
                    layer.gradients.append(GradientHooks(info.heads))
                layer.gradients[0].follow(call)

    def _all(self) -> list[LayersByPlace]:
        return [self.layers, *self.running.values(), *self.failed.values()]

    def end_pass(self, complete: bool) -> None:
        """The pass of this thread has ended."""
        thread = threading.get_ident()
        with self.lock:
            layers = self.running.pop(thread, {})
            if complete:
                _join(self.layers, layers)
            elif layers:
                _join(self.failed.setdefault(thread, {}), layers)

    def drop_failed(self, threads: Collection[int] | None = None) -> bool:
        """Forget the passes that raised, in these threads or in all; whether there were any."""
        with self.lock:
            dropped = [self.failed.pop(thread) for thread in [*self.failed] if threads is None or thread in threads]
        for layer in (layer for layers in dropped for layer in layers.values()):
            layer.close_hooks()
        return bool(dropped)

    def settle(self) -> None:
        """Count what running passes have so far, and passes that raised: the step ends."""
        with self.lock:
            parts, self.running, self.failed = self._all()[1:], {}, {}
            for layers in parts:
                _join(self.layers, layers)

    def _fold(self, layers: Sequence[LayerSums]) -> None:
        """Fold the rows that are kept, those of each device in one launch. Nothing waits for a device."""
        by_device: dict[torch.device, list[tuple[LayerSums, UnfoldedRows]]] = {}
        for layer in layers:
            for rows in layer.unfolded:
                by_device.setdefault(rows.device, []).append((layer, rows))
            layer.unfolded = []
        self.kept = 0
        for device, pairs in by_device.items():
            with torch.cuda.device(device):
                triton = kernels.load("triton")
                stream = triton.current_stream(device.index)
                for _, rows in pairs:
                    rows.wait_on(stream)
                calls = [(rows.addresses, rows.shape, rows.rows) for _, rows in pairs]
                block = triton.summary.by_head(calls, device, SATURABLE_KEYS, SATURATED_WEIGHT)
            first = 0
            for layer, rows in pairs:
                heads = rows.shape[1]
                summary: HeadSummary = BlockSummary(ALL_COLUMNS, block, first, heads)
                if rows.score_peaks is not None:
                    summary = HeadSummary(ALL_COLUMNS, summary.sums, summary.peaks, rows.score_peaks)
                layer.add(summary)
                first += heads
            _leave_large_block([layer for layer, _ in pairs], block)

    def drop(self, module: str) -> None:
        """Forget the calls of this step inside a module."""
        with self.lock:
            for layers in self._all():
                for place in [place for place in layers if is_in(place[0], module)]:
                    layers.pop(place).close_hooks()

    def close(self, step: int) -> tuple[list[Entry], dict[tuple[str, str], CallInfo]]:
        """The entries and info of this step; the next one starts empty."""
        with self.lock:
            layers, self.layers = self.layers, {}
            if self.kept:
                self._fold([*layers.values()])
            blocks, rows, self.blocks, self.rows, self.free = self.blocks, self.rows, [], 0, 0
        self.rows_before = rows or self.rows_before
        entries, info, self.failures = [], {}, {}
        if rows > sum([len(heads) for *_, heads in layers]):  # some were merged
            for block in blocks:
                _leave_large_block([*layers.values()], block)
        for (name, kind, heads), layer in layers.items():
            sums = layer.close_hooks() if layer.gradients else None
            failures = [hooks.failure for hooks in layer.gradients if hooks.failure is not None]
            if failures:
                self.failures[name] = failures[-1]
            info[name, kind] = replace(layer.info, local=True) if name in self.local else layer.info
            if layer.summary is not None:
                entries.append(Entry(step, name, kind, heads, layer.summary, sums))
        return entries if len(info) == len(layers) else _joined(entries), info


def _joined(entries: list[Entry]) -> list[Entry]:
    """The entries, with those of different heads of a layer as one: heads that were computed apart."""
    joined: dict[tuple[str, str], Entry] = {}
    others: list[Entry] = []
    for entry in entries:
        first = joined.setdefault((entry.layer, entry.kind), entry)
        if first is entry:
            continue
        if {*first.heads} & {*entry.heads} or first.summary.columns != entry.summary.columns:
            others.append(entry)  # calls that differ in their heads
        else:
            joined[entry.layer, entry.kind] = first.beside(entry)
    return [*joined.values(), *others]


def _join(layers: LayersByPlace, later: LayersByPlace) -> None:
    """Add the calls of a later pass."""
    for place, layer in later.items():
        if place in layers:
            layers[place].join(layer)
        else:
            layers[place] = layer


def _leave_large_block(layers: list[LayerSums], block: Tensor) -> None:
    """Copy the rows that summaries still use of a block, if those are few: layers with many calls have merged theirs."""
    summaries = [(layer, layer.summary) for layer in layers]
    using = [(layer, own) for layer, own in summaries if isinstance(own, BlockSummary) and own.block is block]
    if SPARSE * sum([own.heads for _, own in using]) < len(block):
        for layer, own in using:
            layer.summary = own.alone()


@cache
def _all(heads: int) -> tuple[int, ...]:
    return tuple(range(heads))
