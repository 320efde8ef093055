"""Trial: run work on untrusted files first in a forked child, with limits of memory and time."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from ...errors import InputError, out_of_memory
from .pipes import Progress

MEMORY = 4 * 2**30  # bytes, beyond what this process holds
SECONDS = 60.0
EVERY = 5.0  # seconds between two reports of progress
TOO_MUCH = 3  # the exit code of a child that had no memory left


def attempt(work: Callable[[], object], what: str, progress: Progress) -> None:
    """Raise if the work exceeds the limits. Otherwise it is safe to run it in this process, which needs its result or its error.

    Only on Linux: elsewhere memory is not limited by the system, or a fork of a process with threads is not safe.
    """
    progress(what)
    if sys.platform != "linux":
        return
    began, reported, status = time.monotonic(), 0.0, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this child does not wait for
        child = os.fork()
    if not child:
        _end(work)
    try:
        while (passed := time.monotonic() - began) < SECONDS:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            status = None
            if passed - reported > EVERY:
                reported = passed
                progress(what)
            time.sleep(min(0.05, 0.001 + passed / 10))
    finally:
        if status is None:  # out of time, or Ctrl-C
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status != 0:
        took = f"{SECONDS:g} seconds" if status is None else f"{MEMORY / 2**30:g} GiB of memory"
        raise InputError(
            f"scan: {what} takes more than {took}, so it was stopped. If you trust these files, load the model yourself and "
            "call attemper.scan(model, {'input_ids': …}) with ids of your own."
        )


def _end(work: Callable[[], object]) -> NoReturn:
    """Run the work in the child, without output or signal handlers, and exit."""
    import resource

    code = 0
    try:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_DFL)
        faulthandler.disable()  # Rust aborts when it gets no memory
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(silent, stream)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread for each processor, each with memory of its own
        with open("/proc/self/statm", encoding="ascii") as file:
            held = int(file.read().split()[5]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = held + MEMORY if hard == resource.RLIM_INFINITY else min(held + MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        work()
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            code = TOO_MUCH if out_of_memory(cause) else code
            cause = cause.__context__
    finally:
        os._exit(code)
