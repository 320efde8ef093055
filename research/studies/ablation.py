"""ablation: what does the scale change in a language model of 30 million parameters, with warm-up and clipped gradients?

No scale, 1/√d_k, 1/d_k and QK-norm, head dims 64 and 128, six learning rates and more where the best is at an edge; then two
more seeds at the best rates. Bytes of the standard library's sources. Rates are chosen on validation text, with the first seed,
which every rate has; losses are those of the test. Both are files that training never sees.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.maths.stats import over_seeds
from attemper_lab.training.runs import PARTS, at_edge, best_lr, cost, diverged, largest, last_loss, runs

from ..stacked.fit import about, fit
from ..stacked.study import Deadline, Settings, define, missing
from .collapse import extended, rate

TOGETHER = (("sqrt_dk", "none", "dk"), ("qk_norm",))
RULES = tuple(rule for rules in TOGETHER for rule in rules)
WINDOWS = 512  # of validation and test text each: 64 left ±0.05 nats open by the choice of the text alone
LOGGED = 16  # rows per run
GRADIENTS = ("grad_q_median", "grad_q_rms")  # of LanguageStack.gradient


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """Every head dim and rule at every rate with one seed, the middle rates first; then other seeds at the best rates."""
    first, *others = settings["seeds"]
    groups = list(itertools.product(settings["head_dim"], RULES))
    order = sorted(settings["powers"], key=lambda one: abs(one - settings["middle"]))
    every: list[Cell] = [
        {"head_dim": head_dim, "rule": rule, "lr": rate(power), "seed": first}
        for head_dim in settings["head_dim"]
        for rules in TOGETHER
        for power in order
        for rule in rules
    ]
    left = missing(rows, every)
    if left:
        return _stack(left, settings["stack"])
    beyond: list[Cell] = []
    best: list[Cell] = []
    for head_dim, rule in groups:
        some = pick(rows, head_dim=head_dim, rule=rule, seed=first)
        powers = extended(some, settings["powers"], (first,), chosen_rate)
        beyond += [{"head_dim": head_dim, "rule": rule, "lr": rate(power), "seed": first} for power in powers]
        lr = chosen_rate(some)
        best += [{"head_dim": head_dim, "rule": rule, "lr": lr, "seed": seed} for seed in others]
    return _stack(missing(rows, beyond) or missing(rows, best), settings["stack"])


def _stack(cells: Sequence[Cell], most: int) -> list[Cell]:
    """As many of the first cells as fit: of one head dim, and all with norms or all without, since norms cost time."""
    if not cells:
        return []
    together = next(rules for rules in TOGETHER if cells[0]["rule"] in rules)
    fitting = [cell for cell in cells if cell["head_dim"] == cells[0]["head_dim"] and cell["rule"] in together]
    return fitting[:most]


def chosen_rate(rows: Rows) -> float:
    """The best rate on the validation text with the first seed alone: rates with more seeds are compared by no other measure."""
    first = min(row["seed"] for row in rows)
    return best_lr(pick(rows, seed=first), "held_out", False)


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    """Train a stack to its end; return nothing if there is no time."""
    stack = fit(cells, settings["width"], int(cells[0]["head_dim"]), settings, device, deadline)
    if stack is None:
        return
    validation = stack.held_out("validation", settings["windows"], PARTS)
    test = stack.held_out("test", settings["windows"], PARTS)
    losses, norms, every = stack.losses.tolist(), stack.norms.tolist(), settings["every"]
    gradient = stack.gradient.tolist()
    for run, cell in enumerate(cells):
        signs = stack.probe.series(run)
        logged = sorted({round(place * (len(signs["peak"]) - 1) / (LOGGED - 1)) for place in range(LOGGED)})
        logs: list[Row] = [
            {
                "step": place * every,
                "loss": losses[run][place * every],
                "grad_norm": norms[run][place * every],
                **dict(zip(GRADIENTS, gradient[run][place * every], strict=True)),
                "validation": math.nan,
                "held_out": math.nan,
                **{sign: values[place] for sign, values in signs.items()},
            }
            for place in logged
        ]
        ended = {f"held_out_{number}": value for number, value in enumerate(test[run], start=1)}
        ended |= {part: statistics.fmean(some[run]) for part, some in (("validation", validation), ("held_out", test))}
        logs.append({"step": stack.size.steps, "loss": losses[run][-1], "grad_norm": norms[run][-1], **ended})
        yield cell, [{**about(stack.size), **row} for row in logs]


def total(settings: Settings) -> float:
    """The weight of all cells, without the rates that are added at edges."""
    groups = len(settings["head_dim"]) * len(RULES)
    return float(groups * (len(settings["powers"]) + len(settings["seeds"]) - 1))


def summary(rows: Rows) -> list[Row]:
    """Per head dim and rule, at its best rate: held-out loss over seeds, what it costs beside 1/√d_k, the largest logit, and the
    median query's gradient beside that with 1/√d_k, when training begins and when it ends."""
    found = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        part = pick(rows, head_dim=head_dim)
        tried = {rule: some for rule in RULES if (some := pick(part, rule=rule))}
        best = {rule: chosen_rate(some) for rule, some in tried.items()}
        chosen = {rule: pick(some, lr=best[rule]) for rule, some in tried.items()}
        scaled = chosen.get("sqrt_dk", [])
        for rule in chosen if scaled else ():
            of_seed = list(runs(chosen[rule], "seed").values())
            found.append(
                {
                    "head_dim": head_dim,
                    "rule": rule,
                    "lr": best[rule],
                    "at_edge": at_edge(pick(tried[rule], seed=of_seed[0][0]["seed"]), best[rule]),
                    "seeds": len(of_seed),
                    "diverged": sum(map(diverged, of_seed)),
                    **over_seeds("held_out", [last_loss(run) for run in of_seed]),
                    **cost(scaled, chosen[rule]).row(),
                    "peak": largest([row for row in chosen[rule] if "peak" in row], "peak"),
                    **{
                        f"gradient, {when}": _gradient(chosen[rule], place) / _gradient(scaled, place)
                        for when, place in (("first", 0), ("last", -1))
                    },
                }
            )
    return found


def _gradient(rows: Rows, place: int) -> float:
    """The median query's gradient at the first or the last logged step, the median over seeds; NaN where rows have none."""
    column = GRADIENTS[0]
    logged = [
        [row[column] for row in run if math.isfinite(row.get(column, math.nan))] for run in runs(rows, "seed").values()
    ]
    return statistics.median(some[place] for some in logged) if all(logged) else math.nan


def finding(rows: Rows) -> str:
    parts = []
    for row in summary(rows):
        if row["rule"] == "none":
            half = f" ± {(row['cost_high'] - row['cost_low']) / 2:.2f}" if row["seeds"] > 1 else ""
            lost = f", {row['diverged']} of {row['seeds']} runs diverged" if row["diverged"] else ""
            parts.append(f"{row['cost']:.2f}{half} nats at d_k = {row['head_dim']}{lost}")
    if not parts:
        return "Not every rule was trained yet"
    return f"Leaving the scale out costs {' and '.join(parts)}, each rule at its best rate"


def draw(rows: Rows, finding: str) -> Any:
    """Held-out loss against the learning rate for each rule, by head dim."""
    import altair as alt

    from attemper_lab.figures import marks, panels, theme

    ended = [row for row in rows if math.isfinite(row["held_out"])]
    ends = runs(rows, "head_dim", "rule", "lr", "seed").values()
    lost = sum(map(diverged, ends))
    dims = sorted({row["head_dim"] for row in ended})
    width = (theme.WIDTH - panels.GAP * (len(dims) - 1)) // max(1, len(dims))
    found: list[Any] = []
    for head_dim in dims:
        shown = []
        for (rule, lr), part in runs(pick(ended, head_dim=head_dim), "rule", "lr").items():
            shown.append({"rule": rule, "lr": lr, **over_seeds("held_out", [row["held_out"] for row in part])})
        shown = theme.labelled(sorted(shown, key=lambda row: row["lr"]))
        x = theme.powers("lr", "learning rate", [row["lr"] for row in shown], ".0e")
        chart = marks.curve(
            shown, x, "held_out", "" if found else "held-out loss, nats per byte", theme.by_rule(shown), zero=False
        )
        found.append(chart.properties(width=width, height=260, title=panels.heading(f"d_k = {head_dim}")))
    note = (
        f"{rows[0]['parameters'] / 1e6:.0f} M parameters, bytes of the standard library's sources ({rows[0]['text']}), "
        f"{rows[0]['tokens'] / 1e6:.1f} M of them seen; warm-up, gradients clipped at 1, bfloat16 products. "
        "Median and range of the seeds." + (f" {lost} of {len(ends)} runs diverged and are not drawn." if lost else "")
    )
    return theme.finish(alt.hconcat(*found, spacing=18).resolve_scale(y="shared"), finding, note)


_SHARED = {"head_dim": (64, 128), "seeds": (0, 1, 2), "powers": (-9, -8, -7, -6, -5, -4), "middle": -6.6}
FULL = {**_SHARED, "width": 512, "layers": 10, "length": 256, "batch": 64, "steps": 400, "warm_up": 60, "every": 10,
        "stack": 9, "windows": WINDOWS, "compute": "bfloat16"}  # fmt: skip

STUDY = define(
    globals(),
    "What does the scale change in a language model of 30 million parameters?",
    presets={
        "full": FULL,
        "short": {**FULL, "steps": 250, "warm_up": 40},
        "tiny": {
            "head_dim": (4,), "seeds": (0, 1), "powers": (-6, -5), "middle": -5, "width": 8, "layers": 1, "length": 16,
            "batch": 2, "steps": 6, "warm_up": 2, "every": 2, "stack": 16, "windows": 8, "compute": "float32",
        },
    },
    version=2,
)  # fmt: skip
