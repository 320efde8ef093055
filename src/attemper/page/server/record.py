"""FollowedRecord: the file of a watch, read while it grows: a line per step for the charts, and the findings of the last step.

Lines are read as `attemper.watch` reads them. A step counts when all of its rows are there. A run that was started again replaces
what it writes again; of a long run every second step is left out, again and again, so that there are never more than MOST. A file
that is replaced, also in place, is read from its beginning; one that is gone is waited for.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import stat
import statistics
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..._display import safe
from ..._files import finite
from ...errors import InputError
from .events import event

LOOK = 0.5  # seconds between two looks at the file
CHUNK = 1 << 20  # bytes that are read at a time
LINE = 1 << 20  # bytes of a line, at most
MOST = 1000  # steps that are kept
FINDINGS = NOTES = 40
TAIL = 4096  # bytes before the place that was read to, by which the file is known again
LARGEST = 1e150  # whose square is a float; no dtype of a model reaches it
LOSSES = ("loss", "train_loss", "train/loss")  # names under which loops and trainers log it
MEANS = ("entropy", "effective_keys", "evenness", "top_weight", "grad_k_rms")
JsonDict = dict[str, Any]


class FollowedRecord:
    """Reads ``path`` from its beginning, then what is appended."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, safe(path.name)
        self.more = False  # whether the last look left something unread
        self._begin()

    def _begin(self) -> None:
        from ...watch.examine import ParsedLines

        self._parsed = ParsedLines()
        self._rest, self._number, self._offset, self._tail = b"", 0, 0, b""
        self._damaged, self._inode = 0, (0, 0)
        self._open: dict[int, list[JsonDict]] = {}  # rows of steps that are not complete
        self.steps: dict[int, JsonDict] = {}
        self.last: list[JsonDict] = []

    def check(self) -> None:
        """Raise unless the file can be read and is a record, or is empty."""
        from ...watch.examine import check_header

        try:
            with _opened(self.path) as file:
                first = file.readline(LINE).decode(errors="replace")
        except OSError as error:
            raise InputError(
                f"serve: cannot read --record {str(self.path)!r}: {error.strerror}. Name a file that watch(path=…) writes."
            ) from None
        if first:
            check_header("serve", self.path, first)

    def read(self) -> bool:
        """Read what is new, CHUNK bytes at most; whether there is something new to show."""
        self.more = anew = False
        try:
            with _opened(self.path) as file:
                file.seek(self._offset - len(self._tail))
                status = os.fstat(file.fileno())
                inode = (status.st_dev, status.st_ino)
                # another file, or shorter, or written again
                anew = self._offset > 0 and (file.read(len(self._tail)) != self._tail or inode != self._inode)
                if anew:
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
        return self._sort() or anew

    def _sort(self) -> bool:
        complete = False
        for written, row in self._parsed.rows:
            rows = self._open.setdefault(written.step, [])
            rows.append(dict(row))
            if len(rows) >= (written.rows or len(rows)):
                self.last = self._open.pop(written.step)
                self.steps[written.step] = summary(written.step, self.last)
                complete = True
        self._logged()
        self._damaged += len(self._parsed.bad)
        for done in (self._parsed.rows, self._parsed.lines, self._parsed.bad):
            done.clear()
        while len(self._open) > 4:  # cut short by a kill
            self._open.pop(next(iter(self._open)))
        while len(self.steps) > MOST:
            kept = sorted(self.steps)[::2]
            self.steps = {step: self.steps[step] for step in {*kept, max(self.steps)}}
        return complete

    def _logged(self) -> None:
        """Add the loss that was logged to its step. A watch writes it before the rows."""
        newest = max(self.steps, default=-1)
        for step in [step for step in self._parsed.logged if step <= newest]:
            numbers = self._parsed.logged.pop(step)
            loss = next((numbers[name] for name in LOSSES if name in numbers), None)
            if step in self.steps and loss is not None and math.isfinite(loss):
                self.steps[step]["loss"] = loss
        for step in list(self._parsed.logged)[:-MOST]:  # whose rows never came
            del self._parsed.logged[step]

    def document(self) -> JsonDict:
        """All steps, the last step's heads, and what is found in them."""
        from ...health import findings, verdict

        layers = [{"layer": layer, **facts.to_dict()} for (layer, _), facts in self._parsed.facts.items()]
        found = findings(self.last, layers)
        level, line = verdict(found, len(self.last) or None)
        return dict(
            finite(
                {
                    "name": self.name,
                    "steps": [self.steps[step] for step in sorted(self.steps)],
                    "heads": [_head(row) for row in self.last],
                    "verdict": {"level": level, "line": line},
                    "findings": [one.to_dict() for one in found[:FINDINGS]],
                    "more": max(0, len(found) - FINDINGS),
                    "notes": list(self._parsed.notes)[:NOTES],
                    "damaged": self._damaged,
                }
            )
        )

    async def follow(self) -> AsyncIterator[bytes]:
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
    """One line of a step: means over its heads, the largest logit, the gradient at q. What was not measured is left out."""
    found: JsonDict = {"step": step}
    for name in MEANS:
        if values := _values(rows, name):
            found[name] = statistics.fmean(values)
    if values := [value for value in _values(rows, "variance") if value >= 0]:
        found["logit_std"] = math.sqrt(statistics.fmean(values))
    if values := _values(rows, "peak"):
        found["peak"] = max(values)
    if values := _values(rows, "grad_q_rms"):
        found["grad_q_rms"] = math.sqrt(statistics.fmean(value**2 for value in values))
    if values := _values(rows, "grad_q_median"):
        found["grad_q_median"] = statistics.median(values)
    return found


def _values(rows: Sequence[JsonDict], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None and abs(row[name]) < LARGEST]


def _head(row: JsonDict) -> JsonDict:
    return {"layer": safe(row["layer"]), "kind": row["kind"], "head": row["head"], "peak": row.get("peak"),
            "entropy": row.get("entropy"), "top_weight": row.get("top_weight")}  # fmt: skip
