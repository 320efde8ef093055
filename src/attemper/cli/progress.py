"""progress: what the command is doing, on stderr, shown from before the first slow import."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._display import safe

EVERY = 10.0  # seconds between lines of progress where there is no terminal


@contextmanager
def progress() -> Iterator[Callable[[str], object]]:
    """On a terminal, one line that is updated; elsewhere, a line every ten seconds of work. Always on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda words: bar.update(task, description=escape(safe(words)))


class _Lines:
    """Progress as lines of a log. Loading and reading are not logged: the clock starts when the model runs."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, words: str) -> None:
        now = time.monotonic()
        if words.startswith(("loading ", "reading ")):
            self.last = now
        elif now - self.last >= EVERY:
            self.last = now
            print(safe(words), file=sys.stderr, flush=True)


@contextmanager
def busy(words: str) -> Iterator[None]:
    """On a terminal, a line on stderr while something is done, and none afterwards; elsewhere nothing."""
    with progress() as update:
        if not isinstance(update, _Lines):
            update(words)
        yield
