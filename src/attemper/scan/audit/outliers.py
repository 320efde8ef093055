"""Outliers: a layer that applies another scale than all other layers of its shape, with nothing that declares it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .judge import MeasuredScale, close

NUMBER = re.compile(r"\d+")
OTHERS = 2
"""At least this many other layers must agree."""


@dataclass(frozen=True)
class Outlier:
    """Which layer it is, the scale of the others, and how many others there are."""

    place: int
    common: float
    others: int


def outliers(found: Sequence[tuple[str, str, MeasuredScale]]) -> list[Outlier]:
    """The layers, kinds and scales, by place, whose scale differs from that of all others of the same name, kind and shape."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, (layer, kind, scale) in enumerate(found):
        if scale.applied is not None and scale.varies is None:
            shape = scale.head_dim, scale.heads, scale.norms is None
            groups.setdefault((NUMBER.sub("#", layer), kind, *shape), []).append(place)
    odd = []
    for group in groups.values():
        numbers = {place: found[place][2].applied or 0.0 for place in group}
        for place, number in numbers.items():
            others = [other for beside, other in numbers.items() if beside != place]
            agree = len(others) >= OTHERS and all(close(other, others[0]) for other in others)
            if agree and not close(number, others[0]) and not _meant(found[place][2]):
                odd.append(Outlier(place, others[0], len(others)))
    return odd


def _meant(scale: MeasuredScale) -> bool:
    """Whether its scale is published, learned, or declared in a setting or an attribute."""
    stated = scale.declared
    named = stated is not None and (stated.firm or "." in stated.by)
    written = named and stated is not None and close(scale.without_rotary or 0.0, stated.number)
    return scale.by_design or scale.learned or scale.layered or written
