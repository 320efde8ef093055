"""command: what `attemper scan` does between parsing and printing: reads what was given, shows progress, compares, writes."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest
from . import baseline, output
from .inputs import make
from .load import load
from .result import SCHEMA, Scan
from .scanning import run

FAILING = ("note", "warn", "act", "critical", "diverging")
PATIENCE = 1.0  # seconds for a pipe that nobody mentioned to begin
EVERY = 10.0  # seconds between lines of progress where there is no terminal


@dataclass(frozen=True)
class Asked:
    """The options of the command, as they were typed."""

    model: str | None = None
    texts: Sequence[str] = ()
    files: Sequence[str] = ()
    images: Sequence[str] = ()
    sounds: Sequence[str] = ()
    task: str | None = None
    truncate: bool = False
    token: str | None = None
    what_if: str | None = None
    attention: bool = False
    baseline: Path | None = None
    output: Path | None = None
    force: bool = False
    fail_on: str | None = None
    allow_download: bool = False
    dtype: str | None = None
    device: str = "cpu"


def answer(asked: Asked) -> Scan:
    """The scan that was asked for; what is wrong with the options is said before the work.

    Args:
        asked: the options.
    """
    if asked.fail_on is not None and asked.fail_on not in FAILING:
        raise InputError(f"scan: unknown --fail-on {asked.fail_on!r}. {nearest(asked.fail_on, FAILING)}")
    output.check(asked.output, asked.force)
    older = None if asked.baseline is None else baseline.read(asked.baseline, SCHEMA)
    rules = [word.strip() for word in (asked.what_if or "").split(",") if word.strip()]
    if asked.what_if is not None and not rules:
        raise InputError("scan: --what-if needs the names of rules. Type --what-if none,dk.")
    given = read_texts(asked.texts, asked.files)
    if not given and not asked.images and not asked.sounds:
        given = read_texts((), ("-",)) if is_piped() else []
        given = [text for text in given if text]  # an empty pipe, as a scheduler has it, gives no text
    loaded = load(
        asked.model, task=asked.task, dtype=asked.dtype, device=asked.device, allow_download=asked.allow_download
    )
    inputs = make(loaded, texts=given, images=asked.images, sounds=asked.sounds, truncate=asked.truncate)
    pictures = asked.attention or (asked.output is not None and asked.output.suffix.lower() == ".html")
    with progress() as told:
        found = run(loaded, inputs, rules=rules, token=asked.token, pictures=pictures, progress=told)
    if older is not None and asked.baseline is not None:
        found.document["baseline"] = baseline.compare(older, found.document, asked.baseline.name)
    return found


def fails(document: dict[str, Any], level: str | None) -> bool:
    """Whether a finding is at a level or above it.

    Args:
        document: of the scan.
        level: one of ``FAILING``; None: nothing fails.
    """
    return level is not None and any(one["level"] in FAILING[FAILING.index(level) :] for one in document["findings"])


def read_texts(texts: Sequence[str], files: Sequence[str]) -> list[str]:
    """The texts that were typed, then those of files, a whole file being one text; ``-`` is what is piped in."""
    found = [text.encode("utf-8", "replace").decode() for text in texts]  # an argument may hold bytes that are no text
    for name in files:
        if name == "-" and sys.stdin is None:
            raise InputError("scan: --file -: stdin is closed, so there is nothing to read. Pipe a text in.")
        try:
            raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            found.append(raw.decode("utf-8-sig").strip())
        except OSError as error:
            raise InputError(f"scan: --file: cannot read {name!r}: {error.strerror}. Give a text file.") from None
        except UnicodeDecodeError:
            raise InputError(f"scan: --file {name!r} is not UTF-8 text. Give a text file.") from None
    return found


def is_piped() -> bool:
    """Whether stdin is a file or a pipe with something to read, or at its end; a pipe that stays silent is left alone."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return True
        return stat.S_ISFIFO(mode) and bool(select.select([descriptor], [], [], PATIENCE)[0])
    except (AttributeError, OSError, ValueError):  # no stdin at all, one without a descriptor, a pipe on Windows
        return False


@contextmanager
def progress() -> Iterator[Callable[[str], object]]:
    """On a terminal a line that changes; elsewhere a line now and then, when the work is long. Always on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda words: bar.update(task, description=escape(words))


class _Lines:
    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, words: str) -> None:
        now = time.monotonic()
        if now - self.last >= EVERY:
            self.last = now
            print(words, file=sys.stderr, flush=True)
