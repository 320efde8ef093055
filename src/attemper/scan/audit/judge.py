"""The rule that a measured scale matches, its fault, the sentences about it, and layers unlike all others of their kind."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...heads import SATURABLE_KEYS
from ...health.faults import FAULTS, declaring
from ...scale import RULES
from ...watch.examine import same
from .declared import Declared

CLOSE = 5e-3
"""Relative distance within which a scale is that of a rule: bfloat16 rounds a regression by less, two rules differ by more."""

WEIGHTS_CLOSE = 2e-2
"""Relative distance within which a row of weights sums to one number: bfloat16 rounds each weight."""


@dataclass(frozen=True)
class MeasuredScale:
    """What was measured of one layer's scale."""

    head_dim: int
    heads: int
    applied: float | None
    factors: tuple[float, ...] = ()  # those that count
    varies: tuple[float, float] | None = None
    learned: bool = False
    stretch: float = 1.0  # the factor in it by which a rotary embedding stretches q and k (YaRN)
    log_n: bool = False  # whether it grows with the logarithm of the keys a row sees
    norms: tuple[float, float] | None = None
    softcap: float | None = None
    width: int | None = None  # the model's, where it is named
    layer: int | None = None
    layered: bool = False  # whether the model's layers follow 1/((layer + 1) √d_k) together
    declared: Declared | None = None
    given: float | None = None  # the scale that the attention interface was given
    argument: float | None = None  # the scale that the call inside the interface applied
    row_sums: tuple[float, float] | None = None
    output_factors: tuple[float, ...] = ()
    by_design: bool = False  # whether the module's authors published this scale
    followed: bool = True
    logit_std: float | None = None
    keys: float | None = None  # visible to a row, on average

    @property
    def lost(self) -> bool:
        """Whether the call itself applies no scale, and the ops before it could not be followed."""
        return self.applied is None and not self.followed and self.argument is not None

    @property
    def without_rotary(self) -> float | None:
        """The applied scale without the stretch of the rotary embedding: what rules and settings define."""
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
    # if one factor is 1/√d_k, another one makes up the rest
    whole = any(close(factor, scale.head_dim**-0.5) for factor in scale.factors)
    if not whole and any(close(number, width**-0.5) for width in widths(scale)):
        return "sqrt_dmodel"
    return None


def inverse_of(scale: MeasuredScale) -> str | None:
    """The divisor, √d_k or d_k, that a scale equals where it should be its inverse."""
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


REMARKS = ("shrunk", "unscaled", "unknown", "odd")
"""Faults with which the verdict of a layer stays "ok"."""


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
        return None
    if _twice(scale):
        return "twice"
    if rule == "sqrt_dmodel":
        return "sqrt_dmodel"
    if _by_heads(scale, rule, number):
        return "sqrt_heads"
    if _disregarded(scale) or _interface_ignored(scale):
        return "ignored"
    if number < 0 and not scale.by_design and (scale.varies is None or scale.varies[1] < 0):
        return "negative"
    by_hand = scale.norms is None and scale.varies is None and not scale.by_design and scale.followed
    if by_hand and inverse_of(scale) is not None:  # after a norm it is intended, as in nGPT
        return "multiplied"
    return _without_scale(scale, number) or ("unknown" if by_hand and _is_unknown(scale, rule, number) else None)


def _is_unknown(scale: MeasuredScale, rule: str | None, number: float) -> bool:
    """Whether a scale below 1/√d_k is that of no rule, was not learned, and nothing declares it."""
    stated = scale.declared
    meant = scale.learned or (stated is not None and (stated.firm or "." in stated.by))
    return rule is None and not meant and scale.softcap is None and 0 < number < scale.head_dim**-0.5


def _by_heads(scale: MeasuredScale, rule: str | None, number: float) -> bool:
    """Whether the scale is that of a head as wide as there are heads, and nothing else asks for it."""
    plain = rule is None and scale.followed and scale.varies is None and scale.norms is None and not scale.by_design
    return plain and scale.heads > 1 and close(number, scale.heads**-0.5)


def _is_a_rules(number: float, scale: MeasuredScale) -> bool:
    """Whether a factor after the softmax is one that belongs before it: 1/√d_k, 1/d_k or 1/√d_model."""
    named = [scale.head_dim**-0.5, 1 / scale.head_dim, *(width**-0.5 for width in widths(scale))]
    return any(close(number, expected, WEIGHTS_CLOSE) for expected in named)


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
    """Whether a declared scale is not part of the applied scale, where the whole path is known."""
    if scale.declared is None or not scale.followed or scale.varies is not None or _tied(scale):
        return False
    return scale.declared.firm or not (scale.declared.heeded or scale.norms)


def _tied(scale: MeasuredScale) -> bool:
    """Whether q·k is summed over several rows too, and divided by the root of all numbers in the sum (MSA Transformer)."""
    if scale.declared is None or scale.declared.firm or not scale.applied or rule_of(scale) != "sqrt_dk":
        return False
    rows = (scale.declared.number / scale.applied) ** 2
    return round(rows) > 1 and close(rows, round(rows)) and scale.head_dim % round(rows) == 0


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
        if any(close(number, expected) for expected in wanted):
            return number
    return None


NUMBER = re.compile(r"\d+")
OTHERS = 2
"""At least this many other layers must agree."""


@dataclass(frozen=True)
class Outlier:
    """The index of a layer, the scale of the others like it, and their number."""

    index: int
    common: float
    others: int


def outliers(scales: Sequence[tuple[str, str, MeasuredScale]]) -> list[Outlier]:
    """The layers whose scale differs from that of all others of the same name, kind and shape."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, (layer, kind, scale) in enumerate(scales):
        if scale.applied is not None and scale.varies is None:
            shape = scale.head_dim, scale.heads, scale.norms is None
            groups.setdefault((NUMBER.sub("#", layer), kind, *shape), []).append(index)
    odd = []
    for group in groups.values():
        numbers = {index: scales[index][2].applied or 0.0 for index in group}
        for index, number in numbers.items():
            others = [other for other_index, other in numbers.items() if other_index != index]
            agree = len(others) >= OTHERS and all(close(other, others[0]) for other in others)
            if agree and not close(number, others[0]) and not _is_intended(scales[index][2]):
                odd.append(Outlier(index, others[0], len(others)))
    return odd


def _is_intended(scale: MeasuredScale) -> bool:
    """Whether a scale is published, learned, or declared in a setting or an attribute."""
    stated = scale.declared
    named = stated is not None and (stated.firm or "." in stated.by)
    written = named and stated is not None and close(scale.without_rotary or 0.0, stated.number)
    return scale.by_design or scale.learned or scale.layered or written


LOST = "The call applies no scale, and what happened to q and k before it could not be followed"
ALIGNED = 0.25  # a ratio of spreads this far from 1 is not chance at the sizes of models


def explain(scale: MeasuredScale, verdict: ScaleVerdict) -> tuple[str, str]:
    """A sentence about a layer's scale or its fault, and the advice."""
    if verdict.fault is None:
        return _fine(scale, verdict.rule, verdict.after_softmax), ""
    fault = FAULTS[verdict.fault]
    words = _words(scale, verdict.after_softmax)
    return fault.message.format(**words), fault.advice.format(**words) + declaring(verdict.fault)


def _fine(scale: MeasuredScale, rule: str | None, after: float | None) -> str:
    number = scale.applied
    if scale.lost:
        return (
            "The scale is not known: the call itself multiplies q·k by nothing, and what happened to q and k between their "
            "projections and the call could not be followed."
        )
    if number is None:
        return "The scale could not be measured: between q·k and the softmax the scores are changed by more than one factor."
    shown = f"{number:.4g}" if scale.varies is None else f"{scale.varies[0]:.4g} to {scale.varies[1]:.4g}"
    words = f"q·k is multiplied by {shown}"
    if scale.norms is not None:
        gain = number * scale.norms[0] * scale.norms[1] * scale.head_dim**0.5
        words = f"q and k are normalised, then multiplied by {shown}: g √d_k cos(q, k) with g = {gain:.3g}"
    elif rule is not None:
        words += f": {RULES[rule].formula}"
    else:
        words += ", which matches no named rule"
    if scale.declared is not None and (scale.declared.firm or "." in scale.declared.by):
        formula = (
            f" ({scale.declared.formula})" if scale.declared.formula and scale.declared.formula != "1/√d_k" else ""
        )
        words += (
            f", as {scale.declared.by} says{formula}" if close(number / scale.stretch, scale.declared.number) else ""
        )
    if scale.stretch != 1.0:
        words += f"; {scale.stretch:.4g} of it is the rotary embedding's, which stretches q and k (YaRN)"
    if scale.softcap is not None:
        words += f"; then capped at {scale.softcap:g}"
    if after is not None:
        words += f"; the weights of a row add up to {after:.4g}"
    if not scale.followed:
        words += "; what happened to q and k between their projections and the call could not be followed"
    return words + "."


def spread(measured: float | None, predicted: float | None) -> str:
    """The logit std compared with that of q and k of the same lengths in random directions."""
    if not measured or not predicted:
        return "The logit std could not be compared with that of q and k in random directions."
    times = measured / predicted
    means = "their directions look random, as before training"
    if times > 1 + ALIGNED:
        means = "queries are aligned with the directions in which keys differ, as training makes them"
    elif times < 1 - ALIGNED:
        means = "queries are aligned with directions in which keys differ little"
    return (
        f"The logit std is {measured:.3g}, {times:.2g} times the {predicted:.3g} of q and k of the same lengths in random "
        f"directions: {means}."
    )


def _words(scale: MeasuredScale, after: float | None) -> dict[str, object]:
    """What fills in the message of a fault."""
    bare = scale.applied is not None and close(scale.applied, 1.0)
    opening = f"q·k is multiplied by {_short(scale.applied)}, without QK-norm" if scale.applied is not None else LOST
    declared, rule = scale.declared, rule_of(scale)
    if declared is not None and (declared.firm or not declared.heeded):
        setting = f"{declared.by} says {f'{declared.formula} = ' if declared.formula else ''}{_short(declared.number)}"
    else:
        setting = f"the attention interface was given {_short(scale.given)}"
    root = scale.head_dim**-0.5
    return {
        "applied": _short(scale.applied),
        "after": _short(after),
        "root": _short(root),
        "width": scale.head_dim,
        "heads": scale.heads,
        "times": f"{root / (scale.applied or 1):.3g}",
        "inverse": _as_root(scale.applied),
        "divisor": inverse_of(scale),
        "setting": setting,
        "formula": _short(scale.applied) + (f" ({RULES[rule].formula})" if rule is not None else ""),
        "opening": "No scale and no QK-norm" if bare else opening,
        "std": f"{scale.logit_std or 0.0:.3g}",
        "spread": "" if scale.logit_std is None else f" The logit std is {scale.logit_std:.3g}.",
        "limit": f"{limit(scale.keys or 1.0):.3g}",
        "keys": f"{scale.keys or 0.0:.0f}",
    }


def _as_root(number: float | None) -> str:
    """ " = 1/√n" of a scale that is the root of a whole number."""
    whole = round(number**-2) if number else 0
    return f" = 1/√{whole}" if number and 1 < whole < 10**6 and close(number, whole**-0.5, 1e-4) else ""


def out_of_line(number: float, others: int, common: float) -> tuple[str, str]:
    """The sentences for a layer that applies another scale than all others like it."""
    odd = FAULTS["odd"]
    return odd.message.format(applied=_short(number), others=others, common=_short(common)), odd.advice


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"
