"""charlm: on a small language model of Python source, how much does the scale matter, for each initialisation?"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, heads_divide, pick
from ..maths.stats import over_seeds
from .language import INITS, NO_ATTENTION, RULES, TRAINING, train
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
    found = []
    for init in dict.fromkeys(row["init"] for row in rows):
        for name in dict.fromkeys(row["rule"] for row in rows):
            tried = pick(rows, init=init, rule=name)
            lr = best_lr(tried, "held_out", False)
            of_seed = list(runs(pick(tried, lr=lr), "seed").values())
            last = [last_loss(run) for run in of_seed]
            found.append(
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
    return found


def early(run: Rows) -> Row:
    """The third logged step: an eighth of the training."""
    return dict(run[min(2, len(run) - 1)])


def gap(run: Rows) -> float:
    """Held-out less training loss at the end; NaN where rows have no loss of the training text as a whole."""
    return end(run, "held_out") - float(run[-1].get("seen", math.nan))


def differences(rows: Rows) -> list[Row]:
    """Per initialisation and learning rate: what leaving the scale out costs, with its interval and what that says."""
    return [
        {"init": init, "lr": lr, **found.row(), "diverged": found.diverged, "diverged with it": found.diverged_scaled}
        for (init, lr), found in cells(rows).items()
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
    chosen = [pick(some, lr=best_lr(some, "held_out", False)) for some in (scaled, bare)]
    found = [{seed: run for (seed,), run in runs(some, "seed").items() if not diverged(run)} for some in chosen]
    every = [run for some in found for run in some.values()]
    if not every:
        return mean_cost([])
    level = max(min(row["seen"] for row in run) for run in every)
    one, other = ({seed: _when(run, level) for seed, run in some.items()} for some in found)
    return mean_cost([[other[seed] - one[seed]] for seed in one if seed in other], text=of_text(*chosen))


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
    found: dict[float, dict[int, float]] = {}
    for lr, step in sorted({(row["lr"], row["step"]) for row in rows}):
        pair = [[row[column] for row in some] for some in both(rows, lr=lr, step=step)]
        if all(pair):
            scaled, bare = map(statistics.median, pair)
            found.setdefault(lr, {})[step] = bare / scaled
    return found


def trained(rows: Rows, what: str) -> Expectation:
    """A test of the sign: every seed has learned more than pairs of characters."""
    quantity = f"nats below counting pairs of characters, 1/√d_k{what}, the least of the seeds"
    why = "a test of the sign, of every seed"
    return Expectation(
        quantity, 0.0, min(_past_pairs(rows)), 0.0, "counting pairs: this run's own text", why, above=True
    )


def expect(rows: Rows) -> list[Expectation]:
    found = []
    for init in INITS:
        part = pick(rows, init=init, rule="sqrt_dk")
        if part and "bigram" in part[0]:
            found.append(trained(part, f", {init} initialisation"))
    return found


WORDS = {"small": "std 0.02", "unit": "unit variance"}


def finding(rows: Rows) -> str:
    lost = survived(rows, "rule", "init", "lr", "seed")
    where = {name: found for name, found in cells(rows).items() if math.isfinite(found.mean)}
    if not where:
        least = min(
            (end(run, "held_out") for run in runs(rows, "rule", "init", "lr", "seed").values()), default=math.inf
        )
        return f"Held-out loss {least:.3f} nats at best{lost}"
    order = sorted(where.items(), key=lambda one: one[1].mean)
    ends = [
        f"{found.mean:+.3f} ({WORDS[init]}, lr {lr:g})" for (init, lr), found in dict.fromkeys((order[0], order[-1]))
    ]
    if order[-1][1].says != MORE:
        return (
            f"What leaving the scale out costs a small language model is not seen at this size: {ends[-1]} nats{lost}"
        )
    return f"Leaving the scale out costs a small language model {' to '.join(ends)} nats{lost}"


HEADINGS = {"small": "projections drawn with std 0.02", "unit": "unit-variance q and k"}
COST = "no scale minus 1/√d_k"


def draw(rows: Rows, finding: str) -> Any:
    """What leaving the scale out costs, by learning rate; and every rule at its best learning rate while it trains."""
    import altair as alt

    from ..figures import panels, theme

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
    import altair as alt

    from ..figures import marks, panels, theme

    width = (theme.WIDTH - panels.GAP * (len(costs) - 1)) // len(costs)
    one = theme.series("name", "", [COST]).legend(None)
    found: list[Any] = []
    for name, some in costs.items():
        x = theme.powers("lr", "learning rate", [row["lr"] for row in some], ".0e")
        points = marks.labelled_line(0.0, "no cost", at=0.62 * width) + marks.curve(
            some, x, "cost", "" if found else f"{COST}, nats", one
        )
        found.append(points.properties(width=width, height=130, title=panels.heading(name)))
    return alt.hconcat(*found, spacing=18).resolve_scale(y="shared")


LENGTHS = "one character has nothing before it, and the held-out text must have many windows"
TEXTS = "a window must fit, and the rest is held out"
TASK = (
    Parameter("steps", (200,), "training steps", least=1, single=True),
    Parameter("batch", (16,), "windows per step", least=1, single=True),
    Parameter("length", (48,), "characters per window", least=2, most=4096, single=True, hint=LENGTHS),
    Parameter("d_model", (64,), "the model's width", least=1, single=True),
    Parameter("heads", (2,), "number of heads", least=1, single=True),
    Parameter("text", (TRAINING,), "characters to train on", least=5000, most=TRAINING, single=True, hint=TEXTS),
)
"""The parameters that every experiment on this task has."""
UNIT = Parameter(
    "init", ("unit",), "projections: std 0.02 (small), or unit-variance q and k (unit)", choices=INITS, single=True
)
LARGE: dict[str, tuple[int, ...]] = {"batch": (32,), "length": (128,), "d_model": (256,), "heads": (4,)}

# a text that is read many times over, so that seen and unseen text can come apart
MEMORISE: dict[str, tuple[int | float | str, ...]] = {
    "rule": ("sqrt_dk", "none"),
    "init": ("unit",),
    "lr": (3e-3,),
    "text": (10_000,),
    "steps": (400,),
}

EXPERIMENT = define(
    __name__,
    question="On a small language model of source code, how much does the scale matter?",
    claims=("C9", "C15", "C19"),
    parameters=(
        Parameter("rule", ("sqrt_dk", "none", NO_ATTENTION), "the scale's rule, or no attention at all", choices=RULES),
        replace(UNIT, default=INITS, single=False),
        Parameter("lr", (1e-3, 3e-3), "Adam's learning rate", above=0),
        Parameter("layers", (2,), "number of layers", least=1, most=1000, single=True),
        *TASK,
    ),
    check=heads_divide,
    presets={
        "full": {
            "rule": ("sqrt_dk", "none", "dk", "qk_norm", NO_ATTENTION),
            "lr": (1e-4, 3e-4, 1e-3, 3e-3),
            "steps": (800,),
            "layers": (4,),
            **LARGE,
        },
        "memorise": MEMORISE,
    },
    trains=True,
)
