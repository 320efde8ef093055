"""judge_real_model: what the heads of a real model say about the claims made of them. Pure functions from rows."""

from __future__ import annotations

from statistics import fmean, median

from ..engine.experiment import pick
from ..real_model.real_heads import ALMOST_ALL, almost_all
from .judge_exact import NO_SCALE
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement

NEARLY_ALL, MOST = 0.9, 0.5  # of the heads, or of the pairs of heads
ONE_SPACE = 0.5  # an overlap from which on two heads read one subspace rather than two


def one_token_gets_all(evidence: Evidence) -> Judgement:
    rows = evidence["real_heads"]
    (bare, heads), (scaled, _) = (almost_all(rows, rule) for rule in ("none", "sqrt_dk"))
    without = pick(rows, rule="none")
    numbers = {
        f"heads of {heads} whose mean top weight is above {ALMOST_ALL:g}, without the scale": float(bare),
        f"heads of {heads} whose mean top weight is above {ALMOST_ALL:g}, with 1/√d_k": float(scaled),
    }
    least = min(row["top_weight"] for row in without)
    context = {
        "mean top weight of the least one-hot head, without the scale": least,
        "mean top weight of the median head, without the scale": median(row["top_weight"] for row in without),
        "mean top weight of the median head, with 1/√d_k": median(
            row["top_weight"] for row in pick(rows, rule="sqrt_dk")
        ),
    }
    if bare <= MOST * heads or bare <= scaled:
        words = "most heads still spread their attention, or did not spread it before"
        return Judgement(FALSE, numbers, words, context)
    if bare > NEARLY_ALL * heads:
        return Judgement(HOLDS, numbers, "in a model that was trained with the scale", context)
    words = f"in {bare / heads:.0%} of the heads of a model that was trained with the scale (d_k = {without[0]['d']})"
    others = f"every other head gives one token at least {least:.3f}" if least > MOST else "the others spread it more"
    return Judgement(CONDITION, numbers, f"{words}; {others}", context)


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
