"""stats: estimates with their standard errors and Student's t, from independent batches. Needs torch alone, as measuring does."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..engine.experiment import Expectation

WIDEST = 0.25
"""Of a number: an interval that is wider is no test of it, and is left out."""
RARE = 1 / 16_000
"""How often chance alone puts an estimate farther from the truth than its reach."""
CHANCE = "t interval of the batches: missed by chance once in 16,000"


def expect_column(
    row: Mapping[str, Any], column: str, quantity: str, expected: float, source: str, more: float = 0.0, why: str = ""
) -> Expectation:
    """A row's estimate against a number: they agree within its reach, and ``more``, for the reason ``why``."""
    because = f"{CHANCE}; and {why}" if why else CHANCE
    return Expectation(quantity, expected, row[column], row[f"{column}_reach"] + more, source, because)


class Estimate(NamedTuple):
    """A mean, its standard error, and the degrees of freedom of that error: batches less one."""

    mean: float
    error: float
    freedom: int

    def columns(self, name: str) -> dict[str, float]:
        """``name``, the ends of its 95 % interval, and its reach, which chance exceeds once in 16,000."""
        half = t_quantile(self.freedom, 0.05) * self.error
        return {
            name: self.mean,
            f"{name}_low": self.mean - half,
            f"{name}_high": self.mean + half,
            f"{name}_reach": t_quantile(self.freedom, RARE) * self.error,
        }

    def root(self, name: str) -> dict[str, float]:
        """The columns of its square root: ends and reach are carried over the root, not linearised."""
        inside = self.columns(name)
        low, high = (math.sqrt(max(0.0, inside[f"{name}_{end}"])) for end in ("low", "high"))
        middle, reach = math.sqrt(max(0.0, self.mean)), inside[f"{name}_reach"]
        beyond = max(math.sqrt(self.mean + reach) - middle, middle - math.sqrt(max(0.0, self.mean - reach)))
        return {name: middle, f"{name}_low": low, f"{name}_high": high, f"{name}_reach": beyond}


def over_batches(values: Tensor) -> Estimate:
    """The mean of ``values``, (batches, …), and its error from how the batches differ: within one they may be dependent."""
    batches = values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()
    count = len(batches)
    error = float(batches.std() / math.sqrt(count)) if count > 1 else math.nan
    return Estimate(float(batches.mean()), error, count - 1)


def median_over_batches(values: Tensor) -> Estimate:
    """The median of all ``values``, (batches, count), and its error from the medians of the batches."""
    return over_batches(values.median(dim=1).values)._replace(mean=float(values.median()))


def columns(**values: Tensor) -> dict[str, float]:
    """The columns of several means over batches, by name."""
    return {column: number for name, of in values.items() for column, number in over_batches(of).columns(name).items()}


def over_seeds(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most of a number that was measured once per seed, as columns."""
    return {name: statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def within(row: Mapping[str, Any], name: str, expected: float) -> bool:
    """Whether a row's estimate lies within its reach of a number."""
    return bool(abs(row[name] - expected) <= row[f"{name}_reach"])


def clearly_below(low: Mapping[str, Any], high: Mapping[str, Any], name: str) -> bool:
    """Whether one row's estimate is below another's by more than both reaches."""
    return bool(low[name] + low[f"{name}_reach"] < high[name] - high[f"{name}_reach"])


@functools.cache
def t_quantile(freedom: int, outside: float) -> float:
    """The t that the absolute value of a Student variable exceeds with probability ``outside``; NaN for 0 degrees."""
    if freedom < 1:
        return math.nan
    low, high = 0.0, 1.0
    while _inside(high, freedom) < 1 - outside:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 1 - outside else (low, middle)
    return high


def outside(t: float, freedom: int) -> float:
    """P(|T| > t) of a Student variable; its square is an F of 1 and ``freedom``."""
    return 1 - _inside(t, freedom)


def _inside(t: float, freedom: int) -> float:
    """P(|T| < t) for whole degrees of freedom: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share
