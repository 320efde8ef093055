"""Neighbours: how much of its weight each head puts on the token before, on the token itself, and on the token after.

Heads that attend to a neighbouring token in every text are common and healthy, and as sharp as a collapsed head. This
distinguishes them. One key per row, so it costs O(n·E).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...heads import SATURABLE_KEYS
from ...vitals import Vitals
from ...watch.examine import AttentionCall, logits_of_offset

OFFSETS = (-1, 0, 1)


class Neighbours:
    """Examiner: read ``table()`` after the last pass."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}  # (H, offsets and rows)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor | None:
        facts = call.facts
        if facts.kind != "self" or not call.in_order or facts.queries != facts.keys - sum(call.sink_columns):
            return None
        counted = vitals.visible >= SATURABLE_KEYS
        if rows is not None:
            counted = counted & rows[:, None, :]
        weights = [(logits_of_offset(call, offset) - vitals.lse).exp() for offset in OFFSETS]
        sums = [weight.masked_fill(~counted, 0.0).double().sum((0, 2)) for weight in weights]
        return torch.stack([*sums, counted.double().sum((0, 2))], -1)

    def keep(self, name: str, call: AttentionCall, found: Tensor | None) -> None:
        place = (name, call.facts.kind)
        if found is not None:
            before = self._sums.get(place)
            self._sums[place] = found if before is None or before.shape != found.shape else before + found

    def table(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Per (layer, kind) and head: neighbour_weight, the mean over rows that see at least 8 keys, and neighbour_offset, the
        one of -1, 0 and 1 with the most weight; None: no such row."""
        return {place: [_of_head(sums[head]) for head in range(len(sums))] for place, sums in self._sums.items()}


def _of_head(sums: Tensor) -> dict[str, Any]:
    *weights, rows = sums.tolist()
    best = max(range(len(OFFSETS)), key=lambda place: weights[place])
    if not rows or weights[best] != weights[best]:
        return {"neighbour_weight": None, "neighbour_offset": None}
    return {"neighbour_weight": weights[best] / rows, "neighbour_offset": OFFSETS[best]}
