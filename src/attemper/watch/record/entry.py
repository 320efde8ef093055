"""Entry: one layer's numbers in one step; ``to_dicts`` and ``from_rows`` convert them to rows and back."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...heads import HeadSummary, count_column

KEYS = ("step", "layer", "kind", "head")
SCORE_PEAK = "score_peak"
"""The largest scale · q·k of a head, in rows where it is not the largest logit: numbers are added to its scores."""

GRADIENTS = tuple(f"grad_{name}_{sign}" for name in ("q", "k") for sign in ("rms", "median", "count"))

RecordRow = dict[str, Any]


class Entry(NamedTuple):
    """One layer in one step: its heads, their summary, and the sums of their gradients if a backward ran."""

    step: int
    layer: str
    kind: str
    heads: tuple[int, ...]
    summary: HeadSummary
    gradients: Tensor | None = None  # (H, 6)

    @property
    def place(self) -> tuple[int, str, str, tuple[int, ...]]:
        return self[:4]

    def take(self, heads: Collection[int]) -> Entry | None:
        """The same entry with these heads only; None if it has none of them."""
        chosen = [place for place, head in enumerate(self.heads) if head in heads]
        if not chosen:
            return None
        rows = torch.tensor(chosen, device=self.summary.sums.device)
        own, scores = self.summary, self.summary.score_peaks
        summary = HeadSummary(own.columns, own.sums[rows], own.peaks[rows], None if scores is None else scores[rows])
        names = tuple(self.heads[place] for place in chosen)
        gradients = None if self.gradients is None else self.gradients[rows]
        return Entry(self.step, self.layer, self.kind, names, summary, gradients)

    def beside(self, other: Entry) -> Entry:
        """The same layer and step, with the heads of both, in order."""
        both = (*self.heads, *other.heads)
        order = sorted(range(len(both)), key=both.__getitem__)
        left, two = self.summary, other.summary
        parts = [(left.sums, two.sums), (left.peaks, two.peaks), (left.largest_scores, two.largest_scores)]
        summary = HeadSummary(left.columns, *(torch.cat(part)[order] for part in parts))
        gradients = None
        if self.gradients is not None and other.gradients is not None:
            gradients = torch.cat([self.gradients, other.gradients])[order]
        return Entry(self.step, self.layer, self.kind, tuple(both[place] for place in order), summary, gradients)

    def join(self, other: Entry) -> Entry:
        """The same layer and step, with the rows of both."""
        if self.summary.columns != other.summary.columns:
            raise InputError(
                f"merge(): both records must hold the same signs for step {self.step} of {self.layer!r}; got "
                f"{self.summary.columns} and {other.summary.columns}. Watch both with the same signs=."
            )
        gradients = [part for part in (self.gradients, other.gradients) if part is not None]
        total = torch.stack(gradients).sum(0) if gradients else None
        return Entry(*self.place, self.summary.merge(other.summary), total)

    def to_dicts(self) -> list[RecordRow]:
        """One row per head. :func:`from_rows` is the inverse."""
        columns = {name: getattr(self.summary, name).tolist() for name in self.summary.columns}
        if self.summary.has_scores:
            columns[SCORE_PEAK] = self.summary.largest_scores.tolist()
        if self.gradients is not None:
            columns |= {name: column.tolist() for name, column in _gradient_columns(self.gradients).items()}
        keys = {"step": self.step, "layer": self.layer, "kind": self.kind}
        return [
            {**keys, "head": head, **{name: column[index] for name, column in columns.items()}}
            for index, head in enumerate(self.heads)
        ]


def from_rows(rows: Sequence[RecordRow]) -> Entry:
    """The entry whose rows these are: means times their counts are sums again."""
    first = rows[0]
    values = {name: [row[name] for row in rows] for name in first if name not in KEYS}
    column = {name: torch.tensor(each, dtype=torch.float64, device="cpu") for name, each in values.items()}
    names = [name for name in column if name not in ("peak", SCORE_PEAK) and not name.startswith("grad_")]
    sums = torch.stack([_sum(column[name], column.get(count_column(name))) for name in names], dim=-1)
    peaks = column.get("peak", torch.full((len(rows),), -math.inf, dtype=torch.float64, device="cpu"))
    columns = (*names, "peak") if "peak" in column else tuple(names)
    summary = HeadSummary(columns, sums, peaks, column.get(SCORE_PEAK))
    heads = tuple(row["head"] for row in rows)
    return Entry(first["step"], first["layer"], first["kind"], heads, summary, _gradient_sums(column))


def _sum(mean: Tensor, count: Tensor | None) -> Tensor:
    """The sum behind a mean: 0 where no rows were counted, whose mean is NaN. A NaN of counted rows stays NaN."""
    return mean if count is None else (mean * count).masked_fill(count == 0, 0.0)


def _gradient_columns(sums: Tensor) -> dict[str, Tensor]:
    columns = {}
    for name, place in (("q", 0), ("k", 3)):
        count = sums[:, place]
        columns[f"grad_{name}_rms"] = (sums[:, place + 1] / count).sqrt()
        columns[f"grad_{name}_median"] = sums[:, place + 2] / count
        columns[f"grad_{name}_count"] = count
    return columns


def _gradient_sums(column: dict[str, Tensor]) -> Tensor | None:
    if "grad_q_count" not in column:
        return None
    parts = []
    for name in ("q", "k"):
        count = column[f"grad_{name}_count"]
        rms, median = column[f"grad_{name}_rms"], column[f"grad_{name}_median"]
        parts += [count, _sum(rms.square(), count), _sum(median, count)]
    return torch.stack(parts, dim=-1)
