"""Judge: what was measured of one layer's scale, the rule it matches by name, and which fault it is, if any."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...heads import SATURABLE_KEYS
from ...scale import RULES
from ...watch.examine import same
from .declared import Declared

CLOSE = 5e-3
"""Relative distance within which a scale is a rule's: more than bfloat16 rounds a regression, less than between any two rules."""

WEIGHTS_CLOSE = 2e-2
"""The same for the sum of a row of weights, each of which bfloat16 rounds by itself."""


@dataclass(frozen=True)
class MeasuredScale:
    """What was measured of one layer's scale."""

    head_dim: int
    heads: int
    applied: float | None
    factors: tuple[float, ...] = ()  # those that count
    varies: tuple[float, float] | None = None
    learned: bool = False
    stretch: float = 1.0  # the part of it that a rotary embedding adds by stretching (YaRN)
    log_n: bool = False  # whether it grows with the logarithm of the keys a row sees
    norms: tuple[float, float] | None = None
    softcap: float | None = None
    width: int | None = None  # the model's, where it is named
    layer: int | None = None
    layered: bool = False  # whether the model's layers follow 1/((layer + 1) √d_k) together
    declared: Declared | None = None
    given: float | None = None  # what the attention interface was given
    argument: float | None = None  # what the call inside it then applied
    row_sums: tuple[float, float] | None = None
    output_factors: tuple[float, ...] = ()
    by_design: bool = False  # whether the module's authors published it so
    followed: bool = True
    logit_std: float | None = None
    keys: float | None = None  # visible to a row, on average

    @property
    def lost(self) -> bool:
        """Whether the call itself applies no scale, and what came before it could not be followed."""
        return self.applied is None and not self.followed and self.argument is not None

    @property
    def without_rotary(self) -> float | None:
        """The scale applied, without the factor of the rotary embedding: what a rule or a setting is about."""
        return None if self.applied is None else self.applied / self.stretch


def close(a: float, b: float, within: float = CLOSE) -> bool:
    return same(a, b, within)


def rule_of(scale: MeasuredScale) -> str | None:
    """The name in ``attemper.RULES`` that a measured scale matches."""
    number = scale.without_rotary
    if number is None:
        return None
    if scale.declared is not None and scale.declared.rule is not None and close(number, scale.declared.number):
        return scale.declared.rule
    if scale.norms is not None:
        return "qk_norm"
    if scale.log_n:
        return "log_n"
    if scale.varies is not None:
        return "learned" if scale.learned else None
    if scale.layered and scale.layer and close(number, _rule("layer", scale)):
        return "layer"
    for name in ("sqrt_dk", "none", "dk"):
        if close(number, _rule(name, scale)):
            return "softcap" if name == "sqrt_dk" and scale.softcap else name
    if any(close(number, width**-0.5) for width in widths(scale)):
        return "sqrt_dmodel"
    return None


def inverse_of(scale: MeasuredScale) -> str | None:
    """The divisor, √d_k or d_k, that a scale equals instead of its inverse."""
    number = scale.without_rotary
    if number is None or scale.head_dim == 1:
        return None
    named = {"√d_k": scale.head_dim**0.5, "d_k": float(scale.head_dim)}
    return next((name for name, divisor in named.items() if close(number, divisor)), None)


def limit(keys: float) -> float:
    """The logit std at which a softmax over n random logits freezes: √(2 ln n)."""
    return math.sqrt(2 * math.log(max(keys, 1.0)))


def widths(scale: MeasuredScale) -> list[int]:
    named = [scale.heads * scale.head_dim, scale.width]
    return [width for width in named if width is not None and width > scale.head_dim]


def _rule(name: str, scale: MeasuredScale) -> float:
    return float(RULES[name].scale(head_dim=scale.head_dim, heads=scale.heads, layer=scale.layer))


REMARKS = ("shrunk", "unscaled", "odd")
"""Faults that are only remarks: the layer's verdict stays "ok"."""


@dataclass(frozen=True)
class ScaleVerdict:
    """The rule that a scale matches, its fault, and the factor after the softmax; each may be None."""

    rule: str | None
    fault: str | None
    after_softmax: float | None


def judge(scale: MeasuredScale) -> ScaleVerdict:
    """Name the rule and the fault of one layer."""
    rule, after = rule_of(scale), _after_softmax(scale)
    return ScaleVerdict(rule, _fault(scale, rule, after), after)


def _fault(scale: MeasuredScale, rule: str | None, after: float | None) -> str | None:
    if scale.head_dim == 1:
        return None  # 1/√d_k is 1
    if after is not None and _is_a_rules(after, scale):
        averaged = rule in ("sqrt_dk", "softcap", "qk_norm") and close(after, 1 / scale.heads)
        if not averaged:
            return "after_softmax"
        return None if scale.by_design else "shrunk"
    number = scale.without_rotary
    if number is None:
        return _without_scale(scale, 1.0) if scale.lost else None
    if scale.declared is not None and scale.declared.firm and close(number, scale.declared.number):
        return None  # as intended
    if _twice(scale):
        return "twice"
    if rule == "sqrt_dmodel":
        return "sqrt_dmodel"
    if _disregarded(scale) or _interface_ignored(scale):
        return "ignored"
    if number < 0 and not scale.by_design and (scale.varies is None or scale.varies[1] < 0):
        return "negative"
    by_hand = scale.norms is None and scale.varies is None and not scale.by_design and scale.followed
    if by_hand and inverse_of(scale) is not None:  # after a norm it is meant, as in nGPT
        return "multiplied"
    return _without_scale(scale, number)


def _is_a_rules(number: float, scale: MeasuredScale) -> bool:
    """Whether a factor after the softmax is one that belongs before it: 1/√d_k, 1/d_k or 1/√d_model."""
    named = [scale.head_dim**-0.5, 1 / scale.head_dim, *(width**-0.5 for width in widths(scale))]
    return any(close(number, one, WEIGHTS_CLOSE) for one in named)


def _without_scale(scale: MeasuredScale, number: float) -> str | None:
    """The fault of a scale of 1 or more, if nothing else (a norm, a softcap, a paper) keeps the logits small."""
    unscaled = number > 1 - CLOSE and scale.norms is None and scale.softcap is None
    if not unscaled or scale.by_design:
        return None
    keys = scale.keys or 0
    if scale.logit_std is not None and keys >= SATURABLE_KEYS and scale.logit_std > limit(keys):
        return "uncontrolled"
    silent = scale.declared is None and scale.followed and scale.varies is None
    return "unscaled" if silent and close(number, 1.0) else None


def _twice(scale: MeasuredScale) -> bool:
    """Whether two of the factors are 1/√d_k. A factor d_k^(-1/4) on q and one on k count as one of them."""
    root = scale.head_dim**-0.5
    whole = [number for number in scale.factors if close(number, root)]
    roots = [number for number in scale.factors if close(number, math.sqrt(root))]
    return len(whole) + len(roots) // 2 >= 2


def _disregarded(scale: MeasuredScale) -> bool:
    """Whether a declared scale is no part of the scale applied; only if the whole path is known."""
    if scale.declared is None or not scale.followed or scale.varies is not None:
        return False
    return scale.declared.firm or not (scale.declared.heeded or scale.norms)


def _interface_ignored(scale: MeasuredScale) -> bool:
    """Whether the interface was given a scale that nothing on the path applied."""
    if scale.given is None or scale.argument is None or scale.applied is None:
        return False
    return not any(close(scale.given, other) for other in (scale.argument, scale.without_rotary or 0.0, *scale.factors))


def _after_softmax(scale: MeasuredScale) -> float | None:
    """The sum of the weights of a row, if it is the same for all rows and not 1; or the factor on the output."""
    if scale.row_sums is not None:
        low, high = scale.row_sums
        if close(low, high, WEIGHTS_CLOSE) and not close((low + high) / 2, 1.0, WEIGHTS_CLOSE):
            return (low + high) / 2
    bare = scale.applied is not None and close(scale.applied, 1.0) and scale.norms is None
    wanted = [scale.head_dim**-0.5, *(width**-0.5 for width in widths(scale))]
    for number in scale.output_factors if bare and not scale.by_design else ():
        if any(close(number, one) for one in wanted):
            return number
    return None
