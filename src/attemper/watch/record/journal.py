"""Journal: appends a watch's steps to a JSONL file, so that whatever happens in mid-write leaves a file that can be read.

A step is written under a lock, whole or not at all: a write that fails is taken back. A kill can still cut one short; the next
append takes the broken line away first. Rows that cannot be written wait, since a full disk is no reason to end a training.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import InputError
from ..call import Facts
from .entry import Entry
from .lines import HEADER, dump, facts_line, row_lines
from .store import check_header, check_path

try:
    import fcntl
except ImportError:  # Windows: no lock, and whoever shares a file there shares it at their own risk
    fcntl = None  # type: ignore[assignment]

OPENING = dump(HEADER).encode()
CHUNK = 1 << 16
SHARED = (
    "another watch writes to {name!r} too; where both wrote the same step, layer and head, the last is read. "
    "Give each its own path."
)
FAILED = "{name!r} could not be written: {reason}. The rows wait in memory and are tried again at every step."
LOST = "{count} rows are not in {name!r}: {reason}. This watch's record has them: watch.record.write(…) to a place with room."


class Journal:
    """A file that a watch appends to. Making one looks at the file; ``open()`` is the first to write."""

    def __init__(self, path: Path) -> None:
        check_path("watch", path, (".jsonl",))
        self.path = path
        self.known: dict[tuple[str, str], Facts] = {}
        self.noted = 0
        self.waiting: list[bytes] = []
        self.failure = ""
        self.end: int | None = None  # where the last append of ours ended
        self.say: Callable[[str], None] = lambda sentence: None
        if path.exists():
            with path.open("rb") as file:
                self._check(file.readline(CHUNK))

    def _check(self, line: bytes) -> None:
        """The first line must be ours, or what a kill left of it."""
        if not OPENING.startswith(line):
            check_header("watch", self.path, line.decode(errors="replace"))

    def open(self, say: Callable[[str], None]) -> None:
        """Begin a run in the file; what cannot work is said now and not after hours."""
        self.say, self.end = say, None
        try:
            self._write(b"", opening=True)
        except OSError as error:
            raise InputError(
                f"watch(): `path` {str(self.path)!r} cannot be written: {error.strerror}. Choose another, or leave it out."
            ) from error

    def append(self, entries: Iterable[Entry], facts: dict[tuple[str, str], Facts], notes: list[str]) -> None:
        """The rows of a step, after what is new of facts and notes."""
        news = {place: found for place, found in facts.items() if self.known.get(place) != found}
        self.known |= news
        lines = [facts_line(place, found) for place, found in news.items()]
        lines += [{"note": note} for note in notes[self.noted :]]
        self.noted = len(notes)
        self.waiting += [dump(line).encode() for line in lines]
        self.waiting += [dump(row).encode() for row in row_lines(entries)]
        self._flush()

    def close(self) -> None:
        """Try once more what is still waiting."""
        if self.waiting:
            self._flush()
        if self.waiting:
            self.say(LOST.format(count=len(self.waiting), name=self.path.name, reason=self.failure))

    def _flush(self) -> None:
        try:
            self._write(b"".join(self.waiting))
        except OSError as error:
            self.failure = error.strerror or str(error)
            self.say(FAILED.format(name=self.path.name, reason=self.failure))
        else:
            self.waiting = []

    def _write(self, text: bytes, opening: bool = False) -> None:
        with _locked(self.path) as file:
            size = self._mend(file)
            if size and self.end not in (None, size):
                self.say(SHARED.format(name=self.path.name))
            if not size:  # new, or taken away in the meantime
                text = OPENING + b"".join(dump(facts_line(*item)).encode() for item in self.known.items()) + text
            elif opening and _tail(file, size, len(OPENING)) != OPENING:
                text = OPENING + text
            try:
                _write_all(file, text)
            except BaseException:
                os.ftruncate(file, size)
                raise
            self.end = size + len(text)

    def _mend(self, file: int) -> int:
        """Take away a line that was cut short; how long the file is then."""
        size = end = os.fstat(file).st_size
        while end:
            part = _tail(file, end, CHUNK)
            newline = part.rfind(b"\n")
            end = end - len(part) + newline + 1
            if newline >= 0:
                break
        if end < size:
            if not end:
                self._check(_tail(file, size, CHUNK))
            os.ftruncate(file, end)
        return end


def _tail(file: int, end: int, length: int) -> bytes:
    """The bytes before a place in a file."""
    start = max(0, end - length)
    os.lseek(file, start, os.SEEK_SET)
    return os.read(file, end - start)


def _write_all(file: int, text: bytes) -> None:
    """A disk that fills up takes a part, and says so only when it is asked for the rest."""
    rest = memoryview(text)
    while rest:
        count = os.write(file, rest)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[count:]


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, to append to, ours alone where the system has locks."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)  # and the lock with it
