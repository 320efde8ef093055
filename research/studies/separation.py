"""separation: how well a number tells failing runs from healthy ones; larger is worse. Intervals are of a bootstrap over runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DRAWS = 1000  # of the bootstrap
OUTSIDE = 0.025  # of the draws, on either side


class Interval(NamedTuple):
    """A number, and where 95 % of a bootstrap's draws lie."""

    value: float
    low: float
    high: float

    def columns(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


NO_INTERVAL = Interval(math.nan, math.nan, math.nan)


def wins(failed: Sequence[float], healthy: Sequence[float]) -> Tensor:
    """(failed, healthy): 1 where the failing run has the larger number, a half where they are equal."""
    bad, good = (torch.tensor(list(one), dtype=torch.float64, device="cpu") for one in (failed, healthy))
    return (bad[:, None] > good).double() + 0.5 * (bad[:, None] == good).double()


def area(won: Tensor) -> Interval:
    """The area under the ROC: how often a failing run has the larger number, from the wins of all pairs."""
    return areas([won])[0]


def areas(won: Sequence[Tensor]) -> list[Interval]:
    """The areas of several numbers of the same runs; of two numbers also the first area minus the second. All of them use
    the same draws of runs."""
    failed, healthy = won[0].shape
    if not failed or not healthy:
        return [NO_INTERVAL] * (len(won) + (len(won) == 2))
    left, right = _drawn(failed, 0), _drawn(healthy, 1)
    drawn = [((left @ one) * right).sum(1) / (failed * healthy) for one in won]
    found = [interval(float(one.mean()), some) for one, some in zip(won, drawn, strict=True)]
    if len(won) == 2:
        found.append(interval(found[0].value - found[1].value, drawn[0] - drawn[1]))
    return found


def within(groups: Sequence[Tensor]) -> Interval:
    """The area among the pairs of runs of one group, over all groups, from the wins of each: what tells groups apart is worth
    nothing. Runs are drawn again group by group."""
    some = [won for won in groups if won.numel()]
    if not some:
        return NO_INTERVAL
    pairs = sum(won.numel() for won in some)
    drawn = [
        ((_drawn(won.shape[0], 2 * place) @ won) * _drawn(won.shape[1], 2 * place + 1)).sum(1)
        for place, won in enumerate(some)
    ]
    return interval(sum(float(won.sum()) for won in some) / pairs, torch.stack(drawn).sum(0) / pairs)


def _drawn(count: int, seed: int) -> Tensor:
    """(draws, count): how often each of `count` runs is drawn."""
    stream = torch.Generator("cpu").manual_seed(seed)
    places = torch.randint(count, (DRAWS, count), generator=stream, device="cpu")
    found = torch.zeros(DRAWS, count, dtype=torch.float64, device="cpu")
    return found.scatter_add_(1, places, torch.ones_like(places).double())


def interval(value: float, drawn: Tensor) -> Interval:
    """A number, and the range of the middle 95 % of its draws; NaN without draws."""
    if not len(drawn):
        return Interval(value, math.nan, math.nan)
    order = drawn.sort().values
    return Interval(value, float(order[round(OUTSIDE * (DRAWS - 1))]), float(order[round((1 - OUTSIDE) * (DRAWS - 1))]))


def curve(failed: Sequence[float], healthy: Sequence[float]) -> list[tuple[float, float]]:
    """False and true alarms as shares, from the highest threshold to the lowest."""
    found = [(0.0, 0.0)]
    for level in sorted({*failed, *healthy}, reverse=True):
        found.append((sum(v >= level for v in healthy) / len(healthy), sum(v >= level for v in failed) / len(failed)))
    return found


def threshold(healthy: Sequence[float], share: float) -> Interval:
    """The lowest level that at most this share of healthy runs exceeds: a value above it is an alarm."""
    if not healthy:
        return Interval(math.inf, math.inf, math.inf)
    allowed = min(math.floor(share * len(healthy)), len(healthy) - 1)
    drawn = resampled(healthy, 2).sort(1, descending=True).values[:, allowed]
    return interval(sorted(healthy, reverse=True)[allowed], drawn)


def share(found: Sequence[bool]) -> Interval:
    """The share of True among runs, with its 95 % interval (Wilson 1927)."""
    count = len(found)
    if not count:
        return NO_INTERVAL
    value, z = sum(found) / count, 1.959964
    middle = value + z * z / (2 * count)
    half = z * math.sqrt(value * (1 - value) / count + z * z / (4 * count * count))
    whole = 1 + z * z / count
    return Interval(value, max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole))


def median(values: Sequence[float]) -> Interval:
    """The median of runs; no interval for fewer than two."""
    if len(values) < 2:
        return Interval(values[0] if values else math.nan, math.nan, math.nan)
    return interval(statistics.median(values), resampled(values, 3).quantile(0.5, dim=1))


def mean(values: Sequence[float]) -> Interval:
    """The mean of runs; no interval for fewer than two."""
    if len(values) < 2:
        return Interval(values[0] if values else math.nan, math.nan, math.nan)
    return interval(statistics.fmean(values), resampled(values, 4).mean(1))


def resampled(values: Sequence[float], seed: int, fewer: int = 0) -> Tensor:
    """(draws, values - fewer): values drawn from `values` with replacement."""
    given = torch.tensor(list(values), dtype=torch.float64, device="cpu")
    stream = torch.Generator("cpu").manual_seed(seed)
    return given[torch.randint(len(given), (DRAWS, len(given) - fewer), generator=stream, device="cpu")]
