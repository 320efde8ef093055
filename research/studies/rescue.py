"""rescue: does a treatment that comes after the warning still save a run, and how late may it come?

Runs that fail, with a twin each (QK-norm, the same weights, text and rate). The warning is the first probe whose largest
logit is above 50. Each run is then repeated with a treatment that begins at the warning, or some steps later. A run is
rescued where its held-out loss ends within 0.05 nats of its twin's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attemper_lab.engine.experiment import Cell, Row, Rows, pick
from attemper_lab.training.runs import NOTHING

from ..stacked.fit import about, fit
from ..stacked.study import Deadline, Settings, define, missing
from ..stacked.text import UNTRAINED_LOSS
from . import separation

WARNS = 50.0
TREATMENTS = {"clip100": "clip 100", "clip30": "clip 30", "floor": "entropy floor", "third": "lr / 3"}
FAILING = (("sqrt_dk", (2e-2, 1e-1)), ("none", (3e-3, 3e-2)))
"""Rules, and the range of rates at which runs failed in the pilot."""


def made(number: int, twin: bool) -> dict[str, Any]:
    """The rule, rate and seed of a run."""
    rule, (low, high) = FAILING[number % 2]
    place = (number // 2 * 0.6180339887498949) % 1.0
    return {
        "rule": "qk_norm" if twin else rule,
        "lr": float(f"{low * (high / low) ** place:.3g}"),
        "seed": 5000 + number,
    }


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """The untreated runs and their twins first; then the treated ones, the shortest delay first."""
    first: list[Cell] = [
        {"number": number, "treatment": treatment, "delay": 0, "start": 0}
        for number in range(settings["runs"])
        for treatment in ("", "twin")
    ]
    left = missing(rows, first)
    if left:
        return left[: settings["stack"]]
    warned = {row["number"]: row["warned"] for row in pick(rows, treatment="") if _is_number(row["warned"])}
    treated: list[Cell] = [
        {"number": number, "treatment": treatment, "delay": delay, "start": int(step) + delay}
        for delay in settings["delays"]
        for number, step in warned.items()
        for treatment in TREATMENTS
        if int(step) + delay < settings["steps"] - settings["steps"] // 5
    ]
    return missing(rows, treated)[: settings["stack"]]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    runs = []
    for cell in cells:
        twin = cell["treatment"] == "twin"
        its = made(int(cell["number"]), twin)
        runs.append({**its, "treatment": "" if twin else cell["treatment"], "start": cell["start"]})
    stack = fit(runs, settings["width"], settings["head_dim"], settings, device, deadline)
    if stack is None:
        return
    held = stack.held_out("test", settings["windows"])
    for run, (cell, its) in enumerate(zip(cells, runs, strict=True)):
        peaks = stack.probe.series(run)["peak"]
        warned = next((place * settings["every"] for place, peak in enumerate(peaks) if peak > WARNS), math.inf)
        row = {"held_out": held[run][0], "warned": warned, "peak": max(peaks), "peak_end": peaks[-1]}
        yield cell, [{**about(stack.size), "rule": its["rule"], "lr": its["lr"], "seed": its["seed"], **row}]


def failing(rows: Rows) -> dict[int, Mapping[str, Any]]:
    """Number → the untreated run, where it warned and ended above its twin; with its twin's loss."""
    twins = {row["number"]: row["held_out"] for row in pick(rows, treatment="twin")}
    return {
        row["number"]: {**row, "twin": twins[row["number"]]}
        for row in pick(rows, treatment="")
        if _is_number(row["warned"]) and row["number"] in twins and not _near(row["held_out"], twins[row["number"]])
    }


def _near(loss: float, twin: float) -> bool:
    return loss <= twin + NOTHING  # False for NaN


def summary(rows: Rows) -> list[Row]:
    """Per treatment and delay: the share of failing runs that were rescued, and the gap to the twin that is left."""
    bad, found = failing(rows), []
    for treatment in TREATMENTS:
        for delay in sorted({row["delay"] for row in pick(rows, treatment=treatment)}):
            some = [row for row in pick(rows, treatment=treatment, delay=delay) if row["number"] in bad]
            if not some:
                continue
            found.append(
                {
                    "treatment": treatment,
                    "delay": delay,
                    "runs": len(some),
                    **separation.share([_near(row["held_out"], bad[row["number"]]["twin"]) for row in some]).columns(
                        "rescued"
                    ),
                    **separation.median([_gap(bad[row["number"]], bad[row["number"]]) for row in some]).columns(
                        "gap untreated"
                    ),
                    **separation.median([_gap(row, bad[row["number"]]) for row in some]).columns("gap"),
                }
            )
    return found


def _gap(row: Mapping[str, Any], bad: Mapping[str, Any]) -> float:
    """Nats above the twin of a failing run; a run that diverged counts as untrained."""
    loss = row["held_out"]
    return min(loss, UNTRAINED_LOSS) - bad["twin"] if _is_number(loss) else UNTRAINED_LOSS - bad["twin"]


def finding(rows: Rows) -> str:
    """What the best treatment saves if it comes at once, and if it comes at the longest delay tried."""
    found = summary(rows)
    if not found:
        return f"{len(failing(rows))} runs fail; none of them was treated yet"
    first = [row for row in found if row["delay"] == min(one["delay"] for one in found)]
    best = max(first, key=lambda row: (row["rescued"], -row["gap"]))
    name = TREATMENTS[best["treatment"]]
    if not best["rescued"]:
        return (
            f"No treatment rescues one of {best['runs']} failing runs; {name} leaves {best['gap']:.2f} nats to the twin"
        )
    when = "at the warning" if not best["delay"] else f"{best['delay']} steps after the warning"
    last = max((row for row in found if row["treatment"] == best["treatment"]), key=lambda row: row["delay"])
    later = (
        f"; {last['delay'] - best['delay']} steps later it rescues {last['rescued']:.0%}" if last is not best else ""
    )
    sure = f"{best['rescued_low']:.0%} to {best['rescued_high']:.0%}"
    gap = f"brings the median gap to the twin from {best['gap untreated']:.2f} to {best['gap']:.2f} nats"
    saved = f"rescues {best['rescued']:.0%} of {best['runs']} failing runs ({sure})"
    return f"{name[0].upper()}{name[1:]} {when} {saved} and {gap}{later}"


def draw(rows: Rows, finding: str) -> Any:
    """The share rescued, and the gap to the twin that is left, against the delay of the treatment."""
    import altair as alt

    from attemper_lab.figures import marks, theme

    found = summary(rows)
    delays, order = sorted({row["delay"] for row in found}), list(TREATMENTS)
    apart = 0.012 * max(1, max(delays, default=1))  # side by side, so that intervals do not cover one another
    shown = [
        {
            **row,
            "name": TREATMENTS[row["treatment"]],
            "at": row["delay"] + apart * (order.index(row["treatment"]) - 1.5),
        }
        for row in found
    ]
    colour = theme.series("name", "treatment", list(TREATMENTS.values()))
    axis = alt.Axis(values=delays, grid=False)
    x = alt.X(
        "at:Q", title="steps from the warning to the treatment", axis=axis, scale=alt.Scale(nice=False, padding=12)
    )
    width = theme.WIDTH // 2 - 40
    left = marks.curve(shown, x, "rescued", "share of failing runs rescued", colour, most=1.0)
    right = marks.curve(shown, x, "gap", "nats above the twin", colour)
    bare = statistics.median(row["gap untreated"] for row in shown) if shown else 0.0
    right = marks.labelled_line(bare, "untreated", at=0.55 * width) + right
    note = (
        f"{len(failing(rows))} runs that end above their twin; the warning is a logit above {WARNS:g}. Rescued: within {NOTHING} "
        "nats of the twin (QK-norm, same weights, text and rate). 95 % intervals; "
        "gaps are medians, with 95 % of a bootstrap over runs."
    )
    return theme.finish(theme.side_by_side(left, right, width, 260), finding, note)


def total(settings: Settings) -> float:
    """If every run warns, early enough for every delay."""
    return float(settings["runs"] * (2 + len(settings["delays"]) * len(TREATMENTS)))


FULL = {"width": 256, "head_dim": 64, "runs": 40, "delays": (0, 50, 100, 200), "layers": 6, "length": 256, "batch": 64,
        "steps": 1000, "warm_up": 100, "every": 5, "stack": 24, "windows": 64, "compute": "bfloat16"}  # fmt: skip

STUDY = define(
    globals(),
    "Does a treatment that comes after the warning still save a run?",
    presets={
        "full": FULL,
        "short": {**FULL, "width": 128, "runs": 20, "length": 128, "batch": 16, "steps": 500, "warm_up": 50, "stack": 60},
        "small": {**FULL, "width": 32, "head_dim": 16, "runs": 6, "delays": (0, 20, 50), "layers": 2, "length": 64,
                  "batch": 8, "steps": 200, "warm_up": 20, "windows": 16, "compute": "float32"},
        "tiny": {**FULL, "width": 8, "head_dim": 4, "runs": 2, "delays": (0, 2), "layers": 1, "length": 16, "batch": 2,
                 "steps": 10, "warm_up": 2, "every": 2, "windows": 2, "compute": "float32"},
    },
    version=2,
)  # fmt: skip
