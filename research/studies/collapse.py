"""collapse: on which one number of d_k and n does the slow-down of training without a scale depend?

Recall for every head dim and number of keys, with 1/√d_k and without: steps until 90 % of unseen answers are right, each at its
fastest learning rate. Rates are chosen on validation sequences and the steps are those of the test. Where the fastest rate is
the least or the most that was tried, the next one beyond is tried too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attemper.extension.tools import plural
from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.maths.stats import outside, over_seeds
from attemper_lab.training.runs import at_edge

from ..stacked.recall import KEPT, LEARNED, SETTLE, SLOWER, RecallStack
from ..stacked.study import Deadline, Settings, define, missing

RULES = ("sqrt_dk", "none")
NEVER = math.inf
EXTENDED = 4  # rates that may be added beyond the first ones, on either side
FINEST, COARSE = 5, 20  # accuracy is looked at every 5 steps, and later every 20th of the steps so far
SOME = 0.2  # accuracy: a fifth of the answers, where chance has a thirty-second
ROUNDS = 200  # of the fit with cells that never learned
CLOSE = 0.05  # of R²: one variable explains as much as two
UNLIKELY = 0.05  # p of a fit that is rejected


def rate(power: float) -> float:
    """Half decades: 1e-3 for −6, 3.2e-3 for −5."""
    return float(f"{10 ** (power / 2):.2g}")


def widened(powers: Sequence[float], best: float) -> list[float]:
    """The powers, with one more, as far off as they are apart, on the side where the best rate is at the edge."""
    apart = powers[1] - powers[0]
    if best == rate(powers[0]):
        return [powers[0] - apart, *powers]
    return [*powers, powers[-1] + apart] if best == rate(powers[-1]) else list(powers)


def first_rates(d: int, rule: str) -> list[float]:
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
                for power in extended(pick(some, pairs=pairs, rule=rule), first_rates(d, rule), seeds, promising)
                for seed in seeds
            ]
            left = missing(some, wanted)
            if left:
                return left
    return []


def extended(rows: Rows, powers: Sequence[float], seeds: Sequence[int], choose: Callable[[Rows], float]) -> list[float]:
    """The powers, and one more on the side where the chosen rate is at the edge, until it is inside. As they are while one of
    them is not measured with every seed."""
    found = list(powers)
    for _ in range(EXTENDED):
        some = [row for row in rows if row["lr"] in {rate(power) for power in found}]
        asked = {row["seed"] for row in some} | set(seeds)
        if len({(row["lr"], row["seed"]) for row in some}) < len(found) * len(asked):
            return found
        found = widened(found, choose(some))
    return found


def promising(rows: Rows) -> float:
    """The fastest rate; NaN if no rate learns anything in the steps there are."""
    best = fastest(rows)
    return best if statistics.median(row["accuracy"] for row in pick(rows, lr=best)) >= SOME else math.nan


def fastest(rows: Rows) -> float:
    """The rate whose median over seeds learns in the fewest steps on the validation set; if none learns, the most accurate."""

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
    stack = RecallStack(int(cells[0]["d"]), cells, settings["batch"], device)
    yield from raced(stack, cells, pick(rows, d=cells[0]["d"]), settings["steps"], deadline)


def raced(
    stack: RecallStack, cells: Sequence[Cell], rows: Rows, steps: int, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    """Train a stack; a run ends when it has learned, has diverged, or is twice as slow as another rate of its cell and seed."""
    found = {part: [NEVER] * len(cells) for part in ("validation", "test")}
    names = [name for name in cells[0] if name != "lr"]
    best = _best(rows, names)
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
            group = _group(cells[run], names)
            reached = max(found[part][run] for part in found)
            best[group] = min(best.get(group, NEVER), reached)
        for place, run in enumerate(of_place):
            why = _ended(
                max(found[part][run] for part in found),
                losses[place],
                stack.done,
                best[_group(cells[run], names)],
                steps,
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


def _group(cell: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """What runs with other rates have in common."""
    return tuple(cell[name] for name in names)


def _best(rows: Rows, names: Sequence[str]) -> dict[tuple[Any, ...], float]:
    """The fewest steps to 90 % so far, whatever the rate."""
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        reached = max(_steps(row, "validation"), _steps(row, "test"))
        group = _group(row, names)
        found[group] = min(found.get(group, NEVER), reached)
    return found


def _ended(reached: float, loss: float, step: int, best: float, steps: int) -> str:
    """Why a run ends here; empty if it continues."""
    if reached < NEVER:
        return "learned"
    if not math.isfinite(loss):
        return "diverged"
    if step > SLOWER * best + SETTLE:
        return "slower than another rate"
    return "out of steps" if step >= steps else ""


def weight(cell: Cell, settings: Settings) -> float:
    """Besides its products, every run pays a share of the fixed cost of a step."""
    return float(cell["d"]) ** 2 + 2e4


def total(settings: Settings) -> float:
    """The weight of all cells, without the rates that are added at edges."""
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
                "at_edge": " and ".join(edge) or "neither"
                if math.isfinite(statistics.median(ratios))
                else "none: never learned",
                **over_seeds("slower", ratios),
                "slower_least": _at_least(some, best, of_seed["sqrt_dk"]),
                **{f"gradient, {when}": _compared(some, best, f"grad_{when}_median") for when in ("first", "last")},
            }
        )
    return found


def _at_least(some: Mapping[str, Rows], best: Mapping[str, float], scaled: Mapping[Any, float]) -> float:
    """The median over seeds of the least slow-down without a scale: a run that had not learned counts with its steps."""
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


RATIO, PRODUCT, FREE = "√d_k / √(2 ln n)", "√d_k · √(2 ln n)", "√d_k and ln n, two slopes"


def fits(rows: Rows) -> list[Row]:
    """ln(slow-down) against candidate variables: slope, R², R² of cells that are left out one by one, error of the fit in nats.

    `FREE` has √d_k and ln n as two variables: what any function a·ln d_k + b·ln ln n could explain. `p` is the chance that its
    second slope explains so much more than the variable does if it were the right one: an F test among the cells that learned.
    The last two lines also have the cells that had not learned when the steps were over, as at least so slow; `p` is then that of
    the ratio of likelihoods.
    """
    every = summary(rows)
    cells = [row for row in every if math.isfinite(row["slower"])]
    ys = [math.log(row["slower"]) for row in cells]
    columns: dict[str, Callable[[Mapping[str, Any]], list[float]]] = {
        RATIO: lambda row: [math.log(row["x"])],
        "√d_k alone": lambda row: [math.log(row["d"]) / 2],
        "ln n alone": lambda row: [math.log(math.log(row["pairs"]))],
        PRODUCT: lambda row: [math.log(row["d"] * 2 * math.log(row["pairs"])) / 2],
        FREE: lambda row: [math.log(row["d"]) / 2, math.log(math.log(row["pairs"]))],
    }
    if len(cells) < 4:
        return []
    found: list[Row] = []
    left: dict[str, float] = {}
    freedom = len(cells) - 3
    for name, of in columns.items():
        xs = [of(row) for row in cells]
        slopes, r2, error = _regression(xs, ys)
        left[name] = error**2 * (len(xs) - len(slopes) - 1)
        said = " and ".join(f"{slope:.2f}" for slope in slopes)
        found.append(
            {"variable": name, "cells": len(xs), "slope": said, "r2": r2, "left out": _left_out(xs, ys), "error": error}
        )
    for row in found:
        nested = row["variable"] in (RATIO, PRODUCT, "√d_k alone") and freedom > 0 and left[FREE] > 0
        more = max(left[row["variable"]] - left[FREE], 0.0)
        row["p"] = outside(math.sqrt(more * freedom / left[FREE]), freedom) if nested else math.nan
    unlearned = [row for row in every if not math.isfinite(row["slower"]) and math.isfinite(row["slower_least"])]
    if unlearned:
        least = [math.log(row["slower_least"]) for row in unlearned]
        fitted = {
            name: _censored([columns[name](row) for row in (*cells, *unlearned)], ys, least) for name in (PRODUCT, FREE)
        }
        for name, (slopes, error, likely) in fitted.items():
            said = " and ".join(f"{slope:.2f}" for slope in slopes)
            gained = max(fitted[FREE][2] - likely, 0.0)
            found.append(
                {
                    "variable": f"{name}, with {len(unlearned)} cells that never learned as at least so slow",
                    "cells": len(cells) + len(unlearned),
                    "slope": said,
                    "r2": math.nan,
                    "left out": math.nan,
                    "error": error,
                    "p": math.erfc(math.sqrt(gained)) if name == PRODUCT else math.nan,
                }
            )
    return found


def dropped(rows: Rows) -> list[tuple[int, int]]:
    """The cells that are in no fit: 1/√d_k did not learn in the steps there were, so that nothing can be compared."""
    there = {(row["d"], row["pairs"]) for row in summary(rows)}
    return sorted({(row["d"], row["pairs"]) for row in rows} - there)


def _left_out(xs: Sequence[Sequence[float]], ys: Sequence[float]) -> float:
    """R² of predictions, each from a line without that cell."""
    mean, errors = statistics.fmean(ys), []
    for place in range(len(ys)):
        kept = [n for n in range(len(ys)) if n != place]
        first, *slopes = _solved([xs[n] for n in kept], [ys[n] for n in kept])
        errors.append(ys[place] - first - math.fsum(s * x for s, x in zip(slopes, xs[place], strict=True)))
    whole = sum((y - mean) ** 2 for y in ys)
    return 1 - sum(error**2 for error in errors) / whole if whole else math.nan


def _censored(
    xs: Sequence[Sequence[float]], ys: Sequence[float], least: Sequence[float]
) -> tuple[list[float], float, float]:
    """Slopes, the residual's std and the log-likelihood of the most likely line when the last points are only known to lie above
    a number (Tobin 1958): they are replaced by their mean, given the line, and the line is fitted again."""
    import torch

    design = torch.tensor([[1.0, *row] for row in xs], dtype=torch.float64, device="cpu")
    solver = torch.linalg.pinv(design)
    low = torch.tensor(list(least), dtype=torch.float64, device="cpu")
    values = torch.tensor([*ys, *least], dtype=torch.float64, device="cpu")
    freedom, learned = max(1, len(values) - design.shape[1]), len(ys)
    line = design @ (solver @ values)
    error, beyond = max(math.sqrt(float((values - line).square().sum()) / freedom), 1e-9), torch.zeros_like(low)
    for _ in range(ROUNDS):
        mean = line[learned:]
        at = (low - mean) / error
        hazard = (-at.square() / 2).exp() / (math.sqrt(math.pi / 2) * torch.erfc(at / math.sqrt(2))).clamp(min=1e-300)
        values[learned:] = mean + error * hazard
        beyond = error**2 * (1 + at * hazard - hazard.square())
        line = design @ (solver @ values)
        before, left = error, float((values - line).square().sum() + beyond.sum())
        error = max(math.sqrt(left / len(values)), 1e-9)
        if abs(error - before) < 1e-9 * before:
            break
    slopes: list[float] = (solver @ values)[1:].tolist()
    line = design @ (solver @ values)
    likely = -float(((values - line)[:learned] / error).square().sum()) / 2 - learned * math.log(error)
    likely += float((torch.erfc((low - line[learned:]) / (error * math.sqrt(2))) / 2).clamp(min=1e-300).log().sum())
    return slopes, error, likely


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
    """The fitted line at every point."""
    first, *slopes = _solved(xs, ys)
    return [first + math.fsum(slope * x for slope, x in zip(slopes, row, strict=True)) for row in xs]


def finding(rows: Rows) -> str:
    """The fit in a sentence: one variable is enough where a second slope explains no more."""
    found = {row["variable"]: row for row in fits(rows)}
    if not found:
        return "Too few cells have learned with and without the scale for a fit"
    free = found[FREE]
    enough = [name for name in (RATIO, PRODUCT) if free["r2"] - found[name]["r2"] < CLOSE]
    if enough:
        name = max(enough, key=lambda name: found[name]["r2"])
        other = PRODUCT if name == RATIO else RATIO
        one, two = (f"{found[which]['r2']:.2f}" for which in (name, other))
        said = f"Where it learns, the slow-down without a scale grows with {name} (R² {one}), not with {other} ({two})"
        never = [row for row in found.values() if row["variable"].startswith(f"{name}, with") and row["p"] < UNLIKELY]
        return said + "".join(f"; cells that never learned speak against it (p = {row['p']:.3f})" for row in never)
    by_keys = float(free["slope"].split(" and ")[1])
    and_keys = " and with more keys" if by_keys > 0.1 else ""
    return f"Without a scale training slows down with √d_k{and_keys}; neither the ratio to √(2 ln n) nor the product explains it"


def draw(rows: Rows, finding: str) -> Any:
    """Every cell against √d_k · √(2 ln n), coloured by its number of keys; below, the same cells against the ratio."""
    import altair as alt

    from attemper_lab.figures import marks, theme

    cells = [{**row, "n": row["pairs"]} for row in summary(rows) if math.isfinite(row["slower"])]
    cells, colour = theme.by_keys(cells)
    cells = [{**row, "product": math.sqrt(2 * row["d"] * math.log(row["n"]))} for row in cells]
    panels = []
    for field, title in (("product", PRODUCT), ("x", RATIO)):
        x = alt.X(f"{field}:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=24))
        chart = marks.curve(cells, x, "slower", "steps without ÷ with 1/√d_k", colour, log=True)
        panels.append(
            (marks.labelled_line(1.0, "as fast", at=theme.WIDTH - 60) + chart).properties(width=theme.WIDTH, height=220)
        )
    seeds = max((row["seeds"] for row in cells), default=0)
    never = sum(not math.isfinite(row["slower"]) for row in summary(rows))
    fitted = "; ".join(f"{row['variable']} R² {row['r2']:.2f}" for row in fits(rows)[:5])
    gone = ", ".join(f"d_k = {d} with {n} keys" for d, n in dropped(rows))
    said = f"Not in the fits: {gone}, which 1/√d_k did not learn. " if gone else ""
    note = (
        "Recall, one layer, one head: steps to 90 % of unseen answers, each rule at its fastest learning rate; median and "
        f"range of {plural(seeds, 'seed')}. "
        + (
            f"{never} cells without the scale had not learned when the steps were over, most of them with many keys; not shown. "
            if never
            else ""
        )
        + f"{said}Fits of ln(steps without ÷ with): {fitted}. Width and scale grow together here: d_model is d_k."
    )
    return theme.finish(alt.vconcat(*panels, spacing=24), finding, note)


STUDY = define(
    globals(),
    "On which one number of d_k and n does the slow-down of training without a scale depend?",
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
)
