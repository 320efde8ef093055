"""costs: how much more loss one rule has than another, in nats, with the interval that seeds and pieces of text leave open."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..engine.experiment import Row, Rows, pick
from ..maths.stats import t_quantile
from .loop import diverged, runs

NOTHING = 0.05  # nats: less counts as no difference
PARTS = 8  # of the held-out windows, each with its own loss
MORE, LESS, SAME, OPEN = "costs", "gains", "no difference", "not decided"


class Cost(NamedTuple):
    """A mean over seeds and parts of the text, its 95 % interval, and how many runs diverged without a scale and with one."""

    mean: float
    low: float
    high: float
    diverged: int = 0
    diverged_scaled: int = 0

    @property
    def says(self) -> str:
        """No difference: the whole interval within ±NOTHING. A cost or a gain: a mean beyond that, and an interval without 0."""
        if self.low > -NOTHING and self.high < NOTHING:
            return SAME
        if self.low > 0 and self.mean > NOTHING:
            return MORE
        return LESS if self.high < 0 and self.mean < -NOTHING else OPEN

    def row(self) -> Row:
        return {"cost": self.mean, "cost_low": self.low, "cost_high": self.high, "says": self.says}

    def __str__(self) -> str:
        return f"{self.mean:+.3f} nats ({self.low:+.3f} to {self.high:+.3f})"


def apart(values: Sequence[Sequence[float]], lost: int = 0, lost_scaled: int = 0, text: float = 0.0) -> Cost:
    """Differences by seed and part → their mean, with the error of drawing other seeds and other text.

    Seeds and parts are crossed, so their variances add; t is that of the seeds, which are fewer. ``text`` is the variance that
    comes with the text where values have no parts.
    """
    if not values:
        return Cost(math.nan, math.nan, math.nan, lost, lost_scaled)
    of_seed = [statistics.fmean(parts) for parts in values]
    of_part = [statistics.fmean(parts) for parts in zip(*values, strict=True)]
    mean = statistics.fmean(of_seed)
    if len(of_seed) < 2:
        return Cost(mean, math.nan, math.nan, lost, lost_scaled)
    variance = text + sum(statistics.variance(some) / len(some) for some in (of_seed, of_part) if len(some) > 1)
    half = t_quantile(len(of_seed) - 1, 0.05) * math.sqrt(variance)
    return Cost(mean, mean - half, mean + half, lost, lost_scaled)


def parts(run: Rows) -> list[float]:
    """The last held-out loss by part of the text; all in one where the rows have no parts."""
    last = run[-1]
    found = [float(last.get(f"held_out_{place}", math.nan)) for place in range(1, PARTS + 1)]
    return found if all(map(math.isfinite, found)) else [float(last["held_out"])]


def by_seed(scaled: Rows, bare: Rows) -> dict[int, list[float]]:
    """Seed → by how much the loss without a scale is higher, by part; seeds of which a run diverged are left out."""
    one, other = runs(scaled, "seed"), runs(bare, "seed")
    return {
        seed[0]: [b - a for a, b in zip(parts(one[seed]), parts(other[seed]), strict=True)]
        for seed in one
        if seed in other and not diverged(one[seed]) and not diverged(other[seed])
    }


def cost(scaled: Rows, bare: Rows) -> Cost:
    """What leaving the scale out costs, from the runs with it and those without."""
    lost = [sum(map(diverged, runs(some, "seed").values())) for some in (bare, scaled)]
    return apart(list(by_seed(scaled, bare).values()), *lost)


def of_text(scaled: Rows, bare: Rows) -> float:
    """The variance of a difference from part to part of the text: what a curve over as many windows as a part leaves open."""
    found = [statistics.fmean(part) for part in zip(*by_seed(scaled, bare).values(), strict=True)]
    return statistics.variance(found) if len(found) > 1 else 0.0


def both(rows: Rows, **wanted: object) -> tuple[Rows, Rows]:
    """The runs with 1/√d_k and those with no scale."""
    return pick(rows, rule="sqrt_dk", **wanted), pick(rows, rule="none", **wanted)
