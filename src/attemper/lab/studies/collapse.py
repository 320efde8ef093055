"""collapse: does the slow-down of training without a scale depend on √d_k/√(2 ln n) alone?

Recall for every head dim and number of keys, with 1/√d_k and without: steps until 90 % of unseen answers are right, each at its
fastest learning rate. Rates are chosen on validation sequences and the steps are those of the test. Where the fastest rate is
the least or the most that was tried, the next one beyond is tried too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._display import plural
from ..engine.experiment import Cell, Row, Rows, pick
from ..maths.stats import over_seeds
from ..stacked.recall import KEPT, LEARNED, SETTLE, SLOWER, RecallStack
from ..stacked.study import Deadline, Settings, Study, missing
from ..training.runs import at_edge

RULES = ("sqrt_dk", "none")
NEVER = math.inf
EXTENDED = 4  # rates that may be added beyond the first ones, on either side
FINEST, COARSE = 5, 20  # accuracy is looked at every 5 steps, and later every 20th of the steps so far
SOME = 0.2  # accuracy: a fifth of the answers, where chance has a thirty-second
ROUNDS = 200  # of the fit with cells that never learned
CLOSE = 0.05  # of R²: one variable explains as much as two


def rate(power: int) -> float:
    """Half decades: 1e-3 for −6, 3.2e-3 for −5."""
    return float(f"{10 ** (power / 2):.2g}")


def widened(powers: list[int], best: float) -> list[int]:
    """With one more power on the side where the best rate is at the edge; as they are where it is inside."""
    if best == rate(powers[0]):
        return [powers[0] - 1, *powers]
    return [*powers, powers[-1] + 1] if best == rate(powers[-1]) else powers


def first_rates(d: int, rule: str) -> list[int]:
    """Six half decades around what a pilot found: a wider layer needs smaller steps."""
    middle = round(2 * math.log10(0.03 * (16 / d) ** 0.75))
    return list(range(middle - 3, middle + 3)) if rule == "sqrt_dk" else list(range(middle - 4, middle + 2))


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """One seed over the whole grid first, then the others; rates are added until the fastest has a slower one on either side."""
    for seeds in settings["seeds"]:
        for d in settings["d"]:
            some = pick(rows, d=d)
            wanted: list[Cell] = [
                {"d": d, "pairs": pairs, "rule": rule, "lr": rate(power), "seed": seed}
                for pairs in settings["pairs"]
                for rule in RULES
                for power in _rates(pick(some, pairs=pairs, rule=rule), d, rule, seeds)
                for seed in seeds
            ]
            left = missing(some, wanted)
            if left:
                return left
    return []


def _rates(rows: Rows, d: int, rule: str, seeds: Sequence[int]) -> list[int]:
    """Powers: the first ones, and one more on the side where the fastest is at the edge, as long as that is so."""
    powers = first_rates(d, rule)
    for _ in range(EXTENDED):
        some = [row for row in rows if row["lr"] in {rate(power) for power in powers}]
        if len(some) < len(powers) * len({row["seed"] for row in some} | set(seeds)):
            return powers
        best = fastest(some)
        if statistics.median(row["accuracy"] for row in pick(some, lr=best)) < SOME:
            return powers  # no rate learns anything in the steps there are
        wider = widened(powers, best)
        if wider == powers:
            break
        powers = wider
    return powers


def fastest(rows: Rows) -> float:
    """The rate whose median over seeds learns in the fewest steps on the validation set; where none learns, the most accurate."""

    def order(lr: float) -> tuple[float, float]:
        some = pick(rows, lr=lr)
        return statistics.median(_steps(row, "validation") for row in some), -statistics.median(
            row["accuracy"] for row in some
        )

    return min(sorted({row["lr"] for row in rows}), key=order)


def _steps(row: Any, part: str = "test") -> float:
    """Steps to 90 %; infinite where there is no number."""
    value = row[f"steps_{part}"]
    return NEVER if value is None or not math.isfinite(value) else float(value)


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    """Train a stack; a run ends when it has learned, has diverged, or is twice as slow as another rate of its cell and seed."""
    stack, steps = RecallStack(int(cells[0]["d"]), cells, settings["batch"], device), settings["steps"]
    found = {part: [NEVER] * len(cells) for part in ("validation", "test")}
    best = _best(pick(rows, d=cells[0]["d"]))
    of_place, training = list(range(len(cells))), set(range(len(cells)))
    began, look, first = deadline.spent, FINEST, [[math.nan, math.nan]]
    while training and not deadline.over:
        stack.train()
        first = stack.gradient.tolist() if stack.done == 1 else first
        if stack.done < min(look, steps):
            continue
        look = stack.done + max(FINEST, stack.done // COARSE)
        right = {part: stack.accuracy(part) for part in found}
        losses, last = stack.losses.tolist(), stack.gradient.tolist()
        for place, run in enumerate(of_place):
            if run not in training:
                continue
            for part, accuracies in right.items():
                if accuracies[place] >= LEARNED:
                    found[part][run] = min(found[part][run], stack.done)
            group = _group(cells[run])
            reached = max(found[part][run] for part in found)
            best[group] = min(best.get(group, NEVER), reached)
        for place, run in enumerate(of_place):
            why = _ended(
                max(found[part][run] for part in found), losses[place], stack.done, best[_group(cells[run])], steps
            )
            if run in training and why:
                training.remove(run)
                steps_to = {f"steps_{part}": found[part][run] for part in found}
                row = {"step": stack.done, "accuracy": right["test"][place], "loss": losses[place], "ended": why}
                yield cells[run], [{**row, **steps_to, **_gradients(first[run], last[place])}]
        if training and len(training) <= KEPT * len(of_place):
            stack.keep([place for place, run in enumerate(of_place) if run in training])
            of_place = [run for run in of_place if run in training]
        speed = stack.done / max(deadline.spent - began, 1e-9)
        deadline.say(f"step {stack.done}, {len(training)} of {len(cells)} runs train, {speed:.0f} steps/s")


def _gradients(first: Sequence[float], last: Sequence[float]) -> Row:
    """The gradient at the input of the softmax, at the first step and at the last: its median and root mean square."""
    both = {"first": first, "last": last}
    return {f"grad_{when}_{what}": of[n] for when, of in both.items() for n, what in enumerate(("median", "rms"))}


def _group(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What runs with other rates have in common."""
    return cell["pairs"], cell["rule"], cell["seed"]


def _best(rows: Rows) -> dict[tuple[Any, ...], float]:
    """The fewest steps to 90 % so far, whatever the rate."""
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        reached = max(_steps(row, "validation"), _steps(row, "test"))
        found[_group(row)] = min(found.get(_group(row), NEVER), reached)
    return found


def _ended(reached: float, loss: float, step: int, best: float, steps: int) -> str:
    """Why a run ends here; empty where it goes on."""
    if reached < NEVER:
        return "learned"
    if not math.isfinite(loss):
        return "diverged"
    if step > SLOWER * best + SETTLE:
        return "slower than another rate"
    return "out of steps" if step >= steps else ""


def weight(cell: Cell, settings: Settings) -> float:
    """Beside the products, every run has its share of what a step costs however small it is."""
    return float(cell["d"]) ** 2 + 2e4


def total(settings: Settings) -> float:
    """Without the rates that are added at edges."""
    seeds, cells = len(settings["seeds"][-1]), len(settings["pairs"]) * len(RULES)
    rates = len(first_rates(16, "none"))
    return sum(weight({"d": d}, settings) for d in settings["d"]) * cells * rates * seeds


def summary(rows: Rows) -> list[Row]:
    """Per head dim and number of keys: steps with the scale and without, each at its fastest rate, and their ratio by seed."""
    found = []
    for d, pairs in sorted({(row["d"], row["pairs"]) for row in rows}):
        some = {rule: pick(rows, d=d, pairs=pairs, rule=rule) for rule in RULES}
        if not all(some.values()):
            continue
        best = {rule: fastest(part) for rule, part in some.items()}
        edge = [rule for rule in RULES if at_edge(some[rule], best[rule])]
        of_seed = {rule: {row["seed"]: _steps(row) for row in pick(some[rule], lr=best[rule])} for rule in RULES}
        seeds = sorted(set(of_seed["none"]) & set(of_seed["sqrt_dk"]))
        ratios = [
            of_seed["none"][seed] / of_seed["sqrt_dk"][seed] for seed in seeds if of_seed["sqrt_dk"][seed] < NEVER
        ]
        if not ratios:
            continue
        found.append(
            {
                "d": d,
                "pairs": pairs,
                "x": math.sqrt(d / (2 * math.log(pairs))),
                "seeds": len(seeds),
                **{f"steps, {rule}": statistics.median(of_seed[rule].values()) for rule in RULES},
                **{f"lr, {rule}": best[rule] for rule in RULES},
                "at_edge": " and ".join(edge) or "neither",
                **over_seeds("slower", ratios),
                "slower_least": _at_least(some, best, of_seed["sqrt_dk"]),
                **{f"gradient, {when}": _compared(some, best, f"grad_{when}_median") for when in ("first", "last")},
            }
        )
    return found


def _at_least(some: Mapping[str, Rows], best: Mapping[str, float], scaled: Mapping[Any, float]) -> float:
    """The median over seeds of how slow no scale is at least: a run that had not learned when it ended counts with its steps."""
    found = [
        min(_steps(row), row.get("step", NEVER)) / scaled[row["seed"]]
        for row in pick(some["none"], lr=best["none"])
        if scaled.get(row["seed"], NEVER) < NEVER
    ]
    return statistics.median(found)


def _compared(some: Mapping[str, Rows], best: Mapping[str, float], column: str) -> float:
    """The median gradient at the softmax without the scale over that with it, each at its fastest rate."""
    bare, scaled = (
        statistics.median(row.get(column, math.nan) for row in pick(some[rule], lr=best[rule]))
        for rule in ("none", "sqrt_dk")
    )
    return bare / scaled if scaled else math.nan


def fits(rows: Rows) -> list[Row]:
    """ln(slow-down) against candidate variables: slope, R², the error of the fit in nats; cells without a number are left out.

    The fourth line has √d_k and ln n as two variables: what any function a·ln d_k + b·ln ln n could explain. The last one has
    them too, and counts the cells that had not learned when the steps were over as at least as slow as that.
    """
    every = summary(rows)
    cells = [row for row in every if math.isfinite(row["slower"])]
    ys = [math.log(row["slower"]) for row in cells]
    columns: dict[str, list[list[float]]] = {
        "√d_k / √(2 ln n)": [[math.log(row["x"])] for row in cells],
        "√d_k alone": [[math.log(row["d"]) / 2] for row in cells],
        "ln n alone": [[math.log(math.log(row["pairs"]))] for row in cells],
        "√d_k and ln n, two slopes": [[math.log(row["d"]) / 2, math.log(math.log(row["pairs"]))] for row in cells],
    }
    found = []
    for name, xs in columns.items():
        if xs and len(xs) > len(xs[0]) + 1:
            slopes, r2, error = _regression(xs, ys)
            said = " and ".join(f"{slope:.2f}" for slope in slopes)
            found.append({"variable": name, "cells": len(xs), "slope": said, "r2": r2, "error": error})
    unlearned = [row for row in every if not math.isfinite(row["slower"]) and math.isfinite(row["slower_least"])]
    if found and unlearned:
        xs = [[math.log(row["d"]) / 2, math.log(math.log(row["pairs"]))] for row in (*cells, *unlearned)]
        slopes, error = _censored(xs, ys, [math.log(row["slower_least"]) for row in unlearned])
        name = f"the same, with {len(unlearned)} cells that never learned counted as at least so slow"
        said = " and ".join(f"{slope:.2f}" for slope in slopes)
        found.append({"variable": name, "cells": len(xs), "slope": said, "r2": math.nan, "error": error})
    return found


def _censored(xs: Sequence[Sequence[float]], ys: Sequence[float], least: Sequence[float]) -> tuple[list[float], float]:
    """Slopes and the residual's std of the most likely line when the last points are only known to lie above a number (Tobin
    1958): they are replaced by their mean, given the line, and the line is fitted again."""
    normal = statistics.NormalDist()
    values, beyond, error = [*ys, *least], [0.0] * len(least), max(_regression(xs, [*ys, *least])[2], 1e-9)
    for _ in range(ROUNDS):
        line = _line(xs, values)
        for place, low in enumerate(least):
            mean = line[len(ys) + place]
            at = (low - mean) / error
            hazard = normal.pdf(at) / max(1 - normal.cdf(at), 1e-300)
            values[len(ys) + place] = mean + error * hazard
            beyond[place] = error**2 * (1 + at * hazard - hazard**2)
        line = _line(xs, values)
        left = sum((value - mean) ** 2 for value, mean in zip(values, line, strict=True))
        error = max(math.sqrt((left + sum(beyond)) / len(values)), 1e-9)
    slopes, _, _ = _regression(xs, values)
    return slopes, error


def _regression(xs: Sequence[Sequence[float]], ys: Sequence[float]) -> tuple[list[float], float, float]:
    """Least squares with an intercept: slopes, R², root of the residual variance."""
    solved = _solved(xs, ys)
    left = sum((y - at) ** 2 for y, at in zip(ys, _line(xs, ys), strict=True))
    mean = statistics.fmean(ys)
    whole = sum((y - mean) ** 2 for y in ys)
    freedom = len(ys) - len(solved)
    return solved[1:], 1 - left / whole if whole else math.nan, math.sqrt(left / freedom)


def _solved(xs: Sequence[Sequence[float]], ys: Sequence[float]) -> list[float]:
    """The intercept and the slopes of least squares."""
    import torch

    design = torch.tensor([[1.0, *row] for row in xs], dtype=torch.float64, device="cpu")
    target = torch.tensor(ys, dtype=torch.float64, device="cpu")
    found: list[float] = torch.linalg.lstsq(design, target[:, None], driver="gelsd").solution[:, 0].tolist()
    return found


def _line(xs: Sequence[Sequence[float]], ys: Sequence[float]) -> list[float]:
    """What the fitted line says at every point."""
    first, *slopes = _solved(xs, ys)
    return [first + math.fsum(slope * x for slope, x in zip(slopes, row, strict=True)) for row in xs]


def finding(rows: Rows) -> str:
    """The fit in a sentence: it collapses where one variable explains as much as two, and more than either alone."""
    found = {row["variable"]: row for row in fits(rows)}
    if len(found) < 4:
        return "Too few cells have learned with and without the scale for a fit"
    joint, width, _, free, *_ = found.values()
    if joint["r2"] > width["r2"] and free["r2"] - joint["r2"] < CLOSE:
        return f"The slow-down without a scale falls on one curve of √d_k/√(2 ln n): R² {joint['r2']:.2f}"
    by_keys = float(free["slope"].split(" and ")[1])
    and_keys = " and with more keys" if by_keys > 0 else ""
    return f"Without a scale training slows down with √d_k{and_keys}; √d_k/√(2 ln n) alone does not explain it"


def draw(rows: Rows, finding: str) -> Any:
    """Every cell on one axis, coloured by its number of keys; below, the same cells against √d_k alone."""
    import altair as alt

    from ..figures import marks, theme

    cells = [{**row, "n": row["pairs"]} for row in summary(rows) if math.isfinite(row["slower"])]
    cells, colour = theme.by_keys(cells)
    cells = [{**row, "root": math.sqrt(row["d"])} for row in cells]
    panels = []
    for field, title in (("x", "√d_k / √(2 ln n)"), ("root", "√d_k")):
        x = alt.X(f"{field}:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=24))
        chart = marks.curve(cells, x, "slower", "steps without ÷ with 1/√d_k", colour, log=True)
        panels.append(
            (marks.labelled_line(1.0, "as fast", at=theme.WIDTH - 60) + chart).properties(width=theme.WIDTH, height=220)
        )
    seeds = max((row["seeds"] for row in cells), default=0)
    never = sum(not math.isfinite(row["slower"]) for row in summary(rows))
    fitted = "; ".join(f"{row['variable']} R² {row['r2']:.2f}" for row in fits(rows)[:4])
    note = (
        "Recall, one layer, one head: steps to 90 % of unseen answers, each rule at its fastest learning rate; median and "
        f"range of {plural(seeds, 'seed')}. "
        + (
            f"{never} cells without the scale had not learned when the steps were over, most of them with many keys; not shown. "
            if never
            else ""
        )
        + f"Fits of ln(ratio): {fitted}."
    )
    return theme.finish(alt.vconcat(*panels, spacing=24), finding, note)


STUDY = Study(
    "collapse",
    "Does the slow-down of training without a scale depend on √d_k/√(2 ln n) alone?",
    presets={
        "full": {
            "d": (16, 32, 64, 128, 256, 512, 1024),
            "pairs": (8, 16, 32, 64, 128, 256, 512),
            "seeds": ((0,), (0, 1, 2, 3, 4)),
            "batch": 64,
            "steps": 3000,
        },
        "tiny": {"d": (4,), "pairs": (2,), "seeds": ((0,), (0, 1)), "batch": 2, "steps": 6},
    },
    plan=plan,
    train=train,
    weight=weight,
    total=total,
    finding=finding,
    summary=summary,
    draw=draw,
)
