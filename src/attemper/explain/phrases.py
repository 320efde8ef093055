"""Phrases of the scale step: a lane's formula with its numbers, what its rule is for, what theory expects, what bounds it."""

from __future__ import annotations

from .flow import Computed
from .lanes import Lane
from .settings import Settings
from .steps import short


def scaled(lane: Lane, settings: Settings) -> str:
    """A lane's formula with its numbers in it; S is the matrix of the step before."""
    score = "S" if lane.info.score == settings.score else "cos(q, k)"
    product = score if lane.info.scale == 1 else f"{short(lane.info.scale)} {score}"
    if lane.softcap is None:
        return f"Z = {product}"
    return f"Z = {short(lane.softcap)} tanh({product} / {short(lane.softcap)})"


def rule(settings: Settings) -> str:
    """What the table says of the chosen rule."""
    if settings.score == "additive":
        return ""
    chosen = settings.rule
    facts = {"layer": settings.layer, "keys": settings.count}
    here = [f"{name} = {facts[name]:,}" for name in chosen.needs if name in facts]
    if chosen.gain is not None:
        here.append(f"the learned number is {short(chosen.gain)}, where it starts")
    return f"{chosen.name}: {chosen.says}" + (f" Here {', '.join(here)}." if here else "")


def theory(settings: Settings, found: Computed) -> str:
    """Where the expected variance comes from."""
    parts = {"cosine": "scale²/d_k", "dot": "scale²·d_k"}
    kinds = dict.fromkeys(parts[lane.info.score] for lane in found.lanes if lane.variance is not None)
    return "" if not kinds else f"{' and '.join(kinds)}; ± for {len(set(settings.words)):,} words"


def bounds(found: Computed) -> str:
    """The most a logit can be."""
    known = [f"{lane.info.label} ≤ {short(lane.info.bound)}" for lane in found.lanes if lane.info.bound is not None]
    return f"always {', '.join(known)}" if known else "nothing bounds it"
