"""Neighbours: how much of its weight each head puts on the token itself, and on each of two tokens before and after it.

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

OFFSETS = (-2, -1, 0, 1, 2)  # published models have heads at each of them: docs/checkpoints.md


class Neighbours:
    """Examiner: read ``table()`` after the last pass."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}  # (H, offsets and rows)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor | None:
        info = call.info
        if info.kind != "self" or not call.in_order or info.queries != info.keys - sum(call.sink_columns):
            return None
        counted = vitals.visible >= SATURABLE_KEYS
        if rows is not None:
            counted = counted & rows[:, None, :]
        weights = [(logits_of_offset(call, offset) - vitals.lse).exp() for offset in OFFSETS]
        sums = [weight.masked_fill(~counted, 0.0).double().sum((0, 2)) for weight in weights]
        return torch.stack([*sums, counted.double().sum((0, 2))], -1)

    def keep(self, name: str, call: AttentionCall, sums: Tensor | None) -> None:
        layer = (name, call.info.kind)
        if sums is not None:
            before = self._sums.get(layer)
            self._sums[layer] = sums if before is None or before.shape != sums.shape else before + sums

    def table(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Per (layer, kind) and head: neighbour_weight, the mean over rows that see at least 8 keys, and neighbour_offset, the
        one of OFFSETS with the most weight; None: no such row."""
        return {layer: [_of_head(sums[head]) for head in range(len(sums))] for layer, sums in self._sums.items()}


def _of_head(sums: Tensor) -> dict[str, Any]:
    *weights, rows = sums.tolist()
    best = max(range(len(OFFSETS)), key=lambda index: weights[index])
    if not rows or weights[best] != weights[best]:
        return {"neighbour_weight": None, "neighbour_offset": None}
    return {"neighbour_weight": weights[best] / rows, "neighbour_offset": OFFSETS[best]}
