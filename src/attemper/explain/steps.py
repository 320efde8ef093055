"""The plain data of an explanation: matrices by their corner, readings, steps. Needs neither torch nor rich."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


def short(number: float) -> str:
    """A number that is known exactly, in up to three digits."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def measured(number: float) -> str:
    """A number that was measured, in three digits, and never a 1 that is not one."""
    if 0.9995 <= number < 1:
        return "> 0.999"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:#.3g}".removesuffix(".")


def _about(expected: float | None, give: float | None) -> str:
    if expected is None:
        return "–"
    return f"{short(expected)} ± {give:.2g}" if give else short(expected)


@dataclass(frozen=True)
class Matrix:
    """The top left corner of a matrix, the shape of the whole, and the words its rows and columns stand for."""

    name: str
    shape: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    weights: bool = False

    @property
    def size(self) -> str:
        """The shape: [3×512]."""
        return f"[{'×'.join(map(str, self.shape))}]"

    def format(self, value: float) -> str:
        """An entry in at most six characters, as precise as the largest one shown allows."""
        largest = max(abs(number) for row in self.values for number in row)
        if largest >= 1e5 or largest < 0.005:
            return f"{value:.0e}"
        return f"{value:.{3 if largest < 1 or self.weights else 2 if largest < 100 else 1 if largest < 1000 else 0}f}"


@dataclass(frozen=True)
class LaneReading:
    """One number for each lane; where there is a prediction, ``expected`` give or take ``give``, and the ``theory`` of it."""

    name: str
    label: str
    says: str
    values: tuple[float, float]
    expected: tuple[float | None, float | None] | None = None
    give: tuple[float | None, float | None] | None = None
    theory: str = ""

    @property
    def predictions(self) -> list[list[str]]:
        """The predictions in words, one for each lane; empty where there are none."""
        if self.expected is None or self.give is None or self.expected == (None, None):
            return []
        return [[_about(*pair) for pair in zip(self.expected, self.give, strict=True)]]


@dataclass(frozen=True)
class HeadLine:
    """One head, in both lanes."""

    head: int
    variance: tuple[float, float]
    top_weight: tuple[float, float]
    entropy: tuple[float, float]


@dataclass(frozen=True)
class LessonStep:
    """One step of the flow: what happens in words, its formula, and its numbers.

    ``matrices`` stand below one another, ``lanes`` side by side (the chosen rule, then the other one); ``note`` is a worked
    example or a caution.
    """

    name: str
    title: str
    words: str
    formula: str
    matrices: tuple[Matrix, ...] = ()
    lanes: tuple[Matrix, ...] = ()
    readings: tuple[LaneReading, ...] = ()
    heads: tuple[HeadLine, ...] = ()
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON takes it."""
        return asdict(self)
