"""Options: what monitor() and the callbacks are given, checked before a training begins."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest
from ..health.thresholds import LEVELS
from ..watch.examine import check_path, to_path
from .numbers import HeadNumbers, check_signs
from .targets import LogTarget, target

STOPS = LEVELS[LEVELS.index("note") :]


@dataclass
class MonitorOptions:
    """The options of a monitor; ``where`` is what the user called, for errors."""

    where: str
    every: int | None
    log: Any
    path: str | Path | None
    keep: int
    layers: bool
    pictures: int
    gradients: bool
    clip: float | None
    stop_on: str | None
    signs: str | Iterable[str] | None = None
    heads: HeadNumbers = False

    def __post_init__(self) -> None:
        if self.every is not None:
            self._whole("every", self.every, 1, "Leave it out to measure when the trainer logs")
        self._whole("keep", self.keep, 1, "Leave it out for 100")
        self._whole("pictures", self.pictures, 0, "Use 0 for none")
        if not isinstance(self.gradients, bool):
            raise InputError(f"{self.where}(): `gradients` must be True or False; got {self.gradients!r}.")
        self.logged = check_signs(self.where, self.layers, self.signs, self.heads, self.gradients)
        # what is iterated over once is read once, and a checkpoint of transformers keeps lists
        self.signs = None if self.signs is None else list(self.logged.signs)
        self.heads = True if self.logged.heads is None else sorted(self.logged.heads)
        if self.clip is not None and not (_is_number(self.clip) and 0 < self.clip < math.inf):
            raise InputError(
                f"{self.where}(): `clip` must be a logit above 0, such as 100; got {self.clip!r}. Leave it out for no clip."
            )
        if self.stop_on is not None and self.stop_on not in STOPS:
            raise InputError(
                f"{self.where}(): `stop_on` must be a level of a finding; got {self.stop_on!r}. {nearest(self.stop_on, STOPS)}"
            )
        if self.path is not None:
            check_path(self.where, to_path(self.where, self.path), (".jsonl",))
        self.target: LogTarget | None = None if self.log is None else target(self.log, self.where)

    def _whole(self, name: str, value: object, least: int, otherwise: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(
                f"{self.where}(): `{name}` must be a whole number, at least {least}; got {value!r}. {otherwise}."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
