"""law: how do the steps to learn grow with the scale and with the number of keys, if nothing else changes?

Recall at one width, with the scale c/√d_k for c from 1 to 32, for several head dims and numbers of keys; steps until 90 % of
unseen answers are right, each cell at its fastest rate. In `collapse` the width is d_k, so that scale and width grow together;
here c alone changes the scale. The cap of steps is higher, and cells that never learn count as at least so slow. One slice is
trained with plain SGD, which does not divide by the gradient's size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from attemper.extension.tools import plural
from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.training.runs import at_edge

from ..stacked.recall import RecallStack
from ..stacked.study import Deadline, Settings, define, missing
from .causal import interval
from .collapse import NEVER, _censored, _steps, extended, fastest, promising, raced, rate

DRAWS = 200  # of the bootstrap over cells
SHARES = (0.025, 0.975)


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """One seed over the whole grid first, then the others; a stack is one head dim under one optimizer."""
    for seeds in settings["seeds"]:
        for optimizer, d, pairs in _slices(settings):
            some = pick(rows, optimizer=optimizer, d=d)
            wanted: list[Cell] = [
                {"optimizer": optimizer, "d": d, "pairs": n, "c": c, "lr": rate(power), "seed": seed}
                for n in pairs
                for c in settings["c"]
                for power in extended(pick(some, pairs=n, c=c), first_powers(optimizer, c, settings), seeds, promising)
                for seed in seeds
            ]
            left = missing(some, wanted)
            if left:
                return left[: settings["stack"]]
    return []


def _slices(settings: Settings) -> list[tuple[str, int, tuple[int, ...]]]:
    """Every head dim and number of keys with Adam, one slice with SGD."""
    sgd = settings["sgd"]
    return [("adam", d, settings["pairs"]) for d in settings["d"]] + [("sgd", d, pairs) for d, pairs in sgd]


def first_powers(optimizer: str, c: float, settings: Settings) -> list[float]:
    """Half decades around what `collapse` found: the rate of Adam falls as logits move faster; SGD's with their square."""
    middle, least, most = settings["powers"][optimizer]
    shift = round(math.log10(c) * (1 if optimizer == "adam" else 2))
    return list(range(middle - shift + least, middle - shift + most + 1))


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    d, sgd = int(cells[0]["d"]), cells[0]["optimizer"] == "sgd"
    stack = RecallStack(d, cells, settings["batch"], device, width=settings["width"], sgd=sgd)
    yield from raced(stack, cells, pick(rows, optimizer=cells[0]["optimizer"], d=d), settings["steps"], deadline)


def total(settings: Settings) -> float:
    """The cells, without the rates that are added at edges."""
    seeds = len(settings["seeds"][-1])
    return float(
        sum(
            len(first_powers(optimizer, c, settings)) * len(pairs) * seeds
            for optimizer, _, pairs in _slices(settings)
            for c in settings["c"]
        )
    )


def summary(rows: Rows) -> list[Row]:
    """Per optimizer, head dim, number of keys and c: the steps at the fastest rate, the median over seeds."""
    found = []
    for which in sorted({(row["optimizer"], row["d"], row["pairs"], row["c"]) for row in rows}):
        some = pick(rows, **dict(zip(("optimizer", "d", "pairs", "c"), which, strict=True)))
        best = fastest(some)
        runs = pick(some, lr=best)
        steps = statistics.median(_steps(row) for row in runs)
        least = statistics.median(min(_steps(row), row.get("step", NEVER)) for row in runs)
        found.append(
            {
                **dict(zip(("optimizer", "d", "pairs", "c"), which, strict=True)),
                "seeds": len(runs),
                "lr": best,
                "at_edge": at_edge(some, best) if math.isfinite(steps) else "never learned",
                "steps": steps,
                "steps_least": least,
            }
        )
    return found


def law(rows: Rows, optimizer: str = "adam") -> Row | None:
    """ln(steps) on ln c, ln ln n and ln d_k by likelihood, cells that never learned counting as at least so slow: b and a of
    (c · (ln n)^a)^b, the exponent of d_k beside them, with 95 % of a bootstrap over cells. None for too few cells."""
    cells = [row for row in summary(rows) if row["optimizer"] == optimizer and row["c"] > 1]
    learned = sum(math.isfinite(row["steps"]) for row in cells)
    varies = [len({row[name] for row in cells}) > 1 for name in ("c", "pairs", "d")]
    if not all(varies[:2]) or learned < 6:
        return None
    fitted = _exponents(cells, varies[2])
    stream = torch.Generator("cpu").manual_seed(0)
    drawn = []
    for _ in range(DRAWS):
        places = torch.randint(len(cells), (len(cells),), generator=stream, device="cpu").tolist()
        sample = [cells[place] for place in places]
        if sum(math.isfinite(row["steps"]) for row in sample) >= 6:
            drawn.append(_exponents(sample, varies[2]))
    row: Row = {"optimizer": optimizer, "cells": len(cells), "never learned": len(cells) - learned}
    for place, name in enumerate(("b, of c", "a, of ln n", "of d_k")):
        values = sorted(one[place] for one in drawn if math.isfinite(one[place]))
        ends = [values[round(share * (len(values) - 1))] if values else math.nan for share in SHARES]
        row |= {name: fitted[place], f"{name}_low": ends[0], f"{name}_high": ends[1]}
    return row


def _exponents(cells: Rows, by_width: bool) -> tuple[float, float, float]:
    """b, a, and the exponent of d_k, which is NaN for one head dim."""
    ordered = sorted(cells, key=lambda row: math.isinf(row["steps"]))
    xs = [
        [math.log(row["c"]), math.log(math.log(row["pairs"])), *([math.log(row["d"])] if by_width else [])]
        for row in ordered
    ]
    ys = [math.log(row["steps"]) for row in ordered if math.isfinite(row["steps"])]
    least = [math.log(row["steps_least"]) for row in ordered[len(ys) :]]
    slopes, _, _ = _censored(xs, ys, least)
    return slopes[0], slopes[1] / slopes[0] if slopes[0] else math.nan, slopes[2] if by_width else math.nan


def laws(rows: Rows) -> list[Row]:
    return [found for optimizer in ("adam", "sgd") if (found := law(rows, optimizer)) is not None]


def slopes(rows: Rows) -> list[Row]:
    """Per optimizer, head dim and number of keys: the exponent of c alone, the slope of ln(steps) against ln c among the cells
    that learned, by seed, each cell at its fastest rate; the mean of the seeds that have all cells, and its 95 % interval."""
    found: list[Row] = []
    cells = [row for row in summary(rows) if math.isfinite(row["steps"])]
    for which in sorted({(row["optimizer"], row["d"], row["pairs"]) for row in cells}):
        names = dict(zip(("optimizer", "d", "pairs"), which, strict=True))
        some = pick(cells, **names)
        runs = {row["c"]: pick(rows, **names, c=row["c"], lr=row["lr"]) for row in some}
        steps = {c: {row["seed"]: _steps(row) for row in of_c if _steps(row) < NEVER} for c, of_c in runs.items()}
        seeds = sorted(set.intersection(*(set(of_seed) for of_seed in steps.values())))
        if len(steps) < 3 or not seeds:
            continue
        xs = [math.log(c) for c in steps]
        each = [
            statistics.linear_regression(xs, [math.log(of_seed[seed]) for of_seed in steps.values()]).slope
            for seed in seeds
        ]
        found.append({**names, "c, at most": max(steps), "seeds": len(seeds), **interval("of c", each)})
    return found


def finding(rows: Rows) -> str:
    """The exponent of c at the middle one of the head dims, which shows whether it is the same for every number of keys."""
    adam = pick(slopes(rows), optimizer="adam")
    if not adam:
        return "Too few cells have learned for a fit"
    dims = sorted({row["d"] for row in adam})
    some = pick(adam, d=dims[len(dims) // 2])
    said = ", ".join(f"c^{row['of c']:.2f} with {row['pairs']} keys" for row in some)
    return f"At a fixed width and d_k = {some[0]['d']} the steps to learn grow like {said}"


def draw(rows: Rows, finding: str) -> Any:
    """Steps against c for each number of keys, a panel per head dim."""
    import altair as alt

    from attemper_lab.figures import marks, panels, theme

    cells = [row for row in summary(rows) if row["optimizer"] == "adam" and math.isfinite(row["steps"])]
    cells, colour = theme.by_keys([{**row, "n": row["pairs"]} for row in cells])
    dims = sorted({row["d"] for row in cells})
    width = (theme.WIDTH - panels.GAP * (len(dims) - 1)) // max(1, len(dims))
    charts: list[Any] = []
    for d in dims:
        shown = [row for row in cells if row["d"] == d]
        x = theme.powers("c", "c, of the scale c/√d_k", [row["c"] for row in shown])
        chart = marks.curve(shown, x, "steps", "" if charts else "steps to 90 %", colour, log=True)
        charts.append(chart.properties(width=width, height=240, title=panels.heading(f"d_k = {d}")))
    never = sum(not math.isfinite(row["steps"]) for row in summary(rows))
    by_sgd = law(rows, "sgd")
    seeds = " to ".join(str(count) for count in sorted({row["seeds"] for row in cells}))
    note = (
        f"Recall at one width, one head, each cell at its fastest rate, seeds: {seeds}; {plural(never, 'cell')} never learned. "
        "Not shown: other widths, rates closer than half a decade."
        + (f" With SGD b = {by_sgd['b, of c']:.2f}." if by_sgd else "")
    )
    return theme.finish(alt.hconcat(*charts, spacing=18).resolve_scale(y="shared"), finding, note)


_POWERS = {"adam": (-5, -3, 2), "sgd": (0, -3, 2)}  # the middle at c = 1, how far below and above
FULL: Mapping[str, Any] = {
    "d": (16, 64, 256), "pairs": (8, 32, 128, 512), "c": (1, 2, 4, 8, 16, 32), "seeds": ((0,), (0, 1, 2)), "width": 512,
    "batch": 64, "steps": 8000, "powers": _POWERS, "sgd": ((64, (32,)),), "stack": 160,
}  # fmt: skip

STUDY = define(
    globals(),
    "How do the steps to learn grow with the scale and the number of keys, at a fixed width?",
    presets={
        "full": FULL,
        "slice": {**FULL, "d": (64, 16), "pairs": (8, 32, 128), "c": (1, 2, 4, 8), "width": 128, "batch": 32, "steps": 3000,
                  "sgd": ((64, (8,)),)},
        "small": {**FULL, "d": (16,), "pairs": (4, 8), "c": (1, 4, 16), "seeds": ((0,),), "width": 64, "batch": 32, "steps": 120,
                  "powers": {"adam": (-4, -1, 1), "sgd": (0, -1, 1)}, "sgd": ((16, (4,)),)},
        "tiny": {**FULL, "d": (4,), "pairs": (2, 3), "c": (1, 2), "seeds": ((0,), (0, 1)), "width": 8, "batch": 2, "steps": 6,
                 "powers": {"adam": (-5, -1, 0), "sgd": (0, -1, 0)}, "sgd": ((4, (2,)),)},
    },
)  # fmt: skip
