"""Findings about what a head does with its weight: rests, looks at a neighbour, chooses, averages, ignores the text."""

from __future__ import annotations

from .finding import Finding, Row, made, number
from .thresholds import COLLAPSED, CROWD, DEAD, FEW_KEYS, FLAT, POSITIONAL, SATURATED, SINK, Threshold


def patterns(row: Row) -> set[str]:
    """What a head's weights look like; where one thing explains another, only the first is said."""
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
    if found:  # sharp on purpose, and so the same whatever the text
        return found
    if share is not None:  # None: no row saw enough keys to tell
        if without is not None and without < COLLAPSED.value:
            found.add("collapsed")
        elif share > SATURATED.value:
            found.add("saturated")
    if distance is not None and distance < DEAD.value:
        found.add("dead")
    return found


def _saturated(row: Row, crowd: bool) -> Finding:
    share = row["saturated"]
    known = number(row, "sink_weight") is not None
    says = f"{share:.0%} of its rows put over 99 % of their weight on one key: they choose, they no longer mix"
    if not known:
        return made(
            row, "saturated", "note", share, SATURATED, f"{says}. It may be a sink or a positional head.", _SCAN
        )
    return _crowded(row, "saturated", share, SATURATED, says, crowd)


def _collapsed(row: Row, crowd: bool) -> Finding:
    value = row["evenness_without_sinks"]
    says = f"Even without the first and special tokens its weight lies on one key: evenness {value:.3f} of 1"
    return _crowded(row, "collapsed", value, COLLAPSED, says, crowd)


def _flat(row: Row, crowd: bool) -> Finding:
    value = row["evenness"]
    says = f"It spreads its weight evenly over all keys (evenness {value:.3f} of 1): it averages, it does not choose"
    return _crowded(row, "flat", value, FLAT, says, crowd)


_CROWD_TODO = {
    "saturated": "Check the scale: logits are too large. Lower the learning rate or add QK-norm.",
    "collapsed": "Check the scale: logits are too large. Lower the learning rate or add QK-norm.",
    "flat": "Check the scale: logits are too small, or the layer has not learned yet. Or the text is one word repeated.",
}
_SCAN = "Run attemper scan on the model with a text: it knows the tokens and tells these apart."


def _crowded(row: Row, name: str, value: float, threshold: Threshold, says: str, crowd: bool) -> Finding:
    if crowd:
        says += "; so does half of this layer or more."
        return made(row, name, CROWD.level, value, threshold, says, _CROWD_TODO[name])
    return made(row, name, threshold.level, value, threshold, f"{says}.", "Nothing to do for one head: a specialist.")


def _sink(row: Row, crowd: bool) -> Finding:
    weight, token = row["sink_weight"], row.get("sink_token")
    on = "the first token" if row.get("sink_position") == 0 else "one token" if token is None else ""
    on = f"{on}{f' {token!r}' if token else ''}".strip()
    says = f"It rests on {on}, with {weight:.0%} of its weight{_always(row)}: a sink, as in most trained models."
    return made(row, "sink", SINK.level, weight, SINK, says, "Nothing to do.")


def _positional(row: Row, crowd: bool) -> Finding:
    weight = row["neighbour_weight"]
    which = {-1: "the token before", 0: "the token itself", 1: "the token after"}[row["neighbour_offset"]]
    says = f"It looks at {which}, with {weight:.0%} of its weight{_always(row)}: a positional head, sharp on purpose."
    return made(row, "positional", POSITIONAL.level, weight, POSITIONAL, says, "Nothing to do.")


def _dead(row: Row, crowd: bool) -> Finding:
    distance = row["text_distance"]
    says = (
        f"Its weights are the same whatever the text (they differ by {distance:.3f} of 1): it goes by position alone, or does "
        "nothing."
    )
    return made(row, "dead", DEAD.level, distance, DEAD, says, "Try more texts; a head that stays so can be pruned.")


TELL = {
    "sink": _sink,
    "positional": _positional,
    "saturated": _saturated,
    "collapsed": _collapsed,
    "flat": _flat,
    "dead": _dead,
}


def _always(row: Row) -> str:
    distance = number(row, "text_distance")
    return ", whatever the text" if distance is not None and distance < DEAD.value else ""
