"""Ledger: what one step has heard, by layer and kind, until it is closed into entries of a record."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ...heads import HeadSummary
from ..attach.gradients import Gradients
from ..call import Call, Facts
from ..passes import is_in
from .entry import Entry


@dataclass
class Line:
    """A layer in the step under way."""

    facts: Facts
    summary: HeadSummary | None = None
    gradients: Gradients | None = None


class Ledger:
    """Sums the calls of a step. Micro-batches and threads add up; nothing is read back from a device."""

    def __init__(self, gradients: bool) -> None:
        self.wants_gradients = gradients
        self.lock = threading.Lock()
        self.lines: dict[tuple[str, str, int], Line] = {}  # layer, kind, heads
        self.calls = 0  # since the watch began
        self.failures: dict[
            str, str
        ] = {}  # of the step that was closed last: layers whose gradients could not be measured

    def add(self, name: str, call: Call, summary: HeadSummary | None) -> None:
        place = (name, call.facts.kind, call.facts.heads)
        with self.lock:
            line = self.lines.setdefault(place, Line(call.facts))
            line.facts = call.facts
            if summary is not None:
                self.calls += 1
                line.summary = summary if line.summary is None else line.summary.merge(summary)
            if self.wants_gradients:
                if line.gradients is None:
                    line.gradients = Gradients(call.facts.heads)
                line.gradients.follow(call)

    def drop(self, module: str) -> None:
        """Forget what this step heard inside a module."""
        with self.lock:
            for place in [place for place in self.lines if is_in(place[0], module)]:
                line = self.lines.pop(place)
                if line.gradients is not None:
                    line.gradients.close()

    def close(self, step: int) -> tuple[list[Entry], dict[tuple[str, str], Facts]]:
        """The entries of this step; the next one starts empty."""
        with self.lock:
            lines, self.lines = self.lines, {}
        entries, facts, self.failures = [], {}, {}
        for (layer, kind, _), line in lines.items():
            sums = line.gradients.close() if line.gradients is not None else None
            if line.gradients is not None and line.gradients.failure is not None:
                self.failures[layer] = line.gradients.failure
            facts[layer, kind] = line.facts
            if line.summary is not None:
                heads = tuple(range(len(line.summary.sums)))
                entries.append(Entry(step, layer, kind, heads, line.summary, sums))
        return entries, facts
