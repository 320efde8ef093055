"""roc: which sign tells a run that will fail from one that will not, where the settings of the run cannot?

In `warning` nearly every run above a rate fails and no run below it does, so that any number that grows with the rate separates
them; the rate times √d_k for a run without a scale, known before the first step, has an AUC of 0.98 there. Here every run is
near the critical rate of its family, and runs differ in what the rate does not say: initialisation and order of the text (the
seed), the std of W_Q and W_K, and the length of the warm-up. The rival `lr · scale` is judged with the signs. Twins, events,
statistics and AUC are those of `warning`; leads are not compared, since the healthy runs are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from attemper_lab.engine.experiment import Cell, Row, Rows

from ..stacked.study import Deadline, Settings, define, missing
from . import alarm, separation, warning

RANGES = {"rate": (0.0045, 0.006), "unscaled": (0.0003, 0.00042)}
"""The learning rates around which runs of `warning` begin to fail, with 1/√d_k and without a scale, at d_k = 64; `ranges` of a
preset."""
SPREADS = (0.7, 1.4)  # of the std of W_Q and W_K, beside that of `warning`
WARM_UPS = (0.5, 2.0)  # of the warm-up of the preset
KEPT = (
    "peak", "logit_std", "lse", "entropy_mean", "evenness", "saturated", "sum_p2_mean", "spectral_norm", "loss_rise", "loss_z",
    "grad_norm", "update_ratio",
)  # fmt: skip
"""The signs that are kept of a run: 300 kB hold no more."""
KNOWN = "lr · scale"
CHANCE = 0.5  # the AUC of a sign that says nothing


def made(cell: Cell, settings: Settings) -> dict[str, Any]:
    """How a run is trained; its number determines everything, and its twin differs in the rule alone."""
    number, twin = int(cell["number"]), bool(cell["twin"])
    family = "unscaled" if number % 3 == 2 else "rate"
    places = [(number * step) % 1.0 for step in (0.6180339887498949, 0.7548776662466927, 0.5698402909980532)]

    def between(ends: tuple[float, float], place: float) -> float:
        return float(f"{ends[0] * (ends[1] / ends[0]) ** place:.3g}")

    return {
        "family": family,
        "lr": between(settings["ranges"][family], places[0]),
        "spread": between(SPREADS, places[1]),
        "warm_up": max(1, round(settings["warm_up"] * between(WARM_UPS, places[2]))),
        "seed": 5000 + number,
        "rule": "qk_norm" if twin else "none" if family == "unscaled" else "sqrt_dk",
        "fault": "",
        "fault_step": 0,
    }


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    wanted: list[Cell] = [{"number": number, "twin": twin} for number in range(settings["runs"]) for twin in (0, 1)]
    return missing(rows, wanted)[: settings["stack"]]


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    its = [made(cell, settings) for cell in cells]
    for cell, found in warning.trained(cells, its, settings, device, deadline):
        for row in found:
            row["settings"] = row["lr"] * (math.sqrt(settings["head_dim"]) if row["family"] == "unscaled" else 1.0)
        yield cell, found


def total(settings: Settings) -> float:
    return 2.0 * settings["runs"]


def packed(rows: Rows) -> list[Row]:
    """The runs with their events, and the signs that are kept."""
    left_out = set(alarm.ALL) - set(KEPT)
    return [{name: value for name, value in row.items() if name not in left_out} for row in alarm.pairs(rows)]


def summary(rows: Rows) -> list[Row]:
    """Per sign, best first, and for what is known before the first step: the AUC over failing runs whose departure has a date,
    with 95 % of a bootstrap over runs: of pairs of one family, of all pairs, and of each family.

    Runs without a scale fail more often and have larger logits and another rate: over all pairs whatever tells the families
    apart seems to tell failing runs from others.
    """
    found = alarm.pairs(rows)
    groups = [alarm.of_families(found, (one,)) for one in alarm.NORMED]
    table = []
    for sign in (*KEPT, KNOWN):
        row: Row = {"sign": sign, **separation.within([_wins(some, sign) for some in groups]).columns("auc")}
        row |= separation.area(_wins(found, sign)).columns("auc, together")
        for name, some in zip(alarm.NORMED, groups, strict=True):
            row |= separation.area(_wins(some, sign)).columns(f"auc, {name}")
        table.append(row)
    return sorted(table, key=lambda row: -row["auc"] if math.isfinite(row["auc"]) else 1.0)


def _wins(runs: Rows, sign: str) -> Tensor:
    bad, good = alarm.dated(runs), alarm.healthy(runs)
    if sign == KNOWN:
        return separation.wins([run["settings"] for run in bad], [run["settings"] for run in good])
    return alarm.wins(bad, good, sign)


def finding(rows: Rows) -> str:
    found = alarm.pairs(rows)
    table = [row for row in summary(rows) if math.isfinite(row["auc"])]
    if not table:
        return f"{len(alarm.failed(found))} of {len(found)} runs failed: too few of a kind to tell signs apart"
    (known,) = [row for row in table if row["sign"] == KNOWN]
    best = next(row for row in table if row["sign"] != KNOWN)
    name = alarm.named(best["sign"])
    areas = [f"{row['auc']:.2f} ({row['auc_low']:.2f} to {row['auc_high']:.2f})" for row in (best, known)]
    if best["auc_low"] <= CHANCE:
        return (
            f"Near the critical rate no sign surely tells failing runs apart: the best of {len(table) - 1}, the {name}, has an "
            f"AUC of {areas[0]}, the rate {areas[1]}"
        )
    better = best["auc_low"] > known["auc"] and best["auc"] > known["auc_high"]
    return (
        f"Near the critical rate the {name} tells failing runs from others with an AUC of {areas[0]}, "
        f"{'' if better else 'not clearly '}better than the rate times the scale: {areas[1]}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The AUC of every sign, and of what is known before the first step, with intervals."""
    import altair as alt

    from attemper_lab.figures import marks, theme

    shown = [{**row, "name": alarm.named(row["sign"])} for row in summary(rows) if math.isfinite(row["auc"])]
    found = alarm.pairs(rows)
    base = alt.Chart(theme.data(shown)).encode(y=alt.Y("name:N", title="", sort=[row["name"] for row in shown]))
    x = alt.X("auc_low:Q", title="AUC", scale=alt.Scale(domain=[0, 1]))
    bars = base.mark_rule(strokeWidth=2).encode(x=x, x2="auc_high:Q")
    dots = base.mark_point(filled=True, size=60, opacity=1, color=theme.SERIES[0]).encode(x="auc:Q")
    chance = alt.Chart(theme.data([{"at": CHANCE}])).mark_rule(strokeDash=[4, 4]).encode(x="at:Q")
    chart = (chance + bars + dots).properties(width=theme.WIDTH - 200, height=alt.Step(22))
    rates = {family: [row["lr"] for row in alarm.of_families(found, (family,))] for family in alarm.NORMED}
    ends = {family: f"{min(some):g} to {max(some):g}" if some else "none" for family, some in rates.items()}
    note = (
        f"{len(found)} runs: {len(alarm.dated(found))} failing with a date, {len(alarm.healthy(found))} healthy; rates "
        f"{ends['rate']} with 1/√d_k and {ends['unscaled']} without a scale; seed, std of W_Q and W_K and warm-up vary. "
        "Pairs of runs of one family; 0.5 is chance. 95 % of a bootstrap over runs."
    )
    return (
        theme.finish(chart, finding, note) if shown else theme.finish(marks.labelled_line(0.5, "chance"), finding, note)
    )


STUDY = define(
    globals(),
    "Which sign tells a run that will fail from one that will not, where its settings cannot?",
    presets={
        "full": {**warning.STUDY.presets["short"], "runs": 100, "stack": 50, "ranges": RANGES},
        "slice": {**warning.STUDY.presets["small"], "runs": 100, "width": 64, "head_dim": 64, "layers": 1, "length": 32,
                  "steps": 300, "warm_up": 30, "stack": 20, "ranges": {"rate": (0.0043, 0.0059), "unscaled": (0.00095, 0.00128)}},
        "small": {**warning.STUDY.presets["small"], "runs": 6, "ranges": RANGES},
        "tiny": {**warning.STUDY.presets["tiny"], "runs": 3, "ranges": RANGES},
    },
)  # fmt: skip
"""`slice` is a model that a CPU trains, and begins to fail at other rates: those of 20 runs at rates as in `warning`."""
