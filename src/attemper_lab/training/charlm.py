"""charlm: on a small language model of Python source, how much does the scale matter, for each initialisation?"""

from __future__ import annotations

import math
import statistics
from typing import Any

from ..engine.experiment import Cell, Expectation, Row, Rows, define, heads_divide, pick
from ..figures import alt, marks, panels, theme
from ..maths.stats import over_seeds
from .language import INITS, train
from .runs import (
    MORE,
    Cost,
    at_best,
    at_edge,
    best_lr,
    both,
    cost,
    diverged,
    end,
    largest,
    last_loss,
    mean_cost,
    of_text,
    runs,
    survived,
)


def measure(cell: Cell) -> list[Row]:
    return train(cell, str(cell["rule"]))


def summary(rows: Rows) -> list[Row]:
    """Per rule and initialisation, at the rule's own best learning rate: held-out loss over seeds, median and range.

    ``gap`` is held-out less training loss, both at the last step and of as many windows.
    """
    summaries = []
    for init in dict.fromkeys(row["init"] for row in rows):
        for name in dict.fromkeys(row["rule"] for row in rows):
            tried = pick(rows, init=init, rule=name)
            lr = best_lr(tried, "held_out", False)
            of_seed = list(runs(pick(tried, lr=lr), "seed").values())
            last = [last_loss(run) for run in of_seed]
            summaries.append(
                {
                    "init": init,
                    "rule": name,
                    "lr": lr,
                    "at_edge": at_edge(tried, lr),
                    "seeds": len(last),
                    "diverged": sum(map(diverged, of_seed)),
                    **over_seeds("held_out", last),
                    "early_entropy": statistics.median(early(run)["entropy"] for run in of_seed),
                    "gap": statistics.median(gap(run) for run in of_seed),
                    "peak": largest([row for run in of_seed for row in run], "peak"),
                }
            )
    return summaries


def early(run: Rows) -> Row:
    """The third logged step: an eighth of the training."""
    return dict(run[min(2, len(run) - 1)])


def gap(run: Rows) -> float:
    """Held-out less training loss at the end; NaN where rows have no loss of the training text as a whole."""
    return end(run, "held_out") - float(run[-1].get("seen", math.nan))


def differences(rows: Rows) -> list[Row]:
    """Per initialisation and learning rate: what leaving the scale out costs, with its interval and what that says."""
    return [
        {"init": init, "lr": lr, **cost.row(), "diverged": cost.diverged, "diverged with it": cost.diverged_scaled}
        for (init, lr), cost in cells(rows).items()
    ]


def cells(rows: Rows) -> dict[tuple[str, float], Cost]:
    """(initialisation, learning rate) → the cost of leaving the scale out, where both were run."""
    which = dict.fromkeys((row["init"], row["lr"]) for row in rows)
    pairs = {(init, lr): both(rows, init=init, lr=lr) for init, lr in which}
    return {name: cost(*pair) for name, pair in sorted(pairs.items()) if all(pair)}


def at_equal_fit(rows: Rows) -> Cost:
    """The extra held-out loss without a scale at the same training loss, the lowest that every run reaches. This separates
    generalising worse from fitting worse."""
    scaled, bare = both(rows)
    chosen = [pick(part, lr=best_lr(part, "held_out", False)) for part in (scaled, bare)]
    of_seed = [{seed: run for (seed,), run in runs(part, "seed").items() if not diverged(run)} for part in chosen]
    every = [run for part in of_seed for run in part.values()]
    if not every:
        return mean_cost([])
    level = max(min(row["seen"] for row in run) for run in every)
    losses, bare_losses = ({seed: _when(run, level) for seed, run in part.items()} for part in of_seed)
    differences = [[bare_losses[seed] - loss] for seed, loss in losses.items() if seed in bare_losses]
    return mean_cost(differences, text=of_text(*chosen))


def _when(run: Rows, level: float) -> float:
    """The held-out loss when the training loss first fell to a level, on the straight line between logged steps."""
    before = run[0]
    for row in run:
        if row["seen"] <= level:
            part = (before["seen"] - level) / (before["seen"] - row["seen"]) if row is not before else 0.0
            return float(before["held_out"] + part * (row["held_out"] - before["held_out"]))
        before = row
    return float(run[-1]["held_out"])


def past_pairs(rows: Rows) -> float:
    """How far the best learning rate's median run with 1/√d_k is below counting pairs; negative where it has not learned that."""
    return statistics.median(_past_pairs(rows))


def _past_pairs(rows: Rows) -> list[float]:
    scaled = pick(rows, rule="sqrt_dk")
    of_seed = runs(pick(scaled, lr=best_lr(scaled, "held_out", False)), "seed").values()
    return [float(scaled[0]["bigram"]) - last_loss(run) for run in of_seed]


def gradient_ratios(rows: Rows, column: str) -> dict[float, dict[int, float]]:
    """Learning rate → step → a gradient without the scale over that with it, each the median over seeds, where both were run."""
    ratios: dict[float, dict[int, float]] = {}
    for lr, step in sorted({(row["lr"], row["step"]) for row in rows}):
        pair = [[row[column] for row in some] for some in both(rows, lr=lr, step=step)]
        if all(pair):
            scaled, bare = map(statistics.median, pair)
            ratios.setdefault(lr, {})[step] = bare / scaled
    return ratios


def trained(rows: Rows, what: str) -> Expectation:
    """A test of the sign: every seed has learned more than pairs of characters."""
    quantity = f"nats below counting pairs of characters, 1/√d_k{what}, the least of the seeds"
    why = "a test of the sign, of every seed"
    return Expectation(
        quantity, 0.0, min(_past_pairs(rows)), 0.0, "counting pairs: this run's own text", why, above=True
    )


def expect(rows: Rows) -> list[Expectation]:
    expectations = []
    for init in INITS:
        part = pick(rows, init=init, rule="sqrt_dk")
        if part and "bigram" in part[0]:
            expectations.append(trained(part, f", {init} initialisation"))
    return expectations


WORDS = {"small": "std 0.02", "unit": "unit variance"}


def finding(rows: Rows) -> str:
    lost = survived(rows, "rule", "init", "lr", "seed")
    where = {name: cost for name, cost in cells(rows).items() if math.isfinite(cost.mean)}
    if not where:
        ends_of = [end(run, "held_out") for run in runs(rows, "rule", "init", "lr", "seed").values()]
        least = min(ends_of, default=math.inf)
        return f"Held-out loss {least:.3f} nats at best{lost}"
    order = sorted(where.items(), key=lambda item: item[1].mean)
    ends = [f"{cost.mean:+.3f} ({WORDS[init]}, lr {lr:g})" for (init, lr), cost in dict.fromkeys((order[0], order[-1]))]
    if order[-1][1].says != MORE:
        return (
            f"What leaving the scale out costs a small language model is not seen at this size: {ends[-1]} nats{lost}"
        )
    return f"Leaving the scale out costs a small language model {' to '.join(ends)} nats{lost}"


HEADINGS = {"small": "projections drawn with std 0.02", "unit": "unit-variance q and k"}
COST = "no scale minus 1/√d_k"


def draw(rows: Rows, finding: str) -> Any:
    """What leaving the scale out costs, by learning rate; and every rule at its best learning rate while it trains."""
    columns, costs = {}, {}
    for init in [name for name in HEADINGS if any(row["init"] == name for row in rows)]:
        part = pick(rows, init=init)
        columns[HEADINGS[init]] = theme.labelled(at_best(part, "rule", "held_out", False))
        costs[HEADINGS[init]] = [{**row, "name": COST} for row in differences(part)]
    first = rows[0]
    note = (
        f"{first['layers']} layers, width {first['d_model']}, d_k = {first['d_model'] // first['heads']}, "
        f"{first['length']} characters of Python's source at a time. "
    )
    colour = theme.by_rule([row for part in columns.values() for row in part])
    chart = panels.draw(columns, colour, "rule_label", panels.LANGUAGE)
    if all(costs.values()):
        note += "Top: the difference of held-out losses, mean and 95 % interval. "
        note += "Below: every rule at its best learning rate. "
        chart = alt.vconcat(_top(costs), chart, spacing=24).resolve_scale(color="independent")
    else:
        note += "Every rule at its best learning rate. "
    return theme.finish(chart, finding, note + panels.ON_THE_WAY)


def _top(costs: dict[str, list[dict[str, Any]]]) -> Any:
    """Cost against learning rate, initialisations side by side on one scale."""
    width = (theme.WIDTH - panels.GAP * (len(costs) - 1)) // len(costs)
    without_legend = theme.series("name", "", [COST]).legend(None)
    charts: list[Any] = []
    for name, some in costs.items():
        x = theme.powers("lr", "learning rate", [row["lr"] for row in some], ".0e")
        points = marks.labelled_line(0.0, "no cost", at=0.62 * width) + marks.curve(
            some, x, "cost", "" if charts else f"{COST}, nats", without_legend
        )
        charts.append(points.properties(width=width, height=130, title=panels.heading(name)))
    return alt.hconcat(*charts, spacing=18).resolve_scale(y="shared")


EXPERIMENT = define(globals(), check=heads_divide)
