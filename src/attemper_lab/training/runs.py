"""runs: how training runs are grouped, how learning rates are chosen, and what one rule costs beside another.

A cost is in nats, with its interval over seeds and pieces of text. Figures, tables and verdicts all take these numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..engine.experiment import Row, Rows, pick
from ..maths.stats import t_quantile

Run = list[Mapping[str, Any]]  # the rows of one run, in the order of their steps
NOTHING = 0.05  # nats: less counts as no difference
PARTS = 8  # of the held-out windows, each with its own loss
MORE, LESS, SAME, OPEN = "costs", "gains", "no difference", "not decided"


def runs(rows: Rows, *names: str) -> dict[tuple[Any, ...], Run]:
    """The rows of each run by the values of these parameters, in the order of their steps."""
    rows_of: dict[tuple[Any, ...], Run] = {}
    for row in rows:
        rows_of.setdefault(tuple(row[name] for name in names), []).append(row)
    return {which: sorted(part, key=lambda row: row["step"]) for which, part in rows_of.items()}


def diverged(run: Rows) -> bool:
    """Whether a run's loss stopped being a number."""
    return not math.isfinite(run[-1]["loss"])


def end(run: Rows, column: str, larger: bool = False) -> float:
    """A column's last value; for a run that diverged the worst possible one, so that a median counts it and is never NaN."""
    value = float(run[-1][column])
    worst = -math.inf if larger else math.inf
    return worst if diverged(run) or math.isnan(value) else value


def largest(rows: Rows, column: str) -> float:
    """The largest finite value of a column; NaN where there is none."""
    return max((row[column] for row in rows if math.isfinite(row[column])), default=math.nan)


def survived(rows: Rows, *names: str) -> str:
    """How many runs diverged, in words; empty if none did. ``names`` are the parameters that tell runs apart."""
    all_runs = runs(rows, *names).values()
    lost = sum(diverged(run) for run in all_runs)
    return f"; {lost} of {len(all_runs)} runs diverged" if lost else ""


def first_step(run: Rows, column: str, level: float) -> float:
    """The first logged step at which a column reached a level; infinite when it never did."""
    return next((float(row["step"]) for row in run if row[column] >= level), math.inf)


def chosen_by(rows: Rows, column: str) -> str:
    """What a learning rate is chosen by: the validation set where rows have one, so that what is reported did not choose."""
    return "validation" if rows and "validation" in rows[0] else column


def best_lr(rows: Rows, column: str, larger: bool) -> float:
    """The learning rate with the best median over seeds of the last value on the validation set; each rule has its own.

    Of two that are equally good at the end, the one that was better on average over the steps.
    """
    column = chosen_by(rows, column)
    ends_of: dict[float, list[tuple[float, float]]] = {}
    for (lr, _), run in runs(rows, "lr", "seed").items():
        last = end(run, column, larger)
        on_the_way = statistics.fmean(row[column] for row in run) if math.isfinite(last) else last
        ends_of.setdefault(lr, []).append((last, on_the_way))
    order = max if larger else min
    return order(ends_of, key=lambda lr: tuple(statistics.median(ends) for ends in zip(*ends_of[lr], strict=True)))


def at_best(rows: Rows, which: str, column: str, larger: bool) -> list[Mapping[str, Any]]:
    """The runs of each rule (or whatever ``which`` names) at its own best learning rate."""
    tried = [pick(rows, **{which: name}) for name in dict.fromkeys(row[which] for row in rows)]
    return [row for some in tried for row in pick(some, lr=best_lr(some, column, larger))]


def fastest_lr(rows: Rows, column: str, level: float) -> float:
    """The learning rate whose median run reaches a level first on the validation set; of equals, the best in the end."""
    column = chosen_by(rows, column)
    ends_of: dict[float, list[tuple[float, float]]] = {}
    for (lr, _), run in runs(rows, "lr", "seed").items():
        ends_of.setdefault(lr, []).append((first_step(run, column, level), -end(run, column, larger=True)))
    return min(ends_of, key=lambda lr: tuple(statistics.median(ends) for ends in zip(*ends_of[lr], strict=True)))


def at_edge(rows: Rows, lr: float) -> bool:
    """Whether a learning rate is the lowest or highest tried: a better one may lie beyond."""
    tried = [row["lr"] for row in rows]
    return lr in (min(tried), max(tried))


class Cost(NamedTuple):
    """A mean over seeds and parts of the text, its 95 % interval, and how many runs diverged without a scale and with one."""

    mean: float
    low: float
    high: float
    diverged: int = 0
    diverged_scaled: int = 0

    @property
    def says(self) -> str:
        """The interval decides. Within ±NOTHING: no difference. Otherwise above 0: a cost; below 0: a gain; else not decided."""
        if self.low > -NOTHING and self.high < NOTHING:
            return SAME
        if self.low > 0:
            return MORE
        return LESS if self.high < 0 else OPEN

    def row(self) -> Row:
        return {"cost": self.mean, "cost_low": self.low, "cost_high": self.high, "says": self.says}

    def __str__(self) -> str:
        return f"{self.mean:+.3f} nats ({self.low:+.3f} to {self.high:+.3f})"


def mean_cost(values: Sequence[Sequence[float]], lost: int = 0, lost_scaled: int = 0, text: float = 0.0) -> Cost:
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
    """The last held-out loss by part of the text; a single one if the rows have no parts."""
    last = run[-1]
    losses = [float(last.get(f"held_out_{index}", math.nan)) for index in range(1, PARTS + 1)]
    return losses if all(map(math.isfinite, losses)) else [float(last["held_out"])]


def last_loss(run: Rows) -> float:
    """The last held-out loss over all parts of the text; infinite for a run that diverged."""
    return math.inf if diverged(run) else statistics.fmean(parts(run))


def by_seed(scaled: Rows, bare: Rows) -> dict[int, list[float]]:
    """Seed → by how much the loss without a scale is higher, by part; seeds of which a run diverged are left out."""
    with_it, without = runs(scaled, "seed"), runs(bare, "seed")
    return {
        seed[0]: [b - a for a, b in zip(parts(run), parts(without[seed]), strict=True)]
        for seed, run in with_it.items()
        if seed in without and not diverged(run) and not diverged(without[seed])
    }


def cost(scaled: Rows, bare: Rows) -> Cost:
    """What leaving the scale out costs, from the runs with it and those without."""
    lost = [sum(map(diverged, runs(some, "seed").values())) for some in (bare, scaled)]
    return mean_cost(list(by_seed(scaled, bare).values()), *lost)


def pooled(rows: Rows, rule: str) -> Cost:
    """What a rule costs beside 1/√d_k, over all head dims together: paired by head dim, seed and part of the text."""
    dims = sorted({row["head_dim"] for row in rows})
    pairs = [[pick(rows, rule=name, head_dim=dim) for name in ("sqrt_dk", rule)] for dim in dims]
    return mean_cost([differences for pair in pairs for differences in by_seed(*pair).values()])


def of_text(scaled: Rows, bare: Rows) -> float:
    """The variance of the difference between parts of the text: how uncertain a loss over as many windows as a part is."""
    differences = [statistics.fmean(part) for part in zip(*by_seed(scaled, bare).values(), strict=True)]
    return statistics.variance(differences) if len(differences) > 1 else 0.0


def both(rows: Rows, **wanted: object) -> tuple[Rows, Rows]:
    """The runs with 1/√d_k and those with no scale."""
    return pick(rows, rule="sqrt_dk", **wanted), pick(rows, rule="none", **wanted)
