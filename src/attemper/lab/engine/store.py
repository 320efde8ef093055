"""store: finished cells of a sweep in one file per experiment, one line per cell, so that a kill loses none of them.

The first line says which versions made it, and has a hash of the code that measures. A line is flushed to disk before its cell
counts as done; one that a kill or a full disk cut short is taken away again. Another that cannot be read is left out and named,
and its cell is measured again. NaN is written as Python does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import InputError
from .experiment import Cell, Row, key, origin

FORMAT = 2  # raised when the columns of rows change too


class Store:
    """The finished cells of one experiment in a folder.

    ``rows`` maps a cell's key to its rows; ``damaged`` says which lines could not be read, in a sentence, or is empty.
    """

    def __init__(self, folder: Path, experiment: str, code: str = "") -> None:
        self.folder, self.path = folder, folder / f"{experiment}.jsonl"
        self.head = {"format": FORMAT, **origin(experiment), "code": code}
        self.rows: dict[str, list[Row]] = {}
        self.damaged = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
                raise InputError(f"run: {str(self.path)!r} is not a file. Choose another --results.")
            # each write goes to the disk, or fails: a buffer would fail again when it is closed
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (held until close)
            self._alone()
            self._resume()
            if not self.path.stat().st_size:
                self._line(self.head)
        except OSError as error:
            self.close()
            raise InputError(
                f"run: cannot keep results in {str(folder)!r}: {error.strerror}. Choose another --results."
            ) from None

    def _alone(self) -> None:
        """Two runs that write one file would measure every cell twice. The lock goes when the process does, killed or not."""
        try:
            fcntl: Any = importlib.import_module("fcntl")
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InputError(
                f"run: another run is writing {str(self.path)!r}. Wait for it, or choose another --results."
            ) from None

    def _resume(self) -> None:
        """Read what is there, under the lock: a line without an end is a kill's, and no longer being written."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.split(b"\n")[:-1]
        try:
            self._same_versions(lines[0] if lines else None)
        except InputError:
            self.close()
            raise
        bad = [number for number, line in enumerate(lines[1:], start=2) if not self._take(line)]
        if bad:
            shown = ", ".join(map(str, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
            self.damaged = (
                f"{str(self.path)!r}: {'line' if len(bad) == 1 else 'lines'} {shown} cannot be read and "
                f"{'is' if len(bad) == 1 else 'are'} left out: what {'it' if len(bad) == 1 else 'they'} held is measured again"
            )
        if len(whole) < len(content):
            self._file.truncate(len(whole))

    def _take(self, line: bytes) -> bool:
        """Take the rows of a line; whether it was one of ours."""
        try:
            found = json.loads(line)
            cell, rows = found["cell"], found["rows"]
            if not isinstance(cell, dict) or not all(isinstance(row, dict) for row in rows):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        self.rows[key(cell)] = list(rows)
        return True

    def _same_versions(self, first: bytes | None) -> None:
        if first is None:
            return
        try:
            head = json.loads(first)
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict) or "experiment" not in head:
            raise InputError(
                f"run: {str(self.path)!r} is not a results file of attemper: its first line does not say what made it. "
                "Choose another --results."
            )
        differing = [name for name in self.head if head.get(name) != self.head[name]]
        if differing:
            theirs = ", ".join(f"{name} {head.get(name, 'unknown')}" for name in differing)
            ours = ", ".join(f"{name} {self.head[name]}" for name in differing)
            raise InputError(
                f"run: the results in {str(self.path)!r} were made by {theirs}; this is {ours}. Results of two versions are not "
                "mixed: choose another --results, or delete that file to measure again."
            )

    def add(self, cell: Cell, rows: list[Row]) -> None:
        """Keep a finished cell; an OSError where the disk will not, and then nothing of it is there."""
        self._line({"cell": dict(cell), "rows": rows})
        self.rows[key(cell)] = rows

    def _line(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        file = self._file.fileno()
        before = os.fstat(file).st_size
        try:
            left = memoryview(line)
            while left:  # a disk that is nearly full takes a part
                left = left[os.write(file, left) :]
            os.fsync(file)
        except BaseException:  # half a line, which the next would be joined to
            with contextlib.suppress(OSError):
                os.ftruncate(file, before)
            raise

    def close(self) -> None:
        if hasattr(self, "_file"):
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
