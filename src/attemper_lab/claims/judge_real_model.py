"""judge_real_model: what the heads of a real model say about the claims made of them. Pure functions from rows."""

from __future__ import annotations

from statistics import fmean

from ..engine.experiment import pick
from ..real_model.real_heads import ALMOST_ALL, almost_all
from ..training.runs import runs
from .judge_exact import NO_SCALE
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement

NEARLY_ALL, MOST = 0.9, 0.5  # of the heads, or of the pairs of heads
ONE_SPACE = 0.5  # an overlap from which on two heads read one subspace rather than two


def one_token_gets_all(evidence: Evidence) -> Judgement:
    """From models that were trained without the scale: removing it from one that was trained with it answers another question."""
    rows = evidence["charlm"]
    without, with_it = (
        {
            (init, lr): fmean(row["top_weight"] for row in some)
            for (init, lr), some in runs(pick(rows, rule=rule), "init", "lr").items()
        }
        for rule in ("none", "sqrt_dk")
    )
    settings = f"{len(without)} settings of initialisation and rate"
    model = f"language models trained without the scale for {rows[0]['steps']} steps, {settings}"
    numbers = {
        f"mean top weight, the least ({model})": min(without.values()),
        "mean top weight, the most of these": max(without.values()),
        "mean top weight of those trained with 1/√d_k, the most": max(with_it.values()),
    }
    context = {
        f"mean top weight without the scale, {init} init, lr {lr:g}": value for (init, lr), value in without.items()
    }
    for rule, said in (("none", "is removed"), ("sqrt_dk", "is kept")) if "real_heads" in evidence else ():
        hot, heads = almost_all(evidence["real_heads"], rule)
        context[f"heads of {heads} of MiniLM, trained with the scale, above {ALMOST_ALL:g} when it {said}"] = float(hot)
    if max(without.values()) <= ALMOST_ALL or max(with_it.values()) > ALMOST_ALL:
        words = "no model spends almost all on one token on average, or those with the scale do so too"
        return Judgement(FALSE, numbers, words, context)
    if min(without.values()) > ALMOST_ALL:
        return Judgement(HOLDS, numbers, "at every initialisation and learning rate that was tried", context)
    many = sum(value > ALMOST_ALL for value in without.values())
    words = (
        f"in {many} of {len(without)} settings of initialisation and learning rate, where the rate is high; in the others the "
        f"top weight is {min(without.values()):.2f} or more on average"
    )
    return Judgement(CONDITION, numbers, words, context)


def heads_differ(evidence: Evidence) -> Judgement:
    rows = evidence["subspaces"]
    different, overlap = (fmean(row[name] for row in rows) for name in ("different", "overlap"))
    numbers = {
        "share of pairs of heads that differ more than one head does on other words": different,
        "overlap of the query subspaces of two heads, mean (1: the same)": overlap,
        "overlap of two random subspaces, mean": rows[0]["chance"],
    }
    context = {
        "distance of the weights of two heads on the same words, mean": fmean(row["distance"] for row in rows),
        "distance of the weights of one head on other words, mean": fmean(row["own_distance"] for row in rows),
        "largest overlap of two heads in the model": max(row["largest_overlap"] for row in rows),
    }
    if different <= MOST or overlap >= ONE_SPACE:
        words = "most pairs of heads look at the same tokens, or read the same subspace"
        return Judgement(FALSE, numbers, words, context)
    by_chance = all(row["overlap"] <= row["chance"] + row["overlap_reach"] for row in rows)
    if different > NEARLY_ALL and by_chance:
        return Judgement(HOLDS, numbers, NO_SCALE, context)
    times = f"{overlap / rows[0]['chance']:.1f} times as much as random ones"
    words = f"they look at different tokens, but their subspaces overlap {times}; {NO_SCALE}"
    return Judgement(CONDITION, numbers, words, context)
