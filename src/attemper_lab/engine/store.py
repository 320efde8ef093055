"""store: the finished cells of a sweep in one file per experiment, one line per cell, so that a kill loses none of them.

The first line names the versions that made the file, and has a hash of the code that measures. A line is on the disk before its
cell counts as done; one that a kill or a full disk cut short is removed. Any other line that cannot be read is left out with a
note, and its cell is measured again. NaN is written as Python writes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attemper.errors import InputError
from attemper.extension import files as _files

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
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
                raise InputError(f"run: {str(self.path)!r} is not a file. Choose another --results.")
            self._file = _files.open_lines(self.path)
            # two runs that write one file would measure every cell twice; the lock goes with the process, killed or not
            if not _files.lock(self._file, wait=False):
                raise InputError(
                    f"run: another run is writing {str(self.path)!r}. Wait for it, or choose another --results."
                )
            self._resume()
        except OSError as error:
            self.close()
            raise InputError(
                f"run: cannot keep results in {str(folder)!r}: {error.strerror}. Choose another --results."
            ) from None
        except InputError:
            self.close()
            raise

    def _resume(self) -> None:
        """Read the file under the lock. A last line without an end was left by a killed run: nobody is writing it now."""
        end = _files.end_of_last_line(self._file)
        lines = self.path.read_bytes()[:end].split(b"\n")[:-1]
        if lines:
            self._check_versions(lines[0])
        bad = [number for number, line in enumerate(lines[1:], start=2) if not self._read_cell(line)]
        if bad:
            shown = ", ".join(map(str, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
            lines_are = "line {} cannot be read and is" if len(bad) == 1 else "lines {} cannot be read and are"
            self.damaged = f"{str(self.path)!r}: {lines_are.format(shown)} left out: those cells are measured again"
        os.ftruncate(self._file, end)
        if not end:
            self._write_line(self.head)

    def _read_cell(self, line: bytes) -> bool:
        """Read the rows of a line, and return whether it is valid."""
        try:
            content = json.loads(line)
            cell, rows = content["cell"], content["rows"]
            if not isinstance(cell, dict) or not all(isinstance(row, dict) for row in rows):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        self.rows[key(cell)] = list(rows)
        return True

    def _check_versions(self, first: bytes) -> None:
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
        """Write a finished cell. If the disk refuses, raise OSError and write nothing of the cell."""
        self._write_line({"cell": dict(cell), "rows": rows})
        self.rows[key(cell)] = rows

    def _write_line(self, content: Mapping[str, Any]) -> None:
        _files.append(self._file, json.dumps(content, ensure_ascii=False).encode() + b"\n", sync=True)

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = -1

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
