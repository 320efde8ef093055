"""warning: which sign says first that a run will end worse than its twin, and how many steps before?

Three families of runs: learning rates from good to far too high; no scale; and healthy runs with a fault planted in the middle.
Every run has a twin with the same weights, text and rate: the same model with QK-norm, and for a planted fault the same run
without it. A run *fails* where its loss is 0.05 nats above its twin's for 20 steps after the warm-up; the first of them is the
event. It fails for good where that is still so at the end. A sign warns where it passes a threshold before the event. Beside the
signs of attention: z-scores of the loss and of the gradient's norm, the update relative to the weights, and the spectrum of
W_q W_kᵀ.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..engine.experiment import Cell, Row, Rows
from ..stacked.fit import about, fit, short
from ..stacked.probe import SIGNS
from ..stacked.study import Deadline, Settings, Study, missing
from ..training.runs import NOTHING

FAMILIES = ("rate", "unscaled", "fault")
RANGES = {"rate": (1e-3, 3e-1), "unscaled": (3e-4, 3e-2), "fault": (3e-3, 3e-3)}
HELD, SMOOTH = 20, 10  # steps that a gap must last; steps that losses are averaged over
RIVALS = ("loss_z", "grad_norm_z", "update_ratio")
ALL = (*SIGNS, *RIVALS)
FALLS = ("evenness",)  # warns by falling
MEMORY = 0.97  # of the running mean and variance of z-scores, as ZClip has it (arXiv:2504.02507)
FALSE_ALARMS = 1.0  # per thousand healthy steps
DRAWS = 400  # of the bootstrap
NAMES = {
    "peak": "largest logit", "logit_std": "logit std", "evenness": "evenness (entropy / ln n)", "p2": "Σ p²",
    "top_weight": "top weight", "saturated": "saturated rows", "spectral_norm": "‖W_q W_kᵀ‖₂",
    "concentration": "σ₁² / Σ σ²", "loss_z": "loss, z", "grad_norm_z": "gradient norm, z", "update_ratio": "update / weights",
}  # fmt: skip


def made(cell: Cell, settings: Settings) -> dict[str, Any]:
    """What a run is trained with: the rule, the rate, the seed and the fault that its family and number say."""
    family, number, twin = str(cell["family"]), int(cell["number"]), bool(cell["twin"])
    low, high = RANGES[family]
    place = (number * 0.6180339887498949) % 1.0  # numbers of any count are spread evenly
    lr = float(f"{low * (high / low) ** place:.3g}")
    found = {"lr": lr, "seed": 1000 * FAMILIES.index(family) + number, "rule": "sqrt_dk", "fault": "", "fault_step": 0}
    if family == "fault" and not twin:
        at = round(settings["steps"] * (0.3 + 0.3 * place))
        return {**found, "fault": ("temperature", "rate")[number % 2], "fault_step": at}
    if family != "fault" and twin:
        return {**found, "rule": "qk_norm"}
    return {**found, "rule": "none"} if family == "unscaled" else found


def plan(rows: Rows, settings: Settings) -> list[Cell]:
    """Runs with their twins, all families in turn, so that what is finished is a smaller study of the same kind."""
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
    runs = [made(cell, settings) for cell in cells]
    stack = fit(runs, settings["width"], settings["head_dim"], settings, device, deadline)
    if stack is None:
        return
    losses, norms, moved, sizes = (part.tolist() for part in (stack.losses, stack.norms, stack.moved, stack.sizes))
    every = settings["every"]
    for run, (cell, its) in enumerate(zip(cells, runs, strict=True)):
        series = stack.probe.series(run)
        probes = range(0, len(series["peak"]) * every, every)
        series |= {
            "loss_z": _between(z_scores(losses[run]), probes),
            "grad_norm_z": _between(z_scores(norms[run]), probes),
            "update_ratio": [moved[run][step] / sizes[run][step] for step in probes],
        }
        signs = {name: short(values) for name, values in series.items()}
        yield cell, [{**about(stack.size), **its, "every": every, "losses": short(losses[run]), **signs}]


def z_scores(values: Sequence[float]) -> list[float]:
    """How many standard deviations each value is above the running mean of those before it."""
    mean, variance, found = values[0], 0.0, []
    for value in values:
        found.append((value - mean) / math.sqrt(variance) if variance > 0 else 0.0)
        if math.isfinite(value):
            variance = MEMORY * variance + (1 - MEMORY) * (value - mean) ** 2
            mean = MEMORY * mean + (1 - MEMORY) * value
    return found


def _between(values: Sequence[float], probes: Sequence[int]) -> list[float]:
    """The largest value since the probe before, at each probe."""
    starts = [0, *(step + 1 for step in probes[:-1])]
    return [max(values[start : step + 1]) for start, step in zip(starts, probes, strict=True)]


def event(losses: Sequence[float], twin: Sequence[float], after: int) -> float:
    """The step at which a run has left its twin; infinite where it has not."""
    steps = len(losses)
    for step, value in enumerate(losses):
        if not math.isfinite(value):
            return float(step)
    gaps = [one - other for one, other in zip(losses, twin, strict=True)]
    smooth = [statistics.fmean(gaps[max(0, step - SMOOTH + 1) : step + 1]) for step in range(steps)]
    held = 0
    for step in range(after, steps):
        held = held + 1 if smooth[step] >= NOTHING else 0
        if held == min(HELD, steps - after):
            return float(step - held + 1)
    return math.inf


def pairs(rows: Rows) -> list[Row]:
    """Every run that has a twin, with its event."""
    twins = {(row["family"], row["number"]): row for row in map(_filled, rows) if row["twin"]}
    found = []
    for row in map(_filled, rows):
        twin = twins.get((row["family"], row["number"]))
        if row["twin"] or twin is None or not all(map(math.isfinite, twin["losses"])):
            continue
        after = max(row["every"], row["steps"] // 10)
        found.append(
            {
                **row,
                "event": event(row["losses"], twin["losses"], after),
                "for good": _apart(row["losses"], twin["losses"]),
            }
        )
    return found


def _filled(row: Mapping[str, Any]) -> Row:
    """A row whose series have NaN where a file has nothing."""
    return {**row, **{name: [math.nan if one is None else one for one in row[name]] for name in ("losses", *ALL)}}


def _apart(losses: Sequence[float], twin: Sequence[float]) -> bool:
    """Whether a run is worse than its twin at the end; also where it has no loss any more."""
    gap = statistics.fmean(losses[-HELD:]) - statistics.fmean(twin[-HELD:])
    return not gap < NOTHING


def statistic(run: Mapping[str, Any], sign: str) -> float:
    """The worst value before the event, or of the whole run where there is none; larger is worse, whatever the sign."""
    values = [value for place, value in enumerate(run[sign]) if place * run["every"] < run["event"]]
    values = [-value if sign in FALLS else value for value in values if not math.isnan(value)]
    return max(values, default=-math.inf)


def area(failed: Sequence[float], healthy: Sequence[float]) -> float:
    """The area under the ROC: how often a failing run has the larger statistic, a tie counting half."""
    if not failed or not healthy:
        return math.nan
    wins = sum((one > other) + 0.5 * (one == other) for one in failed for other in healthy)
    return wins / (len(failed) * len(healthy))


def roc(failed: Sequence[float], healthy: Sequence[float]) -> list[tuple[float, float]]:
    """False and true alarms as shares, from the highest threshold to the lowest."""
    found = [(0.0, 0.0)]
    for level in sorted({*failed, *healthy}, reverse=True):
        found.append((sum(v >= level for v in healthy) / len(healthy), sum(v >= level for v in failed) / len(failed)))
    return found


def threshold(healthy: Sequence[float], steps: int) -> float:
    """The lowest level that so many false alarms per thousand healthy steps allow; an alarm is a value above it."""
    allowed = math.floor(FALSE_ALARMS * len(healthy) * steps / 1000)
    order = sorted(healthy, reverse=True)
    return order[min(allowed, len(order) - 1)] if order else math.inf


def lead(run: Mapping[str, Any], sign: str, level: float) -> float:
    """Steps from the alarm to the event; 0 where the alarm came late or never."""
    for place, value in enumerate(run[sign]):
        worst = -value if sign in FALLS else value
        if worst > level:
            return max(0.0, run["event"] - place * run["every"])
    return 0.0


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by drawing runs again."""
    if len(values) < 2:
        return math.nan, math.nan
    stream = random.Random(0)
    medians = sorted(statistics.median(stream.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[round(0.025 * (DRAWS - 1))], medians[round(0.975 * (DRAWS - 1))]


def summary(rows: Rows) -> list[Row]:
    """Per sign, best first: the ROC's area over all runs; with the threshold of the even runs, what happens on the odd ones."""
    found = pairs(rows)
    failed, healthy = ([run for run in found if math.isfinite(run["event"]) == bad] for bad in (True, False))
    lasting = [run for run in failed if run["for good"]]
    if not failed or not healthy:
        return []
    result = []
    for sign in ALL:
        level = threshold([statistic(run, sign) for run in healthy if run["number"] % 2 == 0], healthy[0]["steps"])
        tried = [run for run in failed if run["number"] % 2]
        leads = [lead(run, sign, level) for run in tried]
        alarms = sum(statistic(run, sign) > level for run in healthy if run["number"] % 2)
        steps = sum(run["steps"] for run in healthy if run["number"] % 2)
        low, high = bootstrap(leads)
        result.append(
            {
                "sign": sign,
                "auc": area(*([statistic(run, sign) for run in some] for some in (failed, healthy))),
                "auc, for good": area(*([statistic(run, sign) for run in some] for some in (lasting, healthy))),
                **{f"auc, {family}": _area_of(failed, healthy, family, sign) for family in FAMILIES},
                "threshold": -level if sign in FALLS else level,
                "runs": len(tried),
                "warned": statistics.fmean(one > 0 for one in leads) if leads else math.nan,
                "lead": statistics.median(leads) if leads else math.nan,
                "lead_low": low,
                "lead_high": high,
                "false per 1000 steps": 1000 * alarms / steps if steps else math.nan,
            }
        )
    return sorted(result, key=lambda row: (-row["auc"], -row["lead"]))


def _area_of(failed: Rows, healthy: Rows, family: str, sign: str) -> float:
    """The area within one family: across families a sign may tell no more than which family a run is of, or its rate."""
    return area(*([statistic(run, sign) for run in some if run["family"] == family] for some in (failed, healthy)))


def finding(rows: Rows) -> str:
    best, found = summary(rows), pairs(rows)
    failed = sum(math.isfinite(run["event"]) for run in found)
    if not best:
        return f"{failed} of {len(found)} runs failed: there is nothing to tell apart"
    first = max(best, key=lambda row: (row["lead"], row["auc"]))
    rivals = max((row for row in best if row["sign"] in RIVALS), key=lambda row: (row["lead"], row["auc"]))
    return (
        f"{NAMES[first['sign']]} warns {first['lead']:.0f} steps ahead (median; {first['warned']:.0%} of failing runs, AUC "
        f"{first['auc']:.2f}); the best of loss, gradient and update, {NAMES[rivals['sign']]}, {rivals['lead']:.0f}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The ROC of every sign as its area, and the lead with its interval."""
    import altair as alt

    from ..figures import theme

    table = [{**row, "name": NAMES[row["sign"]]} for row in summary(rows)]
    order = [row["name"] for row in table]
    found = pairs(rows)
    failed, healthy = ([run for run in found if math.isfinite(run["event"]) == bad] for bad in (True, False))
    curves = []
    for row in table[:3] + [one for one in table[3:] if one["sign"] in RIVALS[:2]]:
        both = ([statistic(run, row["sign"]) for run in some] for some in (failed, healthy))
        curves += [
            {"name": row["name"], "false": false, "true": true, "order": place}
            for place, (false, true) in enumerate(roc(*both))
        ]
    names = list(dict.fromkeys(one["name"] for one in curves))
    left = (
        alt.Chart(theme.data(curves))
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X("false:Q", title="false alarms, share of healthy runs", scale=alt.Scale(domain=[0, 1])),
            y=alt.Y("true:Q", title="warned before the event", scale=alt.Scale(domain=[0, 1])),
            color=theme.series("name", "sign", names),
            order="order:Q",
        )
    )
    y = alt.Y("name:N", title="", sort=order)
    base = alt.Chart(theme.data(table))
    right = base.mark_rule(strokeWidth=2).encode(
        y=y, x=alt.X("lead_low:Q", title="steps from warning to event"), x2="lead_high:Q"
    ) + base.mark_point(filled=True, size=70, opacity=1).encode(y=y, x="lead:Q")
    width = theme.WIDTH // 2 - 60
    steps, every = (found[0][name] if found else 0 for name in ("steps", "every"))
    note = (
        f"{len(failed)} runs that failed and {len(healthy)} that did not, {steps} steps each; signs every {every} steps. Left: "
        "thresholds from high to low. Right: at one false alarm per 1,000 healthy steps, the threshold fixed on half the runs "
        "and the lead measured on the others; median and 95 % of a bootstrap over runs."
    )
    return theme.finish(theme.side_by_side(left, right, width, 280), finding, note)


def weight(cell: Cell, settings: Settings) -> float:
    return 1.0


def total(settings: Settings) -> float:
    return 2.0 * len(FAMILIES) * settings["runs"]


FULL = {"width": 256, "head_dim": 64, "runs": 80, "layers": 6, "length": 256, "batch": 64, "steps": 1000, "warm_up": 100,
        "every": 5, "stack": 24, "windows": 64, "compute": "bfloat16"}  # fmt: skip

STUDY = Study(
    "warning",
    "Which sign says first that a run will end worse than its twin, and how many steps before?",
    presets={
        "full": FULL,
        "short": {**FULL, "width": 128, "runs": 36, "length": 128, "batch": 16, "steps": 500, "warm_up": 50, "stack": 72},
        "tiny": {**FULL, "width": 8, "head_dim": 4, "runs": 2, "layers": 1, "length": 16, "batch": 2, "steps": 10, "warm_up": 2,
                 "compute": "float32"},
    },
    plan=plan,
    train=train,
    weight=weight,
    total=total,
    finding=finding,
    summary=summary,
    draw=draw,
    version=2,
)  # fmt: skip
