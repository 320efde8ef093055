"""alarm: when a sign would have warned, how well it tells failing runs from others, and how many steps before.

A run *fails* where its loss is 0.05 nats above its twin's for 20 steps, and so at the end too; the first of these steps is the
event. It is healthy where that never is so. One that left its twin and came back is neither. The AUC of a sign is how often a
failing run was worse before its event than a healthy run *up to the same step*: over its whole length, a healthy run would look
worse by noise alone. A sign warns where it passes a threshold before the event. The threshold is set on the runs of even numbers,
so that one healthy run in ten raises an alarm at any step, and tried on those of odd numbers.

Healthy means no worse than the twin, so that runs are compared with runs whose twin is of the same kind. The twins of `rate` and
`unscaled` have QK-norm. The twin of a planted fault has the same rate and, but for the fault, the same logits: such a run may be
healthy at a rate at which every run of `rate` fails. Events are looked for after the first tenth of the steps. A run that
has left its twin by then has an event without a date: no sign can be said to come before it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.health import thresholds
from attemper_lab.engine.experiment import Row, Rows
from attemper_lab.training.runs import NOTHING

from ..stacked.probe import ATTENTION, FALLING, WEIGHTS
from . import separation

HELD, SMOOTH = 20, 10  # steps that a gap must last; steps that losses are averaged over
MEMORY = 0.97  # of the running mean and variance of z-scores, as ZClip has it (arXiv:2504.02507)
RIVALS = (*WEIGHTS, "loss_rise", "loss_z", "grad_norm", "grad_norm_z", "update_ratio")
OURS = (*ATTENTION, *(f"{sign}_mean" for sign in ATTENTION))
ALL = (*OURS, *RIVALS)
FALLS = (*FALLING, *(f"{sign}_mean" for sign in FALLING if sign in ATTENTION))
NORMED = ("rate", "unscaled")  # families whose twin has QK-norm
FALSE_ALARMS = 0.1  # the share of healthy runs that may raise an alarm
NAMES = {
    "peak": "largest logit", "logit_mean": "size of the mean logit", "logit_std": "std of logits", "lse": "log-sum-exp",
    "entropy": "entropy", "evenness": "evenness", "effective_keys": "effective keys", "sum_p2": "Σ p²",
    "top_weight": "top weight", "saturated": "saturated rows", "spectral_norm": "spectral norm",
    "concentration": "spectral concentration", "increment_entropy": "Δ2 entropy", "alignment": "spectral alignment",
    "loss_rise": "rise of the loss", "loss_z": "z-score of the loss", "grad_norm": "gradient norm",
    "grad_norm_z": "z-score of the gradient norm",
    "update_ratio": "update / weights", "lr · scale": "rate times the scale",
}  # fmt: skip
"""In a figure; of the mean of all heads instead of the worst, the same with words after it."""


def named(sign: str) -> str:
    """A sign as it is called in a table."""
    base = sign.removesuffix("_mean") if sign in OURS and sign not in ATTENTION else sign
    return NAMES[base] + (" (mean of heads)" if base != sign else "")


def z_scores(values: Sequence[float]) -> list[float]:
    """How many standard deviations each value is above the running mean of those before it."""
    mean, variance, found = values[0], 0.0, []
    for value in values:
        found.append((value - mean) / math.sqrt(variance) if variance > 0 else 0.0)
        if math.isfinite(value):
            variance = MEMORY * variance + (1 - MEMORY) * (value - mean) ** 2
            mean = MEMORY * mean + (1 - MEMORY) * value
    return found


def rises(losses: Sequence[float]) -> list[float]:
    """How far a loss, averaged over ten steps, is above its minimum so far."""
    smooth, lowest, found = _smooth(losses), math.inf, []
    for value in smooth:
        lowest = min(lowest, value)
        found.append(value - lowest)
    return found


def _smooth(values: Sequence[float]) -> list[float]:
    """Each value's mean with those of the steps before it."""
    return [statistics.fmean(values[max(0, step - SMOOTH + 1) : step + 1]) for step in range(len(values))]


def event(losses: Sequence[float], twin: Sequence[float], after: int) -> float:
    """The step at which a run left its twin; infinite if it did not."""
    steps = len(losses)
    for step, value in enumerate(losses):
        if not math.isfinite(value):
            return float(step)
    smooth = _smooth([one - other for one, other in zip(losses, twin, strict=True)])
    held = 0
    for step in range(after, steps):
        held = held + 1 if smooth[step] >= NOTHING else 0
        if held == min(HELD, steps - after):
            return float(step - held + 1)
    return math.inf


def worst(values: Sequence[float | None], sign: str, every: int, start: int) -> list[list[float]]:
    """[step, value] wherever a sign is worse than ever since ``start``, in three digits: all that thresholds and leads depend
    on."""
    found: list[list[float]] = []
    for place, value in enumerate(values):
        if value is None or math.isnan(value) or place * every < start:
            continue
        value = float(f"{value:.3g}")
        if not found or (value < found[-1][1] if sign in FALLS else value > found[-1][1]):
            found.append([place * every, value])
    return found


def _looked(run: Mapping[str, Any]) -> int:
    """The first step at which an event is looked for."""
    return int(max(run["every"], run["steps"] // 10))


def pairs(rows: Rows) -> list[Row]:
    """Every run that has a twin, with its event and what its signs were at their worst; rows that are such pairs stay."""
    twins = {(row["family"], row["number"]): row["losses"] for row in rows if row.get("twin") and "losses" in row}
    found = []
    for row in rows:
        if "event" in row:
            there = row["event"] is not None and math.isfinite(row["event"])  # a file has nothing where it is infinite
            found.append({**row, "event": row["event"] if there else math.inf})
            continue
        twin = twins.get((row["family"], row["number"]))
        if row["twin"] or twin is None or not all(value is not None and math.isfinite(value) for value in twin):
            continue
        losses = [math.nan if value is None else value for value in row["losses"]]
        left = event(losses, twin, _looked(row))
        # what was bad before a fault is no warning of the failure after it; in a run that stays healthy it is a false alarm
        start = row["fault_step"] if row["fault"] and math.isfinite(left) else row["steps"] // 20
        gap = statistics.fmean(losses[-HELD:]) - statistics.fmean(twin[-HELD:])
        signs = {sign: worst(row[sign], sign, row["every"], start) for sign in ALL if sign in row}
        kept = {name: value for name, value in row.items() if name not in ("losses", "twin", *ALL)}
        found.append({**kept, "event": left, "for good": not gap < NOTHING, "gap": gap, **signs})
    return found


def statistic(run: Mapping[str, Any], sign: str, before: float = math.inf) -> float:
    """The worst value before the event and ``before`` a step, of the whole run where there is neither; larger is worse, whatever
    the sign."""
    end = min(run["event"], before)
    last = next((value for step, value in reversed(run[sign]) if step < end), -math.inf)
    return last if last == -math.inf else _size(last, sign)


def _size(value: float | None, sign: str) -> float:
    """The value, larger where worse; files have null where it was infinite."""
    if value is None or math.isnan(value):
        return math.inf
    return -value if sign in FALLS else value


def lead(run: Mapping[str, Any], sign: str, level: float) -> float:
    """Steps from the alarm to the event; 0 where the alarm came late or never."""
    alarm = next((step for step, value in run[sign] if _size(value, sign) > level), math.inf)
    return max(0.0, run["event"] - alarm) if alarm < math.inf else 0.0


def failed(runs: Rows) -> list[Row]:
    return [dict(run) for run in runs if math.isfinite(run["event"]) and run["for good"]]


def dated(runs: Rows) -> list[Row]:
    """The failing runs that were still with their twin when events were first looked for."""
    return [run for run in failed(runs) if run["event"] > _looked(run)]


def healthy(runs: Rows) -> list[Row]:
    return [dict(run) for run in runs if not math.isfinite(run["event"])]


def of_families(runs: Rows, families: Sequence[str] = NORMED) -> list[Row]:
    return [dict(run) for run in runs if run["family"] in families]


def of_half(runs: Rows, odd: int) -> list[Row]:
    """The runs of even or of odd numbers."""
    return [dict(run) for run in runs if run["number"] % 2 == odd]


def wins(bad: Rows, good: Rows, sign: str) -> Tensor:
    """(bad, good): 1 where a sign was worse in a failing run before its event than in a healthy one up to the same step, a half
    where it was as bad."""
    if not bad or not good:
        return torch.zeros(len(bad), len(good), dtype=torch.float64, device="cpu")
    return torch.cat(
        [separation.wins([statistic(run, sign)], [statistic(one, sign, run["event"]) for one in good]) for run in bad]
    )


def auc(bad: Rows, good: Rows, sign: str) -> float:
    """How often a failing run was worse before its event than a healthy one up to the same step; NaN where either is missing."""
    return float(wins(bad, good, sign).mean()) if bad and good else math.nan


def summary(rows: Rows, families: Sequence[str] = NORMED) -> list[Row]:
    """Per sign, best first: the AUC; with the threshold of the even runs, what happens on the odd ones. Last, the AUC of each
    family, and of all of them together, whatever their twins are."""
    found = pairs(rows)
    some = of_families(found, families)
    bad, good = dated(some), healthy(some)
    if not bad or not good:
        return []
    each = {f"auc, {one}": of_families(found, (one,)) for one in sorted({run["family"] for run in found})}
    result = []
    for sign in ALL:
        level = separation.threshold([statistic(run, sign) for run in of_half(good, 0)], FALSE_ALARMS)
        leads = [lead(run, sign, level.value) for run in of_half(bad, 1)]
        alarms = [statistic(run, sign) > level.value for run in of_half(good, 1)]
        whole = separation.wins([statistic(run, sign) for run in bad], [statistic(run, sign) for run in good])
        result.append(
            {
                "sign": sign,
                **separation.area(wins(bad, good, sign)).columns("auc"),
                "threshold": -level.value if sign in FALLS else level.value,
                "runs": len(leads),
                **separation.share([one > 0 for one in leads]).columns("warned"),
                **separation.median(leads).columns("lead"),
                **separation.share(alarms).columns("false alarms"),
                **{name: auc(dated(of), healthy(of), sign) for name, of in each.items()},
                "auc, all together": auc(failed(found), healthy(found), sign),
                "auc, whole runs": float(whole.mean()),
            }
        )
    return sorted(result, key=lambda row: (-row["auc"], -row["lead"]))


SHOWN = ("peak", "logit_std", "evenness", "saturated", "loss_z", "grad_norm", "spectral_norm", "update_ratio")
GROUPS = {
    "rate": ("rate",),
    "unscaled": ("unscaled",),
    "both": NORMED,
    "fault": ("fault",),
    "all together": (*NORMED, "fault"),
}
"""What a table of leads has a threshold for: the families, those whose twin has QK-norm, and all of them."""


def by_family(rows: Rows) -> list[Row]:
    """Some signs, with a threshold of each family's own that one of its healthy runs in ten exceeds: the share of its failing
    runs that are warned, and how many steps before."""
    found = pairs(rows)
    result = []
    for name, families in GROUPS.items():
        some = of_families(found, families)
        bad, good = (failed if name == "all together" else dated)(some), healthy(some)
        for sign in SHOWN if bad and good else ():
            level = separation.threshold([statistic(run, sign) for run in good], FALSE_ALARMS).value
            leads = [lead(run, sign, level) for run in bad]
            result.append(
                {
                    "family": name,
                    "failing": len(bad),
                    "healthy": len(good),
                    "sign": sign,
                    "threshold": -level if sign in FALLS else level,
                    **separation.share([one > 0 for one in leads]).columns("warned"),
                    **separation.median(leads).columns("lead"),
                }
            )
    return result


def compared(rows: Rows) -> tuple[str, str, list[separation.Interval]] | None:
    """Our sign and the rival with the largest AUC on the even runs; and on the odd runs the AUC of each, and the difference."""
    found = of_families(pairs(rows))
    halves = [(dated(of_half(found, odd)), healthy(of_half(found, odd))) for odd in (0, 1)]
    if not all(some for half in halves for some in half):
        return None
    areas = {sign: auc(*halves[0], sign) for sign in ALL}
    ours, rival = (max(some, key=lambda sign: areas[sign]) for some in (OURS, RIVALS))
    return ours, rival, separation.areas([wins(*halves[1], sign) for sign in (ours, rival)])


def finding(rows: Rows) -> str:
    found, both = pairs(rows), compared(rows)
    if both is None:
        return f"{len(failed(found))} of {len(found)} runs failed: too few of a kind to tell signs apart"
    ours, rival, (one, other, apart) = both
    than = "better than" if apart.low > 0 else "worse than" if apart.high < 0 else "no better than"
    leads = {row["sign"]: row["lead"] for row in summary(rows)}
    name = named(ours)[0].upper() + named(ours)[1:]
    planted = of_families(found, ("fault",))
    fault = auc(dated(planted), healthy(planted), ours)
    return (
        f"{name} separates failing runs {than} {named(rival)}: AUC {one.value:.2f} against {other.value:.2f} (by "
        f"{apart.low:.2f} to {apart.high:.2f}), median lead {leads[ours]:.0f} and {leads[rival]:.0f} steps"
    ) + ("" if math.isnan(fault) else f"; planted faults: AUC {fault:.2f}")


LEVELS = {
    "peak": thresholds.PEAK[::-1],
    "evenness": (thresholds.COLLAPSED,),
    "saturated": (thresholds.SATURATED,),
}
"""The signs that `health` has thresholds for; of one head, as here those of the worst."""


def levels(rows: Rows) -> list[Row]:
    """What each threshold of `health` would have done: the shares of healthy and of failing runs that pass it, of the failing
    runs those that pass it before their event, and how many steps before."""
    found = of_families(pairs(rows))
    bad, good = dated(found), healthy(found)
    result = []
    for sign, some in LEVELS.items() if bad and good else ():
        for one in some:
            level = -one.value if sign in FALLS else one.value
            leads = [lead(run, sign, level) for run in bad]
            passed = [any(_size(value, sign) > level for _, value in run[sign]) for run in failed(found)]
            result.append(
                {
                    "sign": sign,
                    "passes": f"{'below' if sign in FALLS else 'above'} {one.value:g}",
                    "level": one.level,
                    **separation.share([statistic(run, sign) > level for run in good]).columns("healthy runs"),
                    **separation.share(passed).columns("failing runs"),
                    **separation.share([steps > 0 for steps in leads]).columns("before the event"),
                    **separation.median(leads).columns("lead"),
                }
            )
    return result


def advised(rows: Rows, share: float = FALSE_ALARMS) -> list[Row]:
    """What thresholds of `health` would be at a share of false alarms, with a 95 % interval over runs: set on all healthy runs.

    ``warned`` and ``lead`` are of the failing runs whose event has a date, at that threshold; ``health`` has the values that
    there are now, and ``agrees`` the ones that lie in the interval.
    """
    found = of_families(pairs(rows))
    result = []
    for sign in ALL if healthy(found) else ():
        level, falls = separation.threshold([statistic(run, sign) for run in healthy(found)], share), sign in FALLS
        low, high = (-level.high, -level.low) if falls else (level.low, level.high)
        leads = [lead(run, sign, level.value) for run in dated(found)]
        result.append(
            {
                "sign": sign,
                "warns": "below" if falls else "above",
                **separation.Interval(-level.value if falls else level.value, low, high).columns("threshold"),
                "healthy runs": len(healthy(found)),
                "warned": statistics.fmean(one > 0 for one in leads) if leads else math.nan,
                "lead": statistics.median(leads) if leads else math.nan,
                "health": ", ".join(f"{one.value:g}" for one in LEVELS.get(sign, ())),
                "agrees": ", ".join(f"{one.value:g}" for one in LEVELS.get(sign, ()) if low <= one.value <= high),
            }
        )
    return result
