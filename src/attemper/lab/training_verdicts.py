"""training_verdicts: what the training experiments' rows say about the claims on training. Pure functions, as in verdicts.py."""

from __future__ import annotations

import math

from . import charlm, depth, recall
from .experiment import pick
from .verdicts import CONDITION, FALSE, HOLDS, Evidence, Judgement


def _recall(evidence: Evidence) -> dict[str, dict[str, float]]:
    return {row["rule"]: row for row in recall.summary(evidence["recall"])}


def falls_apart(evidence: Evidence) -> Judgement:
    best = _recall(evidence)
    scaled, bare = best["sqrt_dk"]["accuracy"], best["none"]["accuracy"]
    apart = {init: charlm.difference(evidence["charlm"], init) for init in charlm.INITS}
    numbers = {
        "recall accuracy, 1/√d_k": scaled,
        "none": bare,
        "language model, none less 1/√d_k, nats: unit-variance init": apart["unit"],
        "std 0.02 init": apart["small"],
    }
    if bare >= 0.9 * scaled:
        return Judgement(FALSE, numbers, "each rule at its own best learning rate, it is learned without a scale too")
    if min(apart.values()) < charlm.NOTHING:
        return Judgement(
            CONDITION, numbers, "on recall; the language model trains without it, and with a small init as well"
        )
    return Judgement(HOLDS, numbers, "")


def converges_faster(evidence: Evidence) -> Judgement:
    best = _recall(evidence)
    scaled, bare = best["sqrt_dk"]["steps_to_90"], best["none"]["steps_to_90"]
    apart = charlm.difference(evidence["charlm"], "small")
    last = max(row["step"] for row in evidence["recall"])
    numbers = {"steps to 90 % on recall, 1/√d_k": scaled, "none": bare if math.isfinite(bare) else math.nan, "of": last}
    numbers["language model, std 0.02 init, none less 1/√d_k, nats"] = apart
    if scaled >= bare:
        return Judgement(FALSE, numbers, "on recall it is not faster")
    if apart < charlm.NOTHING:
        return Judgement(
            CONDITION, numbers, "on recall (no number: never); in a language model with a small init it changes nothing"
        )
    return Judgement(HOLDS, numbers, "")


def commits_early(evidence: Evidence) -> Judgement:
    best = {row["rule"]: row for row in pick(charlm.summary(evidence["charlm"]), init="unit")}
    scaled, bare = best["sqrt_dk"], best["none"]
    numbers = {
        "early entropy, none": bare["early_entropy"],
        "1/√d_k": scaled["early_entropy"],
        "held-out less training loss, none": bare["gap"],
        "1/√d_k ": scaled["gap"],
    }
    if bare["early_entropy"] >= scaled["early_entropy"]:
        return Judgement(FALSE, numbers, "attention is not more decided early on")
    if bare["gap"] > scaled["gap"] + charlm.NOTHING:
        return Judgement(HOLDS, numbers, "")
    return Judgement(FALSE, numbers, "it does commit early, but what it loses it loses on seen and unseen text alike")


def limits_depth(evidence: Evidence) -> Judgement:
    costs = depth.costs(evidence["depth"])
    numbers = {f"none less 1/√d_k, nats, depth {layers}": median for layers, (median, _, _) in costs.items()}
    shallow, deep = costs[min(costs)][0], costs[max(costs)][0]
    if deep < charlm.NOTHING:
        return Judgement(FALSE, numbers, "the deepest model loses nothing without a scale")
    if deep > shallow + charlm.NOTHING:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "it costs something, but not more in a deeper model")
