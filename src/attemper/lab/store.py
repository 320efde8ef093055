"""store: finished cells of a sweep in one file per experiment, one line per cell, so that a kill loses none of them.

The first line says which versions made it, and has a hash of the code that measures. A line is flushed to disk before its cell
counts as done; one that a kill cut short has no end, and is dropped when the file is opened again. NaN is written as Python does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import InputError
from .experiment import Cell, Row, key, origin

FORMAT = 2  # raised when the columns of rows change too


class Store:
    """The finished cells of one experiment in a folder; ``rows`` maps a cell's key to its rows."""

    def __init__(self, folder: Path, experiment: str, code: str = "") -> None:
        self.path = folder / f"{experiment}.jsonl"
        self.head = {"format": FORMAT, **origin(experiment), "code": code}
        self.rows: dict[str, list[Row]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115 (held until close)
            self._alone()
            self._resume()
        except OSError as error:
            raise InputError(
                f"run: cannot keep results in {str(folder)!r}: {error.strerror}. Choose another --results."
            ) from None
        if not self.path.stat().st_size:
            self._line(self.head)

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
        lines = whole.splitlines()
        try:
            head, *cells = (json.loads(line) for line in lines) if lines else [self.head]
            self.rows = {key(cell["cell"]): cell["rows"] for cell in cells}
            self._same_versions(head)
        except InputError:
            self.close()
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            self.close()
            raise InputError(
                f"run: {str(self.path)!r} is not a results file of attemper. Choose another --results."
            ) from None
        if len(whole) < len(content):
            self._file.truncate(len(whole))

    def _same_versions(self, head: Mapping[str, Any]) -> None:
        differing = [name for name in self.head if head.get(name) != self.head[name]]
        if differing:
            theirs = ", ".join(f"{name} {head.get(name, 'unknown')}" for name in differing)
            ours = ", ".join(f"{name} {self.head[name]}" for name in differing)
            raise InputError(
                f"run: the results in {str(self.path)!r} were made by {theirs}; this is {ours}. Results of two versions are not "
                "mixed: choose another --results, or delete that file to measure again."
            )

    def add(self, cell: Cell, rows: list[Row]) -> None:
        """Keep a finished cell."""
        self._line({"cell": dict(cell), "rows": rows})
        self.rows[key(cell)] = rows

    def _line(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
