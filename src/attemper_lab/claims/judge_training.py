"""judge_training: what the rows of the training experiments say about the claims on training. Pure functions from rows.

What a small run cannot show is *not decided*: nothing was learned under any rule, or an interval is too wide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attemper.extension.tools import plural

from ..engine.experiment import pick
from ..training import charlm, depth, recall
from ..training.language import NO_ATTENTION
from ..training.runs import LESS, MORE, NOTHING, OPEN, SAME, Cost
from .judgement import CONDITION, FALSE, HOLDS, UNDECIDED, Evidence, Judgement

RUIN = 0.5  # nats: a language model that is worse by this much has not been trained


def _recall(evidence: Evidence) -> tuple[dict[str, Mapping[str, Any]], str]:
    """The summary by rule, and how long was trained, in words."""
    rows = evidence["recall"]
    long = f"within {rows[0]['steps']} steps of {rows[0]['batch']} sequences"
    best: dict[str, Mapping[str, Any]] = {row["rule"]: row for row in recall.summary(rows)}
    edge = [name for name in ("sqrt_dk", "none") if best[name]["at_edge"]]
    return best, long + (f" (best learning rate at the edge of those tried: {', '.join(edge)})" if edge else "")


def _cells(evidence: Evidence) -> dict[str, Cost]:
    costs = charlm.cells(evidence["charlm"])
    return {f"{init} init, lr {lr:g}": cost for (init, lr), cost in costs.items()}


def _numbers(cells: Mapping[str, Cost]) -> dict[str, float]:
    """The cost of every cell; infinite where runs diverged without a scale."""
    label = "language model: held-out loss without the scale minus that with it, nats"
    return {f"{label} ({name})": math.inf if _lost(cell) else cell.mean for name, cell in cells.items()}


def _lost(cost: Cost) -> bool:
    """Whether runs diverged without a scale that did not with it."""
    return cost.diverged > cost.diverged_scaled


def _context(evidence: Evidence, cells: Mapping[str, Cost]) -> dict[str, float]:
    """Context of the costs, which decides nothing: their intervals, and the loss without attention."""
    rows = evidence["charlm"]
    context = {f"half-width of its 95 % interval ({name})": (cost.high - cost.low) / 2 for name, cost in cells.items()}
    best = charlm.summary(rows)
    for name, words in (("sqrt_dk", "with 1/√d_k"), (NO_ATTENTION, "without attention")):
        if losses := [row["held_out"] for row in best if row["rule"] == name]:
            context[f"held-out loss {words}, nats"] = min(losses)
    if "bigram" in rows[0]:
        context["held-out loss of counting pairs of characters, nats"] = rows[0]["bigram"]
    return context


def falls_apart(evidence: Evidence) -> Judgement:
    best, long = _recall(evidence)
    scaled, bare = best["sqrt_dk"]["accuracy"], best["none"]["accuracy"]
    cells = _cells(evidence)
    numbers = {
        "accuracy on recall with 1/√d_k": scaled,
        "accuracy on recall without the scale": bare,
        **_numbers(cells),
    }
    context = _context(evidence, cells)
    if scaled < recall.LEARNED:
        return Judgement(UNDECIDED, numbers, f"recall is not learned {long} with 1/√d_k either", context)
    ruined = [name for name, cost in cells.items() if _lost(cost) or cost.low > RUIN]
    recalls = bare >= 0.9 * scaled
    if recalls and not ruined:
        return Judgement(FALSE, numbers, f"{long}, recall is learned without a scale too", context)
    if not recalls and len(ruined) == len(cells):
        return Judgement(HOLDS, numbers, f"on recall {long}, and in every language model tried", context)
    words = f"not on recall {long}" if recalls else f"on recall {long}"
    words += f", {'but' if recalls else 'and'} in a language model with {' and '.join(ruined)}" if ruined else ""
    same = [name for name, cost in cells.items() if cost.says == SAME and not _lost(cost)]
    if len(ruined) < len(cells):
        words += "; other language models train without it" if ruined else "; a language model trains without it"
    words += f", and it makes no difference with {' and '.join(same)}" if same else ""
    return Judgement(CONDITION, numbers, words, context)


def converges_faster(evidence: Evidence) -> Judgement:
    best, long = _recall(evidence)
    scaled, bare = best["sqrt_dk"]["steps_to_90"], best["none"]["steps_to_90"]
    cells = _cells(evidence)
    numbers = {
        "steps to 90 % on recall with 1/√d_k": scaled,
        "steps to 90 % on recall without the scale (∞: never)": bare,
        **_numbers(cells),
    }
    context = {"training steps on recall": float(evidence["recall"][0]["steps"]), **_context(evidence, cells)}
    if not math.isfinite(scaled):
        return Judgement(UNDECIDED, numbers, f"recall is not learned {long} with 1/√d_k either", context)
    if scaled >= bare:
        return Judgement(FALSE, numbers, f"on recall it is not faster, {long}", context)
    says = {name: MORE if _lost(cost) else cost.says for name, cost in cells.items()}
    if all(word == MORE for word in says.values()):
        return Judgement(HOLDS, numbers, "on recall and in every language model tried", context)
    phrases = {MORE: "in a language model with", SAME: "no difference with", LESS: "slower with",
               OPEN: "not decided at this size with"}  # fmt: skip
    parts = [
        f"{phrase} {', '.join(names)}"
        for word, phrase in phrases.items()
        if (names := [name for name, said in says.items() if said == word])
    ]
    return Judgement(CONDITION, numbers, f"on recall {long}; {'; '.join(parts)}", context)


def commits_early(evidence: Evidence) -> Judgement:
    """Generalising worse is a higher loss on unseen text at the same loss on seen text; there must be a gap to speak of it."""
    rows = pick(evidence["memorise"], init="unit")
    difference = charlm.at_equal_fit(rows)
    summary = {row["rule"]: row for row in charlm.summary(rows)}
    early, gaps = ({name: row[column] for name, row in summary.items()} for column in ("early_entropy", "gap"))
    numbers = {
        "entropy of the weights early in training, without the scale": early["none"],
        "entropy of the weights early in training, with 1/√d_k": early["sqrt_dk"],
        "held-out loss at equal training loss, without the scale minus with it, nats": difference.mean,
        "held-out minus training loss at the end, with 1/√d_k, nats": gaps["sqrt_dk"],
    }
    context = {
        "half-width of the 95 % interval of that difference": (difference.high - difference.low) / 2,
        "held-out minus training loss at the end, without the scale, nats": gaps["none"],
    }
    first = rows[0]
    epochs = first["steps"] * first["batch"] * first["length"] / first["text"]
    rates = ", ".join(f"{lr:g}" for lr in sorted({row["lr"] for row in rows}))
    where = f"{first['text']} characters read {epochs:.0f} times, lr {rates}"
    if early["none"] >= early["sqrt_dk"]:
        return Judgement(FALSE, numbers, f"attention is not sharper early in training ({where})", context)
    if not gaps["sqrt_dk"] > NOTHING:
        return Judgement(UNDECIDED, numbers, f"{where}: the losses on seen and unseen text do not differ yet", context)
    if difference.says == OPEN:
        half = (difference.high - difference.low) / 2
        words = (
            f"it commits early; an interval of ±{half:.2f} nats does not decide whether it generalises worse ({where})"
        )
        return Judgement(UNDECIDED, numbers, words, context)
    if difference.says == MORE:
        return Judgement(HOLDS, numbers, f"at equal training loss, {where}", context)
    words = f"it does commit early, but at equal training loss the loss on unseen text is no higher ({where})"
    return Judgement(FALSE, numbers, words, context)


def limits_depth(evidence: Evidence) -> Judgement:
    """Every depth must have learned more than pairs of characters; the growth is that of the line through all depths."""
    rows = evidence["depth"]
    costs, more = depth.costs(rows), depth.growth(rows)
    deepest = costs[max(costs)]
    past = {layers: charlm.past_pairs(pick(rows, layers=layers)) for layers in costs}
    label = "held-out loss without the scale minus that with it, nats"
    numbers = {f"{label}, {plural(layers, 'layer')}": cost.mean for layers, cost in costs.items()}
    numbers["growth of that from the shallowest to the deepest, nats"] = more.mean
    numbers["nats below counting pairs of characters, the least trained depth"] = min(past.values())
    context = {"half-width of the 95 % interval of the growth": (more.high - more.low) / 2}
    context["half-width of the 95 % interval of the deepest model's"] = (deepest.high - deepest.low) / 2
    first = rows[0]
    size = f"width {first['d_model']}, {first['steps']} steps of {first['batch']} windows"
    if not min(past.values()) > 0:
        words = f"at this size some depth has not learned more than pairs of characters ({size})"
        return Judgement(UNDECIDED, numbers, words, context)
    if _lost(deepest) and not any(_lost(cost) for cost in costs.values() if cost is not deepest):
        return Judgement(HOLDS, numbers, f"the deepest diverges without a scale ({size})", context)
    if deepest.says in (SAME, LESS):
        return Judgement(FALSE, numbers, f"leaving it out costs the deepest model nothing ({size})", context)
    if deepest.says == MORE and more.says == MORE:
        return Judgement(HOLDS, numbers, size, context)
    if deepest.says == MORE and more.says in (SAME, LESS):
        less = "and less in deeper models" if more.says == LESS else "but not more in deeper models"
        return Judgement(CONDITION, numbers, f"it costs something at every depth, {less} ({size})", context)
    return Judgement(UNDECIDED, numbers, f"the intervals are too wide at this size ({size})", context)
