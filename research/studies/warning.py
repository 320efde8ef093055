"""warning: which sign says first that a run will end worse than its twin, and how many steps before?

Three families of runs: learning rates from good to far too high; no scale; and healthy runs with a fault planted in the middle:
logits or a rate 3 to 100 times as large, or scores stored in bfloat16. Every run has a twin with the same weights, text and
rate: the same model with QK-norm, and for a planted fault the same run without it. alarm.py says what fails, and what warns.
Beside the signs of attention are published rivals: those of weights and inputs in stacked/probe.py, the rise of the loss above
its lowest, the gradient's norm, z-scores of both, and the update relative to the weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from attemper_lab.engine.experiment import Cell, Row, Rows

from ..stacked.fit import about, fit, short
from ..stacked.probe import ATTENTION
from ..stacked.study import Deadline, Settings, define, missing
from . import alarm, separation

FAMILIES = ("rate", "unscaled", "fault")
RANGES = {"rate": (1e-3, 3e-1), "unscaled": (3e-4, 3e-2), "fault": (5e-3, 2e-2), "bfloat16": (5e-3, 5e-2)}
FAULTS = ("temperature", "rate", "bfloat16")


def made(cell: Cell, settings: Settings) -> dict[str, Any]:
    """How a run is trained: the rule, the rate, the seed and the fault, which its family and number determine."""
    family, number, twin = str(cell["family"]), int(cell["number"]), bool(cell["twin"])
    fault = FAULTS[number % len(FAULTS)] if family == "fault" else ""
    low, high = RANGES[fault if fault == "bfloat16" else family]
    place = (number * 0.6180339887498949) % 1.0  # numbers of any count are spread evenly
    lr = float(f"{low * (high / low) ** place:.3g}")
    found = {"lr": lr, "seed": 1000 * FAMILIES.index(family) + number, "rule": "sqrt_dk", "fault": "", "fault_step": 0}
    found["factor"] = float(f"{3 * (100 / 3) ** (number * 0.7548776662466927 % 1.0):.3g}")  # of faults alone
    if family == "fault" and not twin:
        at = round(settings["steps"] * (0.3 + 0.3 * place))
        return {**found, "fault": fault, "fault_step": at}
    if family != "fault" and twin:
        return {**found, "rule": "qk_norm"}
    return {**found, "rule": "none"} if family == "unscaled" else found


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """Runs with their twins, all families in turn, so that the finished part is a smaller study of the same kind."""
    wanted: list[Cell] = [
        {"family": family, "number": number, "twin": twin}
        for number in range(settings["runs"])
        for family in FAMILIES
        for twin in (0, 1)
    ]
    return missing(rows, wanted)[: settings["stack"]]


def train(
    cells: Sequence[Cell], rows: Rows, settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    yield from trained(cells, [made(cell, settings) for cell in cells], settings, device, deadline)


def trained(
    cells: Sequence[Cell], runs: Sequence[dict[str, Any]], settings: Settings, device: str, deadline: Deadline
) -> Iterator[tuple[Cell, list[Row]]]:
    """A stack of runs: the losses of all, and the signs of those that are no twin."""
    stack = fit(runs, settings["width"], settings["head_dim"], settings, device, deadline)
    if stack is None:
        return
    losses, norms, moved, sizes = (part.tolist() for part in (stack.losses, stack.norms, stack.moved, stack.sizes))
    every = settings["every"]
    for run, (cell, its) in enumerate(zip(cells, runs, strict=True)):
        row = {**about(stack.size), **its, "every": every, "losses": short(losses[run])}
        if not cell["twin"]:
            series = stack.probe.series(run)
            probes = range(0, len(series["peak"]) * every, every)
            series |= {
                "loss_rise": _between(alarm.rises(losses[run]), probes),
                "loss_z": _between(alarm.z_scores(losses[run]), probes),
                "grad_norm": _between(norms[run], probes),
                "grad_norm_z": _between(alarm.z_scores(norms[run]), probes),
                "update_ratio": [moved[run][step] / sizes[run][step] for step in probes],
            }
            row |= {name: short(series[name]) for name in alarm.ALL}
        yield cell, [row]


def _between(values: Sequence[float], probes: Sequence[int]) -> list[float]:
    """The largest value since the probe before, at each probe."""
    starts = [0, *(step + 1 for step in probes[:-1])]
    return [max(values[start : step + 1]) for start, step in zip(starts, probes, strict=True)]


KINDS = ("worst head", "mean of heads", "rival")
SHOWN = 3  # ROC curves of our signs, and of rivals


def draw(rows: Rows, finding: str) -> Any:
    """The ROC of the best signs and rivals; the area and the lead of all of them, with intervals."""
    import altair as alt

    from attemper_lab.figures import theme

    table = [_labelled(row) for row in alarm.summary(rows)]
    every_run = alarm.pairs(rows)
    found = alarm.of_families(every_run)
    bad, good = alarm.dated(found), alarm.healthy(found)
    best = [
        row for kind in (False, True) for row in [one for one in table if (one["kind"] == KINDS[2]) == kind][:SHOWN]
    ]
    curves: list[Row] = []
    for row in best:
        values = (
            [alarm.statistic(run, row["sign"]) for run in bad],
            [alarm.statistic(one, row["sign"], run["event"]) for run in bad for one in good],
        )
        curves += [
            {
                "name": row["full"],
                "rival": row["kind"] == KINDS[2],
                "false": false,
                "true": true,
                "order": place,
            }
            for place, (false, true) in enumerate(separation.curve(*values))
        ]
    share, fifths = alt.Scale(domain=[0, 1]), alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1])
    ours = (
        alt.Chart(theme.data(curves))
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X("false:Q", title="healthy runs with an alarm, share", scale=share, axis=fifths),
            y=alt.Y("true:Q", title="failing runs warned, share", scale=share, axis=fifths),
            color=theme.series("name", "best signs", [row["full"] for row in best]),
            strokeDash=alt.StrokeDash(
                "rival:N", legend=None, scale=alt.Scale(domain=[False, True], range=[[1, 0], [5, 3]])
            ),
            order="order:Q",
        )
        .properties(width=300, height=260)
    )
    both = alt.hconcat(_intervals(table, "auc", "AUC", 1.0), _intervals(table, "lead", "lead, steps"), spacing=12)
    steps, every = (found[0][name] if found else 0 for name in ("steps", "every"))
    note = (
        f"Runs at many rates, with 1/√d_k or without a scale; {steps} steps, signs every {every}: {len(bad)} failing, "
        f"{len(good)} healthy; "
        f"{len(alarm.failed(found)) - len(bad)} more had left their twin when it was first looked for. AUC: a failing run before "
        "its event against a healthy one up to the same step, also in the ROC. Leads: at the threshold "
        f"that {alarm.FALSE_ALARMS:.0%} of the healthy runs of one half exceed, for the failing runs of the other half; 0 where "
        f"no warning came. 95 % of a bootstrap over runs.{_planted(every_run)}"
    )
    return theme.finish(alt.vconcat(ours, both, spacing=18).resolve_scale(color="independent"), finding, note)


def _planted(runs: Rows) -> str:
    """What signs of attention show before a planted fault shows in the loss."""
    some = alarm.of_families(runs, ("fault",))
    bad, good = alarm.dated(some), alarm.healthy(some)
    if not bad or not good:
        return ""
    areas = [alarm.auc(bad, good, sign) for sign in alarm.OURS]
    after = statistics.median(run["event"] - run["fault_step"] for run in bad)
    return (
        f" Planted faults ({len(bad)} failing, {len(good)} healthy): AUC {min(areas):.2f} to {max(areas):.2f} for signs of "
        f"attention; the loss leaves {after:.0f} steps later (median), and these healthy runs have large logits too."
    )


def _intervals(table: Rows, column: str, title: str, most: float | None = None) -> Any:
    """A column of the table with its intervals: a line per sign, the kinds of a sign one above the other."""
    import altair as alt

    from attemper_lab.figures import theme

    order = list(dict.fromkeys(row["name"] for row in table))
    shown = [{**row, "shift": KINDS.index(row["kind"]) % 2} for row in table]
    shift = alt.YOffset("shift:Q", scale=alt.Scale(domain=[0, 1], range=[6, 13]))
    kind = alt.Color(
        "kind:N", title="sign", sort=list(KINDS), scale=alt.Scale(domain=list(KINDS), range=theme.SERIES[:3])
    )
    axis = alt.Axis() if most is not None else alt.Axis(labels=False, ticks=False)
    y = alt.Y("name:N", title="", sort=order, axis=axis)
    x = alt.X(f"{column}_low:Q", title=title, scale=alt.Scale() if most is None else alt.Scale(domain=[0, most]))
    base = alt.Chart(theme.data(shown))
    bars = base.mark_rule(strokeWidth=2).encode(y=y, x=x, x2=f"{column}_high:Q", color=kind, yOffset=shift)
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(y=y, x=f"{column}:Q", color=kind, yOffset=shift)
    return (bars + dots).properties(width=230, height=alt.Step(19))


def _labelled(row: Row) -> Row:
    """With the name of its line in the figure, and which kind it is: two kinds of one sign are in one line."""
    sign, named = row["sign"], alarm.named(row["sign"])
    kind = KINDS[2] if sign in alarm.RIVALS else KINDS[sign not in ATTENTION]
    full = f"rival: {named}" if kind == KINDS[2] else named
    return {**row, "kind": kind, "name": named.removesuffix(" (mean of heads)"), "full": full}


def total(settings: Settings) -> float:
    return 2.0 * len(FAMILIES) * settings["runs"]


FULL = {"width": 256, "head_dim": 64, "runs": 80, "layers": 6, "length": 256, "batch": 64, "steps": 1000, "warm_up": 100,
        "every": 5, "stack": 24, "windows": 64, "compute": "bfloat16"}  # fmt: skip

STUDY = define(
    globals(),
    "Which sign says first that a run will end worse than its twin, and how many steps before?",
    presets={
        "full": FULL,
        "short": {**FULL, "width": 128, "runs": 70, "length": 128, "batch": 16, "steps": 500, "warm_up": 50, "stack": 60},
        "small": {**FULL, "width": 32, "head_dim": 16, "runs": 6, "layers": 2, "length": 64, "batch": 8, "steps": 200,
                  "warm_up": 20, "compute": "float32"},
        "tiny": {**FULL, "width": 8, "head_dim": 4, "runs": 6, "layers": 1, "length": 16, "batch": 2, "steps": 10, "warm_up": 2,
                 "compute": "float32"},
    },
    finding=alarm.finding,
    summary=alarm.summary,
    packed=alarm.pairs,
    version=2,
)  # fmt: skip
