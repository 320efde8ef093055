"""depth: does leaving the scale out cost more in a deeper model? The language model of language.py at several depths."""

from __future__ import annotations

import math
import statistics
from typing import Any

from ..engine.experiment import Expectation, Row, Rows, define, heads_divide, pick
from ..figures import alt, marks, panels, theme
from . import charlm
from .runs import LESS, MORE, OPEN, SAME, Cost, at_best, at_edge, both, by_seed, cost, mean_cost, survived

measure = charlm.measure


def pairs(rows: Rows) -> dict[int, tuple[Rows, Rows]]:
    """layers → the runs with 1/√d_k and those without a scale, each at its own best learning rate at that depth."""
    depths = sorted({row["layers"] for row in rows})
    both_of = {layers: both(at_best(pick(rows, layers=layers), "rule", "held_out", False)) for layers in depths}
    return {layers: pair for layers, pair in both_of.items() if all(pair)}


def costs(rows: Rows) -> dict[int, Cost]:
    """layers → what leaving the scale out costs."""
    return {layers: cost(*pair) for layers, pair in pairs(rows).items()}


def summary(rows: Rows) -> list[Row]:
    """Per depth: the cost with its interval, and the learning rates it was measured at; ``at_edge`` says which rule's is the
    least or the most that was tried, so that a better one may lie beyond."""
    summaries = []
    for layers, pair in pairs(rows).items():
        lrs = {name: some[0]["lr"] for name, some in zip(("sqrt_dk", "none"), pair, strict=True)}
        edge = [name for name, lr in lrs.items() if at_edge(pick(rows, layers=layers, rule=name), lr)]
        columns = {f"lr, {name}": lr for name, lr in lrs.items()}
        summaries.append({"layers": layers, **cost(*pair).row(), **columns, "at_edge": " and ".join(edge) or "neither"})
    return summaries


def growth(rows: Rows) -> Cost:
    """How much more leaving the scale out costs from the shallowest to the deepest: the straight line through all depths, against
    their logarithm. Seeds of which any run diverged are left out."""
    of_depth = {math.log2(layers): by_seed(*pair) for layers, pair in pairs(rows).items()}
    if len(of_depth) < 2:
        return mean_cost([])
    seeds = set.intersection(*(set(some) for some in of_depth.values()))
    depths = list(of_depth)
    reach = max(depths) - min(depths)
    lines = [
        [
            reach * statistics.linear_regression(depths, of_part).slope
            for of_part in zip(*(of_depth[depth][seed] for depth in depths), strict=True)
        ]
        for seed in sorted(seeds)
    ]
    return mean_cost(lines)


def expect(rows: Rows) -> list[Expectation]:
    """Each depth is trained past counting pairs: before that, attention has had nothing to do."""
    scaled = pick(rows, rule="sqrt_dk")
    depths = sorted({row["layers"] for row in scaled})
    return [charlm.trained(pick(scaled, layers=layers), f", depth {layers}") for layers in depths]


GROWS = {
    MORE: ": {} more from the shallowest to the deepest",
    LESS: ": it does not grow with depth; {} from the shallowest to the deepest",
    SAME: ": the same at every depth; {} from the shallowest to the deepest",
    OPEN: "; the growth is not decided: {} from the shallowest to the deepest",
}
"""What the growth of the cost says, in words."""


def finding(rows: Rows) -> str:
    lost = survived(rows, "rule", "layers", "lr", "seed")
    known = {layers: cost for layers, cost in costs(rows).items() if math.isfinite(cost.mean)}
    if not known:
        least = min((row["held_out"] for row in rows if math.isfinite(row["held_out"])), default=math.inf)
        return f"Held-out loss {least:.3f} nats at best{lost}"
    said = ", ".join(f"{cost.mean:+.3f}" for cost in known.values())
    words = f"Leaving the scale out costs {said} nats at depth {', '.join(map(str, known))}"
    if len(known) > 1:
        words += GROWS[growth(rows).says].format(growth(rows))
    return words + lost


def draw(rows: Rows, finding: str) -> Any:
    """What leaving the scale out costs, against the number of layers; and the shallowest and deepest model while they train."""
    depths = sorted({row["layers"] for row in rows})
    series = {n: theme.labelled(at_best(pick(rows, layers=n), "rule", "held_out", False)) for n in depths}
    shown = [{"name": charlm.COST, **row} for row in summary(rows)]
    x = theme.powers("layers", "layers", depths)
    without_legend = theme.series("name", "", [charlm.COST]).legend(None)
    points = marks.labelled_line(0.0, "no cost") + marks.curve(shown, x, "cost", f"{charlm.COST}, nats", without_legend)
    ends = {f"depth {layers}": series[layers] for layers in dict.fromkeys((min(series), max(series)))}
    colour = theme.by_rule([row for part in ends.values() for row in part])
    below = panels.draw(ends, colour, "rule_label", panels.LANGUAGE)
    note = (
        f"Language model, {rows[0]['length']} characters of Python's source at a time, unit-variance q and k; each rule "
        "at its best learning rate. "
        f"Top: the difference of held-out losses, mean and 95 % interval. {panels.ON_THE_WAY}"
    )
    chart = alt.vconcat(alt.layer(points).properties(width=theme.WIDTH, height=200), below, spacing=24)
    return theme.finish(chart.resolve_scale(color="independent"), finding, note)


EXPERIMENT = define(globals(), check=heads_divide)
