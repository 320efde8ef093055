"""Lines of a record's file: rows, facts and notes as JSON objects, checked one by one, and rows made entries again.

A file opens with ``{"schema": "attemper.record", "version": 1}``, and so does what each later run appends to it. The other lines
are rows, the ``facts`` of a layer, or a ``note``. Each row says how many rows its step has, so that a step of which a kill left
a part is known for one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...heads import HeadSummary
from ..call import Facts
from .entry import Entry
from .record import KEYS

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]

SCHEMA, VERSION = "attemper.record", 1
HEADER = {"schema": SCHEMA, "version": VERSION}
WORDS = {None: math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no infinity; NaN is null
LARGEST = {"step": 2**63, "head": 2**31, "rows_in_step": 2**31}  # as wide as the columns of a Parquet file
IN_STEP = "rows_in_step"
GRADIENTS = tuple(f"grad_{name}_{sign}" for name in ("q", "k") for sign in ("rms", "median", "count"))


def dump(line: dict[str, Any]) -> str:
    plain = {name: _plain(value) for name, value in line.items()}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def row_lines(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """The rows of entries as a file has them."""
    entries = list(entries)
    rows: Counter[int] = Counter()
    for entry in entries:
        rows[entry.step] += len(entry.heads)
    for entry in entries:
        for row in entry.to_dicts():
            yield {**{name: row[name] for name in KEYS}, IN_STEP: rows[entry.step], **row}


def facts_line(place: tuple[str, str], facts: Facts) -> dict[str, Any]:
    return {"layer": place[0], "kind": place[1], "facts": facts.to_dict()}


class Step(NamedTuple):
    """A step as one run wrote it."""

    run: int
    step: int
    rows: int  # that it has; 0 where a file does not say


class Lines:
    """What the lines of a file add up to. A line that is none of ours is counted and left out."""

    def __init__(self) -> None:
        self.rows: list[tuple[Step, Row]] = []
        self.lines: Counter[Step] = Counter()  # of each step, damaged ones too
        self.loose = 0  # damaged lines before the first row of a step
        self.facts: dict[tuple[str, str], Facts] = {}
        self.notes: dict[str, None] = {}
        self.bad: list[int] = []
        self.run = 0

    def take(self, number: int, line: str | dict[str, Any]) -> None:
        """A line as text, or as a Parquet file has it."""
        try:
            self._sort(json.loads(line) if isinstance(line, str) else line)
        except (ValueError, TypeError, OverflowError, RecursionError):
            self.bad.append(number)
            # a damaged line is named by itself: the step around it was not cut short
            last = self.rows[-1][0] if self.rows else None
            if last is not None and last.run == self.run and self.lines[last] < last.rows:
                self.lines[last] += 1
            else:
                self.loose += 1

    def _sort(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise ValueError
        if found == HEADER:
            self.run, self.loose = self.run + 1, 0
        elif "facts" in found:
            self.facts.update([_read_facts(found)])
        elif "note" in found:
            self.notes[_text(found["note"])] = None
        else:
            row = _read_row(found)
            step = Step(self.run, row["step"], int(row.pop(IN_STEP, 0)))
            self.lines[step] += 1 + self.loose
            self.loose = 0
            self.rows.append((step, row))

    def leave_out_cut(self) -> list[Step]:
        """Take out the steps of which a kill left a part; those are returned that no later run wrote once more."""
        # two watches may have written the same step to one file
        cut = {step for step, count in self.lines.items() if step.rows and count % step.rows}
        self.rows = [(step, row) for step, row in self.rows if step not in cut]
        written = {(step.run, step.step) for step, _ in self.rows}
        lost = [step for step in sorted(cut) if not any(step.run <= run and step.step == n for run, n in written)]
        return list({step.step: step for step in lost}.values())


def _read_facts(found: dict[str, Any]) -> tuple[tuple[str, str], Facts]:
    """A facts line as what it says; a ValueError or a TypeError where it says nothing we know."""
    facts = Facts(**found["facts"])
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in facts.to_dict().values()):
        raise ValueError
    return (_text(found.get("layer")), _text(found.get("kind"))), facts


def _read_row(found: dict[str, Any]) -> Row:
    """A row with its numbers; a ValueError where a key or a count is missing, or where a number is none."""
    row: Row = {"step": _whole(found, "step"), "layer": _text(found.get("layer")), "kind": _text(found.get("kind"))}
    row["head"] = _whole(found, "head")
    for name, value in found.items():
        if name not in KEYS:
            row[name] = _number(value)
    if IN_STEP in found:
        row[IN_STEP] = _whole(found, IN_STEP)
    gradients = [name for name in row if name.startswith("grad_")]
    counts = {_count(name) for name in row if name not in (*KEYS, IN_STEP, "peak", *gradients)}
    if "rows" not in row or not counts <= {"", *row} or (gradients and set(gradients) != set(GRADIENTS)):
        raise ValueError
    return row


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _whole(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST[name]:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if value is None or isinstance(value, str):
        if value not in WORDS:
            raise ValueError
        return WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError
    return float(value)


def to_entries(rows: Iterable[tuple[Step, Row]]) -> tuple[list[Entry], int]:
    """Rows as entries, and how many rows others stand for by now.

    What a later run wrote of a step and layer stands for what an earlier one did; so does what came last where two watches
    wrote to one file at once.
    """
    blocks: list[tuple[int, list[Row]]] = []
    for (run, *_), row in rows:
        if blocks and run == blocks[-1][0] and _follows(blocks[-1][1][-1], row):
            blocks[-1][1].append(row)
        else:
            blocks.append((run, [row]))
    last = {_place(block[0]): run for run, block in blocks}
    kept: dict[tuple[Any, ...], list[Row]] = {}
    for run, block in blocks:
        if run == last[_place(block[0])]:
            kept[(*_place(block[0]), *(row["head"] for row in block))] = block
    dropped = sum(len(block) for _, block in blocks) - sum(map(len, kept.values()))
    return [_entry(block) for block in kept.values()], dropped


def _place(row: Row) -> tuple[int, str, str]:
    return row["step"], row["layer"], row["kind"]


def _follows(before: Row, row: Row) -> bool:
    """Whether a row is a further head of the same entry."""
    return _place(before) == _place(row) and before["head"] < row["head"] and before.keys() == row.keys()


def _entry(heads: list[Row]) -> Entry:
    """Means times their counts are sums again."""
    column = {name: _column(heads, name) for name in heads[0] if name not in KEYS}
    names = [name for name in column if name != "peak" and not name.startswith("grad_")]
    sums = torch.stack([_sum(column[name], column.get(_count(name))) for name in names], dim=-1)
    peaks = column.get("peak", torch.full((len(heads),), -math.inf, dtype=torch.float64, device="cpu"))
    summary = HeadSummary((*names, "peak") if "peak" in column else tuple(names), sums, peaks)
    return Entry(*_place(heads[0]), tuple(row["head"] for row in heads), summary, _gradients(column))


def _column(heads: list[Row], name: str) -> Tensor:
    return torch.tensor([row[name] for row in heads], dtype=torch.float64, device="cpu")


def _sum(mean: Tensor, count: Tensor | None) -> Tensor:
    """A mean of no rows is NaN and their sum is 0; a NaN of some rows is a NaN that was measured."""
    return mean if count is None else (mean * count).masked_fill(count == 0, 0.0)


def _count(name: str) -> str:
    if name == "rows" or name.endswith("_rows"):
        return ""
    return {"evenness": "evenness_rows", "saturated": "saturable_rows"}.get(name, "rows")


def _gradients(column: dict[str, Tensor]) -> Tensor | None:
    if "grad_q_count" not in column:
        return None
    parts = []
    for name in ("q", "k"):
        count = column[f"grad_{name}_count"]
        rms, median = column[f"grad_{name}_rms"], column[f"grad_{name}_median"]
        parts += [count, _sum(rms.square(), count), _sum(median, count)]
    return torch.stack(parts, dim=-1)
