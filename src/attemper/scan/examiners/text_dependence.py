"""Text dependence: how much a head's weights change with the text, by comparing the same rows of different texts.

Some rows of the first text are stored in half precision, and the same rows of every other text are compared with them. Two
texts share the positions that both have, counted from the start, and the special tokens that end them, counted from the end. On
those, each row is scaled to a sum of 1. Half the sum of absolute differences (the total variation) is 0 for a head that depends
on position alone, and 1 for a head that attends to other positions in every text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...vitals import Vitals
from ...watch.examine import AttentionCall, chunks, weights_of_rows
from .items import CurrentInput, Item, items

REACH = 1024  # positions compared, so that memory does not grow with n
ROWS = sorted({round(1.26**power) for power in range(30)})  # 1, 2, 3, 4, 5, 6, 8, … 814: dense where short texts are
LEAST = 1e-3  # rows with less weight on shared positions are left out
FEW_ROWS = 4  # with fewer rows there is no result


@dataclass(frozen=True)
class RowSample:
    """Some rows of one text: their weights on its first keys, and on the special tokens that end it."""

    text: tuple[int, int]  # the input, and the item of its batch or the document of its packed one
    tokens: tuple[str, ...] | None
    body: Tensor  # (H, rows, keys), float16
    tail: Tensor  # (H, rows, special tokens at the end)
    chooses: Tensor  # (H, rows): whether it sees two keys or more


class TextDependence:
    """Examiner: set ``current`` before each pass, read ``table()`` after the last."""

    def __init__(self, current: CurrentInput | None = None) -> None:
        self.current = current or CurrentInput()
        self._first: dict[tuple[str, str], RowSample] = {}
        self._distance: dict[tuple[str, str], Tensor] = {}  # (H,)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> list[RowSample]:
        return [_sampled(call, vitals, item) for item in items(call, rows, self.current)]

    def keep(self, name: str, call: AttentionCall, samples: list[RowSample]) -> None:
        layer = (name, call.info.kind)
        for sample in samples:
            first = self._first.setdefault(layer, sample)
            if first is sample or first.text == sample.text or first.body.shape[0] != sample.body.shape[0]:
                continue  # a layer that runs twice reads the same text
            if first.tokens is not None and first.tokens == sample.tokens:
                continue
            distance = _distance(first, sample)
            before = self._distance.get(layer, torch.full_like(distance, math.nan))
            self._distance[layer] = before.fmax(distance)

    def table(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Per (layer, kind) and head: text_distance, the mean over rows, for the text that differs most from the first; None
        with one text."""
        table = {}
        for layer, first in self._first.items():
            distance = self._distance.get(layer, torch.full((first.body.shape[0],), math.nan, device="cpu"))
            table[layer] = [{"text_distance": None if math.isnan(value) else value} for value in distance.tolist()]
        return table


def _sampled(call: AttentionCall, vitals: Vitals, item: Item) -> RowSample:
    (start, stop), (first, last) = item.rows, item.keys
    device = vitals.lse.device
    end = last - item.tail
    if call.info.kind == "self":
        stop -= item.tail  # in a longer text that row is a word
    chosen = torch.tensor([start + row for row in ROWS if start + row < stop], dtype=torch.long, device=device)
    reach = min(end, first + REACH)
    body, tail = [], []
    for part in chunks(call, chosen):
        weights = weights_of_rows(call, vitals, part, item.index)[0]
        body.append(weights[..., first:reach].half())
        tail.append(weights[..., end:last].half())
    heads = call.info.heads
    empty = torch.zeros(heads, 0, 0, dtype=torch.half, device=device)
    return RowSample(
        (item.number, item.index if call.document is None else call.document),
        item.tokens,
        torch.cat(body, 1) if body else empty,
        torch.cat(tail, 1) if tail else empty,
        vitals.visible[item.index][:, chosen] >= 2,
    )


def _distance(first: RowSample, other: RowSample) -> Tensor:
    """The mean total variation over the rows that both texts have, (H,); NaN where they share too few."""
    rows = min(first.body.shape[1], other.body.shape[1])
    keys = min(first.body.shape[2], other.body.shape[2])
    tail = min(first.tail.shape[2], other.tail.shape[2])
    shared, sums = [], []
    for sample in (first, other):
        ends = sample.tail[:, :rows, sample.tail.shape[2] - tail :]
        weights = torch.cat([sample.body[:, :rows, :keys], ends], -1).float()
        total = weights.sum(-1, keepdim=True)
        shared.append(weights / total.clamp(min=LEAST))
        sums.append(total.squeeze(-1))
    used = (sums[0] > LEAST) & (sums[1] > LEAST) & first.chooses[:, :rows] & other.chooses[:, :rows]
    variation = (shared[0] - shared[1]).abs().sum(-1) / 2
    count = used.sum(-1)  # a row with a NaN is not used: it is not above LEAST
    return (variation.where(used, 0.0).double().sum(-1) / count).masked_fill(count < FEW_ROWS, math.nan)
