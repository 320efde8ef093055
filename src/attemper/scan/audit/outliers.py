"""Alike: one layer that applies another scale than all the others like it, where nothing says that it should."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .evidence import Evidence, close

NUMBER = re.compile(r"\d+")
OTHERS = 2
"""So many others that agree make one that does not an exception."""


@dataclass(frozen=True)
class Odd:
    """Which layer it is, the scale that the others apply, and how many they are."""

    place: int
    common: float
    others: int


def odd_ones(found: Sequence[tuple[str, str, Evidence]]) -> list[Odd]:
    """The layers that stand alone against all others of the same name, kind and shape.

    Args:
        found: layer, kind and evidence of each, in order.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, (layer, kind, seen) in enumerate(found):
        if seen.applied is not None and seen.varies is None:
            shape = seen.head_dim, seen.heads, seen.norms is None
            groups.setdefault((NUMBER.sub("#", layer), kind, *shape), []).append(place)
    odd = []
    for group in groups.values():
        numbers = {place: found[place][2].applied or 0.0 for place in group}
        for place, number in numbers.items():
            others = [other for beside, other in numbers.items() if beside != place]
            agree = len(others) >= OTHERS and all(close(other, others[0]) for other in others)
            if agree and not close(number, others[0]) and not _meant(found[place][2]):
                odd.append(Odd(place, others[0], len(others)))
    return odd


def _meant(seen: Evidence) -> bool:
    """Whether its number is published, learned, or written down in a setting or an attribute."""
    stated = seen.declared
    named = stated is not None and (stated.firm or "." in stated.by)
    written = named and stated is not None and close(seen.scale or 0.0, stated.number)
    return seen.by_design or seen.learned or seen.layered or written
