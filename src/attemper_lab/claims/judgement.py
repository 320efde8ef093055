"""judgement: the verdicts that a claim can get, and what a function from evidence to a verdict returns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..engine.experiment import Rows

HOLDS, CONDITION, FALSE = "holds", "holds with a condition", "false"
UNDECIDED, NOT_RUN = "not decided", "not run"
VERDICTS = (HOLDS, CONDITION, FALSE, UNDECIDED, NOT_RUN)

Evidence = Mapping[str, Rows]  # rows by name


class Judgement(NamedTuple):
    """A verdict, the numbers it was computed from, and its condition or reason in words.

    Every number in ``numbers`` can change the verdict; ``context`` has numbers to compare them with.
    """

    verdict: str
    numbers: dict[str, float]
    condition: str
    context: Mapping[str, float] = MappingProxyType({})
