"""verdicts: what the numbers say about each claim. Pure functions from rows; nothing here knows what to expect.

Each takes the evidence, rows by name, and gives a verdict, the numbers it rests on, and the condition under which it holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .experiment import Rows, pick
from .saturation import jump
from .stats import reach

HOLDS, CONDITION, FALSE, NOT_RUN = "holds", "holds with a condition", "false", "not run"
VERDICTS = (HOLDS, CONDITION, FALSE, NOT_RUN)

Evidence = Mapping[str, Rows]


class Judgement(NamedTuple):
    """A verdict, the numbers it was computed from, and its condition or reason in words."""

    verdict: str
    numbers: dict[str, float]
    condition: str


def _within(row: Mapping[str, Any], name: str, expected: float) -> bool:
    return abs(row[name] - expected) <= reach(row[f"{name}_low"], row[f"{name}_high"])


def _end(rows: Rows, **wanted: object) -> Mapping[str, Any]:
    """The row with the largest d among those wanted."""
    return max(pick(rows, **wanted), key=lambda row: row["d"])


def _real_inits(evidence: Evidence) -> dict[str, float]:
    return {f"{row['init']} init: std/√d_k": row["scaled_std"] for row in evidence["inits"]}


def variance_is_d(evidence: Evidence) -> Judgement:
    rows = evidence["variance"]
    ratios = [row["variance"] / row["d"] for row in rows]
    numbers = {"smallest Var/d_k": min(ratios), "largest Var/d_k": max(ratios), **_real_inits(evidence)}
    if not all(_within(row, "variance", row["d"]) for row in rows):
        return Judgement(FALSE, numbers, "the variance differs from d_k by more than 4 standard errors")
    if all(abs(std - 1) < 0.05 for std in _real_inits(evidence).values()):
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "entries independent, mean 0, variance 1: no common initialisation gives that")


def scaling_gives_one(evidence: Evidence) -> Judgement:
    rows = evidence["variance"]
    scaled = [row["scaled_variance"] for row in rows]
    numbers = {"smallest": min(scaled), "largest": max(scaled), **_real_inits(evidence)}
    if not all(_within(row, "variance", row["d"]) for row in rows):
        return Judgement(FALSE, numbers, "the scaled variance differs from 1 by more than 4 standard errors")
    if all(abs(std - 1) < 0.05 for std in _real_inits(evidence).values()):
        return Judgement(HOLDS, numbers, "")
    return Judgement(
        CONDITION,
        numbers,
        "the same assumptions: drawn as models are drawn, the scaled logits have another variance than 1",
    )


def range_grows(evidence: Evidence) -> Judgement:
    two, five = (pick(evidence["variance"], d=d)[0]["range"] for d in (2, 5))
    numbers = {"range at d_k = 2": two, "range at d_k = 5": five}
    return Judgement(HOLDS if five > two else FALSE, numbers, "of 1000 dot products each")


def softmax_examples(evidence: Evidence) -> Judgement:
    rows = pick(evidence["worked"], kind="softmax")
    numbers = {f"softmax([{row['example']}])[{row['place']}]": row["value"] for row in rows}
    exact = all(abs(row["value"] - row["said"]) <= 0.005 for row in rows)
    return Judgement(HOLDS if exact else FALSE, numbers, "to two decimals")


def large_logits_saturate(evidence: Evidence) -> Judgement:
    rows = evidence["saturation"]
    sizes = sorted({row["n"] for row in rows})
    largest = max(pick(rows, n=sizes[-1]), key=lambda row: row["s"])
    bare = pick(evidence["jacobian"], rule="none", d=64, n=1024)[0]
    numbers = {
        f"top weight, std {largest['s']:g}, n = {sizes[-1]}": largest["top_weight"],
        "top weight, d_k = 64 unscaled, n = 1024": bare["top_weight"],
        "share of rows above 0.99 there": bare["saturated"],
        f"growth across the threshold, n = {sizes[0]}": jump(rows, sizes[0]),
        f"growth across the threshold, n = {sizes[-1]}": jump(rows, sizes[-1]),
    }
    if largest["top_weight"] < 0.8:
        return Judgement(FALSE, numbers, "even the largest logits leave the top weight under 0.8")
    if jump(rows, sizes[-1]) > jump(rows, sizes[0]):
        return Judgement(
            CONDITION, numbers, "past a logit std of √(2 ln n), a threshold that is sharper with more keys"
        )
    return Judgement(HOLDS, numbers, "")


def _gradients(evidence: Evidence) -> tuple[float, float, dict[str, float]]:
    bare, scaled = (_end(evidence["gradient"], rule=name) for name in ("none", "sqrt_dk"))
    rms, median = bare["rms"] / scaled["rms"], bare["median"] / scaled["median"]
    return rms, median, {f"RMS, none over √d_k, d_k = {bare['d']}": rms, "median, none over √d_k": median}


def gradients_vanish(evidence: Evidence) -> Judgement:
    rms, median, numbers = _gradients(evidence)
    peak = max(pick(evidence["jacobian"], rule="none"), key=lambda row: row["square"])
    numbers |= {"largest ‖J‖_F²": peak["square"], "at d_k": peak["d"]}
    if rms >= 1 and median >= 1:
        return Judgement(FALSE, numbers, "neither the mean nor the median gradient is smaller without the scale")
    if rms < 1 and median < 1:
        return Judgement(HOLDS, numbers, "")
    return Judgement(
        CONDITION, numbers, "the median query's gradient vanishes while the RMS grows; p(1−p) is only J's diagonal"
    )


def gradients_explode(evidence: Evidence) -> Judgement:
    rms, median, numbers = _gradients(evidence)
    if rms <= 1:
        return Judgement(FALSE, numbers, "the RMS gradient does not grow without the scale")
    if median > 1:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "on average: the RMS grows while the typical query gets less")


def exp_overflows(evidence: Evidence) -> Judgement:
    rows = evidence["precision"]
    softmax = [row for row in rows if row["stored_finite"] and not row["softmax_finite"]]
    plain = [row["size"] for row in pick(rows, dtype="float32") if not row["plain_finite"]]
    stored = [row["size"] for row in pick(rows, dtype="float16") if not row["eager_finite"]]
    fused = [row for row in rows if not row["fused_finite"]]
    numbers = {
        "softmaxes that overflowed": float(len(softmax)),
        "textbook exp in float32 overflows from": min(plain, default=math.nan),
        "scores stored in float16 overflow from": min(stored, default=math.nan),
        "fused attention that overflowed": float(len(fused)),
    }
    if softmax:
        return Judgement(HOLDS, numbers, "")
    words = "every real softmax subtracts the maximum first"
    return Judgement(
        FALSE, numbers, words + ("; scores stored in float16 do overflow, before the softmax" if stored else "")
    )


def dk_is_too_flat(evidence: Evidence) -> Judgement:
    flat = _end(evidence["divisors"], rule="dk")
    numbers = {
        f"evenness under 1/d_k, d_k = {flat['d']}": flat["evenness"],
        "evenness under 1/√d_k": _end(evidence["divisors"], rule="sqrt_dk")["evenness"],
        "logit of an aligned key under 1/d_k": flat["aligned_logit"],
    }
    if flat["evenness"] < 0.99:
        return Judgement(FALSE, numbers, "the weights are not flat")
    if flat["aligned_logit"] < 0.5:
        return Judgement(HOLDS, numbers, "")
    return Judgement(
        CONDITION, numbers, "before training; once q and k align, q·k grows like d_k and 1/d_k is right (µP)"
    )


def sqrt_dmodel_is_wrong(evidence: Evidence) -> Judgement:
    wrong, right = (pick(evidence["divisors"], rule=name, d=128, heads=96)[0] for name in ("sqrt_dmodel", "sqrt_dk"))
    off = right["logit_std"] / wrong["logit_std"]
    numbers = {
        "temperature off by": off,
        "√96": math.sqrt(96),
        "evenness with √d_model": wrong["evenness"],
        "with √d_k": right["evenness"],
        "logit of an aligned key with √d_model": wrong["aligned_logit"],
    }
    if abs(off - math.sqrt(96)) > 0.1:
        return Judgement(FALSE, numbers, "the temperature is not off by √heads")
    if wrong["aligned_logit"] < 0.5:
        return Judgement(HOLDS, numbers, "")
    return Judgement(
        CONDITION, numbers, "at the start: W_q and W_k can learn a factor of √heads; Gemma 2 27B divides by another"
    )


def additive_within_one(evidence: Evidence) -> Judgement:
    rows = pick(evidence["bounded"], score="additive")
    largest = max(rows, key=lambda row: row["largest_score"])
    numbers = {"largest |score|": largest["largest_score"], "‖w‖₁ there": largest["bound"]}
    if largest["largest_score"] > 1.001:
        return Judgement(FALSE, numbers, "the bound is ‖w‖₁; only each tanh lies within ±1")
    return Judgement(HOLDS, numbers, "")


def additive_stable_but_slow(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["additive_cost"], key=lambda row: row["d"])
    low, high = rows[0], rows[-1]
    small, unit, dot = (
        high[name] / low[name] for name in ("additive_variance_fan_in", "additive_variance_unit", "dot_variance")
    )
    numbers = {
        f"times as slow, d = {high['d']}": high["factor"],
        f"variance, d = {high['d']} over {low['d']}: w ~ 1/√d": small,
        "w ~ 1": unit,
        "bare dot product": dot,
        "MiB beyond inputs and output, additive": high["additive_mib"],
        "dot product": high["dot_mib"],
    }
    if high["factor"] <= 1 or small >= dot / 2:
        return Judgement(FALSE, numbers, "it is not both slower and steadier")
    if unit < dot / 2:
        return Judgement(HOLDS, numbers, "")
    return Judgement(
        CONDITION, numbers, "steady when w is drawn small, as layers are; with unit entries it grows with d too"
    )


def keys_stay_many(evidence: Evidence) -> Judgement:
    scaled, bare = (_end(evidence["divisors"], rule=name) for name in ("sqrt_dk", "none"))
    low = min(pick(evidence["divisors"], rule="sqrt_dk"), key=lambda row: row["effective_keys"])
    numbers = {
        f"effective keys of {scaled['n']} with √d_k, d_k = {scaled['d']}": scaled["effective_keys"],
        "fewest with √d_k at any d_k": low["effective_keys"],
        "without": bare["effective_keys"],
    }
    return Judgement(HOLDS if low["effective_keys"] > 0.25 * low["n"] else FALSE, numbers, "before training")


def output_has_the_input_shape(evidence: Evidence) -> Judgement:
    widths = {row["example"]: row["value"] for row in pick(evidence["worked"], kind="width")}
    numbers = {f"width of {name}": size for name, size in widths.items()}
    if widths["heads joined"] != widths["input"]:
        return Judgement(FALSE, numbers, "not even after the heads are joined")
    if widths["one head"] == widths["input"]:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "only after the heads are concatenated and projected")


def runs_in_parallel(evidence: Evidence) -> Judgement:
    rows = evidence["parallel"]
    last = max(rows, key=lambda row: row["n"])
    numbers = {f"times as fast, n = {row['n']}": row["factor"] for row in rows}
    same = last["difference"] < 1e-4
    return Judgement(HOLDS if same and last["factor"] > 1 else FALSE, numbers, f"on {last['threads']} CPU thread(s)")


def few_weights_move(evidence: Evidence) -> Judgement:
    bare, scaled = (_end(evidence["gradient"], rule=name) for name in ("none", "sqrt_dk"))
    numbers = {
        "W_q entries under 1 % of the RMS, none": bare["w_q_small"],
        "with √d_k": scaled["w_q_small"],
        "W_k, none": bare["w_k_small"],
        "queries under 1 % of the RMS, none": bare["small_share"],
    }
    if bare["w_q_small"] > 0.5 or bare["w_k_small"] > 0.5:
        return Judgement(HOLDS, numbers, "")
    return Judgement(
        FALSE, numbers, "it is queries that go without a gradient, not weights: a weight sums over the queries"
    )


def variance_scales_with_a(evidence: Evidence) -> Judgement:
    numbers, fine = {}, True
    for a in sorted({row["a"] for row in evidence["nonunit"]}):
        one, many = (pick(evidence["nonunit"], a=a, d=d)[0] for d in (1, 64))
        numbers[f"Var at 64 over Var at 1, a = {a:g}"] = many["variance"] / one["variance"]
        fine &= _within(many, "variance", 64 * a) and _within(one, "variance", a)
    return Judgement(HOLDS if fine else FALSE, numbers, "")
