"""Finding: one result about a head or a layer; and how the numbers of a row are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from .faults import ATTENTION_FAULTS
from .thresholds import FAULTS, LEVELS, NAMES, TITLES, Threshold

HeadRow = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing found: its name, where it is, the number, the threshold it passed, who set that, and what to do."""

    name: Annotated[str, {"enum": list(NAMES)}]
    level: Annotated[str, {"enum": [level for level in LEVELS if level != "ok"]}]
    layer: str
    kind: Annotated[str, {"enum": ["self", "cross"]}]
    head: Annotated[int | None, {"minimum": 0, "description": "null: the whole layer"}]
    value: float | None
    threshold: float | None
    source: Annotated[str, {"description": "who set the threshold"}]
    says: Annotated[str, {"description": "what it is and why it matters"}]
    todo: Annotated[str, {"description": "what to do"}]
    fault: Annotated[str | None, {"enum": [None, *FAULTS, *ATTENTION_FAULTS], "description": "what is wrong"}]
    title: Annotated[str | None, {"description": "the heading"}] = None

    def __post_init__(self) -> None:
        if self.title is None:
            fault = self.fault
            own = FAULTS[fault].title if fault in FAULTS else ATTENTION_FAULTS[fault].title if fault else None
            title = own or TITLES[self.name]
            object.__setattr__(self, "title", title)

    def to_dict(self) -> dict[str, Any]:
        """The finding as it is in the document of a scan."""
        return asdict(self)


def finding_of(
    row: HeadRow, name: str, level: str, value: float | None, threshold: Threshold, says: str, todo: str
) -> Finding:
    where = row["layer"], row["kind"], row.get("head")
    return Finding(name, level, *where, value, threshold.value, threshold.source, says, todo, None)


def number(row: HeadRow, name: str) -> float | None:
    value = row.get(name)
    return value if value is not None and math.isfinite(value) else None


def past(ladder: Sequence[Threshold], value: float | None) -> Threshold | None:
    return next((rung for rung in ladder if value is not None and value > rung.value), None)


def listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)} in all)"
