"""Finding: one result about a head or a layer; and functions that read the numbers of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from .faults import ATTENTION_FAULTS, FAULTS, declaring
from .thresholds import KINDS, LEVELS, NAMES, Threshold

HeadRow = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One finding: its name and place, its number, the threshold that it passed and who set it, and what to do."""

    name: Annotated[str, {"enum": list(NAMES)}]
    level: Annotated[str, {"enum": [level for level in LEVELS if level != "ok"]}]
    layer: str
    kind: Annotated[str, {"enum": ["self", "cross"]}]
    head: Annotated[int | None, {"minimum": 0, "description": "null: the whole layer"}]
    value: float | None
    threshold: float | None
    source: Annotated[str, {"description": "who set the threshold"}]
    message: Annotated[str, {"description": "what it is and why it matters"}]
    advice: Annotated[str, {"description": "what to do"}]
    fault: Annotated[str | None, {"enum": [None, *FAULTS, *ATTENTION_FAULTS], "description": "what is wrong"}]
    title: Annotated[str | None, {"description": "the heading"}] = None

    def __post_init__(self) -> None:
        if self.title is None:
            title = KINDS[self.name].title if self.fault is None else (FAULTS | ATTENTION_FAULTS)[self.fault].title
            object.__setattr__(self, "title", title)

    @property
    def where(self) -> str:
        """The layer and the head in words."""
        return (self.layer or "the model") + ("" if self.head is None else f" head {self.head}")

    def to_dict(self) -> dict[str, Any]:
        """The finding as it is in the document of a scan."""
        return asdict(self)


def finding_of(
    row: HeadRow, name: str, level: str, value: float | None, threshold: Threshold, message: str, advice: str
) -> Finding:
    where = row["layer"], row["kind"], row.get("head")
    return Finding(name, level, *where, value, threshold.value, threshold.source, message, advice, None)


def fault_finding(name: str, place: tuple[str, str], value: float | None, **words: object) -> Finding:
    """A finding about a layer's attention. ``words`` fill in its message; a ``message`` or ``advice`` among them replaces it."""
    fault = ATTENTION_FAULTS[name]
    message, advice = (
        str(words.get("message") or fault.message.format(**words)),
        str(words.get("advice") or fault.advice) + declaring(name),
    )
    return Finding("attention", fault.level, *place, None, value, None, fault.source, message, advice, name)


def number(row: HeadRow, name: str) -> float | None:
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None


def past(ladder: Sequence[Threshold], value: float | None) -> Threshold | None:
    return next((rung for rung in ladder if value is not None and value > rung.value), None)


def listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)} in all)"
