"""FollowedRecord: the file of a watch, read while it grows: a line per step for the charts, and the findings of the last step.

Lines are read as `attemper.watch` reads them. A step counts when all of its rows are there. A run that was started again replaces
what it writes again; of a long run every second step is left out, again and again, so that there are never more than MOST.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from ..._display import safe
from ..._files import finite
from ...errors import InputError
from .events import event

LOOK = 0.5  # seconds between two looks at the file
CHUNK = 1 << 20  # bytes that are read at a time
LINE = 1 << 20  # bytes of a line, at most
MOST = 1000  # steps that are kept
FINDINGS = 40
LOSSES = ("loss", "train_loss", "train/loss")  # names under which loops and trainers log it
MEANS = ("entropy", "effective_keys", "evenness", "top_weight", "grad_k_rms")
JsonDict = dict[str, Any]


class FollowedRecord:
    """Reads ``path`` from its beginning, then what is appended."""

    def __init__(self, path: Path) -> None:
        from ...watch.record.jsonl import ParsedLines, check_header

        self.path, self.name = path, safe(path.name)
        self._parsed = ParsedLines()
        self._rest, self._number, self._offset = b"", 0, 0
        self._inode: tuple[int, int] | None = None
        self._stride = 1
        self._open: dict[int, list[JsonDict]] = {}  # rows of steps that are not complete
        self.steps: dict[int, JsonDict] = {}
        self.last: list[JsonDict] = []
        try:
            with path.open("rb") as file:
                first = file.readline(LINE).decode(errors="replace")
        except OSError as error:
            raise InputError(
                f"serve: cannot read --record {str(path)!r}: {error.strerror}. Name a file that watch(path=…) writes."
            ) from None
        if first:
            check_header("serve", path, first)

    def read(self) -> bool:
        """Read what is new; whether a step became complete."""
        try:
            status = os.stat(self.path)
            if self._inode not in (None, (status.st_dev, status.st_ino)) or status.st_size < self._offset:
                self.__init__(self.path)  # type: ignore[misc]  # another file, or shorter: from its beginning
            self._inode = (status.st_dev, status.st_ino)
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read(CHUNK)
        except (OSError, InputError):
            return False
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        self._rest = self._rest[:LINE]
        for line in lines:
            self._number += 1
            self._parsed.take(self._number, line.decode(errors="replace"))
        return self._sort()

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
        self._parsed.rows.clear()
        self._parsed.lines.clear()
        while len(self._open) > 4:  # cut short by a kill
            self._open.pop(next(iter(self._open)))
        while len(self.steps) > MOST:
            self._stride *= 2
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
                    "notes": list(self._parsed.notes),
                    "damaged": len(self._parsed.bad),
                }
            )
        )

    async def follow(self) -> AsyncIterator[bytes]:
        """The document now, and again whenever a step is complete."""
        own = FollowedRecord(self.path)
        yield event("record", own.document())
        while True:
            news = await asyncio.to_thread(own.read)
            while await asyncio.to_thread(_unread, own):
                news = await asyncio.to_thread(own.read) or news
            if news:
                yield event("record", own.document())
            await asyncio.sleep(LOOK)


def _unread(followed: FollowedRecord) -> bool:
    try:
        return os.stat(followed.path).st_size > followed._offset
    except OSError:
        return False


def summary(step: int, rows: Sequence[JsonDict]) -> JsonDict:
    """One line of a step: means over its heads, the largest logit, the gradient at q. What was not measured is left out."""
    found: JsonDict = {"step": step}
    for name in MEANS:
        if values := _values(rows, name):
            found[name] = statistics.fmean(values)
    if values := _values(rows, "variance"):
        found["logit_std"] = math.sqrt(statistics.fmean(values))
    if values := _values(rows, "peak"):
        found["peak"] = max(values)
    if values := _values(rows, "grad_q_rms"):
        found["grad_q_rms"] = math.sqrt(statistics.fmean(value**2 for value in values))
    if values := _values(rows, "grad_q_median"):
        found["grad_q_median"] = statistics.median(values)
    return found


def _values(rows: Sequence[JsonDict], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])]


def _head(row: JsonDict) -> JsonDict:
    return {"layer": safe(row["layer"]), "kind": row["kind"], "head": row["head"], "peak": row.get("peak"),
            "entropy": row.get("entropy"), "top_weight": row.get("top_weight")}  # fmt: skip
