"""Sinks: how much of its weight each head puts on the first and the special tokens, and how even it is without them.

One key costs O(n·E): exp(logit - lse) for its column alone. With P the weight of such keys in a row, the entropy without them is
(H + Σ p ln p)/(1 - P) + ln(1 - P), because the rest is the same softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...heads import SATURABLE_KEYS
from ...kernels.contract import HIDDEN_BIAS
from ...vitals import Vitals
from ...watch.examine import AttentionCall, logits_of_keys
from .items import CurrentInput, Item, items

FIRST = "the first token"  # texts begin with different words
SPECIAL = "a special token"
LEARNED = "a learned column"
LEAST_REST = 1e-3  # least weight on the other keys: below it float32 has too few digits
COLUMNS = 16  # computed together


@dataclass
class SinkGroup:
    """The keys that share a name, such as all [SEP] tokens."""

    weight: Tensor  # (H,), summed over rows
    token: str | None
    positions: list[int]
    each: Tensor  # (H, positions), from the first text that has them


@dataclass
class SinkSums:
    """Sums over the rows of the texts so far."""

    rows: Tensor  # (H,): rows that see enough keys for a weight to mean anything
    evenness: Tensor
    evenness_rows: Tensor
    groups: dict[str, SinkGroup] = field(default_factory=dict)

    def add(self, other: SinkSums) -> None:
        self.rows = self.rows + other.rows
        self.evenness, self.evenness_rows = self.evenness + other.evenness, self.evenness_rows + other.evenness_rows
        for name, group in other.groups.items():
            if name in self.groups:
                self.groups[name].weight = self.groups[name].weight + group.weight
            else:
                self.groups[name] = group


class Sinks:
    """Examiner: set ``current`` before each pass, read ``table()`` after the last."""

    def __init__(self, current: CurrentInput | None = None) -> None:
        self.current = current or CurrentInput()
        self._sums: dict[tuple[str, str], SinkSums] = {}

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> list[SinkSums]:
        return [_look(call, vitals, rows, item) for item in items(call, rows, self.current)]

    def keep(self, name: str, call: AttentionCall, sums: list[SinkSums]) -> None:
        layer = (name, call.info.kind)
        for item in sums:
            if layer not in self._sums:
                self._sums[layer] = item
            elif len(self._sums[layer].rows) == len(item.rows):
                self._sums[layer].add(item)

    def table(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Per (layer, kind) and head: sink_weight, sink_token, sink_position, evenness_without_sinks; None: not known.

        The token is the name that gets most weight, and the weight its mean over rows that see at least 8 keys; the position is
        from the first text with that name.
        """
        return {layer: [_of_head(sums, head) for head in range(len(sums.rows))] for layer, sums in self._sums.items()}


def _look(call: AttentionCall, vitals: Vitals, rows: Tensor | None, item: Item) -> SinkSums:
    lse, visible, entropy = (sign[item.index] for sign in (vitals.lse, vitals.visible, vitals.entropy))  # (H, Lq)
    counted = visible > 0
    if rows is not None:
        counted = counted & rows[item.index if rows.shape[0] > 1 else 0]
    enough = counted & (visible >= SATURABLE_KEYS)
    named = _named(call, item)
    columns = torch.tensor(
        [column for group in named.values() for column in group], device=lse.device, dtype=torch.long
    )
    weight, own, sinks_seen, each = torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(visible), []
    for part in columns.split(COLUMNS):
        z = logits_of_keys(call, item.index, part)
        log_weight = z - lse.unsqueeze(-1)
        p = log_weight.exp()
        weight, sinks_seen = weight + p.sum(-1), sinks_seen + (z > HIDDEN_BIAS).sum(-1)
        own = own + (p * log_weight.masked_fill(p == 0, 0.0)).sum(-1)
        each.append(p.masked_fill(~enough.unsqueeze(-1), 0.0).double().sum(1))
    rest, left = 1 - weight, visible - sinks_seen
    used = counted & (left >= 2) & (rest > LEAST_REST)
    rest = rest.where(used, 1.0)
    even = ((entropy + own) / rest + rest.log()) / left.where(used, 2).to(rest.dtype).log()
    sink_sums = SinkSums(enough.sum(-1), even.clamp(0, 1).where(used, 0.0).double().sum(-1), used.sum(-1))
    sums, start = torch.cat(each, -1), 0
    for name, group in named.items():
        part = sums[:, start : start + len(group)]
        start += len(group)
        positions = [column - item.keys[0] for column in group]
        token = None if name == LEARNED or item.tokens is None else item.tokens[positions[0]]
        sink_sums.groups[name] = SinkGroup(part.sum(-1), token, positions, part)
    return sink_sums


def _named(call: AttentionCall, item: Item) -> dict[str, list[int]]:
    """The columns that may be sinks, by name: the first key, special tokens, and learned columns."""
    start, stop = item.keys
    columns_of: dict[str, list[int]] = {}
    for column in range(start, stop):
        if item.special[column - start]:
            name = item.tokens[column - start] if item.tokens is not None else SPECIAL
        elif column == start:
            name = FIRST
        else:
            continue
        columns_of.setdefault(name, []).append(column)
    before, after = call.sink_columns
    added = [*range(before), *range(call.info.keys - after, call.info.keys)]
    learned = [column for column in added if not any(start <= column < stop for start, stop in call.products)]
    return columns_of | ({LEARNED: learned} if learned else {})


def _of_head(sums: SinkSums, head: int) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("sink_weight", "sink_token", "sink_position", "evenness_without_sinks"))
    rows, even_rows = int(sums.rows[head]), int(sums.evenness_rows[head])
    evenness = float(sums.evenness[head])
    if even_rows and math.isfinite(evenness):
        row["evenness_without_sinks"] = evenness / even_rows
    if rows and sums.groups:
        group = max(sums.groups.values(), key=lambda group: float(group.weight[head]))
        weight = float(group.weight[head]) / rows
        if math.isfinite(weight):
            position = group.positions[int(group.each[head].argmax())]
            outside = position < 0 or group is sums.groups.get(LEARNED)
            row |= {
                "sink_weight": weight,
                "sink_token": group.token,
                "sink_position": None if outside else position,
            }
    return row
