"""Evidence: what was measured of one layer's scale, and which rule that is by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...scale import RULES
from .declared import Declared

CLOSE = 5e-3
"""Within this a scale is a rule's: wider than bfloat16 rounds a regression, narrower than any two rules at real sizes."""

WEIGHTS_CLOSE = 2e-2
"""The same for the sum of a row of weights, each of which bfloat16 rounds by itself."""


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
    if any(close(number, width**-0.5) for width in widths(seen)):
        return "sqrt_dmodel"
    return None


def inverse_of(seen: Evidence) -> str | None:
    """The divisor, √d_k or d_k, that a scale is in place of its inverse."""
    number = seen.scale
    if number is None or seen.head_dim == 1:
        return None
    named = {"√d_k": seen.head_dim**0.5, "d_k": float(seen.head_dim)}
    return next((name for name, divisor in named.items() if close(number, divisor)), None)


def limit(keys: float) -> float:
    """The logit std at which a softmax over so many random logits freezes: √(2 ln n)."""
    return math.sqrt(2 * math.log(max(keys, 1.0)))


def widths(seen: Evidence) -> list[int]:
    named = [seen.heads * seen.head_dim, seen.width]
    return [width for width in named if width is not None and width > seen.head_dim]


def _rule(name: str, seen: Evidence) -> float:
    return float(RULES[name].scale(head_dim=seen.head_dim, heads=seen.heads, layer=seen.layer))
