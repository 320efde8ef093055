"""Paths: what a tensor was multiplied by since the projection it came out of, one factor at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SAME = 3e-3
"""Two numbers this close are one: bfloat16 keeps 8 bits, and a cos² + sin² taken from it is off by less than this."""


@dataclass(frozen=True)
class Factor:
    """One multiplication, in plain words. `low` and `high` where it is not one number: per head, per row, per channel.

    What does not `count` is no part of the scale: the gains of a norm, and weights per channel, which a projection could hold.
    """

    what: str
    number: float
    low: float | None = None
    high: float | None = None
    counts: bool = True
    learned: bool = False
    turn: bool = False  # a rotation's, whose cos and sin are not of length 1 (YaRN)

    @property
    def varies(self) -> bool:
        return self.low is not None

    def of(self, whose: str) -> Factor:
        return replace(self, what=f"{whose} {self.what}")


@dataclass(frozen=True)
class Turn:
    """A rotation under way: the mean square of the cosines, then of cosines and sines together, when it is `whole`.

    What is multiplied by a table and gets no second part was no rotation: the table is a factor like any other.
    """

    square: float
    whole: bool = False

    def factor(self) -> Factor:
        what = "turned by its position: the length of cos and sin" if self.whole else "multiplied by a tensor"
        return Factor(what, self.square**0.5, turn=self.whole)


@dataclass(frozen=True)
class Path:
    """The way of q or k from its projection, or of the scores from their product.

    ``norm`` is the root mean square of the entries behind the last norm on the way (None: there was none); a norm undoes every
    factor before it.
    """

    factors: tuple[Factor, ...] = ()
    norm: float | None = None
    turn: Turn | None = None
    mixed: bool = False  # scores of several heads added up: no one number is theirs

    def times(self, factor: Factor) -> Path:
        return (
            self if same(factor.number, 1.0) and not factor.varies else replace(self, factors=(*self.factors, factor))
        )

    def turned(self) -> Path:
        """The same with its rotation ended: nothing, unless its cos and sin were scaled (YaRN)."""
        return self if self.turn is None else replace(self, turn=None).times(self.turn.factor())

    def normed(self, rms: float) -> Path:
        return Path((), rms)

    @property
    def number(self) -> float:
        """All that counts, multiplied."""
        return math.prod(factor.number for factor in self.factors if factor.counts)


@dataclass
class Traced:
    """What tracing found of one attention call; None where a tensor could not be followed back."""

    query: Path | None = None
    key: Path | None = None
    scores: Path | None = None  # from the product to the softmax; None where one op did both
    sums: tuple[float, float] | None = (
        None  # the smallest and the largest sum of a row of weights, as they met the values
    )
    after: list[Factor] = field(default_factory=list)  # what the attention's output was multiplied by


def same(a: float, b: float, within: float = SAME) -> bool:
    """Whether two numbers are one to rounding."""
    return abs(a - b) <= within * max(abs(a), abs(b))


def joined(parts: Sequence[tuple[Path, int]]) -> Path:
    """Parts side by side in one head, each so many numbers wide: a rotated part and one that passes."""
    first = parts[0][0]
    if all(path == first or _alike(path, first) for path, _ in parts):
        return first
    ended = [(path.turned(), width) for path, width in parts]
    first = ended[0][0]
    if all(_alike(path, first) for path, _ in ended):
        return first
    numbers = [path.number for path, _ in ended]
    if same(min(numbers), max(numbers)):
        return replace(first, norm=None)  # a part is normed, and another is not
    widths = sum(width for _, width in ended)
    mean = math.sqrt(sum(path.number**2 * width for path, width in ended) / widths)
    factor = Factor("multiplied by other numbers in its parts", mean, min(numbers), max(numbers))
    return Path((factor,), first.norm)


def _alike(a: Path, b: Path) -> bool:
    turns = a.turn is b.turn is None or (
        a.turn is not None and b.turn is not None and same(a.turn.square, b.turn.square)
    )
    return turns and (a.norm is None) == (b.norm is None) and same(a.number, b.number)
