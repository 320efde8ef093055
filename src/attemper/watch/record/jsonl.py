"""JSONL: the file of a record, one JSON object per line: how lines are written, appended while a watch runs, and read.

A file opens with ``{"schema": "attemper.record", "version": 1}``, and so does what each later run appends to it. The other lines
are rows, the ``info`` of a layer, what was ``logged`` in a step, or a ``note``. Each row holds the number of rows of its step,
so that a step that a kill cut short is recognised. A step is appended under a lock, whole or not at all: a write that fails is
undone. If a kill cut a line short, the next append removes that line first. Rows that cannot be written are buffered and tried
again.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ... import _files
from ...errors import InputError
from ...heads import count_column
from ..call import CallInfo
from .entry import GRADIENTS, KEYS, SCORE_PEAK, Entry, RecordRow, from_rows

SCHEMA, VERSION = "attemper.record", 1
HEADER = {"schema": SCHEMA, "version": VERSION}
WORDS = {None: math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no infinity; NaN is null
LARGEST = {"step": 2**63, "head": 2**31, "rows_in_step": 2**31}  # as wide as the columns of a Parquet file
IN_STEP = "rows_in_step"
SHARED = (
    "another watch writes to {name!r} too. Where both wrote the same step, layer and head, the last row is read. "
    "Give each watch its own path."
)
FAILED = "{name!r} could not be written: {reason}. Its rows are buffered in memory and tried again at every step."
LOST = (
    "{count} rows are not in {name!r}: {reason}. This watch's record has them: write it with watch.record.write(…) to a disk "
    "with free space."
)


def dump(line: dict[str, Any]) -> str:
    plain = {name: _plain(value) for name, value in line.items()}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


OPENING = dump(HEADER).encode()


def row_lines(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """The rows of entries, as a file holds them."""
    entries = list(entries)
    rows: Counter[int] = Counter()
    for entry in entries:
        rows[entry.step] += len(entry.heads)
    for entry in entries:
        for row in entry.to_dicts():
            yield {**{name: row[name] for name in KEYS}, IN_STEP: rows[entry.step], **row}


def info_line(place: tuple[str, str], info: CallInfo) -> dict[str, Any]:
    return {"layer": place[0], "kind": place[1], "info": info.to_dict()}


def logged_line(step: int, numbers: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "logged": {name: _plain(number) for name, number in numbers.items()}}


def check_header(where: str, path: Path, line: str) -> None:
    """Raise unless the first line of a file is that of a record."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise InputError(
            f"{where}: {str(path)!r} is not a record of attemper: its first line does not name the schema. "
            "Write a record with Record.write() or watch(path=…)."
        )
    if header.get("version") != VERSION:
        raise InputError(
            f"{where}: {str(path)!r} has schema version {header.get('version')!r}; this attemper reads version {VERSION}. "
            "Read it with the version of attemper that wrote it, or choose another file."
        )


class Journal:
    """A file that a watch appends its steps to. The constructor only reads; ``open()`` is the first to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[tuple[str, str], CallInfo] = {}
        self.noted = 0
        self.waiting: list[bytes] = []
        self.failure = ""
        self.end: int | None = None  # where this watch's last append ended
        self.warn: Callable[[str], None] = lambda sentence: None
        if path.exists():
            with path.open("rb") as file:
                self._check(file.readline(_files.CHUNK))

    def _check(self, line: bytes) -> None:
        """The first line must be a record's, or the part of it that a kill left."""
        if not OPENING.startswith(line):
            check_header("watch()", self.path, line.decode(errors="replace"))

    def open(self, warn: Callable[[str], None]) -> None:
        """Begin a run in the file. A file that cannot be written is an error now, not after hours."""
        self.warn, self.end = warn, None
        try:
            self._write(b"", opening=True)
        except OSError as error:
            raise InputError(
                f"watch(): `path` {str(self.path)!r} cannot be written: {error.strerror}. Choose another, or leave it out."
            ) from error

    def append(self, entries: Iterable[Entry], info: dict[tuple[str, str], CallInfo], notes: list[str]) -> None:
        """Append the rows of a step, after its new info and notes."""
        news = {place: new for place, new in info.items() if self.known.get(place) != new}
        self.known |= news
        lines = [info_line(place, new) for place, new in news.items()]
        lines += [{"note": note} for note in notes[self.noted :]]
        self.noted = len(notes)
        self.waiting += [dump(line).encode() for line in lines]
        self.waiting += [dump(row).encode() for row in row_lines(entries)]
        self._flush()

    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Append what was logged in a step, with the next rows or at the end."""
        self.waiting.append(dump(logged_line(step, numbers)).encode())

    def close(self) -> None:
        """Try once more to write the buffered rows."""
        if self.waiting:
            self._flush()
        if self.waiting:
            self.warn(LOST.format(count=len(self.waiting), name=self.path.name, reason=self.failure))

    def _flush(self) -> None:
        try:
            self._write(b"".join(self.waiting))
        except OSError as error:
            self.failure = error.strerror or str(error)
            self.warn(FAILED.format(name=self.path.name, reason=self.failure))
        else:
            self.waiting = []

    def _write(self, text: bytes, opening: bool = False) -> None:
        file = _files.open_lines(self.path)
        try:
            _files.lock(file)
            size = self._remove_cut_line(file)
            if size and self.end not in (None, size):
                self.warn(SHARED.format(name=self.path.name))
            if not size:  # new, or deleted in the meantime
                text = OPENING + b"".join(dump(info_line(*item)).encode() for item in self.known.items()) + text
            elif opening and _tail(file, size, len(OPENING)) != OPENING:
                text = OPENING + text
            _files.append(file, text)
            self.end = size + len(text)
        finally:
            os.close(file)  # and the lock with it

    def _remove_cut_line(self, file: int) -> int:
        """Remove a last line without an end; the length of the file then."""
        size, end = os.fstat(file).st_size, _files.end_of_last_line(file)
        if end < size:
            if not end:
                self._check(_tail(file, size, _files.CHUNK))
            os.ftruncate(file, end)
        return end


def _tail(file: int, end: int, length: int) -> bytes:
    """The bytes before a place in a file."""
    start = max(0, end - length)
    os.lseek(file, start, os.SEEK_SET)
    return os.read(file, end - start)


class WrittenStep(NamedTuple):
    """A step as one run wrote it."""

    run: int
    step: int
    rows: int  # of the whole step; 0 if the file does not hold that number


class ParsedLines:
    """What the lines of a file hold. A line that is not a record's is counted and left out."""

    def __init__(self) -> None:
        self.rows: list[tuple[WrittenStep, RecordRow]] = []
        self.lines: Counter[WrittenStep] = Counter()  # of each step, damaged ones too
        self.loose = 0  # damaged lines before the first row of a step
        self.info: dict[tuple[str, str], CallInfo] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.notes: dict[str, None] = {}
        self.bad: list[int] = []
        self.run = 0

    def take(self, number: int, line: str | dict[str, Any]) -> None:
        """Parse a line: text, or the dict that a Parquet file gives."""
        try:
            self._sort(json.loads(line) if isinstance(line, str) else line)
        except (ValueError, TypeError, OverflowError, RecursionError):
            self.bad.append(number)
            # a damaged line is reported by itself: the step around it was not cut short
            last = self.rows[-1][0] if self.rows else None
            if last is not None and last.run == self.run and self.lines[last] < last.rows:
                self.lines[last] += 1
            else:
                self.loose += 1

    def _sort(self, line: Any) -> None:
        if not isinstance(line, dict):
            raise ValueError
        if line == HEADER:
            self.run, self.loose = self.run + 1, 0
        elif "info" in line:
            self.info.update([_read_info(line)])
        elif "logged" in line:
            numbers = {_text(name): _number(value) for name, value in dict(line["logged"]).items()}
            self.logged.setdefault(_whole(line, "step"), {}).update(numbers)
        elif "note" in line:
            self.notes[_text(line["note"])] = None
        else:
            row = _read_row(line)
            step = WrittenStep(self.run, row["step"], int(row.pop(IN_STEP, 0)))
            self.lines[step] += 1 + self.loose
            self.loose = 0
            self.rows.append((step, row))

    def leave_out_cut(self) -> list[WrittenStep]:
        """Remove the steps that a kill cut short; returns those that no later run wrote again."""
        # two watches may have written the same step to one file
        cut = {step for step, count in self.lines.items() if step.rows and count % step.rows}
        self.rows = [(step, row) for step, row in self.rows if step not in cut]
        written = {(step.run, step.step) for step, _ in self.rows}
        lost = [step for step in sorted(cut) if not any(step.run <= run and step.step == n for run, n in written)]
        return list({step.step: step for step in lost}.values())

    def entries(self) -> tuple[list[Entry], int]:
        """The rows as entries, and how many rows were written again later.

        What a later run wrote of a step and layer replaces what an earlier one wrote; so does the last of two watches that
        wrote to one file at once.
        """
        blocks: list[tuple[int, list[RecordRow]]] = []
        for (run, *_), row in self.rows:
            if blocks and run == blocks[-1][0] and _follows(blocks[-1][1][-1], row):
                blocks[-1][1].append(row)
            else:
                blocks.append((run, [row]))
        last = {_place(block[0]): run for run, block in blocks}
        rows_of: dict[tuple[Any, ...], list[RecordRow]] = {}
        for run, block in blocks:
            if run == last[_place(block[0])]:
                rows_of[(*_place(block[0]), *(row["head"] for row in block))] = block
        dropped = sum(len(block) for _, block in blocks) - sum(map(len, rows_of.values()))
        return [from_rows(block) for block in rows_of.values()], dropped


def _place(row: RecordRow) -> tuple[int, str, str]:
    return row["step"], row["layer"], row["kind"]


def _follows(before: RecordRow, row: RecordRow) -> bool:
    """Whether a row is a further head of the same entry."""
    return _place(before) == _place(row) and before["head"] < row["head"] and before.keys() == row.keys()


def _read_info(line: dict[str, Any]) -> tuple[tuple[str, str], CallInfo]:
    """The info of a line; a ValueError or a TypeError if it holds none."""
    info = CallInfo(**line["info"])
    if not all(_fits(getattr(info, field.name), str(field.type)) for field in fields(CallInfo)):
        raise ValueError
    return (_text(line.get("layer")), _text(line.get("kind"))), info


KINDS: dict[str, Any] = {"str": str, "int": int, "bool": bool, "float": (int, float), "None": type(None)}


def _fits(value: object, annotation: str) -> bool:
    """Whether a value is what the annotation of a field says."""
    kinds = annotation.split(" | ")
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, KINDS[kind]) for kind in kinds)


def _read_row(line: dict[str, Any]) -> RecordRow:
    """A row with its numbers; a ValueError if a key or a count is missing, or a value is not a number."""
    row: RecordRow = {
        "step": _whole(line, "step"),
        "layer": _text(line.get("layer")),
        "kind": _text(line.get("kind")),
    }
    row["head"] = _whole(line, "head")
    for name, value in line.items():
        if name not in KEYS:
            row[name] = _number(value)
    if IN_STEP in line:
        row[IN_STEP] = _whole(line, IN_STEP)
    gradients = [name for name in row if name.startswith("grad_")]
    counts = {count_column(name) for name in row if name not in (*KEYS, IN_STEP, "peak", SCORE_PEAK, *gradients)}
    if "rows" not in row or not counts <= {"", *row} or (gradients and set(gradients) != set(GRADIENTS)):
        raise ValueError
    return row


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _whole(line: dict[str, Any], name: str) -> int:
    value = line.get(name)
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
