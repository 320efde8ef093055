"""training_verdicts: what the training experiments' rows say about the claims on training. Pure functions, as in verdicts.py."""

from __future__ import annotations

import math

from . import charlm, depth, recall
from .experiment import pick
from .verdicts import CONDITION, FALSE, HOLDS, Evidence, Judgement


def _recall(evidence: Evidence) -> dict[str, dict[str, float]]:
    return {row["rule"]: row for row in recall.summary(evidence["recall"])}


RUIN = 0.5  # nats: a language model that is worse by this much has not been trained


def _language_model(evidence: Evidence) -> tuple[dict[str, float], float, bool]:
    """What leaving the scale out costs in each cell; the most; and whether there is a cell where seeds disagree on the sign."""
    cells = charlm.differences(evidence["charlm"])
    numbers = {
        f"language model, none less 1/√d_k, {row['init']} init, lr {row['lr']:g}": row["difference"] for row in cells
    }
    return numbers, max(row["difference"] for row in cells), any(not row["settled"] for row in cells)


def falls_apart(evidence: Evidence) -> Judgement:
    best = _recall(evidence)
    scaled, bare = best["sqrt_dk"]["accuracy"], best["none"]["accuracy"]
    costs, most, unseen = _language_model(evidence)
    numbers = {"recall accuracy, 1/√d_k": scaled, "none": bare, **costs}
    if bare >= 0.9 * scaled:
        return Judgement(FALSE, numbers, "each rule at its own best learning rate, it is learned without a scale too")
    if most > RUIN and not unseen:
        return Judgement(HOLDS, numbers, "")
    words = (
        f"on recall, within {max(row['step'] for row in evidence['recall'])} steps; a language model trains without it"
    )
    return Judgement(
        CONDITION, numbers, words + (", and there is a cell where it makes no difference" if unseen else "")
    )


def converges_faster(evidence: Evidence) -> Judgement:
    best = _recall(evidence)
    scaled, bare = best["sqrt_dk"]["steps_to_90"], best["none"]["steps_to_90"]
    costs, _, unseen = _language_model(evidence)
    last = max(row["step"] for row in evidence["recall"])
    numbers = {
        "steps to 90 % on recall, 1/√d_k": scaled,
        "none (–: never)": bare if math.isfinite(bare) else math.nan,
        "of": last,
    }
    if scaled >= bare:
        return Judgement(FALSE, numbers | costs, "on recall it is not faster")
    if unseen:
        return Judgement(
            CONDITION, numbers | costs, "on recall; there is a language model where it makes no difference"
        )
    return Judgement(HOLDS, numbers | costs, "")


def commits_early(evidence: Evidence) -> Judgement:
    best = {row["rule"]: row for row in pick(charlm.summary(evidence["charlm"]), init="unit")}
    scaled, bare = best["sqrt_dk"], best["none"]
    numbers = {
        "early entropy, none": bare["early_entropy"],
        "early entropy, 1/√d_k": scaled["early_entropy"],
        "held-out less training loss, none": bare["gap"],
        "held-out less training loss, 1/√d_k": scaled["gap"],
    }
    if bare["early_entropy"] >= scaled["early_entropy"]:
        return Judgement(FALSE, numbers, "attention is not more decided early on")
    if bare["gap"] > scaled["gap"] + charlm.NOTHING:
        return Judgement(HOLDS, numbers, "")
    return Judgement(FALSE, numbers, "it does commit early, but what it loses it loses on seen and unseen text alike")


def limits_depth(evidence: Evidence) -> Judgement:
    costs = depth.costs(evidence["depth"])
    numbers = {f"none less 1/√d_k, nats, depth {layers}": median for layers, (median, _, _) in costs.items()}
    (_, _, most_shallow), (_, least_deep, _) = costs[min(costs)], costs[max(costs)]
    if least_deep <= 0:
        return Judgement(FALSE, numbers, "in the deepest model some seed loses nothing without a scale")
    if least_deep > most_shallow:
        return Judgement(HOLDS, numbers, "")
    return Judgement(CONDITION, numbers, "it costs something, but no more in the deepest model than in the shallowest")
