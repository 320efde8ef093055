"""The plain data of an explanation: corners of matrices, readings, steps. Needs neither torch nor rich."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


def format_exact(number: float) -> str:
    """An exact number, in up to three digits."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def format_measured(number: float) -> str:
    """A measured number in three digits; one just below 1 is never rounded to 1."""
    if 0.9995 <= number < 1:
        return "> 0.999"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:#.3g}".removesuffix(".")


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

    @property
    def cut_below(self) -> bool:
        """Whether rows are left out, where more than one is shown."""
        return 1 < len(self.values) < self.shape[0]

    def format(self, value: float) -> str:
        """An entry in at most six characters, as precise as the largest one shown allows."""
        largest = max(abs(number) for row in self.values for number in row)
        if largest >= 1e5 or largest < 0.005:
            return f"{value:.0e}"
        return f"{value:.{3 if largest < 1 or self.weights else 2 if largest < 100 else 1 if largest < 1000 else 0}f}"


@dataclass(frozen=True)
class LaneReading:
    """One number for each lane. A prediction is ``expected`` ± ``std``, and ``theory`` says where it comes from."""

    name: str
    label: str
    says: str
    values: tuple[float, float]
    expected: tuple[float | None, float | None] | None = None
    std: tuple[float | None, float | None] | None = None
    theory: str = ""

    @property
    def predictions(self) -> list[list[str]]:
        """The predictions in words, one for each lane; empty where there are none."""
        if self.expected is None or self.std is None or self.expected == (None, None):
            return []
        pairs = zip(self.expected, self.std, strict=True)
        return [
            ["–" if value is None else format_exact(value) + (f" ± {std:.2g}" if std else "") for value, std in pairs]
        ]

    @property
    def lines(self) -> list[list[str]]:
        """The lines of a table: a label, a cell for each lane, a sentence; then the same for the prediction."""
        values = [self.label, *map(format_measured, self.values), self.says]
        return [values, *(["expected", *words, self.theory] for words in self.predictions)]


@dataclass(frozen=True)
class HeadLine:
    """One head, in both lanes."""

    head: int
    variance: tuple[float, float]
    top_weight: tuple[float, float]
    entropy: tuple[float, float]

    @property
    def signs(self) -> dict[str, tuple[float, float]]:
        """Each sign by its label."""
        return {"variance": self.variance, "top weight": self.top_weight, "entropy": self.entropy}


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
        """The step as plain data."""
        return asdict(self)
