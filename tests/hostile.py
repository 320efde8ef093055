"""A command under a bad condition: a fork of this process, or an interpreter, with streams, limits, user and signals of its own.

`scripts/hostile.py` has the conditions. No command may end in a traceback or a hang, leave a file half written, destroy one that
was there, or leave a process behind that holds its streams. Linux.
"""

from __future__ import annotations

import importlib
import os
import pwd
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attemper import cli

PATIENCE = 120.0  # seconds for a command, on a loaded machine
SOON = 30.0  # seconds for its end after a signal, and for its streams to be let go
NOBODY = next((one.pw_uid for one in pwd.getpwall() if one.pw_name == "nobody"), 65534)


@dataclass
class Case:
    """A command under a condition: what it is called with, and how it may end."""

    command: str
    condition: str
    words: list[str]
    codes: tuple[int, ...] = (2,)
    before: Callable[[], object] = lambda: None  # in the child: closes streams, sets limits, arms signals
    there: dict[str, str] = field(default_factory=dict)  # files that lie in the folder, and must be as they were
    made: str = ""  # a file that must be there, and hold something
    printed: bool | None = None  # whether stdout must hold something; None: either
    said: str = ""  # a part of what stderr must say
    fresh: str = ""  # code for an interpreter of its own in place of a fork
    number: int = 0  # of a signal that comes from outside, once workers have used so many seconds
    busy: float = 0.0


@dataclass
class Ended:
    """How a case ended."""

    case: Case
    code: int | None  # None: it had to be killed
    out: str
    err: str
    wrong: list[str]


def strike(place: str, number: int, when: Callable[..., bool] = lambda *words, **options: True) -> Callable[[], None]:
    """Arms a signal: it comes when a function, ``"module:name"``, is called for the first time."""

    def arm() -> None:
        home, _, path = place.partition(":")
        *inner, name = path.split(".")
        owner: Any = importlib.import_module(home)
        for word in inner:
            owner = getattr(owner, word)
        real = getattr(owner, name)
        struck: list[bool] = []

        def struck_once(*words: Any, **options: Any) -> Any:
            if not struck and when(*words, **options):
                struck.append(True)
                os.kill(os.getpid(), number)
            return real(*words, **options)

        setattr(owner, name, struck_once)

    return arm


class Struck:
    """A stdout at whose first write a signal comes."""

    def __init__(self, number: int) -> None:
        self.stream, self.number = sys.stdout, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        number, self.number = self.number, 0
        if number:
            os.kill(os.getpid(), number)
        return self.stream.write(text)


def limit_files() -> None:
    """A disk on which only short files fit: what is longer ends in an OSError, as on one that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def as_nobody() -> None:
    """Root may read and write everything, so somebody else does it."""
    if os.geteuid() == 0:
        os.setuid(NOBODY)


def onto(path: str, number: int) -> Callable[[], None]:
    return lambda: os.dup2(os.open(path, os.O_WRONLY), number)


def unread(number: int) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, number)
    os.close(reading)


def closed(number: int) -> None:
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as an interpreter finds it


def call(case: Case, folder: Path) -> Ended:
    """Run a case in an empty folder and judge how it ended."""
    for name, content in case.there.items():
        (folder / name).write_text(content)
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    begin = _fresh if case.fresh else _fork
    child = begin(case, folder, out_end, err_end)
    os.close(out_end)
    os.close(err_end)
    texts, code = _wait(child, out, err, case)
    ended = Ended(case, code, *texts, [])
    ended.wrong = list(judge(ended, folder))
    return ended


def _fork(case: Case, folder: Path, out: int, err: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        case.before()
        cli.main(case.words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if sys.stdout is not None:
            code = _flushed(code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _flushed(code: int) -> int:
    """As an interpreter ends: one that cannot flush says "Exception ignored", and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        return 120
    return code


def _fresh(case: Case, folder: Path, out: int, err: int) -> int:
    words = [sys.executable, "-c", case.fresh, *case.words]
    return subprocess.Popen(
        words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
    ).pid


def _wait(child: int, out: int, err: int, case: Case) -> tuple[list[str], int | None]:
    """What it printed, and its exit code; None where it, or somebody who holds its streams, had to be killed."""
    texts, code, deadline = {out: b"", err: b""}, None, time.monotonic() + PATIENCE
    number, left = case.number, {out, err}
    while (left or code is None) and time.monotonic() < deadline:
        ready = select.select(list(left), [], [], 0.05)[0] if left else time.sleep(0.002) or []
        for stream in ready:
            part = os.read(stream, 65536)
            texts[stream] += part
            left -= set() if part else {stream}
        if number and max(_busy(child), default=0.0) >= case.busy:
            (os.killpg if number == signal.SIGINT else os.kill)(child, number)  # a terminal's goes to the whole group
            number, deadline = 0, time.monotonic() + SOON
        if code is None:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code, deadline = os.waitstatus_to_exitcode(status), min(deadline, time.monotonic() + SOON)
    hung = bool(left) or code is None
    if hung:
        os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
    os.close(out)
    os.close(err)
    return [text.decode(errors="replace") for text in texts.values()], None if hung else code


def spent(process: int) -> float:
    """The seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy(parent: int) -> list[float]:
    """The seconds of processor time that each worker of a process has used."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"popen_loky" in path.with_name("cmdline").read_bytes():
                found.append(spent(int(path.parent.name)))
        except OSError:
            continue
    return found


def judge(ended: Ended, folder: Path) -> Iterator[str]:
    case = ended.case
    if ended.code is None:
        yield "hung"
    elif ended.code not in case.codes:
        yield f"exit {ended.code}, not {' or '.join(map(str, case.codes))}"
    for words in ("Traceback", "Exception ignored", "Error in sys.excepthook"):
        if words in ended.err + ended.out:
            yield words
    if case.said and case.said not in ended.err + ended.out:
        yield f"does not say {case.said!r}"
    if case.printed is not None and case.printed != bool(ended.out):
        yield "printed nothing" if case.printed else "printed something"
    if ended.code == 2 and not ended.err and case.condition != "stderr closed":
        yield "no sentence"
    for name, content in case.there.items():
        if not (folder / name).is_file() or (folder / name).read_text() != content:
            yield f"{name} is not as it was"
    if case.made and not ((folder / case.made).is_file() and (folder / case.made).stat().st_size):
        yield f"{case.made} was not written"
    yield from (f"{path.name} is left" for path in folder.glob(".*.part"))
