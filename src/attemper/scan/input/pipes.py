"""Pipes: the bytes of a file or a pipe, with a time limit for a pipe that nothing writes to.

`<(command)` is a pipe and may be slow; a FIFO that nothing opens for writing would block forever.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import InputError

PATIENCE = 10.0  # seconds for a FIFO to be opened for writing
STEP = 0.2  # seconds between two attempts to read a silent pipe
CHUNK = 2**16  # bytes that a pipe holds

Progress = Callable[[str], object]
"""Called with a few words whenever a new part of the work begins."""


def read(path: Path, most: int, option: str, progress: Progress) -> bytes:
    """The first ``most`` bytes of a file: /dev/zero has no end.

    A pipe is read as long as another process has it open for writing. ``option`` names it in the error; ``progress``
    is told what it waits for.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        with path.open("rb") as file:
            return file.read(most)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise open() itself would block
    try:
        content = _drain(descriptor, most, repr(str(path)), progress, opened=False)
    finally:
        os.close(descriptor)
    if content is None:
        raise InputError(
            f"{option} {str(path)!r} is a pipe, and nothing opened it for writing within {PATIENCE:g} seconds. Start the "
            "program that writes to it first, or give a file."
        )
    return content


def read_stdin(most: int, progress: Progress) -> bytes:
    """What is piped to stdin, or typed up to Ctrl-D."""
    try:
        descriptor = sys.stdin.fileno()
        piped = stat.S_ISFIFO(os.fstat(descriptor).st_mode) and os.name == "posix"
    except (AttributeError, OSError, ValueError):  # a stdin without a descriptor
        piped = False
    if not piped:
        return sys.stdin.buffer.read(most)
    return _drain(descriptor, most, "stdin", progress, opened=True) or b""


def _drain(descriptor: int, most: int, name: str, progress: Progress, opened: bool) -> bytes | None:
    """All bytes; None if nothing opened the pipe: until then a FIFO reads as empty, as it does after its writer has closed it."""
    content, began = bytearray(), time.monotonic()
    while len(content) < most:
        if opened and not select.select([descriptor], [], [], STEP)[0]:
            progress(f"waiting for {name}: a pipe that is open and silent")
            continue
        try:
            part = os.read(descriptor, min(CHUNK, most - len(content)))
        except BlockingIOError:
            opened = True
            continue
        content += part
        if not part and opened:
            break
        opened = bool(part)
        if not opened:
            if time.monotonic() - began > PATIENCE:
                return None
            progress(f"waiting for {name}: a pipe that nothing has opened for writing")
            time.sleep(STEP)
    return bytes(content)
