"""Findings about a head: large logits, scores stored in half precision, and where it puts its weight."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .finding import Finding, HeadRow, finding_of, number, past
from .thresholds import (
    COLLAPSED,
    CROWD,
    DEAD,
    FEW_KEYS,
    FLAT,
    OVERFLOW,
    PEAK,
    POSITIONAL,
    ROUNDING,
    SATURATED,
    SINK,
    STORED,
    Threshold,
)

PLACES = {
    -2: "the token two places before",
    -1: "the token before",
    0: "the token itself",
    1: "the token after",
    2: "the token two places after",
}
_SHARP_TODO = (
    "Check the scale. If it is trained on, clip this head (attemper.qk_clip), or add QK-norm and lower the rate."
)
WIDEN = "Use torch's scaled_dot_product_attention, which keeps scores in float32, or compute q·kᵀ in float32."


def high(row: HeadRow, info: HeadRow, names: set[str], finished: bool = False) -> Finding | None:
    """The finding about the largest logit, if it is above a threshold; a note where something explains it.

    In training a large logit warns of larger ones. Of a finished model it says what it does to the weights, and in which dtypes.
    """
    score, mean, cap = number(row, "score_peak"), number(row, "mean"), number(info, "softcap")
    peak = number(row, "peak") if score is None else score
    rung = past(PEAK, peak)
    if rung is None or peak is None:
        return None
    what = "logit" if score is None else "scale · q·k, without the numbers that are added to it,"
    message, why = f"The largest {what} is {peak:.4g}, above {rung.value:g}", None
    if info.get("biased") and score is None:
        why = "it may hold numbers that are added to the scores, and the largest q·k without them is not known"
    elif cap is not None and peak <= cap:  # some kernels ignore a cap that is declared
        why = f"it stays below the cap of {cap:g}"
    elif rung.level == "warn" and "positional" in names:
        why = "this head attends to a neighbouring token and is sharp by design"
    elif rung.level in ("warn", "error") and mean is not None and peak - mean <= PEAK[-1].value:
        why = f"all its logits are large ({mean:.4g} on average), and softmax ignores a common shift"
    level, advice = (rung.level, rung.advice) if why is None else ("note", PEAK[-1].advice)
    if finished and why is None and rung.level in ("warn", "error"):
        return _of_finished(row, rung, peak, message, names)
    return finding_of(row, "peak", level, peak, rung, f"{message}: {why or rung.why}.", advice)


def _of_finished(row: HeadRow, rung: Threshold, peak: float, message: str, names: set[str]) -> Finding:
    """What a large logit is in a model that is no longer trained: published ones have logits up to 382 and work."""
    share = number(row, "saturated")
    if share is None or names & {"saturated", "collapsed"}:
        said = (
            "its rows see too few keys to say whether it is saturated" if share is None else "and the head is saturated"
        )
        return finding_of(row, "peak", rung.level, peak, rung, f"{message}, {said}.", _SHARP_TODO)
    sharp = "sharp by design" if names & {"sink", "positional"} else "not saturated"
    bits = STORED["bfloat16"][1]
    moved = math.expm1(2.0 ** (math.floor(math.log2(peak)) - bits))
    message += f", in a head that is {sharp}: {share:.0%} of its rows put over 99 % of their weight on one key. "
    message += f"Scores stored in bfloat16 would be rounded so coarsely that a weight moves by {moved:.0%}."
    advice = "Nothing to do in float32; in half precision keep scores in float32, as fused kernels do."
    return finding_of(row, "peak", "note", peak, rung, message, advice)


def coarse(row: HeadRow, info: HeadRow, names: set[str]) -> Finding | None:
    """Overflow and rounding of scores that a model stores in half precision. Fused kernels keep float32."""
    peak, dtype = number(row, "peak"), str(info.get("dtype", ""))
    if info.get("route") != "hand-written" or dtype not in STORED or peak is None or peak <= 0:
        return None
    most, bits = STORED[dtype]
    scale = info.get("scale")
    factor = number(scale, "applied") if isinstance(scale, Mapping) else scale
    raw = peak / factor if factor and 0 < factor < 1 else peak  # the product is stored before it is scaled
    near = past(OVERFLOW, raw / most)
    if near is not None:
        message = f"Scores reach {raw:.4g}, and {dtype} ends at {most:g}: slightly larger scores become infinity, and then NaN."
        return finding_of(
            row, "overflow", near.level, raw, Threshold(near.value * most, "", near.source), message, WIDEN
        )
    moved = math.expm1(2.0 ** (math.floor(math.log2(peak)) - bits))
    rung = past(ROUNDING, moved)
    if rung is None:
        return None
    level = "note" if "positional" in names else rung.level
    message = f"Scores up to {peak:.4g} are stored in {dtype}, whose rounding alone moves a weight by {moved:.0%}."
    return finding_of(row, "overflow", level, moved, rung, message, WIDEN)


def patterns(row: HeadRow) -> set[str]:
    """The names of a head's findings, without those that another one explains."""
    sink, neighbour, distance = (number(row, name) for name in ("sink_weight", "neighbour_weight", "text_distance"))
    evenness, share, spread = (number(row, name) for name in ("evenness", "saturated", "effective_keys"))
    without = number(row, "evenness_without_sinks")
    names = set()
    if sink is not None and sink > SINK.value:
        names.add("sink")
    if neighbour is not None and neighbour > POSITIONAL.value:
        names.add("positional")
    if evenness is not None and evenness > FLAT.value and spread is not None and spread >= FEW_KEYS:
        return {*names, "flat"}
    if names:  # such a head is sharp by design, and the same in every text
        return names
    if share is not None:  # None: no row saw enough keys
        if without is not None and without < COLLAPSED.value:
            names.add("collapsed")
        elif share > SATURATED.value:
            names.add("saturated")
    if distance is not None and distance < DEAD.value:
        names.add("dead")
    return names


def _saturated(row: HeadRow, crowd: bool) -> Finding:
    share = row["saturated"]
    known = number(row, "sink_weight") is not None
    message = f"{share:.0%} of its rows put over 99 % of their weight on one key: attention is saturated"
    if not known:
        return finding_of(
            row, "saturated", "note", share, SATURATED, f"{message}. It may be a sink or a positional head.", _SCAN
        )
    return _crowded(row, "saturated", share, SATURATED, message, crowd)


def _collapsed(row: HeadRow, crowd: bool) -> Finding:
    value = row["evenness_without_sinks"]
    message = f"Apart from first and special tokens, nearly all of its weight is on one key: evenness {value:.3f} of 1"
    return _crowded(row, "collapsed", value, COLLAPSED, message, crowd)


def _flat(row: HeadRow, crowd: bool) -> Finding:
    value = row["evenness"]
    message = f"Its weight is spread evenly over all keys (evenness {value:.3f} of 1): it averages and selects nothing"
    return _crowded(row, "flat", value, FLAT, message, crowd)


_CROWD_TODO = {
    "saturated": "Check the scale: logits are too large. Lower the learning rate or add QK-norm.",
    "collapsed": "Check the scale: logits are too large. Lower the learning rate or add QK-norm.",
    "flat": "Check the scale: logits are too small, or the layer has not learned yet. A repeated word does this too.",
}
_SCAN = "Run attemper scan on the model with a text: it knows the tokens, so it can distinguish these."


def _crowded(row: HeadRow, name: str, value: float, threshold: Threshold, message: str, crowd: bool) -> Finding:
    if crowd:
        message += "; the same holds for at least half of this layer's heads."
        return finding_of(row, name, CROWD.level, value, threshold, message, _CROWD_TODO[name])
    advice = "Nothing to do: a single head may specialise" + (
        ", and before training all heads are flat." if name == "flat" else "."
    )
    return finding_of(row, name, threshold.level, value, threshold, f"{message}.", advice)


def _sink(row: HeadRow, crowd: bool) -> Finding:
    weight, token = row["sink_weight"], row.get("sink_token")
    on = "the first token" if row.get("sink_position") == 0 else "one token" if token is None else ""
    on = f"{on}{f' {token!r}' if token else ''}".strip()
    message = f"{weight:.0%} of its weight is on {on}{_always(row)}: an attention sink, as in most trained models."
    return finding_of(row, "sink", SINK.level, weight, SINK, message, "Nothing to do.")


def _positional(row: HeadRow, crowd: bool) -> Finding:
    weight = row["neighbour_weight"]
    which = PLACES[row["neighbour_offset"]]
    message = f"{weight:.0%} of its weight is on {which}{_always(row)}: a positional head, sharp by design."
    return finding_of(row, "positional", POSITIONAL.level, weight, POSITIONAL, message, "Nothing to do.")


def _dead(row: HeadRow, crowd: bool) -> Finding:
    distance = row["text_distance"]
    message = (
        f"Its weights are the same for every text (they differ by {distance:.3f} of 1): it depends on position alone, or has no "
        "function."
    )
    return finding_of(
        row,
        "dead",
        DEAD.level,
        distance,
        DEAD,
        message,
        "Try more texts; if it stays the same, the head can be pruned.",
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
