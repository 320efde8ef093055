"""Entry: one layer's numbers in one step: as one entry, as rows, and as many entries in memory.

EntryBuffer keeps entries; ``to_dicts`` and ``from_rows`` convert an entry to rows and back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...heads import BlockSummary, HeadSummary, count_column

KEYS = ("step", "layer", "kind", "head")
SCORE_PEAK = "score_peak"
"""The largest scale · q·k of a head, in rows where it is not the largest logit: numbers are added to its scores."""

GRADIENTS = tuple(f"grad_{name}_{sign}" for name in ("q", "k") for sign in ("rms", "median", "count"))
BLOCK = 1 << 15  # numbers, 256 KiB

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

    def parts(self) -> list[Tensor]:
        """What holds its numbers: those of its summary, and the gradients if it has them."""
        return [*self.summary.tensors(), *([] if self.gradients is None else [self.gradients])]

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
        one, two = self.summary, other.summary
        parts = [(one.sums, two.sums), (one.peaks, two.peaks), (one.largest_scores, two.largest_scores)]
        summary = HeadSummary(one.columns, *(torch.cat(part)[order] for part in parts))
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
            {**keys, "head": head, **{name: column[place] for name, column in columns.items()}}
            for place, head in enumerate(self.heads)
        ]


def moved(
    summary: HeadSummary, gradients: Tensor | None, on_host: Mapping[int, Tensor]
) -> tuple[HeadSummary, Tensor | None]:
    """The numbers of an entry in host memory, where `on_host` has each of their tensors, by the id that it has now."""
    summary = summary.with_tensors([on_host[id(part)] for part in summary.tensors()])
    return summary, None if gradients is None else on_host[id(gradients)]


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
    found = {}
    for name, place in (("q", 0), ("k", 3)):
        count = sums[:, place]
        found[f"grad_{name}_rms"] = (sums[:, place + 1] / count).sqrt()
        found[f"grad_{name}_median"] = sums[:, place + 2] / count
        found[f"grad_{name}_count"] = count
    return found


def _gradient_sums(column: dict[str, Tensor]) -> Tensor | None:
    if "grad_q_count" not in column:
        return None
    parts = []
    for name in ("q", "k"):
        count = column[f"grad_{name}_count"]
        rms, median = column[f"grad_{name}_rms"], column[f"grad_{name}_median"]
        parts += [count, _sum(rms.square(), count), _sum(median, count)]
    return torch.stack(parts, dim=-1)


def row_of(width: int, has_scores: bool, has_gradients: bool) -> int:
    """How many numbers of a head are kept: sums, peak, the peak of its scores, gradients."""
    return width + 1 + has_scores + (6 if has_gradients else 0)


class Slot(NamedTuple):
    """Where an entry's numbers are in a buffer: for each head its sums, then its peaks, then its gradients."""

    step: int
    layer: str
    kind: str
    heads: tuple[int, ...]
    columns: tuple[str, ...]
    block: int
    start: int
    width: int  # columns of the sums
    has_scores: bool
    has_gradients: bool

    @property
    def row(self) -> int:
        return row_of(self.width, self.has_scores, self.has_gradients)


class EntryBuffer:
    """The numbers of many entries in a few blocks of host memory; entries are made again when they are read.

    An entry's own small tensors are allocated between a pass's activations, and each would pin a page there: 1,000 steps would
    cost 100 MB.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.begins: list[int] = []  # the first slot of each step
        self.blocks: dict[int, Tensor] = {}
        self.last, self.used = -1, BLOCK  # the block that is being filled, and how far
        self.shared: dict[Any, Any] = {}

    def put(self, entries: Sequence[Entry], on_host: Mapping[int, Tensor]) -> None:
        """Copy the numbers of entries into the buffer, those of a shared block at once. `on_host` as in `moved`."""
        placed: dict[int, tuple[int, int]] = {}  # where the blocks of these entries are
        one = self.shared.setdefault  # one object for equal names and tuples, however many entries have them
        for step, layer, kind, heads, summary, gradients in entries:
            place = (step, one(layer, layer), kind, one(heads, heads), one(summary.columns, summary.columns))
            if isinstance(summary, BlockSummary) and gradients is None:
                block = summary.block
                if id(block) not in placed:
                    placed[id(block)] = self._room(block.numel())
                    self._numbers(*placed[id(block)], block.shape).copy_(on_host[id(block)].detach())
                number, start = placed[id(block)]
                row = block.shape[1]
                slot = Slot(*place, number, start + summary.first * row, row - 1, False, False)
            else:
                summary, gradients = moved(summary, gradients, on_host)
                sums, peaks, has_scores = summary.sums.detach(), summary.peaks.detach(), summary.has_scores
                width, has_gradients = sums.shape[1], gradients is not None
                number, start = self._room(len(heads) * row_of(width, has_scores, has_gradients))
                slot = Slot(*place, number, start, width, has_scores, has_gradients)
                numbers = self._numbers(slot.block, slot.start, (len(heads), slot.row))
                numbers[:, : slot.width], numbers[:, slot.width] = sums, peaks
                if has_scores:
                    numbers[:, slot.width + 1] = summary.largest_scores.detach()
                if gradients is not None:
                    numbers[:, slot.width + 1 + has_scores :] = gradients.detach()
            if not self.slots or self.slots[-1].step != step:
                self.begins.append(len(self.slots))
            self.slots.append(slot)

    def _room(self, size: int) -> tuple[int, int]:
        """A block of memory and the first of so many free numbers in it."""
        if self.used + size > len(self.blocks.get(self.last, ())):
            self.last += 1
            self.blocks[self.last] = torch.empty(max(BLOCK, size), dtype=torch.float64, device="cpu")
            self.used = 0
        self.used += size
        return self.last, self.used - size

    def _numbers(self, block: int, start: int, shape: Sequence[int]) -> Tensor:
        return self.blocks[block][start : start + shape[0] * shape[1]].view(*shape)

    def drop(self, keep: int) -> bool:
        """Keep the last steps only; whether there were more."""
        more = len(self.begins) - keep
        if more <= 0:
            return False
        cut = self.begins[more] if keep else len(self.slots)
        del self.slots[:cut]
        self.begins = [begin - cut for begin in self.begins[more:]]
        # later steps are in later blocks, but not the slots of one step
        oldest = self.slots[: self.begins[1] if len(self.begins) > 1 else None]
        needed = min([slot.block for slot in oldest], default=self.last)
        self.blocks = {number: block for number, block in self.blocks.items() if number >= needed}
        return True

    def get(self, slot: Slot) -> Entry:
        numbers = self._numbers(slot.block, slot.start, (len(slot.heads), slot.row))
        scores = numbers[:, slot.width + 1] if slot.has_scores else None
        summary = HeadSummary(slot.columns, numbers[:, : slot.width], numbers[:, slot.width], scores)
        gradients = numbers[:, slot.width + 1 + slot.has_scores :] if slot.has_gradients else None
        return Entry(slot.step, slot.layer, slot.kind, slot.heads, summary, gradients)
