"""Verdict: which rule a measured scale is, which fault it is, and the sentences that say so. Plain numbers in, words out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..heads import SATURABLE_KEYS
from ..scale import RULES
from .declared import Declared

CLOSE = 5e-3
"""Within this a scale is a rule's: wider than bfloat16 rounds a regression, narrower than any two rules at real sizes."""

WEIGHTS_CLOSE = 2e-2
"""The same for the sum of a row of weights, each of which bfloat16 rounds by itself."""

FAULTS = {
    "after_softmax": "scaled after the softmax",
    "twice": "scaled twice",
    "sqrt_dmodel": "√d_model for √d_k",
    "ignored": "a setting that the path ignores",
    "uncontrolled": "no scale, and logits too wide for a softmax",
}
"""The faults, by name."""


@dataclass(frozen=True)
class Evidence:
    """What was measured of one layer."""

    head_dim: int
    heads: int
    applied: float | None
    factors: tuple[float, ...] = ()  # those that count
    varies: tuple[float, float] | None = None
    learned: bool = False
    turn: float = 1.0  # the part of it that a rotary embedding adds by stretching (YaRN)
    log_n: bool = False  # whether it grows with the logarithm of the keys a row sees
    norms: tuple[float, float] | None = None
    softcap: float | None = None
    width: int | None = None  # the model's, where it is named
    layer: int | None = None
    layered: bool = False  # whether the model's layers follow 1/((layer + 1) √d_k) together
    declared: Declared | None = None
    told: float | None = None  # what the attention interface was told
    argument: float | None = None  # what the call inside it then applied
    row_sums: tuple[float, float] | None = None
    output_factors: tuple[float, ...] = ()
    by_design: bool = False  # whether the module's authors published it so
    followed: bool = True
    logit_std: float | None = None
    keys: float | None = None  # that a row sees, on average

    @property
    def scale(self) -> float | None:
        """What was applied but for the rotary embedding: what a rule or a setting speaks of."""
        return None if self.applied is None else self.applied / self.turn


@dataclass(frozen=True)
class Judged:
    """A rule's name or None, a fault's name or None, what to say and what to do."""

    rule: str | None
    fault: str | None
    after_softmax: float | None
    says: str
    todo: str


def close(a: float, b: float, within: float = CLOSE) -> bool:
    return abs(a - b) <= within * max(abs(a), abs(b))


def rule_of(seen: Evidence) -> str | None:
    """The name in ``attemper.RULES`` that a measured scale matches."""
    number = seen.scale
    if number is None:
        return None
    if seen.declared is not None and seen.declared.rule is not None and close(number, seen.declared.number):
        return seen.declared.rule
    if seen.norms is not None:
        return "qk_norm"
    if seen.log_n:
        return "log_n"
    if seen.varies is not None:
        return "learned" if seen.learned else None
    if seen.layered and seen.layer and close(number, _rule("layer", seen)):
        return "layer"
    for name in ("sqrt_dk", "none", "dk"):
        if close(number, _rule(name, seen)):
            return "softcap" if name == "sqrt_dk" and seen.softcap else name
    if any(close(number, width**-0.5) for width in _widths(seen)):
        return "sqrt_dmodel"
    return None


def judge(seen: Evidence) -> Judged:
    """Name the rule and the fault of one layer."""
    rule, after = rule_of(seen), _after_softmax(seen)
    fault = _fault(seen, rule, after)
    if fault is None:
        return Judged(rule, None, after, _fine(seen, rule, after), "")
    says, todo = _SENTENCES[fault](seen, after)
    return Judged(rule, fault, after, says, todo)


def _fault(seen: Evidence, rule: str | None, after: float | None) -> str | None:
    number, root = seen.scale, seen.head_dim**-0.5
    if after is not None and seen.head_dim > 1:
        named = [root, 1 / seen.head_dim, *(width**-0.5 for width in _widths(seen))]
        averaged = rule in ("sqrt_dk", "softcap", "qk_norm") and close(after, 1 / seen.heads)
        if any(close(after, one, WEIGHTS_CLOSE) for one in named) and not averaged:
            return "after_softmax"
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
    unscaled = number > 1 - CLOSE and seen.norms is None and seen.softcap is None
    if unscaled and not seen.by_design and seen.logit_std is not None and (seen.keys or 0) >= SATURABLE_KEYS:
        return "uncontrolled" if seen.logit_std > limit(seen.keys or 0) else None
    return None


def limit(keys: float) -> float:
    """The logit std at which a softmax over so many random logits freezes: √(2 ln n)."""
    return math.sqrt(2 * math.log(max(keys, 1.0)))


def _twice(seen: Evidence, root: float) -> bool:
    """Two of the factors are 1/√d_k each; or the roots on q and k are one, and the call adds another."""
    whole = [number for number in seen.factors if close(number, root)]
    roots = [number for number in seen.factors if close(number, math.sqrt(root))]
    return seen.head_dim > 1 and len(whole) + len(roots) // 2 >= 2


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
    wanted = [seen.head_dim**-0.5, *(width**-0.5 for width in _widths(seen))]
    for number in seen.output_factors if bare and not seen.by_design else ():
        if any(close(number, one) for one in wanted):
            return number
    return None


def _widths(seen: Evidence) -> list[int]:
    named = [seen.heads * seen.head_dim, seen.width]
    return [width for width in named if width is not None and width > seen.head_dim]


def _rule(name: str, seen: Evidence) -> float:
    return float(RULES[name].scale(head_dim=seen.head_dim, heads=seen.heads, layer=seen.layer))


def _fine(seen: Evidence, rule: str | None, after: float | None) -> str:
    number = seen.applied
    if number is None:
        return "Its scale could not be read: the scores are mixed or bent before the softmax."
    shown = f"{number:.4g}" if seen.varies is None else f"{seen.varies[0]:.4g} to {seen.varies[1]:.4g}"
    words = f"q·k is multiplied by {shown}"
    if seen.norms is not None:
        gain = number * seen.norms[0] * seen.norms[1] * seen.head_dim**0.5
        words = f"q and k are normalised, then multiplied by {shown}: g √d_k cos(q, k) with g = {gain:.3g}"
    elif rule is not None:
        words += f": {RULES[rule].formula}"
    else:
        words += ", which is no rule by name"
    if seen.declared is not None and (seen.declared.firm or "." in seen.declared.by):
        formula = f" ({seen.declared.says})" if seen.declared.says and seen.declared.says != "1/√d_k" else ""
        words += f", as {seen.declared.by} says{formula}" if close(number / seen.turn, seen.declared.number) else ""
    if seen.turn != 1.0:
        words += f"; {seen.turn:.4g} of it is the rotary embedding's, which stretches q and k (YaRN)"
    if seen.softcap is not None:
        words += f"; then capped at {seen.softcap:g}"
    if after is not None:
        words += f"; the weights of a row add up to {after:.4g}"
    if not seen.followed:
        words += "; what happened to q and k between their projections and the call could not be followed"
    return words + "."


def _says_twice(seen: Evidence, after: float | None) -> tuple[str, str]:
    d = seen.head_dim
    return (
        f"Scaled twice: 1/√d_k = {d**-0.5:.4g} is applied two times on the way, so q·k is multiplied by {seen.applied:.4g} and "
        "attention is far flatter than meant.",
        "Drop one of the two: pass scale=1.0 to scaled_dot_product_attention, or do not scale q before it. If 1/d_k is meant "
        "(µP), write it as one number.",
    )


def _says_sqrt_dmodel(seen: Evidence, after: float | None) -> tuple[str, str]:
    d = seen.head_dim
    return (
        f"√d_model for √d_k: q·k is multiplied by {seen.applied:.4g}, but each head sums over d_k = {d} numbers, which asks for "
        f"{d**-0.5:.4g}. Logits are {d**-0.5 / (seen.applied or 1):.3g} times too small, and attention too flat.",
        "Divide by the square root of the head's width, head_dim ** 0.5. Weights that were trained like this need it as it is: "
        "then say so beside it.",
    )


def _says_ignored(seen: Evidence, after: float | None) -> tuple[str, str]:
    if seen.declared is not None and (seen.declared.firm or not seen.declared.heeded):
        formula = f"{seen.declared.says} = " if seen.declared.says else ""
        source, wanted = seen.declared.by, f"{formula}{seen.declared.number:.4g}"
    else:
        source, wanted = "the attention interface was told", f"{seen.told:.4g}"
    rule = rule_of(seen)
    given = f"{seen.applied:.4g}" + (f" ({RULES[rule].formula})" if rule is not None else "")
    verb = "" if source.endswith("told") else " says"
    return (
        f"A setting is ignored: {source}{verb} {wanted}, but the path that ran applies {given}.",
        "Use an attention implementation that honours it (attn_implementation='eager' often does), or update the library.",
    )


def _says_uncontrolled(seen: Evidence, after: float | None) -> tuple[str, str]:
    bound = limit(seen.keys or 1.0)
    return (
        f"No scale and no QK-norm: logits spread by {seen.logit_std:.3g}, past √(2 ln n) = {bound:.3g} for the "
        f"{seen.keys:.0f} keys a row sees, where a softmax freezes on one key.",
        "Multiply q·k by 1/√d_k (scaled_dot_product_attention does by itself), or normalise q and k.",
    )


def _says_after(seen: Evidence, after: float | None) -> tuple[str, str]:
    return (
        f"Scaled after the softmax: what comes out of it is multiplied by {after:.4g}, which shrinks the output and leaves "
        "attention as sharp as it was.",
        "Move the factor in front of the softmax: softmax(q·k / √d_k) v.",
    )


_SENTENCES = {
    "twice": _says_twice,
    "sqrt_dmodel": _says_sqrt_dmodel,
    "ignored": _says_ignored,
    "uncontrolled": _says_uncontrolled,
    "after_softmax": _says_after,
}
