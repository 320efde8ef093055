"""Verdict: which fault a measured scale is, if any."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...heads import SATURABLE_KEYS
from .evidence import CLOSE, WEIGHTS_CLOSE, Evidence, close, inverse_of, limit, rule_of, widths
from .sentences import SENTENCES, fine

REMARKS = ("shrunk", "unscaled", "odd")
"""Of the faults, those that are only worth a remark: the layer's verdict stays "ok"."""


@dataclass(frozen=True)
class Judged:
    """A rule's name or None, a fault's name or None, what to say and what to do."""

    rule: str | None
    fault: str | None
    after_softmax: float | None
    says: str
    todo: str


def judge(seen: Evidence) -> Judged:
    """Name the rule and the fault of one layer."""
    rule, after = rule_of(seen), _after_softmax(seen)
    fault = _fault(seen, rule, after)
    if fault is None:
        return Judged(rule, None, after, fine(seen, rule, after), "")
    says, todo = SENTENCES[fault](seen, after)
    return Judged(rule, fault, after, says, todo)


def _fault(seen: Evidence, rule: str | None, after: float | None) -> str | None:
    number, root = seen.scale, seen.head_dim**-0.5
    if after is not None and seen.head_dim > 1:
        named = [root, 1 / seen.head_dim, *(width**-0.5 for width in widths(seen))]
        averaged = rule in ("sqrt_dk", "softcap", "qk_norm") and close(after, 1 / seen.heads)
        if any(close(after, one, WEIGHTS_CLOSE) for one in named):
            if not averaged:
                return "after_softmax"
            return None if seen.by_design else "shrunk"
    if number is None or seen.head_dim == 1:
        return None
    intended = seen.declared is not None and seen.declared.firm and close(number, seen.declared.number)
    if intended:
        return None
    if _twice(seen, root):
        return "twice"
    if rule == "sqrt_dmodel":
        return "sqrt_dmodel"
    if _disregarded(seen) or _unheard(seen):
        return "ignored"
    if number < 0 and not seen.by_design and (seen.varies is None or seen.varies[1] < 0):
        return "negative"
    if _inverted(seen):
        return "multiplied"
    unscaled = number > 1 - CLOSE and seen.norms is None and seen.softcap is None
    if not unscaled or seen.by_design:
        return None
    many = seen.logit_std is not None and (seen.keys or 0) >= SATURABLE_KEYS
    if many and (seen.logit_std or 0.0) > limit(seen.keys or 0):
        return "uncontrolled"
    silent = seen.declared is None and seen.followed and seen.varies is None
    return "unscaled" if silent and close(number, 1.0) else None


def _twice(seen: Evidence, root: float) -> bool:
    """Two of the factors are 1/√d_k each; or the roots on q and k are one, and the call adds another."""
    whole = [number for number in seen.factors if close(number, root)]
    roots = [number for number in seen.factors if close(number, math.sqrt(root))]
    return seen.head_dim > 1 and len(whole) + len(roots) // 2 >= 2


def _inverted(seen: Evidence) -> bool:
    """√d_k or d_k, which somebody multiplied by where they meant to divide; behind a norm that is how nGPT has it."""
    if seen.scale is None or seen.norms is not None or seen.varies is not None or seen.by_design or not seen.followed:
        return False
    return inverse_of(seen) is not None


def _disregarded(seen: Evidence) -> bool:
    """Whether a scale that was declared has no part in what was applied; told only where all of it is known."""
    if seen.declared is None or not seen.followed or seen.varies is not None:
        return False
    return seen.declared.firm or not (seen.declared.heeded or seen.norms)


def _unheard(seen: Evidence) -> bool:
    """Whether the interface was told a scale that nothing on the path applied."""
    if seen.told is None or seen.argument is None or seen.applied is None:
        return False
    return not any(close(seen.told, other) for other in (seen.argument, seen.scale or 0.0, *seen.factors))


def _after_softmax(seen: Evidence) -> float | None:
    """What all weights of a row add up to, where it is one number and not 1; or what the output was multiplied by."""
    if seen.row_sums is not None:
        low, high = seen.row_sums
        if close(low, high, WEIGHTS_CLOSE) and not close((low + high) / 2, 1.0, WEIGHTS_CLOSE):
            return (low + high) / 2
    bare = seen.applied is not None and close(seen.applied, 1.0) and seen.norms is None
    wanted = [seen.head_dim**-0.5, *(width**-0.5 for width in widths(seen))]
    for number in seen.output_factors if bare and not seen.by_design else ():
        if any(close(number, one) for one in wanted):
            return number
    return None
