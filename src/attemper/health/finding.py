"""Finding: one thing to say about a head or a layer; and how a row of numbers is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .thresholds import FAULTS, TITLES, Threshold

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing found: what, where, the number, the threshold it passed, who set that, and what to do.

    ``head`` is None where it is about a whole layer; ``fault`` names what is wrong with a scale.
    """

    kind: str
    level: str
    layer: str
    layer_kind: str
    head: int | None
    value: float | None
    threshold: float | None
    source: str
    says: str
    todo: str
    fault: str | None = None

    @property
    def title(self) -> str:
        """What it is called in a heading."""
        return FAULTS[self.fault].title if self.fault in FAULTS else TITLES[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """The finding as the document of a scan has it."""
        return {**asdict(self), "title": self.title}


def made(row: Row, kind: str, level: str, value: float | None, threshold: Threshold, says: str, todo: str) -> Finding:
    head = row.get("head")
    return Finding(kind, level, row["layer"], row["kind"], head, value, threshold.value, threshold.source, says, todo)


def number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None


def past(ladder: Sequence[Threshold], value: float | None) -> Threshold | None:
    return next((rung for rung in ladder if value is not None and value > rung.value), None)


def count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)} in all)"
