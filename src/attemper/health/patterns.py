"""Findings about where a head puts its weight: a sink, a neighbour, one key, all keys alike, the same keys in every text."""

from __future__ import annotations

from .finding import Finding, HeadRow, finding_of, number
from .thresholds import COLLAPSED, CROWD, DEAD, FEW_KEYS, FLAT, POSITIONAL, SATURATED, SINK, Threshold


def patterns(row: HeadRow) -> set[str]:
    """The names of the findings of a head; if one explains another, only the first."""
    sink, neighbour, distance = (number(row, name) for name in ("sink_weight", "neighbour_weight", "text_distance"))
    evenness, share, spread = (number(row, name) for name in ("evenness", "saturated", "effective_keys"))
    without = number(row, "evenness_without_sinks")
    found = set()
    if sink is not None and sink > SINK.value:
        found.add("sink")
    if neighbour is not None and neighbour > POSITIONAL.value:
        found.add("positional")
    if evenness is not None and evenness > FLAT.value and spread is not None and spread >= FEW_KEYS:
        return {*found, "flat"}
    if found:  # such a head is sharp by design, and the same in every text
        return found
    if share is not None:  # None: no row saw enough keys
        if without is not None and without < COLLAPSED.value:
            found.add("collapsed")
        elif share > SATURATED.value:
            found.add("saturated")
    if distance is not None and distance < DEAD.value:
        found.add("dead")
    return found


def _saturated(row: HeadRow, crowd: bool) -> Finding:
    share = row["saturated"]
    known = number(row, "sink_weight") is not None
    says = f"{share:.0%} of its rows put over 99 % of their weight on one key: attention is saturated"
    if not known:
        return finding_of(
            row, "saturated", "note", share, SATURATED, f"{says}. It may be a sink or a positional head.", _SCAN
        )
    return _crowded(row, "saturated", share, SATURATED, says, crowd)


def _collapsed(row: HeadRow, crowd: bool) -> Finding:
    value = row["evenness_without_sinks"]
    says = f"Apart from first and special tokens, nearly all of its weight is on one key: evenness {value:.3f} of 1"
    return _crowded(row, "collapsed", value, COLLAPSED, says, crowd)


def _flat(row: HeadRow, crowd: bool) -> Finding:
    value = row["evenness"]
    says = f"Its weight is spread evenly over all keys (evenness {value:.3f} of 1): it averages and selects nothing"
    return _crowded(row, "flat", value, FLAT, says, crowd)


_CROWD_TODO = {
    "saturated": "Check the scale: logits are too large. Lower the learning rate or add QK-norm.",
    "collapsed": "Check the scale: logits are too large. Lower the learning rate or add QK-norm.",
    "flat": "Check the scale: logits are too small, or the layer has not learned yet. A repeated word does this too.",
}
_SCAN = "Run attemper scan on the model with a text: it knows the tokens, so it can distinguish these."


def _crowded(row: HeadRow, name: str, value: float, threshold: Threshold, says: str, crowd: bool) -> Finding:
    if crowd:
        says += "; the same holds for at least half of this layer's heads."
        return finding_of(row, name, CROWD.level, value, threshold, says, _CROWD_TODO[name])
    return finding_of(
        row, name, threshold.level, value, threshold, f"{says}.", "Nothing to do: a single head may specialise."
    )


def _sink(row: HeadRow, crowd: bool) -> Finding:
    weight, token = row["sink_weight"], row.get("sink_token")
    on = "the first token" if row.get("sink_position") == 0 else "one token" if token is None else ""
    on = f"{on}{f' {token!r}' if token else ''}".strip()
    says = f"{weight:.0%} of its weight is on {on}{_always(row)}: an attention sink, as in most trained models."
    return finding_of(row, "sink", SINK.level, weight, SINK, says, "Nothing to do.")


def _positional(row: HeadRow, crowd: bool) -> Finding:
    weight = row["neighbour_weight"]
    which = {-1: "the token before", 0: "the token itself", 1: "the token after"}[row["neighbour_offset"]]
    says = f"{weight:.0%} of its weight is on {which}{_always(row)}: a positional head, sharp by design."
    return finding_of(row, "positional", POSITIONAL.level, weight, POSITIONAL, says, "Nothing to do.")


def _dead(row: HeadRow, crowd: bool) -> Finding:
    distance = row["text_distance"]
    says = (
        f"Its weights are the same for every text (they differ by {distance:.3f} of 1): it depends on position alone, or has no "
        "function."
    )
    return finding_of(
        row, "dead", DEAD.level, distance, DEAD, says, "Try more texts; if it stays the same, the head can be pruned."
    )


TELL = {
    "sink": _sink,
    "positional": _positional,
    "saturated": _saturated,
    "collapsed": _collapsed,
    "flat": _flat,
    "dead": _dead,
}


def _always(row: HeadRow) -> str:
    distance = number(row, "text_distance")
    return ", in every text" if distance is not None and distance < DEAD.value else ""
