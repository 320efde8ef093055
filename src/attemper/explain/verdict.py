"""The last sentence: what these numbers, and not the textbook's, say about the two lanes."""

from __future__ import annotations

from collections.abc import Mapping

from .steps import LaneInfo, measured

ONE_HOT = 0.9
"""From this mean top weight on, attention counts as nearly one-hot."""
NARROW = 0.5
"""Below this evenness (entropy as a share of its maximum), it counts as narrow."""
FLAT = 0.99
"""From this evenness on, it counts as flat."""

LOOKS = {
    "one-hot": "is nearly one-hot",
    "narrow": "gathers on few keys without being one-hot",
    "shared": "is shared",
    "flat": "is nearly even",
}

Signs = Mapping[str, float]


def conclude(count: int, distinct: int, lanes: tuple[LaneInfo, LaneInfo], signs: tuple[Signs, Signs]) -> str:
    """One sentence, from the means over rows and heads; the chosen lane comes first in both pairs."""
    if count == 1:
        return "One word sees one key, itself: its weight is 1 whatever the scale. Try two words or more."
    if distinct == 1:
        return (
            f"All {count:,} words are the same, and so are their keys: every weight is 1/{count:,} whatever the scale."
        )
    chosen, other = (lane.label for lane in lanes)
    keys, other_keys = (measured(sign["effective_keys"]) for sign in signs)
    clause = _clause(state(signs[0]), state(signs[1]))
    follows = clause.format(chosen=chosen, other=other, keys=keys, other_keys=other_keys, count=f"{count:,}")
    return f"With {other}, attention {_told(signs[1])}; with {chosen}, it {_told(signs[0])}: {follows}"


def state(signs: Signs) -> str:
    """one-hot, narrow, shared or flat."""
    if signs["top_weight"] >= ONE_HOT:
        return "one-hot"
    if signs["evenness"] >= FLAT:
        return "flat"
    return "narrow" if signs["evenness"] < NARROW else "shared"


def _told(signs: Signs) -> str:
    facts = f"variance {measured(signs['variance'])}, top weight {measured(signs['top_weight'])}"
    return f"{LOOKS[state(signs)]} ({facts})"


def _clause(chosen: str, other: str) -> str:
    sharp = ("one-hot", "narrow")
    if chosen == "flat":
        return "hardly any of the {count} keys is preferred, and " + (
            "neither scale tells them apart." if other == "flat" else "{chosen} is what flattens them."
        )
    if other == "flat":
        return "{chosen} lets a word prefer some of the {count} keys, and {other} hardly does."
    if chosen == other == "shared":
        return (
            "nothing saturates here, and {chosen} only moves the effective keys from {other_keys} to {keys} of {count}."
        )
    if chosen in sharp and other in sharp:
        return "both leave few of the {count} keys in play, {other_keys} and {keys}."
    if other in sharp:
        return "it is {chosen} that keeps {keys} of {count} keys in play instead of {other_keys}."
    return "{chosen} leaves {keys} of {count} keys in play, where {other} keeps {other_keys}."
