"""FollowedRecord: the file of a watch, read while it grows: a line per step for the charts, and the findings of the last step.

It reads lines as `attemper.watch` does, and shows a step when all of its rows are there. A run that was started again replaces
the steps that it writes again. Whenever a run has more than MOST steps, every second one is dropped. A file that was replaced or
written again is read from its beginning; one that is gone is waited for.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import stat
import statistics
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from attemper.errors import InputError
from attemper.extension.files import finite
from attemper.extension.tools import safe

from .events import event

LOOK = 0.5  # seconds between two looks at the file
CHUNK = 1 << 20  # bytes that are read at a time
LINE = 1 << 20  # bytes of a line, at most
MOST = 1000  # steps that are kept
FINDINGS = NOTES = 40
TAIL = 4096  # the last bytes that were read: if they differ, the file was written again
LARGEST = 1e150  # its square is still a float, and no dtype of a model reaches it
LOSSES = ("loss", "train_loss", "train/loss")  # names under which loops and trainers log it
JsonDict = dict[str, Any]


def _root_mean(squares: Sequence[float]) -> float | None:
    squares = [square for square in squares if square >= 0]
    return math.sqrt(statistics.fmean(squares)) if squares else None


SUMMARY: dict[str, tuple[str, Callable[[list[float]], float | None]]] = {
    **{
        name: (name, statistics.fmean) for name in ("entropy", "effective_keys", "evenness", "top_weight", "grad_k_rms")
    },
    "logit_std": ("variance", _root_mean),
    "peak": ("peak", max),
    "grad_q_rms": ("grad_q_rms", lambda values: _root_mean([value**2 for value in values])),
    "grad_q_median": ("grad_q_median", statistics.median),
}
"""Each number of a step's line: the sign that it summarizes, and how."""


class FollowedRecord:
    """Reads ``path`` from its beginning, then what is appended."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, safe(path.name)
        self.more = False  # whether the last look left something unread
        self._begin()

    def _begin(self) -> None:
        from attemper.extension.calls import ParsedLines

        self._parsed = ParsedLines()
        self._rest, self._number, self._offset, self._tail = b"", 0, 0, b""
        self._damaged, self._inode = 0, (0, 0)
        self._open: dict[int, list[JsonDict]] = {}  # rows of steps that are not complete
        self.steps: dict[int, JsonDict] = {}
        self.last: list[JsonDict] = []

    def check(self) -> None:
        """Raise unless the file can be read and is a record, is empty, or may still be written into its folder."""
        from attemper.extension.calls import check_header

        try:
            with _opened(self.path) as file:
                first = file.readline(LINE).decode(errors="replace")
        except OSError as error:
            if error.errno == errno.ENOENT and self.path.absolute().parent.is_dir():
                return
            raise InputError(
                f"serve: cannot read --record {str(self.path)!r}: {error.strerror}. Name a file that watch(path=…) writes."
            ) from None
        if first:
            check_header("serve", self.path, first)

    def read(self) -> bool:
        """Read what was appended, at most CHUNK bytes; return whether there is something new to show."""
        self.more = rewritten = False
        try:
            with _opened(self.path) as file:
                file.seek(self._offset - len(self._tail))
                status = os.fstat(file.fileno())
                inode = (status.st_dev, status.st_ino)
                # another file, or shorter, or written again
                rewritten = self._offset > 0 and (file.read(len(self._tail)) != self._tail or inode != self._inode)
                if rewritten:
                    self._begin()
                    file.seek(0)
                self._inode = inode
                content = file.read(CHUNK)
        except OSError:
            return False
        self.more = len(content) == CHUNK
        self._offset += len(content)
        self._tail = (self._tail + content[-TAIL:])[-TAIL:]
        *lines, self._rest = (self._rest + content).split(b"\n")
        self._rest = self._rest[:LINE]
        for line in lines:
            self._number += 1
            self._parsed.take(self._number, line.decode(errors="replace"))
        return self._take_rows() or rewritten

    def _take_rows(self) -> bool:
        """Move the rows that were parsed into their steps; return whether a step is complete."""
        complete = False
        for written, row in self._parsed.rows:
            rows = self._open.setdefault(written.step, [])
            rows.append(dict(row))
            if len(rows) >= (written.rows or len(rows)):
                self.last = self._open.pop(written.step)
                self.steps[written.step] = summary(written.step, self.last)
                complete = True
        self._take_losses()
        self._damaged += len(self._parsed.bad)
        for taken in (self._parsed.rows, self._parsed.lines, self._parsed.bad):
            taken.clear()
        while len(self._open) > 4:  # steps that a killed run did not finish
            self._open.pop(next(iter(self._open)))
        while len(self.steps) > MOST:
            kept = sorted(self.steps)[::2]
            self.steps = {step: self.steps[step] for step in {*kept, max(self.steps)}}
        return complete

    def _take_losses(self) -> None:
        """Add each logged loss to its step. A watch writes it before the rows."""
        newest = max(self.steps, default=-1)
        for step in [step for step in self._parsed.logged if step <= newest]:
            numbers = self._parsed.logged.pop(step)
            loss = next((numbers[name] for name in LOSSES if name in numbers), None)
            if step in self.steps and loss is not None and math.isfinite(loss):
                self.steps[step]["loss"] = loss
        for step in list(self._parsed.logged)[:-MOST]:  # their rows never came
            del self._parsed.logged[step]

    def document(self) -> JsonDict:
        """All steps, the last step's heads, and what is found in them."""
        from attemper.health import findings, verdict

        layers = [{"layer": layer, **info.to_dict()} for (layer, _), info in self._parsed.info.items()]
        findings_now = findings(self.last, layers)
        level, line = verdict(findings_now, len(self.last) or None)
        document = {
            "name": self.name,
            "steps": [self.steps[step] for step in sorted(self.steps)],
            "heads": [_head(row) for row in self.last],
            "verdict": {"level": level, "line": line},
            "findings": [finding.to_dict() for finding in findings_now[:FINDINGS]],
            "more": max(0, len(findings_now) - FINDINGS),
            "notes": list(self._parsed.notes)[:NOTES],
            "damaged": self._damaged,
        }
        return dict(finite(document))

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """The document now, and again whenever a step is complete."""
        own = FollowedRecord(self.path)
        yield event("record", own.document())
        while True:
            news = await asyncio.to_thread(own.read)
            while own.more:
                news = await asyncio.to_thread(own.read) or news
            if news:
                yield event("record", await asyncio.to_thread(own.document))
            await asyncio.sleep(LOOK)


def _opened(path: Path) -> BinaryIO:
    """A file, open for reading. Whatever else has this name is refused: a pipe would be waited for, a device has no end."""
    # without O_NONBLOCK, a pipe that nobody writes to holds open() for ever
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a file")
    return os.fdopen(number, "rb")


def summary(step: int, rows: Sequence[JsonDict]) -> JsonDict:
    """One line of a step. What was not measured is left out."""
    numbers: JsonDict = {"step": step}
    for name, (sign, summarize) in SUMMARY.items():
        values = [row[sign] for row in rows if row.get(sign) is not None and abs(row[sign]) < LARGEST]
        if values and (number := summarize(values)) is not None:
            numbers[name] = number
    return numbers


def _head(row: JsonDict) -> JsonDict:
    measured = {name: row.get(name) for name in ("peak", "entropy", "top_weight")}
    return {"layer": safe(row["layer"]), "kind": row["kind"], "head": row["head"], **measured}
