"""judge_exact: what the exact experiments say about each claim. Pure functions from rows; none of them knows what to expect.

Each takes the evidence, rows by name, and returns a verdict, the numbers it rests on, and the condition under which it holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from attemper.extension.tools import plural

from ..engine.experiment import Rows, pick
from ..exact import precision
from ..exact.saturation import spread_at, width
from ..maths import moments
from ..maths.stats import clearly_below, within
from ..maths.theory import NEARLY_ONE_HOT, critical_std
from ..training import charlm
from ..training.runs import NOTHING, pooled, runs
from ..training.runs import cost as cost_of
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement

NAMES = {
    "unit": "unit-variance", "fan_in": "fan-in", "linear": "torch.nn.Linear's", "xavier": "Xavier's", "gpt2": "GPT-2's",
    "t5": "T5's",
}  # fmt: skip
"""Initialisations as a sentence names them."""


def _end(rows: Rows, **wanted: object) -> Mapping[str, Any]:
    """The row with the largest d among those wanted."""
    return max(pick(rows, **wanted), key=lambda row: row["d"])


def _inits(rows: Rows, column: str, expected: Callable[[Mapping[str, Any]], float]) -> tuple[str, bool]:
    """Which initialisations have the expected value, in words; and whether all do."""
    met = [NAMES[row["init"]] for row in rows if within(row, column, expected(row))]
    missed = [name for row in rows if (name := NAMES[row["init"]]) not in met]
    words = f"{', '.join(met) or 'none'} {'gives' if len(met) < 2 else 'give'} that"
    return words + (f", {', '.join(missed)} {'does' if len(missed) < 2 else 'do'} not" if missed else ""), not missed


def variance_is_d(evidence: Evidence) -> Judgement:
    rows, inits = evidence["variance"], [row for row in evidence["inits"] if row["scale"] != 1]  # of models that divide
    ratios = [row["variance"] / row["d"] for row in rows]
    numbers = {"smallest Var(q·k) ÷ d_k of all d_k": min(ratios), "largest Var(q·k) ÷ d_k of all d_k": max(ratios)}
    context = {f"Var(q·k) ÷ d_k, {NAMES[row['init']]} initialisation": row["variance"] / row["d"] for row in inits}
    right = [row["d"] for row in rows if within(row, "variance", row["d"])]
    if not right:
        return Judgement(FALSE, numbers, "the variance differs from d_k by more than chance allows", context)
    if len(right) < len(rows):
        return Judgement(CONDITION, numbers, f"at d_k = {', '.join(map(str, right))} alone", context)
    words, _ = _inits(inits, "variance", lambda row: float(row["d"]))
    return Judgement(HOLDS, numbers, f"the claim names its condition; of the initialisations, {words}", context)


def scaling_gives_one(evidence: Evidence) -> Judgement:
    rows, inits = evidence["variance"], evidence["inits"]
    scaled = [row["scaled_variance"] for row in rows]
    numbers = {
        "smallest variance of q·k/√d_k of all d_k": min(scaled),
        "largest variance of q·k/√d_k of all d_k": max(scaled),
    }
    for row in inits:
        what = "q·k (it does not divide)" if row["scale"] == 1 else "q·k/√d_k"
        numbers[f"variance of {what}, {NAMES[row['init']]} initialisation"] = row["scaled_variance"]
    if not all(within(row, "scaled_variance", 1.0) for row in rows):
        return Judgement(FALSE, numbers, "the scaled variance differs from 1 by more than chance allows")
    words, everywhere = _inits(inits, "scaled_variance", lambda row: 1.0)
    words = f"under the same assumptions; of the initialisations, {words}"
    return Judgement(HOLDS, numbers, "") if everywhere else Judgement(CONDITION, numbers, words)


def range_grows(evidence: Evidence) -> Judgement:
    two, five = (pick(evidence["variance"], d=d)[0] for d in (2, 5))
    numbers = {f"largest minus smallest score, mean, d_k = {row['d']}": row["range"] for row in (two, five)}
    verdict = HOLDS if clearly_below(two, five, "range") else FALSE
    return Judgement(verdict, numbers, f"among {two['range_of']} dot products each")


def softmax_examples(evidence: Evidence) -> Judgement:
    rows = pick(evidence["worked"], quantity="softmax")
    numbers = {f"softmax([{row['example']}]), weight {row['place'] + 1}": row["value"] for row in rows}
    exact = all(abs(row["value"] - row["said"]) <= 0.005 for row in rows)
    return Judgement(HOLDS if exact else FALSE, numbers, "to two decimals")


def large_logits_saturate(evidence: Evidence) -> Judgement:
    rows = evidence["saturation"]
    sizes = sorted({row["n"] for row in rows})
    largest = max(pick(rows, n=sizes[-1]), key=lambda row: row["s"])
    hot = {n: spread_at(rows, n, NEARLY_ONE_HOT) / critical_std(n) for n in sizes}
    half = {n: spread_at(rows, n, 0.5) / critical_std(n) for n in sizes}
    label = f"logit std at which one key gets {NEARLY_ONE_HOT:g} of the weight ÷ √(2 ln n)"
    numbers = {f"mean top weight at a logit std of {largest['s']:g}, {sizes[-1]} keys": largest["top_weight"]}
    numbers |= {f"{label}, {n} keys": ratio for n, ratio in hot.items()}
    widths = {n: width(n) for n in (sizes[0], sizes[-1])}
    bare = pick(evidence["jacobian"], rule="none", d=64, n=1024)[0]
    context = {
        **{f"logit std at which one key gets half the weight ÷ √(2 ln n), {n} keys": r for n, r in half.items()},
        **{f"the same by the exact mean, {n} keys": moments.spread_at(n, 0.5) / critical_std(n) for n in sizes},
        **{
            f"growth of the std from a top weight of 1/4 to one of 3/4, exact, {n} keys": ratio
            for n, ratio in widths.items()
        },
    }
    context["mean top weight where the logit std is √(2 ln n), exact, 1024 keys"] = moments.top_weight(
        critical_std(1024), 1024
    )
    context["mean top weight without the scale, d_k = 64, 1024 keys"] = bare["top_weight"]
    context[f"share of rows with a top weight above {NEARLY_ONE_HOT:g}, the same"] = bare["one_hot"]
    if largest["top_weight"] < NEARLY_ONE_HOT:
        words = f"even the largest logits leave the top weight under {NEARLY_ONE_HOT:g}"
        return Judgement(FALSE, numbers, words, context)
    if all(ratio <= 1 for ratio in hot.values()):
        return Judgement(HOLDS, numbers, "from a logit std of √(2 ln n) on", context)
    words = (
        f"at a logit std of √(2 ln n) the weight only begins to condense: one key gets half of it at {_ends(half)} times "
        f"that, and {NEARLY_ONE_HOT:g} of it at {_ends(hot)} times"
    )
    return Judgement(CONDITION, numbers, words, context)


def _ends(of: Mapping[int, float]) -> str:
    return f"{min(of.values()):.1f} to {max(of.values()):.1f}"


def exp_overflows(evidence: Evidence) -> Judgement:
    rows = evidence["precision"]
    softmax = [row for row in rows if row["stored_finite"] and not row["softmax_finite"]]
    fused = [row for row in rows if row["inputs_finite"] and not row["fused_finite"]]
    limits = {row["dtype"]: row for row in rows}
    half, size = limits["float16"], f"d_k = {precision.HEAD}, {precision.TOKENS} keys"
    share = "share of rows in which a float16 softmax overflows that does not subtract the maximum"
    limit = "score above which a softmax that does not subtract the maximum overflows in"
    numbers = {
        f"softmaxes of torch that overflowed, of {len(rows)}": float(len(softmax)),
        f"fused attentions that overflowed, of {len(rows)}": float(len(fused)),
    }
    context = {
        f"{share}, no scale ({size})": half["plain_overflows_none"],
        f"{share}, 1/√d_k ({size})": half["plain_overflows_sqrt_dk"],
        "largest score that was tried": max(row["size"] for row in rows),
        **{f"{limit} {dtype}": limits[dtype]["plain_limit"] for dtype in ("float16", "float32")},
        "score above which a score stored in float16 overflows": half["stored_limit"],
    }
    if softmax:
        return Judgement(HOLDS, numbers, "torch's own softmax overflows", context)
    if fused:
        return Judgement(CONDITION, numbers, "not softmax itself, but fused attention", context)
    words = "a softmax that people use subtracts the maximum first, so exp sees no number above 0"
    if half["plain_overflows_none"] > 0.5 > half["plain_overflows_sqrt_dk"]:
        words += "; one that does not would overflow in float16 without the scale and not with it"
    return Judgement(FALSE, numbers, words, context)


FOUND = 0.5  # the weight from which on a key counts as found


def dk_is_too_flat(evidence: Evidence) -> Judgement:
    """Before training from the divisors; in the end from trained models, by what it costs beside no scale at all."""
    flat, scaled = (_end(evidence["divisors"], rule=name) for name in ("dk", "sqrt_dk"))
    cost, bare = (pooled(evidence["larger"], name) for name in ("dk", "none"))
    numbers = {
        f"evenness of the weights under 1/d_k (1 is uniform), d_k = {flat['d']}": flat["evenness"],
        f"evenness of the weights under 1/√d_k, d_k = {flat['d']}": scaled["evenness"],
        f"weight of a key equal to q beside {flat['n']} others, under 1/d_k": flat["aligned_weight"],
        f"weight of a key equal to q beside {flat['n']} others, under 1/√d_k": scaled["aligned_weight"],
        "held-out loss of a trained language model with 1/d_k minus that with 1/√d_k, nats": cost.mean,
        "the same without a scale, nats": bare.mean,
    }
    context = {"half-width of the 95 % interval of the cost of 1/d_k": (cost.high - cost.low) / 2}
    if not clearly_below(scaled, flat, "evenness"):
        return Judgement(FALSE, numbers, "the weights are no flatter than with √d_k", context)
    if flat["aligned_weight"] >= FOUND or scaled["aligned_weight"] < FOUND:
        return Judgement(FALSE, numbers, "a key equal to q gets as much weight as with √d_k", context)
    if cost.mean >= bare.mean:
        return Judgement(HOLDS, numbers, "and training does not mend it", context)
    words = f"before training. {_size(evidence)}, each rule at its own best rate, ends {cost} higher with it"
    words += ": W_Q and W_K learn the factor"
    return Judgement(CONDITION, numbers, words, context)


def _size(evidence: Evidence) -> str:
    return f"A language model of {evidence['larger'][0]['parameters'] / 1e6:.0f} M parameters"


def sqrt_dmodel_is_wrong(evidence: Evidence) -> Judgement:
    """Before training from the divisors, and after it by what it costs in the end."""
    wrong, right = (pick(evidence["divisors"], rule=name, d=128, heads=96)[0] for name in ("sqrt_dmodel", "sqrt_dk"))
    off = right["logit_std"] / wrong["logit_std"]
    numbers = {
        "temperature with √d_model ÷ that with √d_k, 96 heads": off,
        f"weight of a key equal to q beside {right['n']} others, with √d_model": wrong["aligned_weight"],
        f"weight of a key equal to q beside {right['n']} others, with √d_k": right["aligned_weight"],
    }
    context = {
        "√96, the ratio of the two divisors": math.sqrt(96),
        "evenness of the weights with √d_model": wrong["evenness"],
        "evenness of the weights with √d_k": right["evenness"],
    }
    if off < 1.1:
        return Judgement(FALSE, numbers, "both divisors give the same temperature", context)
    if wrong["aligned_weight"] >= FOUND or right["aligned_weight"] < FOUND:
        words = "the temperature differs, but a key equal to q gets as much weight"
        return Judgement(CONDITION, numbers, words, context)
    rows = evidence["dmodel"]
    best = {row["rule"]: row for row in charlm.summary(rows)}
    trained = cost_of(*(pick(rows, rule=name, lr=best[name]["lr"]) for name in ("sqrt_dk", "sqrt_dmodel")))
    heads = f"{rows[0]['heads']} heads of {rows[0]['d_model'] // rows[0]['heads']}, {rows[0]['steps']} steps"
    numbers["held-out loss of a trained language model with √d_model minus that with √d_k, nats"] = trained.mean
    context["half-width of the 95 % interval of that cost"] = (trained.high - trained.low) / 2
    if trained.low > NOTHING:
        return Judgement(HOLDS, numbers, f"before training, and after it ({heads})", context)
    words = f"before training; after it the held-out loss of a small language model ({heads}) differs by {trained}: W_Q and W_K"
    words += " learn the factor √heads"
    return Judgement(CONDITION, numbers, words, context)


def additive_within_one(evidence: Evidence) -> Judgement:
    rows = pick(evidence["bounded"], score="additive")
    high, low = max(row["largest_score"] for row in rows), min(row["smallest_score"] for row in rows)
    numbers = {"largest additive score reached": high, "smallest additive score reached": low}
    context = {"Σ|w|, the sum of the sizes of w's entries, at most": max(row["bound"] for row in rows)}
    if max(high, -low) > 1.001:
        return Judgement(FALSE, numbers, "the bound is Σ|w|; only each tanh is within ±1", context)
    return Judgement(HOLDS, numbers, "", context)


def additive_stable_but_slow(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["additive_cost"], key=lambda row: row["d"])
    low, high = rows[0], rows[-1]
    names = ("additive_variance_fan_in", "additive_variance_unit", "dot_variance")
    small, unit, dot = (high[name] / low[name] for name in names)
    numbers = {
        f"times as slow as the dot product on this machine, d = {high['d']}, {high['n']} tokens": high["factor"],
        f"additive scores, w drawn with variance 1/d: variance at d = {high['d']} ÷ that at {low['d']}": small,
        f"additive scores, w drawn with variance 1: variance at d = {high['d']} ÷ that at {low['d']}": unit,
        f"unscaled dot products: variance at d = {high['d']} ÷ that at {low['d']}": dot,
    }
    context = {
        "MiB that additive attention needs beyond inputs and output": high["additive_mib"],
        "MiB that dot-product attention needs beyond inputs and output": high["dot_mib"],
    }
    if high["factor_low"] <= 1 or small >= dot / 2:
        return Judgement(FALSE, numbers, "on this machine it is not both slower and more stable", context)
    bound = "how much slower depends on the machine and the kernels; no matrix product can compute its n²·d tanhs"
    if unit < dot / 2:
        return Judgement(HOLDS, numbers, bound, context)
    words = f"stable if w is drawn small, as layers draw it; with unit entries the variance grows with d too; {bound}"
    return Judgement(CONDITION, numbers, words, context)


SHARE = 0.25  # of the keys: from here on they count as sharing the weight


def keys_stay_many(evidence: Evidence) -> Judgement:
    """Before training, from the divisors; during it, which is what the note says, from the rows of a language model."""
    low = min(pick(evidence["divisors"], rule="sqrt_dk"), key=lambda row: row["effective_keys"])
    bare = _end(evidence["divisors"], rule="none")
    trained = evidence["trained"]
    visible, last = (trained[0]["length"] + 1) / 2, max(row["step"] for row in trained)
    seen = f"language model, where a query sees {visible:g} keys on average"
    with_it, without = (
        [statistics.median(row["effective_keys"] for row in run) for run in runs(ended, "lr").values()]
        for ended in (pick(trained, rule=rule, step=last) for rule in ("sqrt_dk", "none"))
    )
    before, after = f"effective keys of {low['n']} before training", f"effective keys after {last} training steps"
    numbers = {
        f"{before} with 1/√d_k, fewest at any d_k": low["effective_keys"],
        f"{before} without the scale, d_k = {bare['d']}": bare["effective_keys"],
        f"{after} with 1/√d_k, fewest at any learning rate ({seen})": min(with_it),
        f"{after} without the scale, most at any learning rate ({seen})": max(without),
    }
    first = statistics.median(row["effective_keys"] for row in pick(trained, rule="sqrt_dk", step=0))
    context = {f"effective keys at step 0 with 1/√d_k ({seen})": first}
    if low["effective_keys"] <= SHARE * low["n"]:
        return Judgement(FALSE, numbers, "with it, fewer than a quarter of the keys share the weight", context)
    if not clearly_below(bare, low, "effective_keys") or min(with_it) <= 2 * max(without):
        return Judgement(FALSE, numbers, "without it there are as many", context)
    if min(with_it) > SHARE * visible:
        return Judgement(HOLDS, numbers, "before training and during it", context)
    words = (
        f"before training. During training they become fewer with the scale too, {min(with_it):.0f} to {max(with_it):.0f} of "
        f"{visible:g} visible ones, as heads learn what to attend to; without the scale {min(without):.1f} to {max(without):.1f}"
    )
    return Judgement(CONDITION, numbers, words, context)


def output_has_the_input_shape(evidence: Evidence) -> Judgement:
    widths = {row["example"]: row["value"] for row in pick(evidence["worked"], quantity="width")}
    numbers = {f"numbers per token, {name}": size for name, size in widths.items()}
    if widths["heads joined"] != widths["input"]:
        return Judgement(FALSE, numbers, "not even after the heads are joined")
    if widths["one head"] == widths["input"]:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "only after the heads are concatenated and projected")


NO_SCALE = "with any scale or none: this does not depend on the scale"


def runs_in_parallel(evidence: Evidence) -> Judgement:
    rows = evidence["parallel"]
    few = pick(rows, threads=min(row["threads"] for row in rows))
    last = max(few, key=lambda row: row["n"])
    many = max(pick(rows, n=last["n"]), key=lambda row: row["threads"])
    threads = plural(last["threads"], "thread")
    numbers = {
        f"speed of one pass ÷ that of a loop over {last['n']} tokens, {threads}": last["factor"],
        "the same, without the cost of the loop's calls": last["work_factor"],
        "largest difference between the two results": last["difference"],
    }
    context = {f"speed of one pass on {many['threads']} threads ÷ that on {threads}": last["pass_ms"] / many["pass_ms"]}
    if last["difference"] > 1e-4:
        return Judgement(FALSE, numbers, "the two give different results", context)
    if last["factor_low"] <= 1:
        return Judgement(FALSE, numbers, "one pass is no faster than a loop over the tokens", context)
    if last["work_factor"] <= 1:
        words = f"{NO_SCALE}; most of the loop's time is the overhead of its calls"
        return Judgement(CONDITION, numbers, words, context)
    return Judgement(HOLDS, numbers, f"{NO_SCALE}; on this machine", context)


def variance_scales_with_a(evidence: Evidence) -> Judgement:
    numbers, fine = {}, True
    for a in sorted({row["a"] for row in evidence["nonunit"]}):
        narrow, many = (pick(evidence["nonunit"], a=a, d=d)[0] for d in (1, 64))
        numbers[f"variance of q·k at d_k = 64 ÷ that at d_k = 1, a = {a:g}"] = many["variance"] / narrow["variance"]
        fine &= within(many, "variance", 64 * a) and within(narrow, "variance", a)
    return Judgement(HOLDS if fine else FALSE, numbers, "for independent entries of mean 0")
