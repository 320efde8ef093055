"""judge_exact: what the exact experiments say about each claim. Pure functions from rows; none of them knows what to expect.

Each takes the evidence, rows by name, and returns a verdict, the numbers it rests on, and the condition under which it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..engine.experiment import Rows, pick
from ..exact.gradient import crossing, without_over_with
from ..exact.saturation import spread_at, width
from ..maths.stats import clearly_below, within
from ..maths.theory import critical_std
from ..training import recall
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement


def _end(rows: Rows, **wanted: object) -> Mapping[str, Any]:
    """The row with the largest d among those wanted."""
    return max(pick(rows, **wanted), key=lambda row: row["d"])


def _inits(rows: Rows, column: str, expected: Callable[[Mapping[str, Any]], float]) -> tuple[str, bool]:
    """Which initialisations have the expected value, in words; and whether all do."""
    met = [row["init"] for row in rows if within(row, column, expected(row))]
    missed = [row["init"] for row in rows if row["init"] not in met]
    words = f"{', '.join(met) or 'none'} {'gives' if len(met) < 2 else 'give'} that"
    return words + (f", {', '.join(missed)} {'does' if len(missed) < 2 else 'do'} not" if missed else ""), not missed


def variance_is_d(evidence: Evidence) -> Judgement:
    rows, inits = evidence["variance"], [row for row in evidence["inits"] if row["scale"] != 1]  # of models that divide
    ratios = [row["variance"] / row["d"] for row in rows]
    numbers = {"smallest Var/d_k": min(ratios), "largest Var/d_k": max(ratios)}
    numbers |= {f"Var/d_k, {row['init']} init": row["variance"] / row["d"] for row in inits}
    if not all(within(row, "variance", row["d"]) for row in rows):
        return Judgement(FALSE, numbers, "the variance differs from d_k by more than chance allows")
    words, everywhere = _inits(inits, "variance", lambda row: float(row["d"]))
    if everywhere:
        return Judgement(HOLDS, numbers, "")
    words = f"entries independent, of mean 0 and variance 1: of the initialisations, {words}"
    return Judgement(CONDITION, numbers, words)


def scaling_gives_one(evidence: Evidence) -> Judgement:
    rows, inits = evidence["variance"], evidence["inits"]
    scaled = [row["scaled_variance"] for row in rows]
    numbers = {"smallest variance after 1/√d_k": min(scaled), "largest": max(scaled)}
    for row in inits:
        numbers[f"{row['init']} init, {'undivided' if row['scale'] == 1 else 'after 1/√d_k'}"] = row["scaled_variance"]
    if not all(within(row, "scaled_variance", 1.0) for row in rows):
        return Judgement(FALSE, numbers, "the scaled variance differs from 1 by more than chance allows")
    words, everywhere = _inits(inits, "scaled_variance", lambda row: 1.0)
    if everywhere:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, f"the same assumptions: of the initialisations, {words}")


def range_grows(evidence: Evidence) -> Judgement:
    two, five = (pick(evidence["variance"], d=d)[0] for d in (2, 5))
    numbers = {"mean range at d_k = 2": two["range"], "at d_k = 5": five["range"]}
    verdict = HOLDS if clearly_below(two, five, "range") else FALSE
    return Judgement(verdict, numbers, f"of {two['range_of']} dot products each")


def softmax_examples(evidence: Evidence) -> Judgement:
    rows = pick(evidence["worked"], quantity="softmax")
    numbers = {f"softmax([{row['example']}])[{row['place']}]": row["value"] for row in rows}
    exact = all(abs(row["value"] - row["said"]) <= 0.005 for row in rows)
    return Judgement(HOLDS if exact else FALSE, numbers, "to two decimals")


def large_logits_saturate(evidence: Evidence) -> Judgement:
    rows = evidence["saturation"]
    sizes = sorted({row["n"] for row in rows})
    largest = max(pick(rows, n=sizes[-1]), key=lambda row: row["s"])
    half = {n: spread_at(rows, n, 0.5) / critical_std(n) for n in sizes}
    numbers = {f"top weight, logit std {largest['s']:g}, n = {sizes[-1]}": largest["top_weight"]}
    numbers |= {f"std for half the weight over √(2 ln n), n = {n}": ratio for n, ratio in half.items()}
    widths = {n: width(rows, n) for n in (sizes[0], sizes[-1])}
    bare = pick(evidence["jacobian"], rule="none", d=64, n=1024)[0]
    context = {f"growth of the std from weight 1/4 to weight 3/4, n = {n}": ratio for n, ratio in widths.items()}
    context["top weight, d_k = 64 unscaled, n = 1024"] = bare["top_weight"]
    context["share of rows above 0.99 there"] = bare["saturated"]
    if largest["top_weight"] < 0.8:
        return Judgement(FALSE, numbers, "even the largest logits leave the top weight under 0.8", context)
    if not all(0.5 < ratio < 2 for ratio in half.values()):
        return Judgement(HOLDS, numbers, "but not at a logit std of √(2 ln n)", context)
    words = "large means a logit std of about √(2 ln n) or more"
    sharper = widths[sizes[-1]] < widths[sizes[0]]
    words += "; the transition is narrower with more keys" if sharper else ""
    return Judgement(CONDITION, numbers, words, context)


def _gradients(evidence: Evidence) -> tuple[dict[int, float], dict[int, float], dict[str, float], dict[str, float]]:
    """By n: the least that the RMS grows, and where the median falls below 1; and medians of common head dims as context."""
    numbers: dict[str, float] = {}
    context: dict[str, float] = {}
    crossings, growth = {}, {}
    for rows in (evidence["gradient"], evidence["gradient_long"]):
        n = rows[0]["n"]
        mean, typical = (without_over_with(rows, column, n) for column in ("rms", "median"))
        least = min(mean, key=lambda d: mean[d])
        growth[n], crossings[n] = mean[least], crossing(rows, n)
        numbers[f"RMS gradient of q, no scale / √d_k, n = {n}: smallest, at d_k = {least}"] = mean[least]
        numbers[f"d_k from which the median gradient is smaller without the scale, n = {n}"] = crossings[n]
        context |= {
            f"median gradient of q, no scale / √d_k, n = {n}, d_k = {d}": typical[d] for d in (64, 1024) if d in typical
        }
    return growth, crossings, numbers, context


def _in_words(crossings: Mapping[int, float]) -> str:
    return " and ".join(f"d_k ≈ {round(d, -1):.0f} with {n} keys" for n, d in crossings.items() if d < math.inf)


def gradients_vanish(evidence: Evidence) -> Judgement:
    growth, crossings, numbers, context = _gradients(evidence)
    rows = sorted(pick(evidence["jacobian"], rule="none"), key=lambda row: row["d"])
    peak = max(rows, key=lambda row: row["square"])
    numbers[f"‖J‖_F² at its peak, d_k = {peak['d']}"] = peak["square"]
    numbers[f"‖J‖_F² at d_k = {rows[-1]['d']}"] = rows[-1]["square"]
    if not clearly_below(rows[-1], peak, "square"):
        return Judgement(FALSE, numbers, "the softmax's Jacobian does not become smaller as the logits grow", context)
    if min(crossings.values()) == math.inf:
        words = "at no measured d_k is the median query's gradient smaller without the scale"
        return Judgement(FALSE, numbers, words, context)
    if max(growth.values()) < 1 and max(crossings.values()) == 0:
        return Judgement(HOLDS, numbers, "", context)
    words = "for the median query" + (f" and only from {_in_words(crossings)} on" if max(crossings.values()) else "")
    words += "; the RMS grows" if min(growth.values()) > 1 else ""
    return Judgement(CONDITION, numbers, f"{words}. p(1−p) is only J's diagonal", context)


def gradients_explode(evidence: Evidence) -> Judgement:
    growth, crossings, numbers, context = _gradients(evidence)
    if min(growth.values()) <= 1:
        return Judgement(FALSE, numbers, "the RMS gradient does not grow without the scale", context)
    if min(crossings.values()) == math.inf:
        return Judgement(HOLDS, numbers, "", context)
    words = f"the RMS grows at every d_k, the median query's gradient only up to {_in_words(crossings)}"
    return Judgement(CONDITION, numbers, words, context)


def exp_overflows(evidence: Evidence) -> Judgement:
    rows = evidence["precision"]
    softmax = [row for row in rows if row["stored_finite"] and not row["softmax_finite"]]
    fused = [row for row in rows if row["inputs_finite"] and not row["fused_finite"]]
    limits = {row["dtype"]: row for row in rows}
    numbers = {
        f"softmaxes of {len(rows)} that overflowed": float(len(softmax)),
        "fused attentions that overflowed": float(len(fused)),
    }
    context = {
        "largest score tried": max(row["size"] for row in rows),
        "a textbook softmax overflows in float32 above": limits["float32"]["plain_limit"],
        "scores stored in float16 overflow above": limits["float16"]["stored_limit"],
    }
    if softmax:
        return Judgement(HOLDS, numbers, "", context)
    if fused:
        return Judgement(CONDITION, numbers, "not softmax itself, but fused attention", context)
    words = "softmax implementations subtract the maximum first; only a score stored in float16 overflows"
    return Judgement(FALSE, numbers, words, context)


FOUND = 0.5  # the weight from which on a key counts as found


def dk_is_too_flat(evidence: Evidence) -> Judgement:
    flat, scaled = (_end(evidence["divisors"], rule=name) for name in ("dk", "sqrt_dk"))
    numbers = {
        f"evenness under 1/d_k, d_k = {flat['d']}": flat["evenness"],
        "evenness under 1/√d_k": scaled["evenness"],
        f"weight of a key equal to q among {flat['n']}, under 1/d_k": flat["aligned_weight"],
        "the same under 1/√d_k": scaled["aligned_weight"],
    }
    if not clearly_below(scaled, flat, "evenness"):
        return Judgement(FALSE, numbers, "the weights are no flatter than with √d_k")
    if flat["aligned_weight"] >= FOUND or scaled["aligned_weight"] < FOUND:
        return Judgement(FALSE, numbers, "a key equal to q gets as much weight as with √d_k")
    learned = {row["rule"]: row for row in recall.summary(evidence.get("recall", ()))}
    if not {"dk", "sqrt_dk"} <= set(learned) or learned["sqrt_dk"]["accuracy"] < recall.LEARNED:
        return Judgement(HOLDS, numbers, "before training; W_q and W_k can learn a factor: --train measures that")
    numbers["recall accuracy after training, 1/d_k"] = learned["dk"]["accuracy"]
    context = {"with 1/√d_k": learned["sqrt_dk"]["accuracy"]}
    if learned["dk"]["accuracy"] < recall.LEARNED:
        return Judgement(HOLDS, numbers, "before training; and recall is not learned with it", context)
    words = "before training: W_q and W_k learn the factor, and recall is learned"
    return Judgement(CONDITION, numbers, words, context)


def sqrt_dmodel_is_wrong(evidence: Evidence) -> Judgement:
    wrong, right = (pick(evidence["divisors"], rule=name, d=128, heads=96)[0] for name in ("sqrt_dmodel", "sqrt_dk"))
    off = right["logit_std"] / wrong["logit_std"]
    numbers = {
        "temperature: times too high": off,
        f"weight of a key equal to q among {right['n']}, √d_model": wrong["aligned_weight"],
        "the same with √d_k": right["aligned_weight"],
    }
    context = {"√96": math.sqrt(96), "evenness with √d_model": wrong["evenness"], "with √d_k": right["evenness"]}
    if off < 1.1:
        return Judgement(FALSE, numbers, "both divisors give the same temperature", context)
    if wrong["aligned_weight"] >= FOUND or right["aligned_weight"] < FOUND:
        words = "the temperature differs, but a key equal to q gets as much weight"
        return Judgement(CONDITION, numbers, words, context)
    return Judgement(HOLDS, numbers, "before training; W_q and W_k can learn a factor of √heads", context)


def additive_within_one(evidence: Evidence) -> Judgement:
    rows = pick(evidence["bounded"], score="additive")
    high, low = max(row["largest_score"] for row in rows), min(row["smallest_score"] for row in rows)
    numbers = {"largest score": high, "smallest score": low}
    context = {"largest ‖w‖₁": max(row["bound"] for row in rows)}
    if max(high, -low) > 1.001:
        return Judgement(FALSE, numbers, "the bound is ‖w‖₁; only each tanh is within ±1", context)
    return Judgement(HOLDS, numbers, "", context)


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
    }
    context = {"MiB beyond inputs and output, additive": high["additive_mib"], "dot product": high["dot_mib"]}
    if high["factor_low"] <= 1 or small >= dot / 2:
        return Judgement(FALSE, numbers, "it is not both slower and more stable", context)
    if unit < dot / 2:
        return Judgement(HOLDS, numbers, "", context)
    words = "stable when w is drawn small, as layers are; with unit entries the variance grows with d too"
    return Judgement(CONDITION, numbers, words, context)


def keys_stay_many(evidence: Evidence) -> Judgement:
    low = min(pick(evidence["divisors"], rule="sqrt_dk"), key=lambda row: row["effective_keys"])
    bare = _end(evidence["divisors"], rule="none")
    numbers = {
        f"effective keys of {low['n']} with √d_k, fewest at any d_k": low["effective_keys"],
        f"without, d_k = {bare['d']}": bare["effective_keys"],
    }
    if low["effective_keys"] <= 0.25 * low["n"]:
        return Judgement(FALSE, numbers, "with it, fewer than a quarter of the keys share the weight")
    if not clearly_below(bare, low, "effective_keys"):
        return Judgement(FALSE, numbers, "without it there are as many")
    return Judgement(HOLDS, numbers, "before training")


def output_has_the_input_shape(evidence: Evidence) -> Judgement:
    widths = {row["example"]: row["value"] for row in pick(evidence["worked"], quantity="width")}
    numbers = {f"width of {name}": size for name, size in widths.items()}
    if widths["heads joined"] != widths["input"]:
        return Judgement(FALSE, numbers, "not even after the heads are joined")
    if widths["one head"] == widths["input"]:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "only after the heads are concatenated and projected")


def runs_in_parallel(evidence: Evidence) -> Judgement:
    rows = evidence["parallel"]
    few = pick(rows, threads=min(row["threads"] for row in rows))
    last = max(few, key=lambda row: row["n"])
    many = max(pick(rows, n=last["n"]), key=lambda row: row["threads"])
    numbers = {
        f"times as fast as a loop, n = {last['n']}, threads = {last['threads']}": last["factor"],
        "times, not counting what the calls cost": last["work_factor"],
        "largest difference of the results": last["difference"],
    }
    context = {f"times as fast on {many['threads']} threads as on {last['threads']}": last["pass_ms"] / many["pass_ms"]}
    if last["difference"] > 1e-4:
        return Judgement(FALSE, numbers, "the two give different results", context)
    if last["factor_low"] <= 1:
        return Judgement(FALSE, numbers, "one pass is no faster than a loop over the tokens", context)
    if last["work_factor"] <= 1:
        return Judgement(CONDITION, numbers, "most of the loop's time is the overhead of its calls", context)
    return Judgement(HOLDS, numbers, "on a CPU", context)


def few_weights_move(evidence: Evidence) -> Judgement:
    bare, scaled = (_end(evidence["gradient"], rule=name) for name in ("none", "sqrt_dk"))
    numbers = {
        f"W_q entries under 1 % of the RMS, none, d_k = {bare['d']}": bare["w_q_small"],
        "W_k, none": bare["w_k_small"],
    }
    context = {
        "W_q, with √d_k": scaled["w_q_small"],
        "queries under 1 % of the RMS, none": bare["small_share"],
        "queries, with √d_k": scaled["small_share"],
    }
    if bare["w_q_small"] > 0.5 or bare["w_k_small"] > 0.5:
        return Judgement(HOLDS, numbers, "", context)
    words = "nearly every weight gets a gradient"
    if bare["small_share"] > max(0.1, 2 * scaled["small_share"]):
        words = "some queries get almost no gradient, but weights do: a weight sums over the queries"
    return Judgement(FALSE, numbers, words, context)


def variance_scales_with_a(evidence: Evidence) -> Judgement:
    numbers, fine = {}, True
    for a in sorted({row["a"] for row in evidence["nonunit"]}):
        one, many = (pick(evidence["nonunit"], a=a, d=d)[0] for d in (1, 64))
        numbers[f"Var at 64 over Var at 1, a = {a:g}"] = many["variance"] / one["variance"]
        fine &= within(many, "variance", 64 * a) and within(one, "variance", a)
    return Judgement(HOLDS if fine else FALSE, numbers, "")
