"""Paths: what a tensor was multiplied by since the projection that made it, one factor at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cuts import Cut
    from .hiding import WeakMask

SAME = 3e-3
"""Numbers this close are equal: bfloat16 keeps 8 bits, and a cos² + sin² computed from it is off by less than this."""


SUMMED = "summed over tokens"


@dataclass(frozen=True)
class Factor:
    """One multiplication, described by `what`. `low` and `high` if it is not one number: per head, per row, per channel.

    What does not `count` is not part of the scale: the gains of a norm, and weights per channel, which a projection could hold.
    """

    what: str
    number: float
    low: float | None = None
    high: float | None = None
    counts: bool = True
    learned: bool = False
    stretches: bool = False  # of a rotation whose cos and sin do not have length 1 (YaRN)

    @property
    def varies(self) -> bool:
        return self.low is not None

    def of(self, whose: str) -> Factor:
        return replace(self, what=f"{whose} {self.what}")


@dataclass(frozen=True)
class Rotation:
    """An unfinished rotation: the mean square of the cosines; when it is `whole`, of cosines and sines together.

    A tensor that is multiplied by a table once, with no second part added, was not rotated: the table is a plain factor.
    """

    square: float
    whole: bool = False

    def factor(self) -> Factor:
        what = "rotated by its position: the length of cos and sin" if self.whole else "multiplied by a tensor"
        return Factor(what, self.square**0.5, stretches=self.whole)


@dataclass(frozen=True)
class FactorPath:
    """What happened to q or k since its projection, or to the scores since their product.

    ``norm`` is the root mean square of the entries after the last norm (None: there was none); a norm undoes every factor
    before it.
    """

    factors: tuple[Factor, ...] = ()
    norm: float | None = None
    rotation: Rotation | None = None
    mixed: bool = False  # scores of several heads were added: no single factor is theirs
    turned: bool = False  # whether it was rotated by angles

    def times(self, factor: Factor) -> FactorPath:
        if same(factor.number, 1.0) and not factor.varies:
            return self
        last = self.factors[-1] if self.factors else None
        if last is not None and last.what == SUMMED and same(last.number * factor.number, 1.0) and not factor.varies:
            return replace(self, factors=self.factors[:-1])  # a sum that is divided by its number is an average
        return replace(self, factors=(*self.factors, factor))

    def rotated(self) -> FactorPath:
        """The path with its rotation ended. A rotation is no factor unless cos and sin were scaled (YaRN)."""
        if self.rotation is None:
            return self
        ended = replace(self, rotation=None, turned=self.turned or self.rotation.whole)
        return ended.times(self.rotation.factor())

    def normed(self, rms: float) -> FactorPath:
        return FactorPath((), rms)

    @property
    def number(self) -> float:
        """The product of all factors that count."""
        return math.prod(factor.number for factor in self.factors if factor.counts)


@dataclass
class Traced:
    """What tracing found of one attention call; None if a tensor could not be followed back."""

    query: FactorPath | None = None
    key: FactorPath | None = None
    scores: FactorPath | None = None  # from the product to the softmax; None if one op did both
    sums: tuple[float, float] | None = None  # the smallest and the largest sum of a row of weights, at the values
    after: list[Factor] = field(default_factory=list)  # what the attention's output was multiplied by
    weak: WeakMask | None = None  # the op that hides keys worst, before the softmax
    changes: frozenset[str] = frozenset()  # what happened to the weights before they met the values
    across: tuple[float, float] | None = None  # as `sums`, over a dimension that the softmax did not run over
    cuts: list[Cut] = field(default_factory=list)  # how queries, keys and values were cut into heads, as far as known
    merged: Cut | None = None  # how the heads were joined, if the output was followed to a projection

    @property
    def rotates(self) -> bool:
        """Whether q was rotated by angles on its way from its projection."""
        return self.query is not None and self.query.turned


def same(a: float, b: float, within: float = SAME) -> bool:
    """Whether two numbers are equal up to rounding."""
    return abs(a - b) <= within * max(abs(a), abs(b))


def joined(parts: Sequence[tuple[FactorPath, int]]) -> FactorPath:
    """The path of concatenated parts of one head, with their widths: a rotated part and one that is not, for example."""
    first = parts[0][0]
    if all(path == first or _alike(path, first) for path, _ in parts):
        return first
    ended = [(path.rotated(), width) for path, width in parts]
    first = ended[0][0]
    if all(_alike(path, first) for path, _ in ended):
        return first
    numbers = [path.number for path, _ in ended]
    if same(min(numbers), max(numbers)):
        return replace(first, norm=None)  # one part has a norm, another does not
    widths = sum(width for _, width in ended)
    mean = math.sqrt(sum(path.number**2 * width for path, width in ended) / widths)
    factor = Factor("multiplied by different numbers in its parts", mean, min(numbers), max(numbers))
    return FactorPath((factor,), first.norm)


def _alike(a: FactorPath, b: FactorPath) -> bool:
    alike = a.rotation is b.rotation is None or (
        a.rotation is not None and b.rotation is not None and same(a.rotation.square, b.rotation.square)
    )
    return alike and (a.norm is None) == (b.norm is None) and same(a.number, b.number)
