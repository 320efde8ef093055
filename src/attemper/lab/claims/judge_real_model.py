"""judge_real_model: what the heads of a real model say about the claims made of them. Pure functions from rows."""

from __future__ import annotations

from statistics import fmean, median

from ..engine.experiment import pick
from ..real_model.real_heads import ALMOST_ALL, almost_all
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement

NEARLY_ALL, MOST = 0.9, 0.5  # of the heads, or of the pairs of heads
ONE_SPACE = 0.5  # an overlap from which on two heads read one subspace rather than two


def one_token_gets_all(evidence: Evidence) -> Judgement:
    rows = evidence["real_heads"]
    (bare, heads), (scaled, _) = (almost_all(rows, rule) for rule in ("none", "sqrt_dk"))
    without = pick(rows, rule="none")
    numbers = {
        f"of {heads} heads, those with a mean top weight above {ALMOST_ALL:g}: none": float(bare),
        "with √d_k": float(scaled),
    }
    context = {
        "median head's top weight, none": median(row["top_weight"] for row in without),
        "with √d_k, median": median(row["top_weight"] for row in pick(rows, rule="sqrt_dk")),
        "least of all heads, none": min(row["top_weight"] for row in without),
    }
    if bare <= MOST * heads or bare <= scaled:
        words = "most heads still spread their attention, or did not spread it before"
        return Judgement(FALSE, numbers, words, context)
    if bare > NEARLY_ALL * heads:
        return Judgement(HOLDS, numbers, "", context)
    words = f"in {bare / heads:.0%} of the heads of a model that was trained with the scale (d_k = {without[0]['d']})"
    return Judgement(CONDITION, numbers, f"{words}; the others still spread their attention", context)


def heads_differ(evidence: Evidence) -> Judgement:
    rows = evidence["subspaces"]
    different, overlap = (fmean(row[name] for row in rows) for name in ("different", "overlap"))
    numbers = {
        "pairs of heads further apart than one head on other words": different,
        "overlap of two heads' query subspaces": overlap,
        "of random ones": rows[0]["chance"],
    }
    context = {
        "distance of two heads": fmean(row["distance"] for row in rows),
        "of one head, other words": fmean(row["own_distance"] for row in rows),
        "largest overlap in the model": max(row["largest_overlap"] for row in rows),
    }
    if different <= MOST or overlap >= ONE_SPACE:
        words = "most pairs of heads look at the same tokens, or read the same subspace"
        return Judgement(FALSE, numbers, words, context)
    by_chance = all(row["overlap"] <= row["chance"] + row["overlap_reach"] for row in rows)
    if different > NEARLY_ALL and by_chance:
        return Judgement(HOLDS, numbers, "", context)
    times = f"{overlap / rows[0]['chance']:.1f} times as much as random ones"
    return Judgement(CONDITION, numbers, f"they look at different tokens, but their subspaces overlap {times}", context)
