"""Heat map: a sign of every head in one step as an image, layers down and heads across, on one scale for a whole run."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, checked_options, nearest
from ..watch import Record
from .numbers import of_step

CELL, GAP = 12, 2
# as in the report: lightness alone carries the number
STOPS = np.array([[244, 247, 250], [190, 215, 232], [107, 168, 208], [41, 108, 168], [10, 42, 92]], float)
MISSING = (226, 196, 196)
SCALES = {"peak": (1.0, 1e4, True), "evenness": (0.0, 1.0, False), "saturated": (0.0, 1.0, False)}
"""Lowest and highest number, and whether the scale is logarithmic: the same in every step, so that images can be compared."""


@checked_options
def picture(record: Record, step: int | None = None, sign: str = "peak") -> NDArray[np.uint8]:
    """A heat map of one step, (height, width, 3): a row of cells for each layer, a cell for each head; darker is more.

    Args:
        record: of a watch.
        step: one of its steps; None is the last one.
        sign: ``"peak"`` (1 to 10,000, logarithmic), ``"evenness"`` or ``"saturated"`` (0 to 1).
    """
    if sign not in SCALES:
        raise InputError(f"picture(): `sign` must be one with a fixed scale; got {sign!r}. {nearest(sign, SCALES)}")
    entries = of_step("picture", record, step).entries
    columns = 1 + max((max(entry.heads) for entry in entries), default=0)
    size = CELL + GAP
    image = np.full((len(entries) * size + GAP, columns * size + GAP, 3), 255, np.uint8)
    for row, entry in enumerate(entries):
        values = getattr(entry.summary, sign).tolist() if sign in entry.summary.columns else []
        for head, value in zip(entry.heads, values, strict=False):
            top, left = GAP + row * size, GAP + head * size
            image[top : top + CELL, left : left + CELL] = _colour(value, *SCALES[sign])
    return image


def _colour(value: float, low: float, high: float, logarithmic: bool) -> NDArray[np.uint8]:
    if math.isnan(value):
        return np.array(MISSING, np.uint8)
    value = min(max(value, low), high)
    share = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
    at = share * (len(STOPS) - 1)
    start = min(int(at), len(STOPS) - 2)
    return np.rint(STOPS[start] + (at - start) * (STOPS[start + 1] - STOPS[start])).astype(np.uint8)
